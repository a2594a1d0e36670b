//! Generates text token by token.

mod ahead;
mod batch;
mod graph;
mod picker;
mod sampler;
mod speculate;
mod steps;
mod stops;

use std::{
    collections::BTreeSet,
    fmt,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

pub use ahead::CompileAhead;
pub use batch::{Batch, BatchText, BatchTotals, Event};
pub use graph::DecodeGraph;
pub use picker::Pick;
pub use sampler::{Sampler, Sampling};
pub use speculate::{DraftModel, Guesses, Speculate};
pub use steps::Steps;
pub use stops::StopStrings;
use tracing::trace_span;

use crate::{
    cache::ModelCache,
    device_use::is_cpu,
    error::{Error, Result},
    model::LanguageModel,
    spans::{OPERATION, PHASE},
    spec::ModelSpec,
};

/// The options of [`generate`]: limits, sampling, and how steps run.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// The sampling parameters.
    pub sampling: Sampling,
    /// Ids that end the text. [`Generated::ids`] includes the end-of-text id, but the callback does
    /// not get it.
    pub eos: BTreeSet<u32>,
    /// Prompt tokens per prefill chunk. It limits memory and does not change the result.
    pub prefill_chunk: usize,
    /// Use of graph capture for decode steps, see [`DecodeGraph`]; `None` decides by
    /// [`Steps::graph_capture_pays`].
    pub graph_capture: Option<bool>,
    /// The guesses of the next tokens, which exclude graph capture.
    pub speculate: Speculate,
}

impl Default for GenerateOptions {
    /// Returns 256 tokens, greedy, no end-of-text id, prefill chunks of 512, no guesses, and graph
    /// capture where it pays off.
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: Sampling::GREEDY,
            eos: BTreeSet::new(),
            prefill_chunk: 512,
            graph_capture: None,
            speculate: Speculate::Never,
        }
    }
}

impl GenerateOptions {
    /// The smallest width of the residual stream at which chunks of half the size are as fast on
    /// the CPU. They also halve the memory of a prefill.
    const WIDE: usize = 2048;

    /// Returns the default with the [prefill chunk](Self::prefill_chunk_for) for a model on a
    /// device.
    pub fn suiting(model: &LanguageModel, device: &Device) -> Self {
        Self { prefill_chunk: Self::prefill_chunk_for(model.spec(), device), ..Self::default() }
    }

    /// Returns the tokens of a prefill chunk for a model on a device: 256 for a width of at least
    /// 2048 on the CPU, otherwise 512. Memory plans use the same number.
    pub fn prefill_chunk_for(spec: &ModelSpec, device: &Device) -> usize {
        let default = Self::default().prefill_chunk;
        match spec.hidden_size >= Self::WIDE && is_cpu(device) {
            true => default / 2,
            false => default,
        }
    }
}

/// The reason why [`generate`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// An end-of-text id was generated.
    Eos,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The cache or the model is full.
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
            Self::Callback => "the callback",
        })
    }
}

/// The result of [`generate`].
#[derive(Clone, Debug)]
pub struct Generated {
    /// The generated ids, including an end-of-text id.
    pub ids: Vec<u32>,
    /// The reason why it stopped.
    pub stop: Stop,
    /// Prompt tokens.
    pub prefill_tokens: usize,
    /// The prompt tokens that were not computed, because a [`Batch`] had stored their prefix.
    pub prefix_tokens: usize,
    /// Time to the logits of the first token.
    pub prefill_time: Duration,
    /// Time from the start of the prefill to the first token; zero if there is none.
    pub first_token_time: Duration,
    /// Tokens decoded one at a time after the prefill.
    pub decode_tokens: usize,
    /// Time from the end of the prefill to the end, including sampling and graph capture.
    pub decode_time: Duration,
    /// The guesses of tokens.
    pub guesses: Guesses,
}

impl Generated {
    /// Creates a result without tokens.
    pub fn new(stop: Stop) -> Self {
        let zero = Duration::ZERO;
        Self {
            ids: vec![],
            stop,
            prefill_tokens: 0,
            prefix_tokens: 0,
            prefill_time: zero,
            first_token_time: zero,
            decode_tokens: 0,
            decode_time: zero,
            guesses: Guesses::default(),
        }
    }

    /// Returns the prompt tokens per second; zero without prompt tokens.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        match self.prefill_tokens {
            0 => 0.0,
            n => n as f64 / self.prefill_time.as_secs_f64(),
        }
    }

    /// Returns the decoded tokens per second; zero without decoded tokens.
    pub fn decode_tokens_per_second(&self) -> f64 {
        match self.decode_tokens {
            0 => 0.0,
            n => n as f64 / self.decode_time.as_secs_f64(),
        }
    }
}

/// Appends `prompt` to `cache` and continues it. Passes each id to `on_token` until that returns
/// false.
///
/// # Errors
/// Fails for an empty prompt, for one that exceeds the cache or the model (nothing is appended),
/// for another batch than 1, for invalid sampling options, for graph capture on a device that does
/// not support it, and for logits that are not finite.
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
    if options.graph_capture == Some(true) && !DecodeGraph::is_supported(device) {
        return Err(steps::no_graph_capture());
    }
    if options.graph_capture == Some(true) && options.speculate.is_forced() {
        let rule = "a captured step takes one token; use one of both";
        return Err(Error::argument("speculate", &options.speculate, rule));
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

/// Continues `text` as [`generate`] does. Its tokens are in `cache`, and `logits` are those of its
/// last token.
///
/// # Errors
/// Fails as [`generate`] does, except for the prompt.
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
    let (sampling, speculate) = (options.sampling, &options.speculate);
    let pays = || Steps::graph_capture_pays(model, cache, options.max_tokens, device);
    let graph_capture = options.graph_capture.unwrap_or_else(|| !speculate.is_forced() && pays());
    let mut steps = match graph_capture {
        true => Steps::new(model, cache, true, sampling, device)?,
        false => Steps::with_guesses(cache, speculate, &text, sampling, device)?,
    };
    steps.start(logits);
    let mut run = || -> Result<()> {
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
            if !call(&mut on_token, id) {
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
        Ok(())
    };
    let ended = run();
    // After an error, too: the cache must not keep guesses that are no part of the text.
    let finished = steps.finish();
    ended?;
    finished?;
    out.guesses = steps.guesses();
    out.decode_time = start.elapsed();
    Ok(out)
}

fn call(on_token: &mut impl FnMut(u32) -> bool, id: u32) -> bool {
    let _span = trace_span!(target: OPERATION, "on_token").entered();
    on_token(id)
}

/// Prefills a prompt in chunks and returns the logits after its last token, `[1, vocab]`.
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

/// Appends `ids` and returns the logits after the last, `[1, vocab]`. The head is applied to that
/// position alone.
pub(crate) fn last_logits(
    model: &LanguageModel,
    cache: &mut ModelCache,
    ids: &[u32],
    device: &Device,
) -> Result<Tensor<2>> {
    // [1, seq, hidden]
    let hidden = model.hidden_step(ids_to_tensor(ids, [1, ids.len()], device), cache)?;
    let last = hidden.narrow(1, ids.len() - 1, 1);
    Ok(model.head(last).squeeze_dim(1))
}

/// Waits for the device, so that timings include its work.
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

/// Creates a tensor of token ids, with 32-bit integers on every backend.
pub fn ids_to_tensor<const D: usize>(
    values: &[u32],
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    let values: Vec<i32> = values.iter().map(|&value| value as i32).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}
