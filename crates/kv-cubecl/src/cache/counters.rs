//! Statistics of the codes and scales of a cache, computed from the stored words on request.

use half::f16;

use super::KvCache;
use crate::{
    Logical,
    layout::{QuantSpec, Side, Sides},
};

/// Statistics of the quantized tokens of one side of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Counters {
    /// Number of codes.
    pub codes: usize,
    /// Number of codes [at an end of the range](QuantSpec::is_extreme), in groups that are not
    /// constant.
    pub extreme: usize,
    /// Number of groups, each with one scale.
    pub groups: usize,
    /// Number of groups whose codes all stand for one number: the scale is 0, or all codes are
    /// alike. -0 counts as 0.
    pub constant: usize,
    /// The smallest scale of a group that is not constant; 0 if there is none.
    pub scale_min: f32,
    /// The mean scale of groups that are not constant; 0 if there is none.
    pub scale_mean: f64,
    /// The largest scale of a group that is not constant; 0 if there is none.
    pub scale_max: f32,
}

impl KvCache {
    /// Returns the [`Counters`] of the tokens in [`packed`](Self::packed); `None` for a side
    /// without quantized tokens.
    pub fn counters(&self) -> Sides<Option<Counters>> {
        Sides::from_fn(|side: Side| {
            let packed = self.packed(side)?;
            Some(count(&packed.to_logical(), packed.spec(), self.layout.shape().head_dim[side]))
        })
    }
}

/// Counts of one group.
#[derive(Clone, Copy, Default)]
struct Group {
    /// Number of codes at an end of the range.
    extreme: usize,
    /// The number that the first code stands for.
    first: Option<f32>,
    /// True if another code stands for another number.
    varied: bool,
}

fn count(logical: &Logical, spec: QuantSpec, head_dim: usize) -> Counters {
    let scales: Vec<f32> = match logical.exponents.is_empty() {
        true => logical.scale.iter().copied().map(f16::to_f32).collect(),
        false => logical.exponents.iter().map(|&exponent| power(exponent)).collect(),
    };
    // The number that a code stands for. It is not scaled in formats without a minimum, because
    // codes then stand for different numbers unless the scale is 0.
    let stands_for = |code: u32, group: usize| match logical.min.get(group) {
        Some(min) => code as f32 * scales[group] + min.to_f32(),
        None if spec.is_negative_zero(code) => 0.0,
        None => code as f32,
    };
    let mut groups = vec![Group::default(); scales.len()];
    for (at, group) in groups.iter_mut().enumerate() {
        let (first, stride) = spec.logical_words(at, head_dim);
        for nth in 0..spec.group_size {
            let code = spec.code(nth, |word| logical.codes[first + word * stride]);
            let number = stands_for(code, at);
            group.extreme += usize::from(spec.is_extreme(code));
            group.varied |= *group.first.get_or_insert(number) != number;
        }
    }
    let varied = || {
        let all = scales.iter().zip(&groups);
        all.filter(|(scale, group)| **scale != 0.0 && group.varied)
    };
    let n = varied().count();
    let sum: f64 = varied().map(|(&scale, _)| f64::from(scale)).sum();
    let least = varied().map(|(&scale, _)| scale).fold(f32::INFINITY, f32::min);
    Counters {
        codes: groups.len() * spec.group_size,
        extreme: varied().map(|(_, group)| group.extreme).sum(),
        groups: scales.len(),
        constant: scales.len() - n,
        scale_min: if n == 0 { 0.0 } else { least },
        scale_mean: if n == 0 { 0.0 } else { sum / n as f64 },
        scale_max: varied().map(|(&scale, _)| scale).fold(0.0, f32::max),
    }
}

/// Returns 2 to the power of a biased exponent (bias 127).
fn power(exponent: u8) -> f32 {
    (f32::from(exponent) - 127.0).exp2()
}
