//! Benchmarks of whole models as in llama.cpp's `llama-bench`: prompts ("pp") and generated tokens
//! ("tg") at a depth, the number of tokens already in the cache.

use std::time::Instant;

use burn::tensor::Tensor;
use kv_cubecl::{On, Target};
use kv_models::{
    Guesses, LanguageModel, ModelCache, ModelCacheConfig, Sampler, Sampling, Speculate, Steps,
    ids_to_tensor,
    spans::{OPERATION, PHASE},
};
use serde::Serialize;
use tracing::{Level, enabled, trace_span};

use super::{model, no_graph_capture, size, wait};
use crate::{Error, Result};

/// The plan of [`time_llm`].
#[derive(Clone, Debug)]
pub struct LlmPlan {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Tokens to generate; at least 50.
    pub generate: usize,
    /// Tokens in the cache before, ascending.
    pub depths: Vec<usize>,
    /// Repetitions after one to warm up; at least 2.
    pub repetitions: usize,
    /// Capture steps once and replay them, see [`kv_models::DecodeGraph`]; `None` captures where it
    /// [pays](Steps::graph_capture_pays).
    pub graph_capture: Option<bool>,
    /// The tokens of caches, prompts and generated texts, whatever the model would pick; filler if
    /// there are none. Guesses find in it what they would find in a text that the model writes.
    pub text: Vec<u32>,
    /// Generate with guesses, too, in turn with generating without.
    pub speculate: Speculate,
}

/// Minimum number of generated tokens, because the first ones are slower.
const LEAST_GENERATED: usize = 50;

impl LlmPlan {
    fn check(&self, positions: usize) -> Result<()> {
        let at_least = |field, value, least| match value >= least {
            true => Ok(()),
            false => Err(Error::plan(field, value, format!("must be at least {least}"))),
        };
        at_least("prompt", self.prompt, 1)?;
        at_least("generate", self.generate, LEAST_GENERATED)?;
        at_least("repetitions", self.repetitions, 2)?;
        size::check_samples("repetitions", self.repetitions)?;
        let depths = || format!("{:?}", self.depths);
        let Some(&deepest) = self.depths.last() else {
            return Err(Error::plan("depths", depths(), "must be at least one"));
        };
        if !self.depths.is_sorted_by(|a, b| a < b) {
            return Err(Error::plan("depths", depths(), "must ascend"));
        }
        let after = self.prompt.max(self.generate);
        let needed = deepest.saturating_add(after) + 1;
        if !self.text.is_empty() && self.text.len() < needed {
            let rule = format!("must have at least {needed} tokens for these depths");
            return Err(Error::plan("text", self.text.len(), rule));
        }
        if positions.checked_sub(after).is_none_or(|most| deepest > most) {
            let rule =
                format!("with {after} more tokens exceeds the model's {positions} positions");
            return Err(Error::plan("depths", deepest, rule));
        }
        Ok(())
    }
}

/// Mean and spread of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// Their sample standard deviation.
    pub deviation: f64,
    /// The middle one.
    pub median: f64,
}

impl Spread {
    fn of(mut samples: Vec<f64>) -> Self {
        let n = samples.len() as f64;
        let mean = samples.iter().sum::<f64>() / n;
        let squares = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
        let median = super::median(&mut samples);
        Self { mean, deviation: (squares / (n - 1.0).max(1.0)).sqrt(), median }
    }
}

/// The times of prompts or generated tokens of one cache at one depth.
#[derive(Clone, Debug, Serialize)]
pub struct LlmPoint {
    /// `pp` or `tg`, and the number of tokens.
    pub test: String,
    /// The cache's short name.
    pub cache: String,
    /// Tokens in the cache before.
    pub depth: usize,
    /// Tokens per second of forward passes, reading logits and picking tokens (for a prompt, the
    /// one after it).
    pub tokens_per_second: Spread,
    /// Tokens per second of the forward passes alone, until the device has completed them.
    pub forward_tokens_per_second: Spread,
    /// Seconds until the first token after a prompt is picked.
    pub first_token_seconds: Option<Spread>,
    /// The longest decode step.
    pub longest_step: Option<LongestStep>,
    /// The guesses of the last repetition, if there were any.
    pub guesses: Option<Guesses>,
}

