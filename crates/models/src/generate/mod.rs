//! Continuing a text, token by token.

mod ahead;
mod batch;
mod graph;
mod picker;
mod sampler;
mod steps;
mod stops;

use std::{
    collections::BTreeSet,
    fmt,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

pub use ahead::CompileAhead;
pub use batch::{Batch, BatchTotals, Event};
pub use graph::DecodeGraph;
pub use sampler::{Sampler, Sampling};
pub use steps::Steps;
pub use stops::StopStrings;
use tracing::trace_span;

use crate::{
    Error, LanguageModel, ModelCache, ModelSpec, Result,
    spans::{OPERATION, PHASE},
};

/// When [`generate`] stops and how it picks tokens.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// How a token is picked from the logits.
    pub sampling: Sampling,
    /// Ids that end the text. The one that is generated is in [`Generated::ids`], but is not passed
    /// to the callback.
    pub eos: BTreeSet<u32>,
    /// Prompt tokens per pass; it bounds the memory and does not change the result.
    pub prefill_chunk: usize,
    /// Record the step of one token once and replay it, see [`DecodeGraph`]; `None` for where that
    /// [pays](Steps::pays_recorded).
    pub recorded: Option<bool>,
}

impl Default for GenerateOptions {
    /// 256 tokens, greedy, no end-of-text id, prefill by 512, steps recorded where it pays.
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: Sampling::GREEDY,
            eos: BTreeSet::new(),
            prefill_chunk: 512,
            recorded: None,
        }
    }
}

impl GenerateOptions {
    /// Width of the residual stream from which on a chunk of half as many tokens is as fast on the CPU, and what it
    /// computes with half as large.
    const WIDE: usize = 2048;

    /// The default, with [chunks](Self::prefill_chunk_for) of prompts that suit a model on a device.
    pub fn suiting(model: &LanguageModel, device: &Device) -> Self {
        Self { prefill_chunk: Self::prefill_chunk_for(model.spec(), device), ..Self::default() }
    }

    /// Tokens of the chunks of prompts that suit a model on a device: 256 for one at least 2048 channels wide on the CPU,
    /// else 512. What plans memory asks this too, so that it counts the passes that there will be.
    pub fn prefill_chunk_for(spec: &ModelSpec, device: &Device) -> usize {
        let default = Self::default().prefill_chunk;
        #[cfg(feature = "flex")]
        {
            use kv_cubecl::{Flex, Target};

            if spec.hidden_size >= Self::WIDE && Flex::hosts(device) {
                return default / 2;
            }
        }
        let _ = (spec, device, Self::WIDE);
        default
    }
}

/// Why [`generate`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// An end-of-text id was generated.
    Eos,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The cache or the model has no room for another token.
    Capacity,
    /// The callback returned `false`.
    Callback,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Eos => "the end of the text",
            Self::MaxTokens => "max_tokens",
            Self::Capacity => "a full cache",
            Self::Callback => "being asked to",
        })
    }
}

/// What [`generate`] did.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The generated ids, an end-of-text id included.
    pub ids: Vec<u32>,
    /// Why it stopped.
    pub stop: Stop,
    /// Prompt tokens.
    pub prefill_tokens: usize,
    /// Time to the logits of the first token.
    pub prefill_time: Duration,
    /// Time from the start of the prefill to the first token; zero when none was generated.
    pub first_token_time: Duration,
    /// Tokens passed through the model one at a time after that.
    pub decode_tokens: usize,
    /// Time from the end of the prefill to the end, sampling and recording included.
    pub decode_time: Duration,
}

impl Generated {
    /// Nothing yet.
    pub fn new(stop: Stop) -> Self {
        let zero = Duration::ZERO;
        Self {
            ids: vec![],
            stop,
            prefill_tokens: 0,
            prefill_time: zero,
            first_token_time: zero,
            decode_tokens: 0,
            decode_time: zero,
        }
    }

    /// Prompt tokens per second, zero when there were none.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        match self.prefill_tokens {
            0 => 0.0,
            n => n as f64 / self.prefill_time.as_secs_f64(),
        }
    }

    /// Decoded tokens per second, zero when there were none.
    pub fn decode_tokens_per_second(&self) -> f64 {
        match self.decode_tokens {
            0 => 0.0,
            n => n as f64 / self.decode_time.as_secs_f64(),
        }
    }
}

