//! Scaled groups on the CPU.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

#[cfg(target_arch = "x86_64")]
mod avx512;

use half::f16;
use macerator::Simd;

use crate::{
    formats::{
        Codec, Granularity,
        flex::{CpuCodec, IndexHeads, PackedRun},
    },
    layout::PackedLayout,
    simd,
};

/// The distance in tokens at which codes are prefetched before they are restored.
const AHEAD: usize = 32;

/// A codec of scaled groups. Implements [`CpuCodec`].
pub(crate) trait Scaled: Sync {
    /// The codec's variant.
    const FORMAT: Codec;

    /// The divisor of the group's largest magnitude in the scale, if gradients pass through the
    /// scale; `None` if scales are powers of two, which are step functions of the magnitude.
    const LARGEST: Option<f32>;

    /// True if 8-bit codes are signed integers and their value is the byte itself.
    #[cfg(target_arch = "x86_64")]
    const INTEGERS: bool = false;

    /// Returns the parameter of a group with this largest magnitude, which must not be NaN.
    fn parameter(amax: f32) -> u32;

    /// Returns the scale in a parameter.
    fn scale(parameter: u32) -> f32;

    /// Returns the code of a number divided by its scale, which must not be NaN.
    fn encode(steps: f32) -> u8;

    /// Returns the number that a code stands for, before the scale.
    fn value(code: u8) -> f32;

    /// Returns how far a number may be from the `value` it is rounded to.
    fn half_step(value: f32) -> f32;

    /// Computes [`CpuCodec::score`] over keys in groups of tokens. Returns whether the codec
    /// supports it.
    fn score_channels(
        &self,
        _keys: &PackedRun<'_>,
        _query: &[f32],
        _scores: &mut [f32],
        _n: usize,
        _scratch: &mut [f32],
    ) -> bool {
        false
    }
}

/// Rounds a scale to f16, at most the largest f16.
pub(crate) fn half_scale(scale: f32) -> f16 {
    f16::from_f32(scale.min(f16::MAX.to_f32()))
}

/// Converts the bits of a finite f16, which must not be negative, to f32.
///
/// With exponent and mantissa at their place in an f32, only the factor 2^112 is missing, the
/// difference of the biases.
#[inline(always)]
pub(crate) fn half_value(bits: u32) -> f32 {
    f32::from_bits(bits << 13) * f32::from_bits((127 + 112) << 23)
}

/// Returns the largest magnitude of `x`, at most the format's limit; ignores NaN.
///
/// Compares bits, which have the order of magnitudes and which compilers vectorize. The bits of NaN
/// are above those of infinity.
#[inline(always)]
fn largest<F: Scaled>(x: &[f32]) -> f32 {
    let bits = |x: &f32| match x.to_bits() & 0x7fff_ffff {
        nan if nan > f32::INFINITY.to_bits() => 0,
        bits => bits,
    };
    f32::from_bits(x.iter().map(bits).fold(0, u32::max)).min(F::FORMAT.limit())
}

/// Returns the magnitude of a number, at most the format's limit; 0 for NaN.
#[inline(always)]
fn magnitude<F: Scaled>(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.abs().min(F::FORMAT.limit()) }
}

/// Returns the code of a number.
#[inline(always)]
fn encode<F: Scaled>(x: f32, scale: f32) -> u8 {
    let x = if x.is_nan() { 0.0 } else { x.clamp(-F::FORMAT.limit(), F::FORMAT.limit()) };
    F::encode(x / scale)
}

/// Quantizes tokens from slot `first` on.
#[macerator::with_simd]
fn quantize_tokens<S: Simd, F: Scaled>(
    _format: &F,
    rows: &[f32],
    words: &mut [u32],
    first: usize,
    place: &PackedLayout,
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    let code_words = spec.code_words();
    for (i, row) in rows.chunks_exact(head_dim).enumerate() {
        let token = first + i;
        for (group, x) in row.chunks_exact(spec.group_size).enumerate() {
            let parameter = F::parameter(largest::<F>(x));
            place.set_parameter(words, token, group, parameter);
            let scale = F::scale(parameter);
            let codes = &mut words[place.codes(token) + group * code_words..][..code_words];
            let codes: &mut [u8] = bytemuck::cast_slice_mut(codes);
            if scale == 0.0 {
                codes.fill(0);
            } else if spec.n_bits == 8 {
                for (code, &x) in codes.iter_mut().zip(x) {
                    *code = encode::<F>(x, scale);
                }
            } else {
                for (code, x) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
                    *code = encode::<F>(x[0], scale) | encode::<F>(x[1], scale) << 4;
                }
            }
        }
    }
}

