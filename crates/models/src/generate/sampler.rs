//! Picks a token from logits.

use std::collections::HashMap;

use kv_sampling::Draw;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::error::{Error, Result};

/// The parameters of sampling. A temperature of 0 picks the most likely token, the first of equals.
/// Otherwise a token is drawn from those that pass all filters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits: below 1 sharpens, above 1 flattens; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens with at least this much probability, the
    /// nucleus of <https://arxiv.org/abs/1904.09751>; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens whose probability is at least this fraction of the highest,
    /// <https://arxiv.org/abs/2407.01082>; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of recent tokens, and multiplies negative ones,
    /// <https://arxiv.org/abs/1909.05858>. Values above 1 make them less likely; 1 changes nothing.
    pub repeat_penalty: f32,
    /// Subtracted from a token's logit for each recent occurrence.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of a token that occurred recently.
    pub presence_penalty: f32,
    /// The number of latest ids, including the prompt, that the penalties apply to.
    pub repeat_last: usize,
    /// Equal seeds give equal texts on the same kind of device.
    pub seed: u64,
}

impl Sampling {
    /// Picks the most likely token, the first of equals.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        repeat_last: 64,
        seed: 0,
    };

    /// Returns whether the most likely token is always picked.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns the same parameters for a device; `None` if the choice depends on earlier tokens.
    pub(super) fn draw(&self) -> Option<Draw> {
        let Self { temperature, top_k, top_p, min_p, seed, .. } = *self;
        (!self.penalizes()).then_some(Draw { temperature, top_k, top_p, min_p, seed })
    }

    /// Returns whether penalties apply. The host must then read the logits of every step.
    pub fn penalizes(&self) -> bool {
        self.repeat_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Applies penalties for `ids` to `logits` in the order of llama.cpp: the repeat penalty first.
    fn penalize(&self, logits: &[f32], ids: &[u32]) -> Vec<f32> {
        let mut counts: HashMap<u32, f32> = HashMap::new();
        ids.iter().for_each(|id| *counts.entry(*id).or_default() += 1.0);
        let mut penalized = logits.to_vec();
        for (id, count) in counts {
            let Some(logit) = penalized.get_mut(id as usize) else { continue };
            match *logit > 0.0 {
                true => *logit /= self.repeat_penalty,
                false => *logit *= self.repeat_penalty,
            }
            *logit -= count * self.frequency_penalty + self.presence_penalty;
        }
        penalized
    }

    fn check(&self) -> Result<()> {
        let Self { temperature, top_k, top_p, min_p, repeat_penalty, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            let rule = "must be finite and at least 0; 0 picks the most likely token";
            return Err(Error::argument("temperature", temperature, rule));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::argument("top_p", top_p, "must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(Error::argument("min_p", min_p, "must be from 0 to 1"));
        }
        if !(repeat_penalty.is_finite() && repeat_penalty > 0.0) {
            return Err(Error::argument("repeat_penalty", repeat_penalty, "must be above 0"));
        }
        for (field, penalty) in [
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
        ] {
            if !penalty.is_finite() {
                return Err(Error::argument(field, penalty, "must be finite"));
            }
        }
        let rule = "needs a temperature above 0";
        for (field, value, chooses) in [
            ("top_k", top_k.to_string(), top_k != 0),
            ("top_p", top_p.to_string(), top_p != 1.0),
            ("min_p", min_p.to_string(), min_p != 0.0),
        ] {
            if self.is_greedy() && chooses {
                return Err(Error::argument(field, value, rule));
            }
        }
        Ok(())
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// A [`Sampling`] with its random state.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Xoshiro256PlusPlus,
    /// The `(probability, id)` candidates; kept to reuse the allocation for every token.
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// Creates a sampler at the start of its random sequence.
    ///
    /// # Errors
    /// Fails for a value out of range, and for a filter without a temperature.
    pub fn new(sampling: Sampling) -> Result<Self> {
        sampling.check()?;
        let rng = Xoshiro256PlusPlus::seed_from_u64(sampling.seed);
        Ok(Self { sampling, rng, candidates: vec![] })
    }

    /// Picks one of `logits.len()` ids; `before` are the ids of the text so far.
    ///
    /// # Errors
    /// Fails without logits, and for a logit that is NaN.
    pub fn sample(&mut self, logits: &[f32], before: &[u32]) -> Result<u32> {
        let _span = tracing::trace_span!(target: crate::spans::OPERATION, "sample").entered();
        // All are looked at without a branch, which the compiler vectorizes.
        if logits.iter().fold(false, |found, logit| found | logit.is_nan()) {
            let id = logits.iter().position(|logit| logit.is_nan()).unwrap_or(0);
            return Err(Error::argument("logits", format!("NaN at id {id}"), "must be numbers"));
        }
        let penalized;
        let logits = if self.sampling.penalizes() {
            let recent = &before[before.len().saturating_sub(self.sampling.repeat_last)..];
            penalized = self.sampling.penalize(logits, recent);
            &penalized
        } else {
            logits
        };
        if self.sampling.is_greedy() { greedy(logits) } else { self.choose(logits) }
            .ok_or_else(|| Error::argument("logits", "none", "must not be empty"))
    }

    /// Applies the temperature, then each filter to the tokens that the previous one kept, as the
    /// transformers library does.
    fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let best = logits[greedy(logits)? as usize];
        let weight = |logit: f32| ((logit - best) / temperature).exp();
        if !best.is_finite() {
            return greedy(logits); // an infinite logit has all the probability
        }
        self.candidates.clear();
        self.candidates.extend(logits.iter().map(|&logit| weight(logit)).zip(0..));
        self.candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if top_k > 0 {
            self.candidates.truncate(top_k);
        }
        let total: f32 = self.candidates.iter().map(|(p, _)| p).sum();
        self.candidates.iter_mut().for_each(|(p, _)| *p /= total);

        let mut mass = 0.0;
        let nucleus = self.candidates.iter().position(|(p, _)| {
            mass += p;
            mass >= top_p
        });
        self.candidates.truncate(nucleus.map_or(self.candidates.len(), |last| last + 1));
        let least = min_p * self.candidates[0].0;
        self.candidates.retain(|(p, _)| *p >= least);
        let mass: f32 = self.candidates.iter().map(|(p, _)| p).sum();
        let mut point = self.rng.random::<f32>() * mass;
        let chosen = self.candidates.iter().find(|(p, _)| {
            point -= p;
            point < 0.0
        });
        // Rounding can leave the point just past the last candidate.
        chosen.or(self.candidates.last()).map(|(_, id)| *id)
    }
}

/// Returns the first of the highest logits. No logit is NaN.
///
/// First finds the part that contains it, with a maximum that the compiler vectorizes. A search for
/// its position among all logits would be several times as slow.
fn greedy(logits: &[f32]) -> Option<u32> {
    const PART: usize = 512;
    const LANES: usize = 16;
    let highest = |part: &[f32]| {
        let (lanes, rest) = part.as_chunks::<LANES>();
        let mut highest = [f32::NEG_INFINITY; LANES];
        for logits in lanes {
            for (highest, &logit) in highest.iter_mut().zip(logits) {
                *highest = if logit > *highest { logit } else { *highest };
            }
        }
        highest.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max)
    };
    let mut best: Option<(usize, f32)> = None;
    for (i, part) in logits.chunks(PART).enumerate() {
        let highest = highest(part);
        if best.is_none_or(|(_, before)| highest > before) {
            best = Some((i * PART, highest));
        }
    }
    let (start, highest) = best?;
    let within = logits[start..].iter().position(|&logit| logit == highest)?;
    Some((start + within) as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    const RANDOM: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    fn draws(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..n).map(|_| sampler.sample(logits, &[]).unwrap()).collect()
    }

    /// Returns the relative frequency of each of four ids in 20,000 draws.
    fn shares(sampling: Sampling, probabilities: [f32; 4]) -> [f64; 4] {
        let ids = draws(sampling, &probabilities.map(f32::ln), 20_000);
        [0, 1, 2, 3].map(|id| ids.iter().filter(|&&i| i == id).count() as f64 / ids.len() as f64)
    }

    #[track_caller]
    fn assert_shares(sampling: Sampling, expected: [f64; 4]) {
        let found = shares(Sampling { seed: 7, ..sampling }, [0.15, 0.5, 0.05, 0.3]);
        for (found_share, share) in found.iter().zip(expected) {
            // A probability of 0 must never be drawn.
            assert!((found_share - share).abs() <= share.min(0.02), "{found:?}, not {expected:?}");
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(draws(Sampling::GREEDY, &[0.0, 3.0, -1.0, 3.0], 2), [1, 1]);
        let lowest = f32::NEG_INFINITY;
        for (n, highest, others) in
            [(1, 1.0, 0.0), (700, -2.0, lowest), (2048, f32::INFINITY, 1.0), (3000, lowest, lowest)]
        {
            for (first, second) in [(0, n - 1), (n / 2, n / 2), (n - 1, n - 1), (511 % n, 530 % n)]
            {
                let mut logits = vec![others; n];
                (logits[first], logits[second]) = (highest, highest);
                let expected = if highest > others { first.min(second) } else { 0 };
                assert_eq!(draws(Sampling::GREEDY, &logits, 1), [expected as u32], "{n} {first}");
            }
        }
    }

    #[test]
    fn filters_keep_the_likely_in_their_proportions() {
        assert_shares(RANDOM, [0.15, 0.5, 0.05, 0.3]);
        let two = [0.0, 0.625, 0.0, 0.375];
        assert_shares(Sampling { top_p: 0.75, ..RANDOM }, two);
        assert_shares(Sampling { top_k: 2, ..RANDOM }, two);
        assert_shares(Sampling { min_p: 0.5, ..RANDOM }, two);
        assert_shares(Sampling { top_k: 9, min_p: 0.2, ..RANDOM }, [0.158, 0.526, 0.0, 0.316]);
        // Top-p applies to what top-k leaves; there the first token alone has 0.625.
        assert_shares(Sampling { top_k: 2, top_p: 0.6, ..RANDOM }, [0.0, 1.0, 0.0, 0.0]);
        let sum = [0.15f64, 0.5, 0.05, 0.3].map(|p| p * p);
        let total: f64 = sum.iter().sum();
        assert_shares(Sampling { temperature: 0.5, ..RANDOM }, sum.map(|p| p / total));
    }

    #[test]
    fn repeated_tokens_become_less_likely() {
        let sampling = Sampling { repeat_penalty: 2.0, repeat_last: 2, ..Sampling::GREEDY };
        let mut sampler = Sampler::new(sampling).unwrap();
        let mut next = |logits: &[f32], before: &[u32]| sampler.sample(logits, before).unwrap();
        assert_eq!(next(&[3.0, 2.0], &[]), 0);
        assert_eq!(next(&[3.0, 2.0], &[0]), 1, "3 / 2 is below 2");
        assert_eq!(next(&[3.0, 1.4], &[0, 0]), 0, "once, however often it was there");
        assert_eq!(next(&[3.0, 2.0], &[0, 5, 6]), 0, "too long ago");
        assert_eq!(next(&[-2.0, -3.0], &[0]), 1, "negative ones are multiplied");
    }

    /// OpenAI documents the formula `logit - count * frequency - (count > 0) * presence`.
    #[test]
    fn frequency_and_presence_are_subtracted() {
        let next = |sampling: Sampling, logits: &[f32], before: &[u32]| {
            Sampler::new(sampling).unwrap().sample(logits, before).unwrap()
        };
        let frequency = Sampling { frequency_penalty: 0.5, ..Sampling::GREEDY };
        assert_eq!(next(frequency, &[3.0, 2.2], &[0]), 0, "3 - 0.5 is above 2.2");
        assert_eq!(next(frequency, &[3.0, 2.2], &[0, 0]), 1, "3 - 1 is below 2.2");
        assert_eq!(next(frequency, &[-1.0, -1.2], &[0]), 1, "negative ones alike");
        let presence = Sampling { presence_penalty: 0.5, ..Sampling::GREEDY };
        assert_eq!(next(presence, &[3.0, 2.6], &[0]), 1, "3 - 0.5 is below 2.6");
        assert_eq!(next(presence, &[3.0, 2.4], &[0, 0, 0]), 0, "once, however often it was there");
        let likes = Sampling { presence_penalty: -0.5, ..Sampling::GREEDY };
        assert_eq!(next(likes, &[3.0, 2.6], &[1]), 1, "a negative penalty makes it more likely");
        let last = Sampling { repeat_last: 2, ..presence };
        assert_eq!(next(last, &[3.0, 2.6], &[0, 9, 9]), 0, "too long ago");
        // After the repeat penalty: 4 / 2 - 0.25 - 0.5 = 1.25.
        let all = Sampling { repeat_penalty: 2.0, frequency_penalty: 0.25, ..presence };
        assert_eq!(next(all, &[4.0, 1.2], &[0]), 0);
        assert_eq!(next(all, &[4.0, 1.3], &[0]), 1);
        for sampling in [frequency, presence, likes] {
            assert!(sampling.draw().is_none(), "the device does not know what occurred");
        }
        assert!(RANDOM.draw().is_some());
    }

    #[test]
    fn seeds_repeat_and_differ() {
        let logits = [0.0; 50];
        let with = |seed| Sampling { temperature: 0.8, seed, ..RANDOM };
        assert_eq!(draws(with(1), &logits, 40), draws(with(1), &logits, 40));
        assert_ne!(draws(with(1), &logits, 40), draws(with(2), &logits, 40));
    }

    #[test]
    fn low_temperature_is_greedy() {
        let sampling = Sampling { temperature: 1e-3, seed: 3, ..RANDOM };
        assert_eq!(draws(sampling, &[1.0, 1.5, 1.4], 5), [1; 5]);
        assert_eq!(draws(sampling, &[1.0, f32::INFINITY, 1.4], 5), [1; 5]);
    }

    #[test]
    fn bad_options_and_logits_are_errors() {
        for (sampling, field) in [
            (Sampling { temperature: -1.0, ..RANDOM }, "temperature"),
            (Sampling { temperature: f32::NAN, ..RANDOM }, "temperature"),
            (Sampling { top_p: 0.0, ..RANDOM }, "top_p"),
            (Sampling { top_p: 1.5, ..RANDOM }, "top_p"),
            (Sampling { min_p: -0.1, ..RANDOM }, "min_p"),
            (Sampling { repeat_penalty: 0.0, ..RANDOM }, "repeat_penalty"),
            (Sampling { frequency_penalty: f32::NAN, ..RANDOM }, "frequency_penalty"),
            (Sampling { presence_penalty: f32::INFINITY, ..RANDOM }, "presence_penalty"),
            (Sampling { top_k: 5, ..Sampling::GREEDY }, "top_k"),
            (Sampling { top_p: 0.5, ..Sampling::GREEDY }, "top_p"),
            (Sampling { min_p: 0.5, ..Sampling::GREEDY }, "min_p"),
        ] {
            let error = Sampler::new(sampling).unwrap_err().to_string();
            assert!(error.starts_with(field), "{error}");
        }
        for sampling in [Sampling::GREEDY, RANDOM] {
            let mut sampler = Sampler::new(sampling).unwrap();
            assert!(sampler.sample(&[], &[]).is_err());
            assert!(sampler.sample(&[0.0, f32::NAN], &[]).is_err());
        }
    }
}