/// The longest decode step, where each step counts with its fastest repetition. It shows how long a
/// flush delays a token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LongestStep {
    /// Tokens in the cache before the step.
    pub tokens: usize,
    /// The time of this step over the median time of a step.
    pub over_median: f64,
}

/// Seconds of one repetition.
#[derive(Clone, Debug)]
struct Pass {
    wall: f64,
    /// Seconds of each forward pass.
    forward: Vec<f64>,
    /// True if a profile had the first step launched and the others replayed.
    first_launched: bool,
    guesses: Guesses,
}

/// Times prompts and generation of `model` with each of `caches` in turn in every repetition.
/// `progress` receives the tokens processed so far, see [`LlmPlan::tokens`].
///
/// # Errors
/// [`Error::Plan`] for an invalid plan, a plan beyond the model's limit, or a device that cannot
/// capture steps, and the model's and the cache's errors.
pub fn time_llm<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    caches: &[ModelCacheConfig],
    plan: &LlmPlan,
    mut progress: impl FnMut(usize),
) -> Result<Vec<LlmPoint>> {
    plan.check(model.max_positions())?;
    if plan.graph_capture == Some(true) && !kv_models::DecodeGraph::is_supported(device) {
        return Err(no_graph_capture::<T>());
    }
    let deepest = plan.depths.last().copied().unwrap_or(0);
    let capacity = deepest + plan.prompt.max(plan.generate);
    let new = |config: &ModelCacheConfig| {
        model.new_cache(config.clone().with_capacity(capacity), 1, device)
    };
    let mut filled = caches.iter().map(new).collect::<kv_models::Result<Vec<_>>>()?;
    let mut points = Vec::with_capacity(2 * caches.len() * plan.depths.len());
    let mut done = 0;
    for &depth in &plan.depths {
        for cache in &mut filled {
            let before = done;
            let _phase = trace_span!(target: PHASE, "fill").entered();
            let ids = |start, n| plan.ids(start, n, model);
            done += model::prefill(device, model, cache, depth, ids, |n| progress(before + n))?;
        }
        let mut prompts = vec![Vec::with_capacity(plan.repetitions); caches.len()];
        let mut texts = prompts.clone();
        let mut guessed = prompts.clone();
        for repetition in 0..=plan.repetitions {
            // In a profile, the first repetition is a phase of its own.
            let _phase = (repetition == 0)
                .then(|| trace_span!(target: PHASE, "warm_up", n = depth).entered());
            for (i, cache) in filled.iter().enumerate() {
                let prompt = pass_prompt(device, model, &mut fresh(cache, device)?, plan)?;
                let never = &Speculate::Never;
                let text = generate(device, model, &mut fresh(cache, device)?, plan, never)?;
                let keep = |passes: &mut Vec<Vec<_>>, pass| {
                    if repetition > 0 {
                        passes[i].push(pass);
                    }
                };
                keep(&mut prompts, prompt);
                keep(&mut texts, text);
                if plan.guesses() {
                    let cache = &mut fresh(cache, device)?;
                    keep(&mut guessed, generate(device, model, cache, plan, &plan.speculate)?);
                }
                done += plan.tokens_of_a_turn();
                progress(done);
            }
        }
        for (i, config) in caches.iter().enumerate() {
            let (prompts, texts, guessed) = (&prompts[i], &texts[i], &guessed[i]);
            let point = |test, tokens, passes| {
                LlmPoint::of(format!("{test}{tokens}"), config.to_string(), depth, tokens, passes)
            };
            let first = Spread::of(prompts.iter().map(|pass| pass.wall).collect());
            points.push(LlmPoint {
                first_token_seconds: Some(first),
                ..point("pp", plan.prompt, prompts)
            });
            points.push(LlmPoint {
                longest_step: longest_step(texts, depth),
                ..point("tg", plan.generate, texts)
            });
            if let Some(last) = guessed.last() {
                let test = format!("tg{} {}", plan.generate, plan.speculate);
                let guesses = Some(last.guesses);
                points.push(LlmPoint { test, guesses, ..point("tg", plan.generate, guessed) });
            }
        }
    }
    Ok(points)
}