/// Quantizes tokens from slot `first` on, in groups of tokens of one channel.
#[macerator::with_simd]
fn quantize_channels<S: Simd, F: Scaled>(
    _format: &F,
    rows: &[f32],
    words: &mut [u32],
    first: usize,
    place: &PackedLayout,
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    let (block_tokens, codes_per_word) = (spec.block_tokens(), spec.codes_per_word());
    let mut largest = vec![0.0; head_dim];
    let mut scales = vec![0.0; head_dim];
    for (i, rows) in rows.chunks_exact(block_tokens * head_dim).enumerate() {
        largest.fill(0.0);
        for row in rows.chunks_exact(head_dim) {
            for (largest, &x) in largest.iter_mut().zip(row) {
                *largest = f32::max(*largest, magnitude::<F>(x));
            }
        }
        let words = &mut words[place.codes(first + i * block_tokens)..];
        let (codes, parameters) =
            words[..spec.words_per_group() * head_dim].split_at_mut(spec.code_words() * head_dim);
        for ((parameter, scale), &largest) in parameters.iter_mut().zip(&mut scales).zip(&largest) {
            *parameter = F::parameter(largest);
            *scale = F::scale(*parameter);
        }
        let lines = rows.chunks_exact(codes_per_word * head_dim);
        for (line, rows) in codes.chunks_exact_mut(head_dim).zip(lines) {
            line.fill(0);
            for (nth, row) in rows.chunks_exact(head_dim).enumerate() {
                let shift = nth as u32 * spec.n_bits;
                for ((word, &x), &scale) in line.iter_mut().zip(row).zip(&scales) {
                    let code = if scale == 0.0 { 0 } else { encode::<F>(x, scale) };
                    *word |= u32::from(code) << shift;
                }
            }
        }
    }
}

/// Restores tokens from slot `first` on, from groups of tokens of one channel.
#[macerator::with_simd]
fn restore_channels<S: Simd, F: Scaled>(
    _format: &F,
    words: &[u32],
    first: usize,
    rows: &mut [f32],
    place: &PackedLayout,
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    let (block_tokens, codes_per_word) = (spec.block_tokens(), spec.codes_per_word());
    let mask = (1u32 << spec.n_bits) - 1;
    let mut scales = vec![0.0; head_dim];
    for (i, rows) in rows.chunks_exact_mut(block_tokens * head_dim).enumerate() {
        let words = &words[place.codes(first + i * block_tokens)..];
        let (codes, parameters) =
            words[..spec.words_per_group() * head_dim].split_at(spec.code_words() * head_dim);
        scales.iter_mut().zip(parameters).for_each(|(to, &from)| *to = F::scale(from));
        let lines = rows.chunks_exact_mut(codes_per_word * head_dim);
        for (line, rows) in codes.chunks_exact(head_dim).zip(lines) {
            for (nth, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                let shift = nth as u32 * spec.n_bits;
                for ((x, &word), &scale) in row.iter_mut().zip(line).zip(&scales) {
                    *x = F::value((word >> shift & mask) as u8) * scale;
                }
            }
        }
    }
}

/// Restores tokens from slot `first` on.
#[macerator::with_simd]
fn restore_tokens<S: Simd, F: Scaled>(
    _format: &F,
    words: &[u32],
    first: usize,
    rows: &mut [f32],
    place: &PackedLayout,
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    let code_words = spec.code_words();
    for (i, row) in rows.chunks_exact_mut(head_dim).enumerate() {
        let token = first + i;
        simd::prefetch(words, place.codes(token + AHEAD), head_dim / spec.codes_per_word());
        for (group, x) in row.chunks_exact_mut(spec.group_size).enumerate() {
            let scale = F::scale(place.parameter_in(words, token, group));
            let codes = &words[place.codes(token) + group * code_words..][..code_words];
            let codes: &[u8] = bytemuck::cast_slice(codes);
            if spec.n_bits == 8 {
                for (x, &code) in x.iter_mut().zip(codes) {
                    *x = F::value(code) * scale;
                }
            } else {
                for (x, &code) in x.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *x = [F::value(code & 15) * scale, F::value(code >> 4) * scale];
                }
            }
        }
    }
}

/// Reads the scales of tokens of one group from slot `first` on.
#[cfg(target_arch = "x86_64")]
#[macerator::with_simd]
fn read_scales<S: Simd, F: Scaled>(
    _format: &F,
    words: &[u32],
    first: usize,
    scales: &mut [f32],
    place: &PackedLayout,
) {
    // 16-bit scales are read as an array of halves of words; the general lookup below is slower.
    if F::FORMAT.parameter_bits() == 16 {
        let halves: &[u16] = bytemuck::cast_slice(&words[place.parameters()..]);
        let halves = &halves[first..][..scales.len()];
        for (scale, &half) in scales.iter_mut().zip(halves) {
            *scale = F::scale(half.into());
        }
        return;
    }
    for (i, scale) in scales.iter_mut().enumerate() {
        *scale = F::scale(place.parameter_in(words, first + i, 0));
    }
}

