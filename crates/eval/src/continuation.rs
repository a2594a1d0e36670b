//! Counts the tokens that a model generates with a quantized cache before they differ from those
//! with the float cache.

use core::fmt;

use kv_cubecl::{On, Target};
use kv_models::{GenerateOptions, LanguageModel, ModelCacheConfig, generate, spans::PHASE};
use kv_report::Table;
use serde::Serialize;
use tracing::trace_span;

use crate::{Error, Result, ids};

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
    /// Returns the number of text tokens that all prompts need.
    pub fn text(&self) -> usize {
        self.prompts.saturating_mul(self.passage())
    }

    /// Returns the number of text tokens in a prompt.
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
            let rule = match self.bos {
                Some(_) => "must be at least 2, because prompts start with a begin-of-text token",
                None => "must be at least 1",
            };
            return Err(Error::plan("context", self.context, rule));
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
            let rule = format!(
                "must have {} tokens for {} prompts of {}; lower prompts or context",
                self.text(),
                self.prompts,
                self.passage()
            );
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
    /// For each cache and prompt, the number of generated tokens before the first that differs from
    /// the first cache's.
    pub agreed: Vec<Vec<usize>>,
}

/// Continues passages of a text greedily with each of `caches`, past end-of-text tokens, and counts
/// the tokens before the output differs from the first cache's. Put the float cache first.
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
    ids::check(plan.bos.as_slice(), model)?;
    plan.check(model, ids.len())?;
    let options =
        GenerateOptions { max_tokens: plan.generate, ..GenerateOptions::suiting(model, device) };
    let mut agreed = vec![vec![]; caches.len()];
    for passage in ids.chunks(plan.passage()).take(plan.prompts) {
        let prompt: Vec<u32> = plan.bos.iter().chain(passage).copied().collect();
        let mut first: Option<Vec<u32>> = None;
        for (cache, agreed) in caches.iter().zip(&mut agreed) {
            let _phase = trace_span!(target: PHASE, "continuation", cache = %cache).entered();
            let config = cache.clone().with_capacity(plan.context + plan.generate);
            let mut cache = model.new_cache(&config, 1, device)?;
            let mut same = 0;
            let generated = generate(model, &mut cache, &prompt, &options, device, |id| {
                let agrees = first.as_ref().is_none_or(|first| first.get(same) == Some(&id));
                same += usize::from(agrees);
                agrees
            })?;
            agreed.push(same);
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
        let mut table = Table::new(["cache", "mean", "least", "identical"]);
        for (cache, agreed) in self.caches.iter().zip(&self.agreed) {
            let mean = agreed.iter().sum::<usize>() as f64 / agreed.len() as f64;
            let least = agreed.iter().min().copied().unwrap_or(0);
            let identical = agreed.iter().filter(|&&tokens| tokens == generate).count();
            table.push([
                cache.clone(),
                format!("{mean:.1}"),
                least.to_string(),
                format!("{identical}/{prompts}"),
            ]);
        }
        write!(f, "{table}")?;
        writeln!(f, "mean, least: generated tokens before the first that differs from float's")
    }
}
