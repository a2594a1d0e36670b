//! Sampling on the host.

use crate::{Draw, noise::uniform};

/// Returns the token that `draw` picks from a row of logits, or `None` if one is not finite.
pub(crate) fn pick(logits: &[f32], draw: &Draw, sequence: u32, position: u32) -> Option<u32> {
    if !logits.iter().all(|logit| logit.is_finite()) {
        return None;
    }
    if draw.is_greedy() {
        return best(logits.iter().copied().zip(0..));
    }
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| ((logit - most) / draw.temperature).exp();
    let mut least = f32::NEG_INFINITY;
    if draw.top_k > 0 && draw.top_k < logits.len() {
        let mut sorted = logits.to_vec();
        let (_, kth, _) = sorted.select_nth_unstable_by(draw.top_k - 1, |a, b| b.total_cmp(a));
        least = *kth;
    }
    if draw.top_p < 1.0 {
        let mut kept: Vec<f32> = logits.iter().copied().filter(|&logit| logit >= least).collect();
        kept.sort_unstable_by(|a, b| b.total_cmp(a));
        let enough = draw.top_p * kept.iter().map(|&logit| weight(logit)).sum::<f32>();
        let mut mass = 0.0;
        let last = kept.iter().find(|&&logit| {
            mass += weight(logit);
            mass >= enough
        });
        least = last.copied().unwrap_or(least);
    }
    let kept =
        logits.iter().zip(0..).filter(|&(&logit, _)| logit >= least && weight(logit) >= draw.min_p);
    // The largest of logits with Gumbel noise is a draw by their softmax.
    best(kept.map(|(&logit, id)| {
        let noise = -(-uniform(draw.seed, sequence, position, id).ln()).ln();
        (logit / draw.temperature + noise, id)
    }))
}

/// Returns the id of the largest score, the first of equals.
fn best(scores: impl Iterator<Item = (f32, u32)>) -> Option<u32> {
    let larger = |best: (f32, u32), next: (f32, u32)| if next.0 > best.0 { next } else { best };
    scores.reduce(larger).map(|(_, id)| id)
}
