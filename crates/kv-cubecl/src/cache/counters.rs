//! What the codes and scales of a cache are like. They are read where they are stored: a cache that
//! nobody asks does nothing for it.

use half::f16;

use super::KvCache;
use crate::{
    Logical,
    layout::{QuantSpec, Side, Sides},
};

/// Codes and scales of the quantized tokens of a side of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Counters {
    /// Codes.
    pub codes: usize,
    /// Codes [at an end of the range](QuantSpec::is_extreme), in groups that are not constant.
    pub extreme: usize,
    /// Groups, each with a scale.
    pub groups: usize,
    /// Groups whose codes all stand for one number, -0 being 0: of scale 0, or of one code.
    pub constant: usize,
    /// The smallest scale of a group that is not constant; 0 if there is none.
    pub scale_min: f32,
    /// The mean of these scales; 0 if there is none.
    pub scale_mean: f64,
    /// The largest of them; 0 if there is none.
    pub scale_max: f32,
}

impl KvCache {
    /// [`Counters`] of the tokens that [`packed`](Self::packed) gives; `None` of a side that has no
    /// quantized ones.
    pub fn counters(&self) -> Sides<Option<Counters>> {
        Sides::from_fn(|side: Side| {
            let packed = self.packed(side)?;
            Some(count(&packed.to_logical(), packed.spec(), self.layout.shape().head_dim[side]))
        })
    }
}

/// Codes of a group.
#[derive(Clone, Copy, Default)]
struct Group {
    /// Those at an end of the range.
    extreme: usize,
    /// What the first one stands for.
    first: Option<f32>,
    /// Whether another one stands for another number.
    varied: bool,
}

fn count(logical: &Logical, spec: QuantSpec, head_dim: usize) -> Counters {
    let scales: Vec<f32> = match logical.exponents.is_empty() {
        true => logical.scale.iter().copied().map(f16::to_f32).collect(),
        false => logical.exponents.iter().map(|&exponent| power(exponent)).collect(),
    };
    // What a code of a group stands for. Without minimum it is before its scale, since each code is
    // then another number unless the scale is 0; but a float's sign alone is -0. Integers have no
    // such code.
    let stands_for = |code: u32, group: usize| match logical.min.get(group) {
        Some(min) => code as f32 * scales[group] + min.to_f32(),
        None if code == 1 << (spec.n_bits - 1) => 0.0,
        None => code as f32,
    };
    let mut groups = vec![Group::default(); scales.len()];
    let per_word = spec.codes_per_word();
    for (at, word) in logical.codes.iter().enumerate() {
        let group = match spec.block_tokens() {
            // Words of a group are next to each other.
            1 => at / spec.code_words(),
            // A word has consecutive tokens of a channel; those of neighboring channels are next to
            // it.
            _ => at / (spec.code_words() * head_dim) * head_dim + at % head_dim,
        };
        for nth in 0..per_word {
            let code = word >> (nth as u32 * spec.n_bits) & spec.max_code();
            let number = stands_for(code, group);
            let group = &mut groups[group];
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
        codes: logical.codes.len() * per_word,
        extreme: varied().map(|(_, group)| group.extreme).sum(),
        groups: scales.len(),
        constant: scales.len() - n,
        scale_min: if n == 0 { 0.0 } else { least },
        scale_mean: if n == 0 { 0.0 } else { sum / n as f64 },
        scale_max: varied().map(|(&scale, _)| scale).fold(0.0, f32::max),
    }
}

/// The power of two of an exponent and 127.
fn power(exponent: u8) -> f32 {
    (f32::from(exponent) - 127.0).exp2()
}
