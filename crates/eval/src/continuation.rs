//! How long a model generates the same text with a quantized cache as with a float one.

use core::fmt;

use kv_cubecl::{On, Target};
use kv_models::{GenerateOptions, LanguageModel, ModelCacheConfig, generate, spans::PHASE};
use kv_report::Table;
use serde::Serialize;
use tracing::trace_span;

use crate::{Error, Result, bench::median, ids};

/// The prompts of [`continuations`].
#[derive(Clone, Debug, Serialize)]
pub struct ContinuationPlan {
    /// Number of prompts, passages of a text that follow each other.
    pub prompts: usize,
    /// Tokens of a prompt.
    pub context: usize,
    /// Tokens to generate after each prompt.
    pub generate: usize,
    /// The begin-of-text token, with which prompts start.
    pub bos: Option<u32>,
}

impl ContinuationPlan {
    /// Returns the tokens of text that are needed.
    pub fn text(&self) -> usize {
        self.prompts.saturating_mul(self.passage())
    }

    /// Returns the tokens of a prompt that are text.
    fn passage(&self) -> usize {
        self.context.saturating_sub(usize::from(self.bos.is_some()))
    }

    fn check(&self, model: &LanguageModel, tokens: usize) -> Result<()> {
        let least = |field, value| match value {
            0 => Err(Error::plan(field, 0, "must be at least 1")),
            _ => Ok(()),
        };
        least("prompts", self.prompts)?;
        least("generate", self.generate)?;
        if self.passage() == 0 {
            return Err(Error::plan("context", self.context, "has no token of text"));
        }
        let positions = model.max_positions();
        if self.context.saturating_add(self.generate) > positions {
            let rule = format!(
                "with {} generated tokens exceeds the model's {positions} positions",
                self.generate
            );
            return Err(Error::plan("context", self.context, rule));
        }
        if tokens < self.text() {
            let rule = format!("must have {} tokens for all prompts", self.text());
            return Err(Error::plan("text", tokens, rule));
        }
        Ok(())
    }
}

/// The result of [`continuations`].
#[derive(Clone, Debug, Serialize)]
pub struct Continuations {
    /// The prompts.
    pub plan: ContinuationPlan,
    /// The short names of the caches.
    pub caches: Vec<String>,
    /// The tokens that each cache generates before its first other token than with the first cache,
    /// by cache and prompt.
    pub agreed: Vec<Vec<usize>>,
}

/// Lets `model` continue passages of a text greedily with each of `caches`, past end-of-text tokens,
/// and counts the tokens until a text differs from that of the first cache, which should be float.
///
/// # Errors
/// [`Error::Plan`] for a setting out of range, and for a text that is too short; and the errors of
/// the model and of its caches.
pub fn continuations<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    ids: &[u32],
    caches: &[ModelCacheConfig],
    plan: ContinuationPlan,
    mut progress: impl FnMut(),
) -> Result<Continuations> {
    ids::check(ids, model)?;
    plan.check(model, ids.len())?;
    let options =
        GenerateOptions { max_tokens: plan.generate, ..GenerateOptions::suiting(model, device) };
    let mut agreed = vec![vec![]; caches.len()];
    for passage in ids.chunks(plan.passage()).take(plan.prompts) {
        let prompt: Vec<u32> = plan.bos.iter().chain(passage).copied().collect();
        let mut first = None;
        for (cache, agreed) in caches.iter().zip(&mut agreed) {
            let _phase = trace_span!(target: PHASE, "continuation", cache = %cache).entered();
            let config = cache.clone().with_capacity(plan.context + plan.generate);
            let mut cache = model.new_cache(&config, 1, device)?;
            let mut same = 0;
            let generated = generate(model, &mut cache, &prompt, &options, device, |id| {
                let Some(first) = &first else { return true };
                let first: &Vec<u32> = first;
                let agrees = first.get(same) == Some(&id);
                same += usize::from(agrees);
                agrees
            })?;
            agreed.push(if first.is_some() { same } else { generated.ids.len() });
            first.get_or_insert(generated.ids);
            progress();
        }
    }
    let caches = caches.iter().map(ToString::to_string).collect();
    Ok(Continuations { plan, caches, agreed })
}

impl fmt::Display for Continuations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ContinuationPlan { prompts, context, generate, .. } = self.plan;
        writeln!(f, "{prompts} prompts of {context} tokens, {generate} generated after each")?;
        let mut table = Table::new(["cache", "mean", "median", "least", "identical"]);
        for (cache, agreed) in self.caches.iter().zip(&self.agreed) {
            let mut all: Vec<f64> = agreed.iter().map(|&tokens| tokens as f64).collect();
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let identical = agreed.iter().filter(|&&tokens| tokens == generate).count();
            table.push([
                cache.clone(),
                format!("{mean:.1}"),
                format!("{:.0}", median(&mut all)),
                format!("{:.0}", all[0]),
                format!("{identical}/{prompts}"),
            ]);
        }
        write!(f, "{table}")?;
        writeln!(f, "mean, median, least: tokens that are equal before the first other token")
    }
}
