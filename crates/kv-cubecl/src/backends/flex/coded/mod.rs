//! Products of many float rows with the codes of packed tokens, which are not restored.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod vnni;

use crate::{formats::flex::PackedRun, layout::PackedLayout};

/// The query rows of a block of attention, and the memory of its products.
pub(super) enum Coded {
    #[cfg(target_arch = "x86_64")]
    Amx(Box<amx::Coded>),
    #[cfg(target_arch = "x86_64")]
    Vnni(Box<vnni::Coded>),
}

#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(unused_variables, reason = "other processors have no such products")
)]
impl Coded {
    /// Multiplies the query by `scale`. Returns `None` if the processor has no products with codes
    /// of one of these layouts, or the query is too large or NaN.
    pub(super) fn new(
        layouts: [Option<PackedLayout>; 2],
        query: &[f32],
        head_dim: usize,
        scale: f32,
    ) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            /// The largest magnitude of a scaled query, 2^90: its products with codes are summed
            /// before the scales of keys are applied, and sums of 2^20 products with codes up to
            /// 2^16 are finite.
            const LARGEST: f32 = f32::from_bits((127 + 90) << 23);
            let any = |reads: fn(&PackedLayout) -> bool| layouts.iter().flatten().any(reads);
            let amx = any(amx::reads) && amx::available();
            let vnni = any(vnni::reads) && vnni::available();
            let is_small = |x: &f32| (x * scale).abs() <= LARGEST;
            if !(amx || vnni) || !query.iter().all(is_small) {
                return None;
            }
            // SAFETY: the processor has the instructions. A thread computes one block at a time.
            Some(unsafe {
                match amx {
                    true => Self::Amx(Box::new(amx::Coded::new(query, head_dim, scale))),
                    false => Self::Vnni(Box::new(vnni::Coded::new(query, head_dim, scale))),
                }
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            None
        }
    }

    /// Returns whether tokens of this layout can be multiplied.
    pub(super) fn reads(&self, layout: &PackedLayout) -> bool {
        match *self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => amx::reads(layout),
            #[cfg(target_arch = "x86_64")]
            Self::Vnni(_) => vnni::reads(layout),
        }
    }

    /// Computes `scores[r * n + t] = scale * query_r . key_t` with the scale of
    /// [`new`](Self::new).
    pub(super) fn score(&mut self, keys: &PackedRun<'_>, scores: &mut [f32], n: usize) {
        match *self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(ref mut coded) => coded.score(keys, scores, n),
            #[cfg(target_arch = "x86_64")]
            Self::Vnni(ref mut coded) => coded.score(keys, scores, n),
        }
    }

    /// Computes `o_r += sum_t weights[r * n + t] * value_t`.
    pub(super) fn add(&mut self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        match *self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(ref mut coded) => coded.add(values, weights, n, o),
            #[cfg(target_arch = "x86_64")]
            Self::Vnni(ref mut coded) => coded.add(values, weights, n, o),
        }
    }
}
