//! Whole models by context length: what a step costs as the cache grows, and what a prompt costs.

use std::time::Instant;

use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{DecodeGraph, LanguageModel, ModelCache, Steps, ids_to_tensor};
use serde::Serialize;

use super::{Subject, Timing, not_recorded, time_in_turn, wait};
use crate::{Error, Result, memory::Tracking};

/// Tokens per prefill pass.
const PREFILL_CHUNK: usize = 512;

/// What [`time_decode`] times.
#[derive(Clone, Copy, Debug)]
pub struct DecodeSubject {
    /// The cache.
    pub cache: KvCacheConfig,
    /// Whether the step is recorded once and replayed, see [`DecodeGraph`], or launched every time.
    pub recorded: bool,
}

/// Decode steps of one cache at one context length.
#[derive(Clone, Debug, Serialize)]
pub struct DecodePoint {
    /// The cache's short name.
    pub cache: String,
    /// Whether a recording of the step was replayed.
    pub recorded: bool,
    /// Tokens in the cache.
    pub context: usize,
    /// Seconds of one step, the head included.
    pub seconds: Timing,
    /// Bytes of the cache that one step reads, all layers.
    pub bytes_read: usize,
}

/// Appends a token and waits until the device has done so.
fn step<T: Target>(steps: &mut Steps<'_>, model: &LanguageModel, device: &On<T>) -> Result<()> {
    let ids = filler(steps.position(), 1, model.vocab_size());
    steps.step(model, &ids, device)?;
    wait(device)
}

/// The tokens that [`time_decode`] appends at each context: its samples and the warm-up steps
/// before them.
pub fn timed_steps(samples: usize) -> usize {
    samples + super::WARM_UP
}

/// Times `samples` decode steps of `model` at each of the ascending `contexts`, for each of
/// `subjects` in turn. `progress` is told the tokens prefilled so far.
///
/// # Errors
/// [`Error::Plan`] for contexts that do not ascend or a device that cannot record, and the model's and the
/// cache's errors.
pub fn time_decode<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    subjects: &[DecodeSubject],
    contexts: &[usize],
    samples: usize,
    mut progress: impl FnMut(usize),
) -> Result<Vec<DecodePoint>> {
    let steps = timed_steps(samples);
    if contexts.first() == Some(&0) || !contexts.is_sorted_by(|a, b| a + steps <= *b) {
        let rule =
            format!("must be above 0 and ascend by at least the {steps} steps timed at each");
        return Err(Error::plan("contexts", format!("{contexts:?}"), rule));
    }
    if subjects.iter().any(|subject| subject.recorded) && !DecodeGraph::is_supported(device) {
        return Err(not_recorded::<T>());
    }
    let capacity = contexts.last().map_or(1, |last| last + steps);
    let mut filled = Vec::with_capacity(subjects.len());
    for subject in subjects {
        filled.push(model.new_cache(subject.cache.with_capacity(capacity), 1, device)?);
    }
    let mut points = Vec::with_capacity(subjects.len() * contexts.len());
    let mut done = 0;
    for &context in contexts {
        let mut running = Vec::with_capacity(subjects.len());
        for (cache, subject) in filled.iter_mut().zip(subjects) {
            let before = done;
            done += prefill(device, model, cache, context, |n| progress(before + n))?;
            running.push(Steps::new(model, cache, subject.recorded, device)?);
        }
        let turns = running
            .iter_mut()
            .map(|steps| -> Subject<'_> { Box::new(|| step(steps, model, device)) });
        let timings = time_in_turn(samples, turns.collect())?;
        drop(running);
        for ((subject, cache), seconds) in subjects.iter().zip(&filled).zip(timings) {
            points.push(DecodePoint {
                cache: subject.cache.to_string(),
                recorded: subject.recorded,
                context,
                seconds,
                bytes_read: cache.layers().iter().map(|c| c.layout().bytes_read(context)).sum(),
            });
        }
    }
    Ok(points)
}

/// A prompt passed into an empty cache.
#[derive(Clone, Debug, Serialize)]
pub struct PrefillPoint {
    /// The cache's short name.
    pub cache: String,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Seconds to pass it, without the head.
    pub seconds: Timing,
    /// The most bytes of host memory that were allocated at any moment, by the cache and by the
    /// pass.
    pub peak_bytes: usize,
}

/// Times passing prompts of `lengths` tokens into empty caches, chunk by chunk, `samples` times for
/// each of `caches` in turn. Before that, each cache is filled once to measure its memory with
/// `memory`, the program's allocator. `progress` is told the tokens passed so far.
///
/// # Errors
/// [`Error::Plan`] for no samples, and the model's and the cache's errors.
pub fn time_prefill<T: Target, A>(
    device: &On<T>,
    model: &LanguageModel,
    caches: &[KvCacheConfig],
    lengths: &[usize],
    samples: usize,
    memory: &Tracking<A>,
    mut progress: impl FnMut(usize),
) -> Result<Vec<PrefillPoint>> {
    let mut points = Vec::with_capacity(caches.len() * lengths.len());
    let mut done = 0;
    let mut pass = |config: &KvCacheConfig, tokens: usize| -> Result<f64> {
        let start = Instant::now();
        let mut cache = model.new_cache(config.with_capacity(tokens), 1, device)?;
        let before = done;
        done += prefill(device, model, &mut cache, tokens, |n| progress(before + n))?;
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

/// Fills `cache` up to `context` tokens and returns how many that took.
fn prefill<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    cache: &mut ModelCache,
    context: usize,
    mut progress: impl FnMut(usize),
) -> Result<usize> {
    let before = cache.len();
    while cache.len() < context {
        let chunk = PREFILL_CHUNK.min(context - cache.len());
        let ids = filler(cache.len(), chunk, model.vocab_size());
        model.hidden_step(ids_to_tensor(&ids, [1, chunk], device), cache)?;
        progress(cache.len() - before);
    }
    Ok(cache.len() - before)
}

/// Ids to pass through the model. They differ from one another; otherwise their values do not
/// matter to the time.
fn filler(at: usize, n: usize, vocab: usize) -> Vec<u32> {
    (at..at + n).map(|i| (i * 7919 % vocab) as u32).collect()
}
