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

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::formats::{Codec, Granularity, GroupRange, QuantSpec};

    const ROWS: usize = 5;
    /// Several parts of each kind of product, and a rest.
    const SLOTS: usize = 568;

    fn wave(len: usize, pitch: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * pitch).sin() * (1.0 + i as f32 / len as f32)).collect()
    }

    /// Compares the products with the codes of a run that starts within the slots and ends at the
    /// last one with those with restored tokens.
    fn check(format: Codec, head_dim: usize, tolerance: f32, new: impl Fn(&[f32], f32) -> Coded) {
        let spec = QuantSpec {
            format,
            granularity: Granularity::PerToken,
            n_bits: 8,
            group_size: head_dim,
            range: GroupRange::MinMax,
            tile: None,
        };
        let place = PackedLayout { spec, head_dim, tokens: SLOTS };
        let mut words = vec![0; place.words()];
        format.on_cpu().quantize(&wave(SLOTS * head_dim, 0.37), &mut words, 0, &place);
        let tokens = 17..SLOTS;
        let n = tokens.len() + 2;
        let run = PackedRun { words: &words, place, tokens, skipped: 0 };
        let (query, scale) = (wave(ROWS * head_dim, 0.7), 0.3);
        let weights = wave(ROWS * n, 1.3);
        let [mut scores, mut restored_scores] = [vec![0.0; ROWS * n], vec![0.0; ROWS * n]];
        let [mut o, mut restored_o] = [vec![1.0; ROWS * head_dim], vec![1.0; ROWS * head_dim]];
        let mut coded = new(&query, scale);
        assert!(coded.reads(&place));
        coded.score(&run, &mut scores, n);
        coded.add(&run, &weights, n, &mut o);
        let scaled: Vec<f32> = query.iter().map(|x| x * scale).collect();
        run.score_restored(&scaled, &mut restored_scores, n);
        run.add_restored(&weights, n, &mut restored_o);
        for (what, got, wanted) in [("scores", scores, restored_scores), ("output", o, restored_o)]
        {
            let largest = wanted.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
            for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                let off = (got - wanted).abs() / largest;
                assert!(
                    off <= tolerance,
                    "{format:?} {what} {i} of {head_dim}: {got}, not {wanted}"
                );
            }
        }
    }

    #[test]
    fn products_with_codes_are_those_with_restored_tokens() {
        let kinds = [("AMX", amx::available()), ("VNNI", vnni::available())];
        for (name, _) in kinds.iter().filter(|(_, available)| !available) {
            let _ = writeln!(std::io::stderr(), "SKIPPED products: this CPU has no {name}");
        }
        for head_dim in [32, 64, 96] {
            if vnni::available() {
                // Sums of up to 551 products in f32, each rounded to 2^-24 of the sum.
                check(Codec::Int8, head_dim, 1e-5, |query, scale| {
                    // SAFETY: the processor has the instructions.
                    let coded = unsafe { vnni::Coded::new(query, head_dim, scale) };
                    Coded::Vnni(Box::new(coded))
                });
            }
            if amx::available() {
                for format in [Codec::Int8, Codec::E4m3, Codec::E5m2] {
                    // Factors are off by up to 2^-17, and products may cancel in sums.
                    check(format, head_dim, 1e-4, |query, scale| {
                        // SAFETY: the processor has the instructions, and no other one exists.
                        let coded = unsafe { amx::Coded::new(query, head_dim, scale) };
                        Coded::Amx(Box::new(coded))
                    });
                }
            }
        }
    }
}