impl LlmPlan {
    /// Returns the number of tokens processed with each cache.
    pub fn tokens(&self) -> usize {
        let once = self.tokens_of_a_turn();
        let times = self.repetitions.saturating_add(1).saturating_mul(self.depths.len());
        once.saturating_mul(times).saturating_add(self.depths.last().copied().unwrap_or(0))
    }

    /// Returns whether texts are generated with guesses, too.
    fn guesses(&self) -> bool {
        !matches!(self.speculate, Speculate::Never)
    }

    fn tokens_of_a_turn(&self) -> usize {
        let texts = 1 + usize::from(self.guesses());
        self.prompt.saturating_add(self.generate.saturating_mul(texts))
    }

    /// Returns `n` tokens from position `start` on.
    fn ids(&self, start: usize, n: usize, model: &LanguageModel) -> Vec<u32> {
        match self.text.get(start..start + n) {
            Some(ids) => ids.to_vec(),
            None => model::filler(start, n, model.vocab_size()),
        }
    }
}

impl LlmPoint {
    fn of(test: String, cache: String, depth: usize, tokens: usize, passes: &[Pass]) -> Self {
        let rates = |seconds: fn(&Pass) -> f64| {
            Spread::of(passes.iter().map(|pass| tokens as f64 / seconds(pass)).collect())
        };
        Self {
            test,
            cache,
            depth,
            tokens_per_second: rates(|pass| pass.wall),
            forward_tokens_per_second: rates(|pass| pass.forward.iter().sum()),
            first_token_seconds: None,
            longest_step: None,
            guesses: None,
        }
    }
}

/// Returns the longest of the steps from `depth` tokens on.
fn longest_step(passes: &[Pass], depth: usize) -> Option<LongestStep> {
    let steps = passes.first().map_or(0, |pass| pass.forward.len());
    let fastest =
        |step: usize| passes.iter().map(|pass| pass.forward[step]).fold(f64::MAX, f64::min);
    let first = usize::from(passes.first()?.first_launched);
    let mut steps: Vec<f64> = (first..steps).map(fastest).collect();
    let (nth, &longest) = steps.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
    let over_median = longest / super::median(&mut steps);
    Some(LongestStep { tokens: depth + first + nth, over_median })
}

/// Copies a cache into its own memory, so copying is not timed.
fn fresh<T: Target>(cache: &ModelCache, device: &On<T>) -> Result<ModelCache> {
    let copy = cache.select(&[0])?;
    wait(device)?;
    Ok(copy)
}

/// Appends a prompt and picks the token after it.
fn pass_prompt<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    cache: &mut ModelCache,
    plan: &LlmPlan,
) -> Result<Pass> {
    let _phase = trace_span!(target: PHASE, "prefill").entered();
    let start = Instant::now();
    let mut last = None;
    let (first, end) = (cache.len(), cache.len() + plan.prompt);
    while cache.len() < end {
        let chunk = model::PREFILL_CHUNK.min(end - cache.len());
        let ids = plan.ids(cache.len(), chunk, model);
        let hidden = model.hidden_step(ids_to_tensor(&ids, [1, chunk], device), cache)?;
        last = Some(hidden.narrow(1, chunk - 1, 1));
    }
    let Some(last) = last else { return Err(Error::plan("prompt", first, "must be at least 1")) };
    let logits = model.head(last);
    wait(device)?;
    let forward = vec![start.elapsed().as_secs_f64()];
    pick(logits)?;
    let (wall, guesses) = (start.elapsed().as_secs_f64(), Guesses::default());
    Ok(Pass { wall, forward, first_launched: false, guesses })
}

