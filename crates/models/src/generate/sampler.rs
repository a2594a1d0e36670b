//! Picking a token from logits.

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::{Error, Result};

/// How a token is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Sampling {
    /// The most likely token; of equals, the first.
    #[default]
    Greedy,
    /// At random from the nucleus, <https://arxiv.org/abs/1904.09751>.
    TopP {
        /// Divides the logits, above 0: below 1 sharpens, above 1 flattens.
        temperature: f32,
        /// The smallest set of most likely tokens with this much probability, up to 1 for all.
        top_p: f32,
        /// Equal seeds give equal texts.
        seed: u64,
    },
}

/// A [`Sampling`] with its random state.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Xoshiro256PlusPlus,
    /// Reused between tokens: `(logit, then probability; id)`.
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    ///
    /// # Errors
    ///
    /// A temperature that is not finite and above 0, or a `top_p` outside `(0, 1]`.
    pub fn new(sampling: Sampling) -> Result<Self> {
        let mut seed = 0;
        if let Sampling::TopP { temperature, top_p, seed: chosen } = sampling {
            if !(temperature.is_finite() && temperature > 0.0) {
                let rule = "must be finite and above 0, greedy sampling is for 0";
                return Err(Error::argument("temperature", temperature, rule));
            }
            if !(top_p > 0.0 && top_p <= 1.0) {
                return Err(Error::argument("top_p", top_p, "must be above 0 and at most 1"));
            }
            seed = chosen;
        }
        Ok(Self { sampling, rng: Xoshiro256PlusPlus::seed_from_u64(seed), candidates: vec![] })
    }

    /// Picks one of `logits.len()` ids.
    ///
    /// # Errors
    ///
    /// No logits, or one that is NaN.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if let Some(id) = logits.iter().position(|logit| logit.is_nan()) {
            return Err(Error::argument("logits", format!("NaN at id {id}"), "must be numbers"));
        }
        match self.sampling {
            Sampling::Greedy => greedy(logits),
            Sampling::TopP { temperature, top_p, .. } => self.nucleus(logits, temperature, top_p),
        }
        .ok_or_else(|| Error::argument("logits", "none", "a vocabulary has at least one token"))
    }

    fn nucleus(&mut self, logits: &[f32], temperature: f32, top_p: f32) -> Option<u32> {
        let best = logits[greedy(logits)? as usize];
        let weight = |logit: f32| ((logit - best) / temperature).exp();
        let total: f32 = logits.iter().map(|&logit| weight(logit)).sum();
        if !total.is_finite() {
            return greedy(logits); // an infinite logit has all the probability
        }
        self.candidates.clear();
        self.candidates.extend(logits.iter().map(|&logit| weight(logit) / total).zip(0..));
        self.candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));

        let mut mass = 0.0;
        let n_nucleus = self
            .candidates
            .iter()
            .position(|(p, _)| {
                mass += p;
                mass >= top_p
            })
            .map_or(self.candidates.len(), |last| last + 1);
        let nucleus = &self.candidates[..n_nucleus];
        let mut point = self.rng.random::<f32>() * mass;
        let chosen = nucleus.iter().find(|(p, _)| {
            point -= p;
            point < 0.0
        });
        // Rounding may leave the point just behind the last candidate.
        chosen.or(nucleus.last()).map(|(_, id)| *id)
    }
}

fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if best.is_none_or(|(_, highest)| logit > highest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    fn draws(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..n).map(|_| sampler.sample(logits).unwrap()).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(draws(Sampling::Greedy, &[0.0, 3.0, -1.0, 3.0], 2), [1, 1]);
    }

    #[test]
    fn top_p_keeps_the_nucleus_and_its_proportions() {
        let logits = [0.5_f32, 0.3, 0.15, 0.05].map(f32::ln);
        let sampling = Sampling::TopP { temperature: 1.0, top_p: 0.75, seed: 7 };
        let ids = draws(sampling, &logits, 20_000);
        assert!(ids.iter().all(|&id| id < 2), "0.5 + 0.3 reach 0.75");
        let first = ids.iter().filter(|&&id| id == 0).count() as f64 / ids.len() as f64;
        assert!((first - 0.625).abs() < 0.02, "{first} is not 0.5 / 0.8");
    }

    #[test]
    fn seeds_repeat_and_differ() {
        let logits = [0.0; 50];
        let with = |seed| Sampling::TopP { temperature: 0.8, top_p: 1.0, seed };
        assert_eq!(draws(with(1), &logits, 40), draws(with(1), &logits, 40));
        assert_ne!(draws(with(1), &logits, 40), draws(with(2), &logits, 40));
    }

    #[test]
    fn low_temperature_is_greedy() {
        let sampling = Sampling::TopP { temperature: 1e-3, top_p: 1.0, seed: 3 };
        assert_eq!(draws(sampling, &[1.0, 1.5, 1.4], 5), [1; 5]);
    }

    #[test]
    fn bad_options_and_logits_are_errors() {
        for (temperature, top_p) in [(0.0, 1.0), (f32::NAN, 1.0), (1.0, 0.0), (1.0, 1.5)] {
            assert!(Sampler::new(Sampling::TopP { temperature, top_p, seed: 0 }).is_err());
        }
        let mut sampler = Sampler::new(Sampling::Greedy).unwrap();
        assert!(sampler.sample(&[]).is_err());
        assert!(sampler.sample(&[0.0, f32::NAN]).is_err());
    }
}
