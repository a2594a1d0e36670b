//! What the codes and scales of a cache are like. They are read where they are stored: a cache that nobody asks does
//! nothing for it.

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
    /// Groups whose codes all stand for one number: of scale 0, or of nothing but codes 0 where scales are powers of
    /// two, which are never 0.
    pub constant: usize,
    /// The smallest scale of a group that is not constant; 0 if there is none.
    pub scale_min: f32,
    /// The mean of these scales; 0 if there is none.
    pub scale_mean: f64,
    /// The largest of them; 0 if there is none.
    pub scale_max: f32,
}

impl KvCache {
    /// [`Counters`] of the tokens that [`packed`](Self::packed) gives; `None` of a side that has no quantized ones.
    pub fn counters(&self) -> Sides<Option<Counters>> {
        Sides::from_fn(|side: Side| {
            let packed = self.packed(side)?;
            Some(count(&packed.to_logical(), packed.spec(), self.layout.shape().head_dim[side]))
        })
    }
}

fn count(logical: &Logical, spec: QuantSpec, head_dim: usize) -> Counters {
    let scales: Vec<f32> = match logical.exponents.is_empty() {
        true => logical.scale.iter().copied().map(f16::to_f32).collect(),
        false => logical.exponents.iter().map(|&exponent| power(exponent)).collect(),
    };
    // Of each group: codes at an end of the range, and whether there is any code but 0.
    let mut groups = vec![(0, false); scales.len()];
    let per_word = spec.codes_per_word();
    for (at, word) in logical.codes.iter().enumerate() {
        let group = match spec.granule() {
            // Words of a group are next to each other.
            1 => at / spec.code_words(),
            // A word has consecutive tokens of a channel; those of neighboring channels are next to it.
            _ => at / (spec.code_words() * head_dim) * head_dim + at % head_dim,
        };
        for nth in 0..per_word {
            let code = word >> (nth as u32 * spec.n_bits) & spec.max_code();
            groups[group].0 += usize::from(spec.is_extreme(code));
            groups[group].1 |= code != 0;
        }
    }
    let exponents = !logical.exponents.is_empty();
    let varied = || {
        let all = scales.iter().zip(&groups);
        all.filter(|(scale, (_, any))| **scale != 0.0 && (*any || !exponents))
    };
    let n = varied().count();
    let sum: f64 = varied().map(|(&scale, _)| f64::from(scale)).sum();
    let least = varied().map(|(&scale, _)| scale).fold(f32::INFINITY, f32::min);
    Counters {
        codes: logical.codes.len() * per_word,
        extreme: varied().map(|(_, (extreme, _))| extreme).sum(),
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
