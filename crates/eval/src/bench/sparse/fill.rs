//! Fills a cache with random entries and keys, without computing a context.

use burn::tensor::{DType, Int, Tensor};
use kv_cubecl::{
    CacheFloat, On, Target,
    sparse::{
        Compression, Gated, IndexConfig, IndexQuery, RowLayout, SparseCache, SparseConfig,
        SparseMemory, SparsePart, SparseTensor,
    },
};

use super::{
    layer::{compressors, normal},
    plan::SparsePlan,
};
use crate::Result;

/// Entries that are computed at once to fill a cache.
const FILL: usize = 512;

pub(super) fn part(parts: &[SparsePart], name: &str) -> SparseTensor {
    let part = parts.iter().find(|part| part.name == name);
    part.expect("caches of alike configurations have the same parts").tensor.clone()
}

/// Creates a cache of `context` tokens, whose entries and keys are random rows.
pub(super) fn filled<T: Target>(
    device: &On<T>,
    plan: &SparsePlan,
    config: &SparseConfig,
    context: usize,
) -> Result<SparseCache> {
    let mut empty = *config;
    // Windows and projections of this cache have the shapes of the large one's.
    empty.capacity = plan.sliding_window.max(plan.compression.ratio).min(config.capacity);
    let recent = SparseCache::new(&empty, 1, device)?.parts();
    let blocks = random_blocks(device, plan, config)?;
    let slots = config.entry_capacity();
    let index = config.index.as_ref();
    let keys = index.map_or((0, config.entries), |index| (index.head_dim, index.keys));
    let fill = |name: &'static str, _: bool| -> Result<SparseTensor> {
        let (width, format) = match name.starts_with("keys") {
            true => keys,
            false => (config.head_dim, config.entries),
        };
        let layout = RowLayout { batch: 1, slots, width, format };
        let all = || blocks.iter().map(|parts| part(parts, name));
        Ok(match name {
            "entries.codes" | "keys.codes" => SparseTensor::Codes(joined_codes(all(), layout)),
            "entries" | "keys" => {
                let rows = all().filter_map(|rows| match rows {
                    SparseTensor::Floats(rows) => Some(rows),
                    SparseTensor::Codes(_) => None,
                });
                SparseTensor::Floats(Tensor::cat(rows.collect(), 1).narrow(1, 0, slots))
            }
            _ => match part(&recent, name) {
                SparseTensor::Floats(rows) => {
                    let random = normal(device, rows.dims());
                    SparseTensor::Floats(random.cast(rows.dtype()))
                }
                codes @ SparseTensor::Codes(_) => codes,
            },
        })
    };
    SparseCache::from_parts(config, vec![context], device, fill)
}

/// Returns the parts of caches of [`FILL`] random entries, enough for all entries of `config`.
fn random_blocks<T: Target>(
    device: &On<T>,
    plan: &SparsePlan,
    config: &SparseConfig,
) -> Result<Vec<Vec<SparsePart>>> {
    // Each token is an entry, and there is one head, so scores take little time.
    let each = Compression::new(1);
    let mut block = SparseConfig::new(config.head_dim, 1)
        .with_capacity(FILL)
        .with_compression(each)
        .with_formats(CacheFloat::F32, config.entries);
    block.index = config.index.map(|index| IndexConfig { top_k: 1, ..index });
    let (entry, key) = compressors(device, plan, &block, each)?;
    let gated = |width: usize| Gated {
        content: normal(device, [1, FILL, width]),
        gate: Tensor::zeros([1, FILL, width], &**device),
    };
    let width = plan.index_head_dim;
    let query = IndexQuery {
        query: normal(device, [1, 1, FILL, width]),
        weights: normal(device, [1, FILL, 1]),
    };
    let blocks = config.entry_capacity().div_ceil(FILL);
    let fill = |_| -> Result<_> {
        let mut cache = SparseCache::new(&block, 1, device)?;
        let mut memory = SparseMemory::cached(&mut cache, &[FILL])?;
        memory.compress(&entry, gated(plan.head_dim))?;
        memory.select(&key, gated(width), &query)?;
        drop(memory);
        let mut parts = cache.parts();
        parts.retain(|part| ["entries", "keys"].contains(&part.name.trim_end_matches(".codes")));
        Ok(parts)
    };
    (0..blocks).map(fill).collect()
}

/// Joins the code words of blocks of [`FILL`] rows to the words of a sequence.
fn joined_codes(blocks: impl Iterator<Item = SparseTensor>, layout: RowLayout) -> Tensor<1, Int> {
    let blocks: Vec<_> = blocks
        .filter_map(|words| match words {
            SparseTensor::Codes(words) => Some(words),
            SparseTensor::Floats(_) => None,
        })
        .collect();
    // Codes of all rows come first, then parameters that share words.
    let regions = |layout: RowLayout| {
        let packed = layout.packed().expect("rows have codes");
        let codes = match packed.spec.packs_parameters() {
            true => packed.parameters(),
            false => packed.words(),
        };
        [0..codes, codes..packed.words()]
    };
    let from = regions(RowLayout { slots: FILL, ..layout });
    let mut parts = vec![];
    for (from, to) in from.into_iter().zip(regions(layout)) {
        if to.is_empty() {
            continue;
        }
        let words = blocks.iter().map(|words| words.clone().narrow(0, from.start, from.len()));
        parts.push(Tensor::cat(words.collect(), 0).narrow(0, 0, to.len()));
    }
    let len: usize = parts.iter().map(|part| part.dims()[0]).sum();
    if layout.words() > len {
        let options = (&blocks[0].device(), DType::U32);
        parts.push(Tensor::zeros([layout.words() - len], options));
    }
    Tensor::cat(parts, 0)
}
