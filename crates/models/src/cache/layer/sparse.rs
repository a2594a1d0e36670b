//! Saves caches of sparse attention.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_cubecl::{
    MemoryBytes,
    sparse::{
        RowFormat, RowLayout, SparseBytes, SparseCache, SparseConfig, SparsePart, SparsePartLayout,
        SparseTensor,
    },
};

use super::part::{Growth, Part, PartName, readable};
use crate::error::{Error, Result};

pub(super) fn memory_bytes(bytes: SparseBytes) -> MemoryBytes {
    MemoryBytes { keys: bytes.keys, values: bytes.entries, floats: bytes.window + bytes.open }
}

/// Returns the bytes of the recent tokens, the keys and the entries that a decode step reads.
pub(super) fn bytes_read(config: &SparseConfig, batch: usize, context: usize) -> usize {
    let bytes = |slots: usize, width: usize, format: RowFormat| match slots {
        0 => 0,
        _ => RowLayout { batch, slots, width, format }.bytes(),
    };
    let entries = config.compression.map_or(0, |compression| compression.entries(context));
    let attended = config.index.map_or(entries, |index| entries.min(index.top_k));
    let recent = context.min(config.sliding_window);
    bytes(recent, config.head_dim, RowFormat::float(config.float))
        + bytes(attended, config.head_dim, config.entries)
        + config.index.map_or(0, |index| bytes(entries, index.head_dim, index.keys))
}

pub(super) fn parts(
    config: &SparseConfig,
    batch: usize,
    keeps: impl Fn(bool) -> bool,
) -> Result<Vec<Part>> {
    let parts = config.parts(batch)?.into_iter().filter(|part| keeps(part.recent));
    Ok(parts.map(|part| Part { name: part.name, dtype: part.dtype, shape: part.shape }).collect())
}

/// Returns what a longer cache does with each tensor of a cache of as many tokens as its capacity:
/// it appends to entries and keys, and overwrites recent tokens and the projections of open
/// windows.
pub(super) fn growth(config: &SparseConfig, batch: usize) -> Result<Vec<Growth>> {
    let stored = config.entry_capacity();
    let entries = (config.head_dim, config.entries);
    let keys = config.index.map(|index| (index.head_dim, index.keys));
    // Each store lists its codes first, then its floats. Either may be absent.
    let stores = [Some(entries), keys].into_iter().flatten().flat_map(|(width, format)| {
        let layout = RowLayout { batch, slots: stored.max(1), width, format };
        let codes = layout.packed().map(|_| (layout, DType::U32));
        let floats = (layout.floats() > 0).then_some((layout, format.float.dtype()));
        codes.into_iter().chain(floats)
    });
    let mut stores = stores.collect::<Vec<_>>().into_iter();
    let growth = |part: SparsePartLayout| {
        let all = Part { name: part.name, dtype: part.dtype, shape: part.shape };
        let store = if part.recent { None } else { stores.next() };
        let Some((layout, dtype)) = store.filter(|(_, dtype)| *dtype == all.dtype) else {
            return Growth::none(&all);
        };
        let mut growth = Growth::default();
        for sequence in 0..batch {
            match layout.packed().filter(|_| dtype == DType::U32) {
                Some(packed) => {
                    growth.add_packed(&packed, stored, sequence * layout.sequence_words());
                }
                None => {
                    let row = |row: usize| (sequence * layout.slots + row) * layout.floats();
                    growth.appended.push(row(0)..row(stored));
                }
            }
        }
        growth
    };
    Ok(config.parts(batch)?.into_iter().map(growth).collect())
}

pub(super) fn names(config: &SparseConfig, keeps: impl Fn(bool) -> bool) -> Result<Vec<PartName>> {
    let parts = parts(config, 1, keeps)?.into_iter();
    Ok(parts.map(|part| PartName { name: part.name, words: part.dtype == DType::U32 }).collect())
}

