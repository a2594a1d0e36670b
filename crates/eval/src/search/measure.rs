//! Losses and divergences of many caches over the same eval windows. The float cache runs once.

use core::ops::ControlFlow;

use burn::tensor::Tensor;
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{LanguageModel, ModelCacheConfig, ids_to_tensor, spans::PHASE};
use serde::Serialize;
use tracing::trace_span;

use crate::{
    Devices, Error, Plan, Result,
    score::{divergence, negative_log_likelihood},
};

/// Rows whose logits are compared at once.
const ROWS: usize = 256;

/// Maximum bytes of float logits kept for all caches of the eval windows in progress; larger ones
/// are computed again.
const KEPT: usize = 1 << 30;

/// Loss of a cache over a text, in nats per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Score {
    /// Mean divergence of the next token's distribution from that with the float cache.
    pub kl: f64,
    /// Mean negative log-likelihood.
    pub nll: f64,
}

impl Score {
    /// `exp(nll)`.
    pub fn perplexity(&self) -> f64 {
        self.nll.exp()
    }
}

/// Logits of an eval window, a block of rows at a time.
struct Window<'a, T: Target> {
    device: &'a On<T>,
    model: &'a LanguageModel,
    ids: Vec<u32>,
    context: usize,
}

impl<T: Target> Window<'_, T> {
    /// Computes the final hidden states `[scored, hidden]` with a cache.
    fn hidden(&self, cache: &ModelCacheConfig) -> Result<Tensor<2>> {
        let inputs = &self.ids[..self.ids.len() - 1];
        let ids = ids_to_tensor(inputs, [1, inputs.len()], self.device);
        let hidden = self.model.hidden(ids, cache)?.squeeze_dim::<2>(0);
        Ok(hidden.narrow(0, self.context - 1, self.targets().len()))
    }

    fn targets(&self) -> &[u32] {
        &self.ids[self.context..]
    }

    /// Computes the logits of some rows of `hidden` and copies them to the host.
    fn logits(&self, hidden: &Tensor<2>, start: usize, rows: usize) -> Result<Vec<f32>> {
        let rows = hidden.clone().narrow(0, start, rows);
        let fail = |why: String| Error::Device { cache: "search".into(), why };
        let data = self.model.head(rows.unsqueeze_dim(0)).try_into_data();
        data.map_err(|error| fail(format!("{error:?}")))?
            .try_into_vec()
            .map_err(|error| fail(format!("{error:?}")))
    }
}

/// The losses of a block of rows, added up.
struct Block {
    /// The cache by its index; `None` is the float cache.
    cache: Option<usize>,
    sum: Score,
}

/// An event of an eval window.
enum Event {
    Block(Block),
    /// A cache is done with the window.
    Cache,
}

/// Returns the scores of the float cache and of each of `caches` over the eval windows of `plan`,
/// whose own caches are ignored. `step` is called after each window of each cache, including the
/// float cache, and may stop the measurement.
///
/// # Errors
/// [`Error::Stopped`] if `step` asks to stop, [`Error::NonFinite`], and the model's and the cache's
/// errors.
pub(super) fn measure<T: Target>(
    devices: Devices<'_, T>,
    model: &LanguageModel,
    plan: &Plan,
    caches: &[ModelCacheConfig],
    step: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<(Score, Vec<Score>)> {
    let mut sums = vec![Score::default(); caches.len()];
    let mut of_float = Score::default();
    let spans: Vec<_> = plan.spans().collect();
    devices.share_out(
        model,
        spans.len(),
        |_, _| Ok(()),
        |device, model, i, send| {
            let (ids, context) = plan.input(&spans[i]);
            let kept = KEPT / devices.at_work(spans.len());
            Window { device, model, ids, context }.measure(plan, caches, kept, send)
        },
        |event| match event {
            Event::Block(Block { cache, sum }) => {
                let total = cache.map_or(&mut of_float, |cache| &mut sums[cache]);
                total.nll += sum.nll;
                total.kl += sum.kl;
                Ok(())
            }
            Event::Cache => end_if(step()),
        },
    )?;
    let n = plan.scored_tokens() as f64;
    let mean = |sum: Score| Score { kl: sum.kl / n, nll: sum.nll / n };
    Ok((mean(of_float), sums.into_iter().map(mean).collect()))
}

impl<T: Target> Window<'_, T> {
    /// Measures the float cache and each of `caches` on this window, with at most `most_kept` bytes
    /// of logits.
    fn measure(
        &self,
        plan: &Plan,
        caches: &[ModelCacheConfig],
        most_kept: usize,
        send: &mut dyn FnMut(Event),
    ) -> Result<()> {
        let float = ModelCacheConfig::from(KvCacheConfig::float().with_capacity(plan.window()));
        let (targets, vocab) = (self.targets(), self.model.vocab_size());
        let blocks =
            || (0..targets.len()).step_by(ROWS).map(|at| (at, ROWS.min(targets.len() - at)));
        let kept = targets.len() * vocab * size_of::<f32>() <= most_kept;
        let hidden = self.hidden(&float)?;
        let mut known = vec![];
        for (at, rows) in blocks() {
            let logits = self.logits(&hidden, at, rows)?;
            let nll = total("float", &logits, &targets[at..at + rows])?;
            send(Event::Block(Block { cache: None, sum: Score { kl: 0.0, nll } }));
            known.push(if kept { logits } else { vec![] });
        }
        send(Event::Cache);
        for (i, cache) in caches.iter().enumerate() {
            let _phase = trace_span!(target: PHASE, "measure", cache = %cache).entered();
            let other = self.hidden(&cache.clone().with_capacity(plan.window()))?;
            for (block, (at, rows)) in blocks().enumerate() {
                let logits = self.logits(&other, at, rows)?;
                let nll = total(&cache.to_string(), &logits, &targets[at..at + rows])?;
                let again = if kept { None } else { Some(self.logits(&hidden, at, rows)?) };
                let float = again.as_ref().unwrap_or(&known[block]);
                let rows = divergence(float, &logits, vocab);
                let kl = rows.iter().map(|row| f64::from(row.kl)).sum();
                send(Event::Block(Block { cache: Some(i), sum: Score { kl, nll } }));
            }
            send(Event::Cache);
        }
        Ok(())
    }
}

fn total(cache: &str, logits: &[f32], targets: &[u32]) -> Result<f64> {
    let losses = negative_log_likelihood(logits, targets);
    match losses.iter().position(|loss| !loss.is_finite()) {
        Some(token) => Err(Error::NonFinite { cache: cache.into(), token, value: losses[token] }),
        None => Ok(losses.iter().map(|&loss| f64::from(loss)).sum()),
    }
}

fn end_if(flow: ControlFlow<()>) -> Result<()> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Stopped),
    }
}
