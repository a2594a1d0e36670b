//! Picks the tokens of a request, and keeps their log-probabilities.

use std::collections::BTreeSet;

use kv_models::{Error, Result, Sampler, Sampling, generate::Pick};
use tokio::sync::mpsc::UnboundedSender;

use super::update::{Scored, Update};
use crate::constraint::Constraint;

/// The rules by which the tokens of a text are chosen, and what is returned with them.
#[derive(Clone, Debug, Default)]
pub struct PickOptions {
    /// The sampling parameters. Penalties apply to generated tokens only.
    pub sampling: Sampling,
    /// Added to the logits of these ids before sampling.
    pub bias: Vec<(u32, f32)>,
    /// The grammar that the text must match.
    pub constraint: Option<Constraint>,
    /// Returns log-probabilities, with this many of the most likely tokens at each position.
    pub top: Option<usize>,
    /// Returns log-probabilities of the prompt's tokens, too.
    pub scores_prompt: bool,
}

/// Picks the tokens of one text and sends them to the request.
#[derive(Debug)]
pub(super) struct Picking {
    sampler: Sampler,
    options: PickOptions,
    eos: BTreeSet<u32>,
    n_prompt: usize,
    to: UnboundedSender<Update>,
    scores: Vec<Scored>,
    /// Kept to reuse the allocation for every token.
    biased: Vec<f32>,
}

impl Picking {
    pub(super) fn new(
        options: PickOptions,
        eos: BTreeSet<u32>,
        n_prompt: usize,
        to: UnboundedSender<Update>,
    ) -> Result<Self> {
        let sampler = Sampler::new(options.sampling)?;
        Ok(Self { sampler, options, eos, n_prompt, to, scores: vec![], biased: vec![] })
    }

    fn scored(&self, id: u32, logits: &[f32]) -> Scored {
        match self.options.top {
            None => Scored { id, logprob: None, top: vec![] },
            Some(top) => scored(id, logits, top),
        }
    }
}

impl Pick for Picking {
    fn pick(&mut self, logits: &[f32], text: &[u32]) -> Result<u32> {
        let generated = text.get(self.n_prompt..).unwrap_or(&[]);
        let PickOptions { bias, constraint, .. } = &mut self.options;
        let id = if bias.is_empty() && constraint.is_none() {
            self.sampler.sample(logits, generated)?
        } else {
            self.biased.clear();
            self.biased.extend_from_slice(logits);
            for &(id, bias) in &*bias {
                if let Some(logit) = self.biased.get_mut(id as usize) {
                    *logit += bias;
                }
            }
            let wrong = |rule: String| Error::argument("response_format", "a constraint", rule);
            if let Some(constraint) = constraint {
                constraint.mask(&mut self.biased).map_err(wrong)?;
            }
            let id = self.sampler.sample(&self.biased, generated)?;
            if let Some(constraint) = constraint {
                constraint.push(id).map_err(wrong)?;
            }
            id
        };
        let scored = self.scored(id, logits);
        let update = match self.eos.contains(&id) {
            true => Update::Eos(scored),
            false => Update::Token(scored),
        };
        // A request that has gone is noticed before the next step.
        let _ = self.to.send(update);
        Ok(id)
    }

    fn scores_prompt(&self) -> bool {
        self.options.scores_prompt
    }

    fn score(&mut self, position: usize, logits: &[f32], prompt: &[u32]) -> Result<()> {
        if position == 0 {
            self.scores.push(Scored { id: prompt[0], logprob: None, top: vec![] });
        }
        if let Some(&next) = prompt.get(position + 1) {
            if next as usize >= logits.len() {
                let rule = format!("must be below {}", logits.len());
                return Err(Error::argument("prompt", next, rule));
            }
            self.scores.push(self.scored(next, logits));
        } else {
            let _ = self.to.send(Update::Prompt(std::mem::take(&mut self.scores)));
        }
        Ok(())
    }
}

/// Returns token `id` with its log-probability and the `n` most likely tokens.
fn scored(id: u32, logits: &[f32], n: usize) -> Scored {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let shift = f64::from(most) + sum.ln();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - shift) as f32;
    let better =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let n = n.min(logits.len());
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if n > 0 && n < ids.len() {
        ids.select_nth_unstable_by(n - 1, better);
    }
    ids.truncate(n);
    ids.sort_unstable_by(better);
    let top = ids.into_iter().map(|id| (id, logprob(id))).collect();
    Scored { id, logprob: Some(logprob(id)), top }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [0.1f32, 0.6, 0.05, 0.25].map(f32::ln);
        // Adding a constant to all logits changes no probability.
        for shift in [0.0, 50.0, -1e3] {
            let logits = logits.map(|logit| logit + shift);
            let found = scored(3, &logits, 2);
            let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-4, "{a}, not {b}");
            close(found.logprob.unwrap().exp(), 0.25);
            assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
            close(found.top[0].1.exp(), 0.6);
        }
        assert_eq!(scored(0, &logits, 0).top, []);
        assert_eq!(scored(0, &logits, 9).top.len(), 4);
        // The first of equals is the one that greedy sampling picks.
        assert_eq!(scored(0, &[1.0; 5], 1).top[0].0, 0);
    }

    #[test]
    fn bias_and_penalties_change_the_choice_and_not_the_log_probability() {
        let (to, mut from) = unbounded_channel();
        let bias = vec![(1, -100.0), (9, 5.0)];
        let options = PickOptions { bias, top: Some(1), ..PickOptions::default() };
        let mut picking = Picking::new(options, BTreeSet::from([2]), 1, to).unwrap();
        let logits = [0.1f32, 0.6, 0.05, 0.25].map(f32::ln);
        assert_eq!(picking.pick(&logits, &[7]).unwrap(), 3);
        let Ok(Update::Token(token)) = from.try_recv() else { panic!("no token") };
        assert_eq!((token.id, token.top[0].0), (3, 1));
        assert_eq!(picking.pick(&[0.0, 0.0, 9.0, 0.0], &[7, 3]).unwrap(), 2);
        assert!(matches!(from.try_recv(), Ok(Update::Eos(token)) if token.id == 2));
        assert!(picking.pick(&[f32::NAN; 4], &[7]).is_err());
    }

    #[test]
    fn prompts_are_scored_from_their_second_token() {
        let (to, mut from) = unbounded_channel();
        let options = PickOptions { top: Some(1), scores_prompt: true, ..PickOptions::default() };
        let mut picking = Picking::new(options, BTreeSet::new(), 3, to).unwrap();
        let logits = [0.1f32, 0.6, 0.3].map(f32::ln);
        for position in 0..3 {
            assert!(from.try_recv().is_err());
            picking.score(position, &logits, &[1, 2, 0]).unwrap();
        }
        let Ok(Update::Prompt(scores)) = from.try_recv() else { panic!("no scores") };
        assert_eq!(scores.iter().map(|it| it.id).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!(scores[0].logprob, None);
        assert!((scores[1].logprob.unwrap().exp() - 0.3).abs() < 1e-5);
        assert!((scores[2].logprob.unwrap().exp() - 0.1).abs() < 1e-5);
    }
}
