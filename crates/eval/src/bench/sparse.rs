//! Benchmark of one layer of sparse attention over compressed entries.

mod fill;
mod layer;
mod plan;

use std::time::Instant;

use kv_cubecl::{
    On, Target,
    sparse::{SparseCache, SparseMemory},
};
use kv_models::spans::PHASE;
use serde::Serialize;
use tracing::trace_span;

pub use self::plan::{RowCodes, SparseFormats, SparsePlan};
use self::{
    fill::{filled, part},
    layer::Layer,
    plan::MEASURED,
};
use super::{Timing, WARM_UP, copier, size, wait};
use crate::{Error, Result, memory::Tracking};

/// One layer of sparse attention at one context length.
#[derive(Clone, Debug, Serialize)]
pub struct SparsePoint {
    /// The format of entries.
    pub entries: String,
    /// The format of the indexer's keys.
    pub keys: String,
    /// Tokens in the cache before the first step.
    pub context: usize,
    /// Entries of these tokens.
    pub n_entries: usize,
    /// Seconds of a step: one token is compressed, entries are selected, and it attends to them.
    pub step: Timing,
    /// Seconds of the steps that complete a window, which are also in `step`; `None` if no timed
    /// step does.
    pub step_completing: Option<Timing>,
    /// Seconds of a step that attends to all entries, without an indexer.
    pub dense: Timing,
    /// The median of `dense` divided by the median of `step`.
    pub dense_over_step: f64,
    /// Seconds of the indexer: storing a key, scoring all keys, and selecting.
    pub index: Timing,
    /// Bytes of the keys that a step reads.
    pub key_bytes: usize,
    /// Seconds to copy this many bytes.
    pub copy: Timing,
    /// The rate at which the indexer reads keys, divided by the rate at which they are copied.
    pub index_over_copy: f64,
    /// Bytes of the cache before the first step.
    pub bytes: usize,
    /// Bytes of the cache after the last step.
    pub bytes_after: usize,
    /// The most blocks that a step allocates.
    pub allocations: usize,
    /// The largest peak of bytes that a step allocates.
    pub peak_bytes: usize,
    /// Bytes of a step's scores, one for each entry.
    pub score_bytes: usize,
}

/// Times steps of one token after `context` tokens, in turn with the same steps over all entries,
/// with the indexer alone, and with copying as many bytes as its keys have. The memory of further
/// steps is measured with `memory`, the program's allocator.
///
/// Entries and keys are random; no context is computed. The indexer's queries are rounded as its
/// keys.
///
/// # Errors
/// [`Error::Plan`] naming the field, the errors of the cache, and [`Error::Device`].
pub fn time_sparse<T: Target, A>(
    device: &On<T>,
    plan: &SparsePlan,
    formats: SparseFormats,
    context: usize,
    memory: &Tracking<A>,
) -> Result<SparsePoint> {
    plan.bytes(formats, context)?;
    let config = plan.config(formats, context);
    let layer = Layer::random(device, plan, &config)?;
    let mut cache = filled(device, plan, &config, context)?;
    let mut dense = {
        let (parts, mut config) = (cache.parts(), config);
        config.index = None;
        let part = |name: &str, _: bool| Ok::<_, Error>(part(&parts, name));
        SparseCache::from_parts(&config, vec![context], device, part)?
    };
    let (bytes, n_entries) = (cache.memory_bytes(), plan.compression.entries(context));
    let key_bytes = bytes.keys / config.entry_capacity() * n_entries;
    let mut copy = copier(device, key_bytes);
    let [mut steps, mut completing, mut denses, mut indexes, mut copies] = [(); 5].map(|()| vec![]);
    for round in 0..size::rounds(plan.samples) {
        let _phase = trace_span!(target: PHASE, "sparse", n = round).entered();
        let completes = (cache.len() + 1).is_multiple_of(plan.compression.ratio);
        let index = seconds(|| {
            layer.select(&mut SparseMemory::cached(&mut cache, &[1])?)?;
            wait(device)
        })?;
        let step = seconds(|| layer.step(&mut cache, true).and_then(|()| wait(device)))?;
        let all = seconds(|| layer.step(&mut dense, false).and_then(|()| wait(device)))?;
        let copied = seconds(&mut copy)?;
        if round < WARM_UP {
            continue;
        }
        let kept = [(&mut steps, step), (&mut denses, all), (&mut indexes, index)];
        kept.into_iter().for_each(|(all, seconds)| all.push(seconds));
        copies.push(copied);
        if completes {
            completing.push(step);
        }
    }
    let (mut allocations, mut peak_bytes) = (0, 0);
    for _ in 0..plan.compression.ratio.min(MEASURED) {
        let before = memory.allocations();
        let (done, peak) =
            memory.peak_of(|| layer.step(&mut cache, true).and_then(|()| wait(device)));
        done?;
        allocations = allocations.max(memory.allocations() - before);
        peak_bytes = peak_bytes.max(peak);
    }
    let [step, dense, index, copy] = [steps, denses, indexes, copies].map(Timing::of);
    let (step, dense, index, copy) = (step?, dense?, index?, copy?);
    let step_completing = if completing.is_empty() { None } else { Some(Timing::of(completing)?) };
    Ok(SparsePoint {
        entries: formats.entries.to_string(),
        keys: formats.keys.to_string(),
        context,
        n_entries,
        step,
        step_completing,
        dense,
        dense_over_step: dense.median / step.median,
        index,
        key_bytes,
        copy,
        index_over_copy: copy.median / index.median,
        bytes: bytes.total(),
        bytes_after: cache.memory_bytes().total(),
        allocations,
        peak_bytes,
        score_bytes: size_of::<f32>() * n_entries,
    })
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}
