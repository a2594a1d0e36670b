//! Int8 on the CPU.

use half::f16;

use super::{Int8, LARGEST};
use crate::{
    formats::{
        Codec, QuantSpec,
        affine::Affine,
        flex::{CpuCodec, PackedRun},
        scaled::flex::{Scaled, half_scale, half_value},
    },
    layout::PackedLayout,
};

/// Tokens whose words are converted to affine words at a time.
const TILE: usize = 128;

/// The largest scale whose affine minimum, -128 times the scale, is a finite f16.
const LARGEST_SCALE: f32 = 65504.0 / 128.0;

impl Scaled for Int8 {
    const FORMAT: Codec = Codec::Int8;
    const LARGEST: Option<f32> = Some(LARGEST);
    #[cfg(target_arch = "x86_64")]
    const INTEGERS: bool = true;

    fn parameter(amax: f32) -> u32 {
        half_scale(amax / LARGEST).to_bits().into()
    }

    #[inline(always)]
    fn scale(parameter: u32) -> f32 {
        half_value(parameter)
    }

    #[inline(always)]
    fn encode(steps: f32) -> u8 {
        // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low
        // bits.
        (steps.clamp(-LARGEST, LARGEST) + 12_582_912.0).to_bits() as u8
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        f32::from(code as i8)
    }

    fn half_step(_value: f32) -> f32 {
        0.5
    }

    /// Uses the loops over 8-bit affine codes, which multiply bytes where the processor can. With
    /// its sign bit flipped, a code counts from -128 up, so the affine minimum is -128 times the
    /// scale.
    fn score_channels(
        &self,
        keys: &PackedRun<'_>,
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        scratch: &mut [f32],
    ) -> bool {
        let PackedLayout { spec, head_dim, .. } = keys.place;
        let (block_tokens, codes) = (spec.block_tokens(), spec.code_words() * head_dim);
        let step = (TILE / block_tokens).max(1) * block_tokens;
        let mut words = vec![0; spec.words(step, head_dim)];
        let affine = QuantSpec { format: Codec::Affine, ..spec };
        for token in keys.tokens.clone().step_by(step) {
            let count = step.min(keys.tokens.end - token);
            // Groups are whole, although the run may end within a group.
            let whole = count.next_multiple_of(block_tokens);
            let from = &keys.words[keys.place.codes(token)..][..spec.words(whole, head_dim)];
            let groups = from.chunks_exact(codes + head_dim);
            for (from, to) in groups.zip(words.chunks_exact_mut(codes + head_dim)) {
                let ((from, scales), (to, parameters)) =
                    (from.split_at(codes), to.split_at_mut(codes));
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ 0x8080_8080);
                for (parameter, &scale) in parameters.iter_mut().zip(scales) {
                    let value = half_value(scale);
                    if value > LARGEST_SCALE {
                        return false;
                    }
                    *parameter = scale | u32::from(f16::from_f32(-128.0 * value).to_bits()) << 16;
                }
            }
            let place = PackedLayout { spec: affine, head_dim, tokens: whole };
            let run = PackedRun { words: &words, place, tokens: 0..count, skipped: 0 };
            let first = token - keys.tokens.start;
            Affine.score(&run, query, &mut scores[first..], n, scratch);
        }
        true
    }
}
