//! Saves caches of keys and values.

use std::{iter, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_cubecl::{
    CacheParts, CacheShape, KvCache, KvCacheConfig, Side, Sides,
    layout::{CacheLayout, Schedule},
};

use super::part::{Growth, Part, PartName, readable};
use crate::error::{Error, Result};

/// The tensors of a [`KvCache`].
pub(super) const PARTS: [PartName; 3] = [
    PartName { name: "keys", words: true },
    PartName { name: "values", words: true },
    PartName { name: "floats", words: false },
];

/// Returns the parts of a [`KvCache`] that a checkpoint keeps.
pub(super) fn kept_names(config: &KvCacheConfig) -> &'static [PartName] {
    let schedule = Schedule::new(config);
    match (schedule.sliding_window, schedule.is_exact_anywhere()) {
        // A sliding window overwrites the tokens that it no longer sees.
        (Some(_), _) => &PARTS,
        (None, true) => &[],
        (None, false) => &PARTS[2..],
    }
}

/// Lists the tensors of a cache.
pub(super) fn parts(config: &KvCacheConfig, shape: CacheShape) -> Result<Vec<Part>> {
    let layout = CacheLayout::new(config, shape)?;
    let words = Sides::from_fn(|side| vec![layout.words(side)]);
    let [keys, values, floats] = PARTS.map(|part| part.name);
    let (dtype, shape) = (config.float.dtype(), layout.float_shape().to_vec());
    Ok(vec![
        Part { name: keys, dtype: DType::U32, shape: words.keys },
        Part { name: values, dtype: DType::U32, shape: words.values },
        Part { name: floats, dtype, shape },
    ])
}

/// Lists the tensors of a checkpoint.
pub(super) fn kept(config: &KvCacheConfig, shape: CacheShape) -> Result<Vec<Part>> {
    let (layout, names) = (CacheLayout::new(config, shape)?, kept_names(config));
    let all = parts(config, shape)?.into_iter();
    let kept = all.filter(|part| names.iter().any(|kept| kept.name == part.name));
    Ok(kept
        .map(|part| match part.dtype {
            DType::U32 => part,
            _ => Part { shape: kept_shape(&layout).to_vec(), ..part },
        })
        .collect())
}

/// Reads the tensors of a cache.
pub(super) fn into_data(cache: KvCache) -> Result<Vec<TensorData>> {
    let CacheParts { keys, values, floats, .. } = cache.into_parts();
    let data = [keys.try_into_data(), values.try_into_data(), floats.try_into_data()];
    data.into_iter().map(readable).collect()
}

/// Makes a cache of its tensors.
pub(super) fn restore(
    config: &KvCacheConfig,
    shape: CacheShape,
    lens: Vec<usize>,
    data: Vec<TensorData>,
    device: &Device,
) -> Result<KvCache> {
    let Ok([keys, values, floats]) = <[TensorData; 3]>::try_from(data) else {
        return Err(Error::argument("parts", "another number", "must be three"));
    };
    let words = |words| Tensor::<1, Int>::from_data(words, (device, DType::U32));
    let dtype = floats.dtype();
    let parts = CacheParts {
        keys: words(keys),
        values: words(values),
        floats: Tensor::from_data(floats, (device, dtype)),
        lens,
    };
    Ok(KvCache::from_parts(config, shape, parts)?)
}

/// Returns the elements of a slice's float rows that a checkpoint keeps: all of them with a sliding
/// window, otherwise the rows of quantized sides, whose rings are short.
fn kept_elements(layout: &CacheLayout) -> Vec<Range<usize>> {
    if layout.schedule().sliding_window.is_some() {
        return iter::once(0..layout.float_elements()).collect();
    }
    // A quantized side has a ring, unless it is never quantized.
    let sides = layout.stored_sides().iter().map(|&side| layout.sides()[side]);
    let quantized = sides.filter(|side| side.spec.is_some());
    let elements =
        quantized.map(|side| side.first_element..side.first_element + side.rows() * side.head_dim);
    elements.filter(|elements| !elements.is_empty()).collect()
}

/// Returns the shape of the floats that a checkpoint keeps of a layer.
fn kept_shape(layout: &CacheLayout) -> [usize; 2] {
    [layout.slices(), kept_elements(layout).iter().map(Range::len).sum()]
}