fn part_of(part: PartName, data: TensorData, device: &Device) -> SparsePart {
    let dtype = data.dtype();
    let tensor = match part.words {
        true => SparseTensor::Codes(Tensor::from_data(data, (device, DType::U32))),
        false => SparseTensor::Floats(Tensor::from_data(data, (device, dtype))),
    };
    SparsePart { name: part.name, tensor }
}

fn cache_of(
    config: &SparseConfig,
    lens: Vec<usize>,
    parts: Vec<SparsePart>,
    device: &Device,
) -> Result<SparseCache> {
    SparseCache::from_parts(config, lens, device, |name, _| {
        let part = parts.iter().find(|part| part.name == name);
        let part = part.ok_or_else(|| Error::argument("parts", name, "is missing"))?;
        Ok::<_, Error>(part.tensor.clone())
    })
}

/// Reads the tensors of a cache.
pub(super) fn into_data(cache: &SparseCache) -> Result<Vec<TensorData>> {
    let data = cache.parts().into_iter().map(|part| match part.tensor {
        SparseTensor::Codes(words) => words.try_into_data(),
        SparseTensor::Floats(rows) => rows.try_into_data(),
    });
    data.map(readable).collect()
}

/// Makes a cache of its tensors.
pub(super) fn restore(
    config: &SparseConfig,
    lens: Vec<usize>,
    data: Vec<TensorData>,
    device: &Device,
) -> Result<SparseCache> {
    let parts = names(config, |_| true)?.into_iter().zip(data);
    let parts = parts.map(|(part, data)| part_of(part, data, device)).collect();
    cache_of(config, lens, parts, device)
}

/// Reads what a cache loses as it grows: recent tokens, and the projections of open windows.
pub(super) fn checkpoint(cache: &SparseCache) -> Result<Vec<TensorData>> {
    let short = cache.resized(cache.len())?;
    let parts = short.config().parts(1)?.into_iter();
    let pairs = parts.zip(into_data(&short)?);
    Ok(pairs.filter(|(part, _)| part.recent).map(|(_, data)| data).collect())
}

/// Entries and keys of the first tokens are still in the longer cache; recent tokens and the
/// projections of open windows are taken from the checkpoint.
pub(super) fn at_checkpoint(
    cache: &SparseCache,
    len: usize,
    kept: &[TensorData],
) -> Result<SparseCache> {
    let (config, device) = (*cache.config(), cache.device());
    let now = cache_of(&config, vec![len], cache.parts(), &device)?.resized(len)?;
    let short = *now.config();
    let mut kept = kept.iter();
    let parts = short.parts(1)?.into_iter().zip(now.parts()).map(|(plan, part)| {
        match plan.recent.then(|| kept.next()).flatten() {
            Some(data) => {
                let words = plan.dtype == DType::U32;
                part_of(PartName { name: plan.name, words }, data.clone(), &device)
            }
            None => part,
        }
    });
    Ok(cache_of(&short, vec![len], parts.collect(), &device)?.resized(config.capacity)?)
}

pub(super) fn fields(config: &SparseConfig) -> Vec<(&'static str, String)> {
    let row = |format: RowFormat| match (format.codes.is_quantized(), format.float_channels) {
        (false, _) => format.float.name().to_string(),
        (true, 0) => format.codes.to_string(),
        (true, n) => format!("{} and {n} channels of {}", format.codes, format.float.name()),
    };
    let compression = config.compression.map_or("none".into(), |compression| {
        let overlap = if compression.overlap { " with overlap" } else { "" };
        format!("1 entry for {} tokens{overlap}", compression.ratio)
    });
    let index = config.index.map_or("none".into(), |index| {
        format!("top {} by keys of {} channels", index.top_k, index.head_dim)
    });
    vec![
        ("head_dim", config.head_dim.to_string()),
        ("sliding_window", config.sliding_window.to_string()),
        ("compression", compression),
        ("index", index),
        ("cache", config.float.name().to_string()),
        ("cache", format!("entries in {}", row(config.entries))),
        (
            "cache",
            config.index.map_or("none".into(), |it| format!("index keys in {}", row(it.keys))),
        ),
        ("rollback", config.rollback.to_string()),
    ]
}