/// Appends `prompt` to `cache` and continues it, passing each id to `on_token` until that returns
/// false.
///
/// # Errors
///
/// An empty prompt, one that exceeds the cache or the model (nothing is appended), a cache of
/// another batch than 1, invalid sampling options, recording on a device that cannot record, or
/// logits that are not finite.
pub fn generate(
    model: &LanguageModel,
    cache: &mut ModelCache,
    prompt: &[u32],
    options: &GenerateOptions,
    device: &Device,
    on_token: impl FnMut(u32) -> bool,
) -> Result<Generated> {
    Sampler::new(options.sampling)?;
    if options.prefill_chunk == 0 {
        return Err(Error::argument("prefill_chunk", 0, "must be at least 1"));
    }
    if options.recorded == Some(true) && !DecodeGraph::is_supported(device) {
        return Err(steps::cannot_record());
    }
    cache.check(1, prompt.len())?;

    let start = Instant::now();
    let logits = prefill(model, cache, prompt, options.prefill_chunk, device)?;
    finish(device)?;
    let prefill_time = start.elapsed();
    let text = prompt.to_vec();
    let mut out = decode(model, cache, text, logits, options, device, on_token)?;
    (out.prefill_tokens, out.prefill_time) = (prompt.len(), prefill_time);
    out.first_token_time += prefill_time;
    Ok(out)
}

/// Continues `text`, whose tokens are in `cache` and whose last one gave `logits`, as [`generate`]
/// does.
///
/// # Errors
///
/// Those of [`generate`] but for the prompt's.
pub(crate) fn decode(
    model: &LanguageModel,
    cache: &mut ModelCache,
    mut text: Vec<u32>,
    logits: Tensor<2>,
    options: &GenerateOptions,
    device: &Device,
    mut on_token: impl FnMut(u32) -> bool,
) -> Result<Generated> {
    let mut out = Generated::new(Stop::MaxTokens);
    let start = Instant::now();
    let pays = || Steps::pays_recorded(model, cache, options.max_tokens, device);
    let recorded = options.recorded.unwrap_or_else(pays);
    let mut steps = Steps::new(model, cache, recorded, options.sampling, device)?;
    steps.start(logits);
    while out.ids.len() < options.max_tokens {
        let _phase = trace_span!(target: PHASE, "decode", n = out.ids.len() + 1).entered();
        let id = steps.pick(&text)?;
        if out.ids.is_empty() {
            out.first_token_time = start.elapsed();
        }
        text.push(id);
        out.ids.push(id);
        if options.eos.contains(&id) {
            out.stop = Stop::Eos;
            break;
        }
        if !told(&mut on_token, id) {
            out.stop = Stop::Callback;
            break;
        }
        if out.ids.len() == options.max_tokens {
            break;
        }
        if steps.remaining() == 0 {
            out.stop = Stop::Capacity;
            break;
        }
        steps.step(model, &[id], device)?;
        out.decode_tokens += 1;
    }
    out.decode_time = start.elapsed();
    Ok(out)
}

fn told(on_token: &mut impl FnMut(u32) -> bool, id: u32) -> bool {
    let _span = trace_span!(target: OPERATION, "on_token").entered();
    on_token(id)
}

/// Passes a prompt in chunks and returns the logits after its last token, `[1, vocab]`.
fn prefill(
    model: &LanguageModel,
    cache: &mut ModelCache,
    prompt: &[u32],
    chunk: usize,
    device: &Device,
) -> Result<Tensor<2>> {
    let _phase = trace_span!(target: PHASE, "prefill").entered();
    let (body, tail) = prompt.split_at((prompt.len() - 1) / chunk * chunk);
    for ids in body.chunks(chunk) {
        model.hidden_step(ids_to_tensor(ids, [1, ids.len()], device), cache)?;
    }
    last_logits(model, cache, tail, device)
}

/// Passes `ids` and returns the logits after the last, `[1, vocab]`; the head is applied to that one alone.
pub(crate) fn last_logits(
    model: &LanguageModel,
    cache: &mut ModelCache,
    ids: &[u32],
    device: &Device,
) -> Result<Tensor<2>> {
    let hidden = model.hidden_step(ids_to_tensor(ids, [1, ids.len()], device), cache)?; // [1, seq, hidden]
    let last = hidden.narrow(1, ids.len() - 1, 1);
    Ok(model.head(last).squeeze_dim(1))
}

/// Waits until the device is done, so that what was asked of it is what is timed.
pub(crate) fn finish(device: &Device) -> Result<()> {
    let _span = trace_span!(target: OPERATION, "wait").entered();
    device.sync().map_err(|error| Error::argument("device", format!("{error:?}"), "must finish"))
}

fn read<const D: usize>(logits: Tensor<D>) -> Result<Vec<f32>> {
    let _span = trace_span!(target: OPERATION, "read").entered();
    let data = logits.into_data().convert::<f32>();
    data.try_into_vec::<f32>()
        .map_err(|error| Error::argument("logits", format!("{error:?}"), "must be readable as f32"))
}

/// A tensor of token ids for a model, with 32-bit integers on every backend.
pub fn ids_to_tensor<const D: usize>(
    values: &[u32],
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    let values: Vec<i32> = values.iter().map(|&value| value as i32).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}