/// Returns the bytes that a checkpoint keeps of a layer.
pub(super) fn kept_bytes(layout: &CacheLayout) -> usize {
    match kept_names(layout.config()) {
        [] => 0,
        [_] => kept_shape(layout).iter().product::<usize>() * layout.config().float.dtype().size(),
        _ => layout.memory_bytes().total(),
    }
}

/// Reads what a cache loses as it grows.
pub(super) fn checkpoint(cache: &KvCache) -> Result<Vec<TensorData>> {
    let kept = kept_names(cache.layout().config());
    if kept.is_empty() {
        return Ok(vec![]);
    }
    let cache = cache.resized(cache.len())?;
    let layout = *cache.layout();
    let CacheParts { keys, values, floats, .. } = cache.into_parts();
    let rows: Tensor<2> = floats.reshape([layout.slices(), layout.float_elements()]);
    let rows = kept_elements(&layout)
        .into_iter()
        .map(|elements| rows.clone().narrow(1, elements.start, elements.len()));
    let floats = Tensor::cat(rows.collect(), 1);
    let mut data = vec![];
    if kept.len() > 1 {
        data.extend([keys.try_into_data(), values.try_into_data()]);
    }
    data.push(floats.try_into_data());
    data.into_iter().map(readable).collect()
}

/// Cuts a cache back to a checkpoint.
pub(super) fn at_checkpoint(cache: &KvCache, len: usize, kept: &[TensorData]) -> Result<KvCache> {
    let (config, shape) = (cache.layout().config(), cache.layout().shape());
    let Some((floats, words)) = kept.split_last() else {
        let mut cache = cache.clone();
        cache.cut_back(0, len)?;
        return Ok(cache);
    };
    let device = cache.device();
    // The codes of the first tokens are still in the longer cache.
    let now = CacheParts { lens: vec![len], ..cache.clone().into_parts() };
    let now = KvCache::from_parts(config, shape, now)?.resized(len)?;
    let layout = *now.layout();
    let mut parts = now.into_parts();
    if let [keys, values] = words {
        let words = |data: &TensorData| Tensor::from_data(data.clone(), (&device, data.dtype()));
        (parts.keys, parts.values) = (words(keys), words(values));
    }
    let float_shape = parts.floats.dims();
    let mut rows: Tensor<2> = parts.floats.reshape([layout.slices(), layout.float_elements()]);
    let floats: Tensor<2> = Tensor::from_data(floats.clone(), (&device, floats.dtype()));
    let mut from = 0;
    for elements in kept_elements(&layout) {
        let n = elements.len();
        let part = floats.clone().narrow(1, from, n);
        rows = rows.slice_assign([0..layout.slices(), elements], part);
        from += n;
    }
    parts.floats = rows.reshape(float_shape);
    let short = KvCache::from_parts(&config.with_capacity(len), shape, parts)?;
    Ok(short.with_options(cache.options())?.resized(config.capacity)?)
}

/// Returns what a longer cache does with each tensor of a cache of as many tokens as its capacity.
pub(super) fn growth(config: &KvCacheConfig, shape: CacheShape) -> Result<Vec<Growth>> {
    let layout = CacheLayout::new(config, shape)?;
    let schedule = layout.schedule();
    if schedule.sliding_window.is_some() {
        return Ok(parts(config, shape)?.iter().map(Growth::none).collect());
    }
    let [mut keys, mut values, mut floats] = <[Growth; 3]>::default();
    let len = config.capacity;
    let first_float = schedule.first_float(len);
    for slice in 0..layout.slices() {
        for &side in layout.stored_sides() {
            let place = layout.sides()[side];
            let words = match side {
                Side::Keys => &mut keys,
                Side::Values => &mut values,
            };
            if let Some(packed) = place.packed() {
                words.add_packed(&packed, packed.tokens, slice * place.slice_words());
            }
            let start = slice * layout.float_elements();
            let row = |row: usize| start + place.first_element + row * place.head_dim;
            // Sinks stay; a side that is never quantized stays as a whole.
            let staying = if place.spec.is_some() { place.sinks } else { place.rows() };
            floats.appended.push(row(0)..row(staying));
            if place.spec.is_some() {
                for token in first_float[side]..len {
                    floats.lose(row(place.row(token))..row(place.row(token) + 1));
                }
            }
        }
    }
    Ok(vec![keys, values, floats])
}
