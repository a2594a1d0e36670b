//! Needles in a haystack: whether a model finds a passage again, by the place where it stands.

use core::fmt;

use burn::tensor::{DType, Tensor};
use kv_cubecl::{On, Target};
use kv_models::{LanguageModel, ModelCacheConfig, ids_to_tensor, spans::PHASE};
use kv_report::Table;
use serde::Serialize;
use tracing::trace_span;

use crate::{Error, Result, ids, score::negative_log_likelihood};

/// The sizes of a search for needles, in tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct NeedlePlan {
    /// Tokens of a prompt: haystack, needle, and the needle again.
    pub context: usize,
    /// Tokens of a needle.
    pub needle: usize,
    /// Its first tokens, which the prompt repeats last. The others are to be predicted.
    pub cue: usize,
    /// Equal parts of the haystack, each with a place for a needle.
    pub chunks: usize,
}

/// The result of [`needles`].
#[derive(Clone, Debug, Serialize)]
pub struct Needles {
    /// The sizes.
    pub plan: NeedlePlan,
    /// One line for each cache and place.
    pub rows: Vec<NeedleRow>,
}

/// A needle at one place, with one cache.
#[derive(Clone, Debug, Serialize)]
pub struct NeedleRow {
    /// The short name of the cache.
    pub cache: String,
    /// The part of the haystack, counted from 0.
    pub chunk: usize,
    /// The tokens before the needle.
    pub at: usize,
    /// The tokens of the needle that were predicted, the most likely ones given all before.
    pub found: usize,
    /// The number of these tokens that were predicted from the cue alone, without the needle in the
    /// haystack.
    pub without: usize,
    /// The tokens to predict.
    pub of: usize,
    /// The mean negative log-likelihood of these tokens, nats.
    pub nll: f64,
    /// The mean negative log-likelihood without the needle in the haystack, nats.
    pub nll_without: f64,
}

impl NeedlePlan {
    /// Returns the tokens of text that are needed: a haystack, and a needle for each place.
    pub const fn text(&self) -> usize {
        self.context.saturating_add(self.needle.saturating_mul(self.chunks))
    }

    fn haystack(&self) -> usize {
        self.context - 2 * self.needle
    }

    fn check(&self, model: &LanguageModel, tokens: usize) -> Result<()> {
        let Self { context, needle, cue, chunks } = *self;
        if cue == 0 || cue >= needle {
            let rule = format!("must be at least 1 and below the {needle} tokens of a needle");
            return Err(Error::plan("cue", cue, rule));
        }
        if chunks == 0 {
            return Err(Error::plan("chunks", chunks, "must be at least 1"));
        }
        let positions = model.max_positions();
        if context > positions {
            let rule = format!("must be at most the {positions} positions of the model");
            return Err(Error::plan("context", context, rule));
        }
        let least = needle.saturating_mul(2).saturating_add(chunks);
        if context < least {
            let rule = format!("must be at least two needles and a token for each chunk, {least}");
            return Err(Error::plan("context", context, rule));
        }
        if tokens < self.text() {
            let rule = format!("must have {} tokens for haystack and needles", self.text());
            return Err(Error::plan("text", tokens, rule));
        }
        Ok(())
    }
}

/// Hides passages in a text, and compares how well the model continues them after it has read the
/// text and their first tokens.
///
/// The haystack is the beginning of `ids`. Each needle is a passage of later text, other for each
/// place. Every prompt has the same length, with the needle or with the text that it replaces.
///
/// # Errors
/// [`Error::Plan`] for sizes that do not fit the model or the text, and the errors of the model and
/// of its caches.
pub fn needles<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    ids: &[u32],
    caches: &[ModelCacheConfig],
    plan: NeedlePlan,
    mut progress: impl FnMut(&NeedleRow),
) -> Result<Needles> {
    ids::check(ids, model)?;
    plan.check(model, ids.len())?;
    let (hay, others) = ids.split_at(plan.context);
    let mut rows = vec![];
    for cache in caches {
        for (chunk, needle) in others.chunks(plan.needle).take(plan.chunks).enumerate() {
            let at = (2 * chunk + 1) * plan.haystack() / (2 * plan.chunks);
            let _phase = trace_span!(target: PHASE, "needle", chunk, cache = %cache).entered();
            let prompt = |hidden: &[u32]| {
                let mut prompt = [&hay[..at], hidden, &hay[at..]].concat();
                prompt.truncate(plan.context - plan.needle);
                prompt.extend(needle);
                prompt
            };
            let (found, nll) = predicted(device, model, &prompt(needle), cache, plan)?;
            let (without, nll_without) = predicted(device, model, &prompt(&[]), cache, plan)?;
            let (of, cache) = (plan.needle - plan.cue, cache.to_string());
            let row = NeedleRow { cache, chunk, at, found, without, of, nll, nll_without };
            progress(&row);
            rows.push(row);
        }
    }
    Ok(Needles { plan, rows })
}

/// Returns how many of the last tokens of `prompt` were the most likely ones, and their mean loss.
fn predicted<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    prompt: &[u32],
    cache: &ModelCacheConfig,
    plan: NeedlePlan,
) -> Result<(usize, f64)> {
    let name = cache.to_string();
    let mut cache = cache.clone();
    cache.capacity = prompt.len();
    let input = ids_to_tensor(&prompt[..prompt.len() - 1], [1, prompt.len() - 1], device);
    let answer = &prompt[prompt.len() - (plan.needle - plan.cue)..];
    let hidden = model.hidden(input, cache)?;
    let last = hidden.dims()[1] - answer.len();
    let logits = model.head(hidden.narrow(1, last, answer.len())).cast(DType::F32);
    let best: Tensor<3, burn::tensor::Int> = logits.clone().argmax(2);
    let fail = |why: String| Error::Device { cache: name.clone(), why };
    let best = best.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    let found = best.iter::<i64>().zip(answer).filter(|(best, id)| *best == i64::from(**id));
    let found = found.count();
    let logits = logits.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    let logits: Vec<f32> = logits.iter::<f32>().collect();
    let losses = negative_log_likelihood(&logits, answer);
    let nll = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / answer.len() as f64;
    match nll.is_finite() {
        true => Ok((found, nll)),
        false => Err(Error::NonFinite { cache: name, token: prompt.len(), value: nll as f32 }),
    }
}

impl Needles {
    /// Lists all needles.
    pub fn table(&self) -> Table {
        let header = ["cache", "chunk", "at", "found", "without", "of", "nll", "nll without"];
        let mut table = Table::new(header);
        for row in &self.rows {
            table.push(vec![
                row.cache.clone(),
                row.chunk.to_string(),
                row.at.to_string(),
                row.found.to_string(),
                row.without.to_string(),
                row.of.to_string(),
                format!("{:.4}", row.nll),
                format!("{:.4}", row.nll_without),
            ]);
        }
        table
    }
}

impl fmt::Display for Needles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NeedlePlan { context, needle, cue, .. } = self.plan;
        writeln!(f, "{context} tokens, needles of {needle} tokens, cues of {cue}")?;
        write!(f, "{}", self.table())
    }
}