/// Generates tokens greedily, or follows the plan's text.
fn generate<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    cache: &mut ModelCache,
    plan: &LlmPlan,
    speculate: &Speculate,
) -> Result<Pass> {
    let depth = cache.len();
    let mut id = plan.ids(depth, 1, model)[0];
    let pays = || Steps::graph_capture_pays(model, cache, plan.generate, device);
    let guesses = !matches!(speculate, Speculate::Never);
    let graph_capture = !guesses && plan.graph_capture.unwrap_or_else(pays);
    let mut steps = match guesses {
        false => Steps::new(model, cache, graph_capture, Sampling::GREEDY, device)?,
        true => {
            let text = plan.ids(0, depth, model);
            Steps::with_guesses(cache, speculate, &text, Sampling::GREEDY, device)?
        }
    };
    wait(device)?;
    let (start, mut forward) = (Instant::now(), Vec::with_capacity(plan.generate));
    for i in 0..plan.generate {
        let _phase = trace_span!(target: PHASE, "decode", n = i + 1).entered();
        let step = Instant::now();
        steps.step(model, &[id], device)?;
        wait(device)?;
        forward.push(step.elapsed().as_secs_f64());
        let picked = steps.pick(&[])?;
        id = plan.text.get(depth + i + 1).copied().unwrap_or(picked);
    }
    let first_launched = steps.uses_graph_capture() && enabled!(target: OPERATION, Level::TRACE);
    let wall = start.elapsed().as_secs_f64();
    Ok(Pass { wall, forward, first_launched, guesses: steps.guesses() })
}

fn pick<const D: usize>(logits: Tensor<D>) -> Result<u32> {
    let read = trace_span!(target: OPERATION, "read");
    let logits: Vec<f32> = read.in_scope(|| logits.into_data().iter::<f32>().collect());
    Ok(Sampler::new(Sampling::GREEDY)?.sample(&logits, &[])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_that_of_a_sample() {
        let spread = Spread::of(vec![4.0, 1.0, 1.0]);
        assert_eq!((spread.mean, spread.median), (2.0, 1.0));
        assert!((spread.deviation - 3f64.sqrt()).abs() < 1e-12);
        assert_eq!(Spread::of(vec![5.0]).deviation, 0.0);
    }

    #[test]
    fn longest_step_is_long_in_all_repetitions() {
        let pass = |forward: [f64; 5]| Pass {
            wall: 9.0,
            forward: forward.into(),
            first_launched: false,
            guesses: Guesses::default(),
        };
        // The first repetition was disturbed at its fourth step.
        let passes = [pass([1.0, 2.5, 1.0, 8.0, 1.5]), pass([1.25, 2.0, 1.0, 1.0, 1.0])];
        let expected = LongestStep { tokens: 101, over_median: 2.0 };
        assert_eq!(longest_step(&passes, 100), Some(expected));
        let launched = passes.map(|pass| {
            let forward = [&[9.0], &pass.forward[1..]].concat();
            Pass { forward, first_launched: true, ..pass }
        });
        assert_eq!(longest_step(&launched, 100), Some(expected));
    }

    #[test]
    fn plans_that_measure_nothing_are_named() {
        let plan = LlmPlan {
            prompt: 512,
            generate: 128,
            depths: vec![0, 512],
            repetitions: 2,
            graph_capture: None,
            text: vec![],
            speculate: Speculate::Never,
        };
        assert!(plan.check(1024).is_ok());
        for (plan, message) in [
            (
                LlmPlan { text: vec![0; 1024], ..plan.clone() },
                "text 1024: must have at least 1025 tokens for these depths",
            ),
            (LlmPlan { generate: 49, ..plan.clone() }, "generate 49: must be at least 50"),
            (LlmPlan { prompt: 0, ..plan.clone() }, "prompt 0: must be at least 1"),
            (LlmPlan { repetitions: 1, ..plan.clone() }, "repetitions 1: must be at least 2"),
            (LlmPlan { depths: vec![], ..plan.clone() }, "depths []: must be at least one"),
            (LlmPlan { depths: vec![5, 5], ..plan.clone() }, "depths [5, 5]: must ascend"),
            (
                LlmPlan { depths: vec![513], ..plan.clone() },
                "depths 513: with 512 more tokens exceeds the model's 1024 positions",
            ),
        ] {
            assert_eq!(plan.check(1024).unwrap_err().to_string(), message);
        }
        assert!(plan.check(3).is_err());
    }
}