/// Unpacks tokens of one group from slot `first` on, to bf16, which has all numbers of 8-bit codes.
#[cfg(target_arch = "x86_64")]
#[macerator::with_simd]
fn unpack_tokens<S: Simd, F: Scaled>(
    _format: &F,
    words: &[u32],
    first: usize,
    codes: &mut [u16],
    stride: usize,
    place: &PackedLayout,
) {
    let code_words = place.spec.code_words();
    for (i, to) in codes.chunks_exact_mut(stride).enumerate() {
        let token = first + i;
        simd::prefetch(words, place.codes(token + AHEAD), code_words);
        let codes: &[u8] = bytemuck::cast_slice(&words[place.codes(token)..][..code_words]);
        for (to, &code) in to.iter_mut().zip(codes) {
            // The upper half of an f32 is a bf16.
            *to = (F::value(code).to_bits() >> 16) as u16;
        }
    }
}

/// Computes [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin) for one group, whose elements
/// are `stride` apart.
fn add_scale_gradient<F: Scaled>(input: &[f32], grad: &mut [f32], stride: usize, most: f32) {
    let elements =
        || input.iter().step_by(stride).map(|x| x.clamp(-F::FORMAT.limit(), F::FORMAT.limit()));
    let mut largest = (0.0, None);
    for (i, x) in elements().enumerate() {
        if x.abs() > largest.0 {
            largest = (x.abs(), Some((i, x.signum())));
        }
    }
    let scale = F::scale(F::parameter(largest.0));
    let (Some((at, sign)), true) = (largest.1, scale > 0.0) else { return };
    let parts = elements().zip(grad.iter().step_by(stride)).map(|(x, grad)| {
        // A NaN has no rounding error.
        if x.is_nan() {
            return 0.0;
        }
        let value = F::value(encode::<F>(x, scale));
        let limit = F::half_step(value);
        grad * (value - x / scale).clamp(-limit, limit)
    });
    grad[at * stride] += sign * (parts.sum::<f32>() / most);
}

impl<F: Scaled> CpuCodec for F {
    fn quantize(&self, rows: &[f32], words: &mut [u32], first: usize, place: &PackedLayout) {
        match place.spec.granularity {
            Granularity::PerToken => quantize_tokens(self, rows, words, first, place),
            Granularity::PerChannel => quantize_channels(self, rows, words, first, place),
        }
    }

    fn restore(&self, words: &[u32], first: usize, rows: &mut [f32], place: &PackedLayout) {
        match place.spec.granularity {
            Granularity::PerToken => restore_tokens(self, words, first, rows, place),
            Granularity::PerChannel => restore_channels(self, words, first, rows, place),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn unpacks(&self, place: &PackedLayout) -> bool {
        let spec = &place.spec;
        spec.granularity == Granularity::PerToken
            && spec.group_size == place.head_dim
            && spec.n_bits == 8
    }

    #[cfg(target_arch = "x86_64")]
    fn has_integers(&self) -> bool {
        F::INTEGERS
    }

    #[cfg(target_arch = "x86_64")]
    fn scales(&self, words: &[u32], first: usize, scales: &mut [f32], place: &PackedLayout) {
        read_scales(self, words, first, scales, place);
    }

    #[cfg(target_arch = "x86_64")]
    fn unpack(
        &self,
        words: &[u32],
        first: usize,
        codes: &mut [u16],
        stride: usize,
        place: &PackedLayout,
    ) {
        unpack_tokens(self, words, first, codes, stride, place);
    }

    fn score(
        &self,
        keys: &PackedRun<'_>,
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        scratch: &mut [f32],
    ) {
        if keys.place.spec.granularity == Granularity::PerChannel
            && self.score_channels(keys, query, scores, n, scratch)
        {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if avx512::score::<F>(keys, query, scores, n, scratch) {
            return;
        }
        keys.score_restored(query, scores, n);
    }

    fn index_scores(&self, keys: &PackedRun<'_>, heads: &IndexHeads<'_>, scores: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if avx512::index_scores::<F>(keys, heads, scores) {
            return;
        }
        keys.index_scores_restored(heads, scores);
    }

    fn add(&self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if avx512::add::<F>(values, weights, n, o) {
            return;
        }
        values.add_restored(weights, n, o);
    }

    fn through_scales(&self, rows: &[f32], grad: &mut [f32], place: &PackedLayout) {
        let Some(most) = F::LARGEST else { return };
        let group_size = place.spec.group_size;
        match place.spec.granularity {
            Granularity::PerToken => {
                let groups = rows.chunks_exact(group_size).zip(grad.chunks_exact_mut(group_size));
                groups.for_each(|(rows, grad)| add_scale_gradient::<F>(rows, grad, 1, most));
            }
            Granularity::PerChannel => {
                let head_dim = place.head_dim;
                let len = group_size * head_dim;
                for (rows, grad) in rows.chunks_exact(len).zip(grad.chunks_exact_mut(len)) {
                    for channel in 0..head_dim {
                        let (rows, grad) = (&rows[channel..], &mut grad[channel..]);
                        add_scale_gradient::<F>(rows, grad, head_dim, most);
                    }
                }
            }
        }
    }
}
