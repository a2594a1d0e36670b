//! Benchmarks of decode steps and prompts of whole models by context length.

use std::time::Instant;

use kv_cubecl::{On, Target};
use kv_models::{
    DecodeGraph, LanguageModel, ModelCache, ModelCacheConfig, Sampling, Steps, ids_to_tensor,
    spans::PHASE,
};
use serde::Serialize;
use tracing::trace_span;

use super::{Subject, Timing, no_graph_capture, size, time_in_turn, wait};
use crate::{Error, Result, memory::Tracking};

pub(super) const PREFILL_CHUNK: usize = 512;

/// The plan of [`time_decode`].
#[derive(Clone, Debug)]
pub struct DecodeSubject {
    /// The cache.
    pub cache: ModelCacheConfig,
    /// Number of sequences. Their lengths differ by one token each.
    pub batch: usize,
    /// Capture the step once and replay it, see [`DecodeGraph`].
    pub graph_capture: bool,
}

impl DecodeSubject {
    /// Returns the caches that [`time_decode`] holds for it, with their sequences: its own, and for
    /// several sequences one more, which reads the text for each of them.
    pub fn caches(&self) -> impl Iterator<Item = (ModelCacheConfig, usize)> {
        let reader = (self.batch > 1).then_some(1);
        [self.batch].into_iter().chain(reader).map(|batch| (self.cache.clone(), batch))
    }
}

/// The times of decode steps of one cache at one context length.
#[derive(Clone, Debug, Serialize)]
pub struct DecodePoint {
    /// The cache's short name.
    pub cache: String,
    /// Sequences that take the step together.
    pub batch: usize,
    /// Set if a captured step was replayed.
    pub graph_capture: bool,
    /// Tokens of the longest sequence in the cache.
    pub context: usize,
    /// Seconds of one step, the head included.
    pub seconds: Timing,
    /// Bytes of the cache that one step reads, all layers.
    pub bytes_read: usize,
}

impl DecodePoint {
    /// Returns the tokens per second of all sequences together.
    pub fn tokens_per_second(&self) -> f64 {
        self.batch as f64 / self.seconds.median
    }
}

/// Appends a token to every sequence and waits for the device.
fn step<T: Target>(
    steps: &mut Steps<'_>,
    model: &LanguageModel,
    DecodeSubject { cache, batch, .. }: &DecodeSubject,
    device: &On<T>,
) -> Result<()> {
    let n = steps.position() + 1;
    let _phase = trace_span!(target: PHASE, "decode", n, %cache).entered();
    let ids = filler(steps.position(), *batch, model.vocab_size());
    steps.step(model, &ids, device)?;
    wait(device)
}

/// Returns the tokens that [`time_decode`] appends at each context, warm-up included.
pub fn timed_steps(samples: usize) -> usize {
    size::rounds(samples)
}

/// Times `samples` decode steps of `model` at each of the ascending `contexts`, for each of
/// `subjects` in turn. `progress` receives the tokens prefilled so far.
///
/// # Errors
/// [`Error::Plan`] for contexts that do not ascend, fewer tokens than sequences, or captured steps
/// of a batch or on a device without graph capture; the model's and the cache's errors.
pub fn time_decode<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    subjects: &[DecodeSubject],
    contexts: &[usize],
    samples: usize,
    mut progress: impl FnMut(usize),
) -> Result<Vec<DecodePoint>> {
    check_decode(device, subjects, contexts, samples)?;
    let steps = timed_steps(samples);
    let capacity = contexts.last().map_or(1, |last| last.saturating_add(steps));
    let mut filled = Vec::with_capacity(subjects.len());
    let mut readers = Vec::with_capacity(subjects.len());
    for subject in subjects {
        let mut caches = subject
            .caches()
            .map(|(config, batch)| model.new_cache(config.with_capacity(capacity), batch, device));
        filled.extend(caches.next().transpose()?);
        readers.push(caches.next().transpose()?);
    }
    let mut points = Vec::with_capacity(subjects.len() * contexts.len());
    let mut done = 0;
    for &context in contexts {
        let mut running = Vec::with_capacity(subjects.len());
        for ((cache, reader), subject) in filled.iter_mut().zip(&mut readers).zip(subjects) {
            let before = done;
            let progress = |n| progress(before + n);
            let _phase = trace_span!(target: PHASE, "fill", cache = %subject.cache).entered();
            done += match reader {
                Some(reader) => fill(device, model, cache, reader, context, progress)?,
                None => prefill(device, model, cache, context, filler_of(model), progress)?,
            };
            let graph_capture = subject.graph_capture;
            running.push(Steps::new(model, cache, graph_capture, Sampling::GREEDY, device)?);
        }
        let turns = running.iter_mut().zip(subjects).map(|(steps, subject)| -> Subject<'_> {
            Box::new(move || step(steps, model, subject, device))
        });
        let timings = time_in_turn(samples, turns.collect())?;
        drop(running);
        for ((subject, cache), seconds) in subjects.iter().zip(&filled).zip(timings) {
            points.push(DecodePoint {
                cache: subject.cache.to_string(),
                batch: subject.batch,
                graph_capture: subject.graph_capture,
                context,
                seconds,
                bytes_read: cache.bytes_read(context),
            });
        }
    }
    Ok(points)
}

