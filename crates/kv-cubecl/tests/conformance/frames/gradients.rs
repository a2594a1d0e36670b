//! Gradients of the closed form.

use kv_cubecl::{
    CacheShape, KvCacheConfig, On, Side, Sides, Target,
    reference::{RowOptions, attend_row_backward},
};

use super::{CONFIGS, Case, HEAD_DIM, lacks, of_frames, sequence, wide};
use crate::common::{CLOSE, Host, Rng, close, stamp_autodiff};

stamp_autodiff!(gradients_pass_straight_through);

impl Case {
    /// Marks the elements of all frames that exceed the scale of their frame. Empty for a format
    /// without such scales.
    fn saturated(&self, side: Side) -> Vec<bool> {
        if !of_frames(self.config.format.format(side)) {
            return vec![];
        }
        let CacheShape { batch, n_kv_heads, .. } = self.shape;
        let sinks = self.config.sinks.tokens(self.config.tokens_per_frame) * HEAD_DIM;
        let lanes = (0..batch * n_kv_heads).flat_map(|lane| {
            let (rows, amax) = self.amax(side, lane, &self.frames);
            let beyond = |(rows, amax): (&Vec<f32>, f32)| {
                rows.iter().map(|x| x.abs() > amax).collect::<Vec<_>>()
            };
            let after = rows.iter().zip(amax).flat_map(beyond);
            core::iter::repeat_n(false, sinks).chain(after).collect::<Vec<_>>()
        });
        lanes.collect()
    }
}

/// The closed form has the gradients of attention to the restored tokens. The quantizer passes them
/// on unchanged, except for numbers beyond the scale of their frame, whose gradient is 0.
fn gradients_pass_straight_through<T: Target>(device: &On<T>) {
    for (seed, of) in (110..).zip(CONFIGS) {
        let case = sequence(of, seed);
        let KvCacheConfig { keys, values, .. } = case.config.format;
        // Saturated elements are only known before the Hadamard transform is undone.
        let transformed =
            case.config.format.uses_hadamard_keys() || case.config.format.uses_hadamard_values();
        let unclear = transformed && (of_frames(keys) || of_frames(values));
        if unclear || lacks(device, case.config.format.float) {
            continue;
        }
        let whole = case.whole();
        let weight = Host::normal(&mut Rng::new(seed + 1000), whole[0].shape);
        let inputs = whole.clone().map(|side| side.on(device).require_grad());
        let grads = (case.at_once(inputs.clone()) * weight.on(device)).sum().backward();
        let got = inputs.map(|input| Host::of(input.grad(&grads).expect("a gradient")));

        let (n_rep, n_tokens) = (case.n_heads / case.shape.n_kv_heads, whole[0].shape[2]);
        let mut want = whole.each_ref().map(|side| vec![0.0; side.data.len()]);
        let saturated = Sides::from_fn(|side| case.saturated(side));
        for (frame, new) in case.frames.iter().enumerate() {
            let lanes = case.seen(&case.frames[..frame], new);
            for (head, token) in (0..2 * case.n_heads).flat_map(|h| (0..of.1).map(move |t| (h, t)))
            {
                let (lane, at) =
                    (head / n_rep, (head * n_tokens + frame * of.1 + token) * HEAD_DIM);
                let [query, grad] =
                    [&whole[0], &weight].map(|side| wide(&side.data[at..][..HEAD_DIM]));
                let (seen, options) = (&lanes[lane], RowOptions::default());
                let row = attend_row_backward(&query, &seen.keys(), &seen.values(), &grad, options);
                let mut add = |side: usize, at: usize, from: &[f64]| {
                    want[side][at..].iter_mut().zip(from).for_each(|(to, from)| *to += from);
                };
                add(0, at, &row.query);
                for ((token, key), value) in seen.tokens.iter().zip(&row.keys).zip(&row.values) {
                    let at = (lane * n_tokens + token) * HEAD_DIM;
                    let own = *token >= frame * of.1;
                    for (i, (side, grad)) in
                        [(Side::Keys, key), (Side::Values, value)].into_iter().enumerate()
                    {
                        let saturates = |channel: usize| {
                            !own && saturated[side].get(at + channel).is_some_and(|&yes| yes)
                        };
                        let grad: Vec<f64> = grad
                            .iter()
                            .enumerate()
                            .map(|(i, &x)| if saturates(i) { 0.0 } else { x })
                            .collect();
                        add(1 + i, at, &grad);
                    }
                }
            }
        }
        for ((name, got), want) in ["query", "key", "value"].iter().zip(&got).zip(&want) {
            close(format!("{of:?}, {name}"), got, want, 5.0 * CLOSE);
        }
    }
}
