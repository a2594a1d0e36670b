//! Speed by context length: what one decode step costs as the cache grows.

use std::time::Instant;

use burn::tensor::{Int, Tensor, TensorData};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::LanguageModel;
use serde::Serialize;

use crate::{Error, Result};

/// Tokens per prefill pass.
const PREFILL_CHUNK: usize = 512;

/// Decode steps of one cache at one context length.
#[derive(Clone, Debug, Serialize)]
pub struct DecodePoint {
    /// The cache's short name.
    pub cache: String,
    /// Tokens in the cache.
    pub context: usize,
    /// Median seconds of one step.
    pub step_seconds: f64,
    /// Bytes of the cache that one step reads, all layers.
    pub bytes_read: usize,
}

/// Times `steps` decode steps of `model` at each of the ascending `contexts`; of each step the whole
/// model runs, its head included.
///
/// # Errors
/// [`Error::Plan`] for contexts that do not ascend, and the model's and the cache's errors.
pub fn decode<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    config: &KvCacheConfig,
    contexts: &[usize],
    steps: usize,
    mut progress: impl FnMut(usize),
) -> Result<Vec<DecodePoint>> {
    if steps == 0 {
        return Err(Error::plan("steps", steps, "must be at least 1"));
    }
    if contexts.first() == Some(&0) || !contexts.is_sorted_by(|a, b| a + steps <= *b) {
        let rule =
            format!("must be above 0 and ascend by at least the {steps} steps timed at each");
        return Err(Error::plan("contexts", format!("{contexts:?}"), rule));
    }
    let capacity = contexts.last().map_or(1, |last| last + steps);
    let config = config.with_capacity(capacity);
    let mut cache = model.new_cache(config, 1, device)?;
    let mut points = Vec::with_capacity(contexts.len());
    for &context in contexts {
        while cache.len() < context {
            let chunk = PREFILL_CHUNK.min(context - cache.len());
            model
                .hidden_step(filler(cache.len(), chunk, model.vocab_size(), device), &mut cache)?;
            progress(cache.len());
        }
        let mut seconds = Vec::with_capacity(steps);
        for _ in 0..steps {
            let ids = filler(cache.len(), 1, model.vocab_size(), device);
            let start = Instant::now();
            let logits = model.step(ids, &mut cache)?;
            // Reading the logits back waits for the device.
            logits.try_into_data().map_err(|error| Error::Device {
                cache: config.to_string(),
                why: format!("{error:?}"),
            })?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        points.push(DecodePoint {
            cache: config.to_string(),
            context,
            step_seconds: median(&mut seconds),
            bytes_read: cache.layers().iter().map(|layer| layer.layout().bytes_read(context)).sum(),
        });
    }
    Ok(points)
}

/// Ids that differ from one another: their values do not matter to the time.
fn filler<T: Target>(at: usize, n: usize, vocab: usize, device: &On<T>) -> Tensor<2, Int> {
    let ids: Vec<i32> = (at..at + n).map(|i| (i * 7919 % vocab) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, n]), &**device)
}

/// The middle one, sorting in place.
pub fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