fn check_decode<T: Target>(
    device: &On<T>,
    subjects: &[DecodeSubject],
    contexts: &[usize],
    samples: usize,
) -> Result<()> {
    size::check_samples("samples", samples)?;
    let steps = timed_steps(samples);
    let ascend = |a: &usize, b: &usize| a.checked_add(steps).is_some_and(|end| end <= *b);
    if contexts.first() == Some(&0) || !contexts.is_sorted_by(ascend) {
        let rule =
            format!("must be above 0 and ascend by at least the {steps} steps timed at each");
        return Err(Error::plan("contexts", format!("{contexts:?}"), rule));
    }
    if subjects.iter().any(|subject| subject.graph_capture) && !DecodeGraph::is_supported(device) {
        return Err(no_graph_capture::<T>());
    }
    let shortest = contexts.first().copied().unwrap_or(0);
    for &DecodeSubject { batch, graph_capture, .. } in subjects {
        if batch == 0 || batch > shortest {
            let rule = format!("must be from 1 to the shortest context, {shortest}");
            return Err(Error::plan("batch", batch, rule));
        }
        if graph_capture && batch > 1 {
            let rule = "must be 1 for captured steps, because sequences have different lengths";
            return Err(Error::plan("batch", batch, rule));
        }
    }
    Ok(())
}

/// The times of prefill into an empty cache.
#[derive(Clone, Debug, Serialize)]
pub struct PrefillPoint {
    /// The cache's short name.
    pub cache: String,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Seconds of prefill, without the head.
    pub seconds: Timing,
    /// Peak of bytes of host memory, allocated by the cache and by the forward pass.
    pub peak_bytes: usize,
}

/// Times prefill of prompts of `lengths` tokens into empty caches, `samples` times for each of
/// `caches` in turn. Before that, each cache is filled once to measure its memory with `memory`,
/// the program's allocator. `progress` receives the tokens processed so far.
///
/// # Errors
/// [`Error::Plan`] for no samples, and the model's and the cache's errors.
pub fn time_prefill<T: Target, A>(
    device: &On<T>,
    model: &LanguageModel,
    caches: &[ModelCacheConfig],
    lengths: &[usize],
    samples: usize,
    memory: &Tracking<A>,
    mut progress: impl FnMut(usize),
) -> Result<Vec<PrefillPoint>> {
    size::check_samples("samples", samples)?;
    let mut points = Vec::with_capacity(caches.len() * lengths.len());
    let mut done = 0;
    let mut pass = |config: &ModelCacheConfig, tokens: usize| -> Result<f64> {
        let start = Instant::now();
        let _phase = trace_span!(target: PHASE, "prefill", cache = %config).entered();
        let mut cache = model.new_cache(config.clone().with_capacity(tokens), 1, device)?;
        let before = done;
        done += prefill(device, model, &mut cache, tokens, filler_of(model), |n| {
            progress(before + n);
        })?;
        wait(device)?;
        Ok(start.elapsed().as_secs_f64())
    };
    for &tokens in lengths {
        let mut peaks = Vec::with_capacity(caches.len());
        for config in caches {
            let (passed, peak) = memory.peak_of(|| pass(config, tokens));
            passed?;
            peaks.push(peak);
        }
        let mut seconds = vec![Vec::with_capacity(samples); caches.len()];
        for _ in 0..samples {
            for (config, seconds) in caches.iter().zip(&mut seconds) {
                seconds.push(pass(config, tokens)?);
            }
        }
        for ((config, seconds), peak_bytes) in caches.iter().zip(seconds).zip(peaks) {
            let (cache, seconds) = (config.to_string(), Timing::of(seconds)?);
            points.push(PrefillPoint { cache, tokens, seconds, peak_bytes });
        }
    }
    Ok(points)
}

/// Fills `cache` up to `context` tokens, which `ids` returns by position and number. Returns the
/// number of tokens appended.
pub(super) fn prefill<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    cache: &mut ModelCache,
    context: usize,
    ids: impl Fn(usize, usize) -> Vec<u32>,
    mut progress: impl FnMut(usize),
) -> Result<usize> {
    let before = cache.len();
    while cache.len() < context {
        let chunk = PREFILL_CHUNK.min(context - cache.len());
        let ids = ids(cache.len(), chunk);
        model.hidden_step(ids_to_tensor(&ids, [1, chunk], device), cache)?;
        progress(cache.len() - before);
    }
    Ok(cache.len() - before)
}

/// Returns filler for [`prefill`].
fn filler_of(model: &LanguageModel) -> impl Fn(usize, usize) -> Vec<u32> {
    let vocab = model.vocab_size();
    move |start, n| filler(start, n, vocab)
}

/// Fills the sequences of `cache` by copies of `reader`: the last one up to `context` tokens, each
/// one before it with one token less. Returns the number of tokens appended to `reader`.
fn fill<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    cache: &mut ModelCache,
    reader: &mut ModelCache,
    context: usize,
    mut progress: impl FnMut(usize),
) -> Result<usize> {
    let (before, batch) = (reader.len(), cache.batch());
    cache.reset();
    for slot in 0..batch {
        let so_far = reader.len() - before;
        let len = context + slot + 1 - batch;
        prefill(device, model, reader, len, filler_of(model), |n| progress(so_far + n))?;
        cache.admit(slot, reader)?;
    }
    Ok(reader.len() - before)
}

/// Returns input ids. They differ from each other; their values do not affect the time.
pub(super) fn filler(at: usize, n: usize, vocab: usize) -> Vec<u32> {
    (at..at + n).map(|i| (i * 7919 % vocab) as u32).collect()
}
