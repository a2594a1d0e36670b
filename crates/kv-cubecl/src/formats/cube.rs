//! Packed formats in kernels: the functions of [`CubeCodec`], selected by a [`QuantSpec`].

use cubecl::prelude::*;

pub(crate) use super::in_kernels::{greater, is_nan, lesser, saturate, square};
use super::{
    Codec, QuantSpec,
    in_kernels::{CubeCodec, code_at},
    minifloat,
    table::codecs,
};

/// Generates a function for each function of [`CubeCodec`] that selects the codec.
macro_rules! dispatch {
    ($($(#[$doc:meta])* $module:ident::$Format:ident { $($formats:tt)* })+) => {
        $(use super::$module::$Format;)+

        /// [`CubeCodec::parameter`].
        #[cube]
        pub(crate) fn parameter(min: f32, max: f32, #[comptime] spec: QuantSpec) -> u32 {
            match comptime!(spec.format) {
                $(Codec::$Format => $Format::parameter(min, max, spec.n_bits),)+
            }
        }

        /// [`CubeCodec::scale`].
        #[cube]
        pub(crate) fn scale(parameter: u32, #[comptime] spec: QuantSpec) -> f32 {
            match comptime!(spec.format) {
                $(Codec::$Format => $Format::scale(parameter),)+
            }
        }

        /// [`CubeCodec::offset`].
        #[cube]
        pub(crate) fn offset(parameter: u32, #[comptime] spec: QuantSpec) -> f32 {
            match comptime!(spec.format) {
                $(Codec::$Format => $Format::offset(parameter),)+
            }
        }

        /// [`CubeCodec::encode`].
        #[cube]
        pub(crate) fn encode(
            x: f32,
            scale: f32,
            offset: f32,
            #[comptime] spec: QuantSpec,
        ) -> u32 {
            match comptime!(spec.format) {
                $(Codec::$Format => $Format::encode(x, scale, offset, spec.n_bits),)+
            }
        }

        /// [`CubeCodec::value`].
        #[cube]
        pub(crate) fn value(code: u32, #[comptime] spec: QuantSpec) -> f32 {
            match comptime!(spec.format) {
                $(Codec::$Format => $Format::value(code, spec.n_bits),)+
            }
        }

        /// [`CubeCodec::add_scale_gradient`].
        #[cube]
        pub(crate) fn add_scale_gradient(
            data: &[f32],
            grad: &mut [f32],
            base: usize,
            stride: usize,
            #[comptime] spec: QuantSpec,
        ) {
            match comptime!(spec.format) {
                $(Codec::$Format => $Format::add_scale_gradient(
                    data,
                    grad,
                    base,
                    stride,
                    spec.group_size,
                    spec.n_bits,
                ),)+
            }
        }
    };
}

codecs!(dispatch);

/// Returns which word of a group holds the low bits of a run: [`QuantSpec::low_word`].
#[cube]
pub(crate) fn low_word(run: usize, #[comptime] spec: QuantSpec) -> usize {
    if comptime!(spec.splits_codes()) { run / 2 * 3 + run % 2 } else { run }
}

/// Returns the bits of a code that are in a word of low bits: [`QuantSpec::low_bits`].
#[cube]
pub(crate) fn low_bits(code: u32, #[comptime] spec: QuantSpec) -> u32 {
    if comptime!(spec.splits_codes()) { code & 3u32 } else { code }
}

/// Returns which word of a group holds the high bits of a run, for split codes:
/// [`QuantSpec::high_word`].
#[cube]
pub(crate) fn high_word(run: usize) -> usize {
    run / 2 * 3 + 2
}

/// Returns the bit position of a run's first high bit in its word.
#[cube]
pub(crate) fn high_shift(run: usize) -> u32 {
    (run % 2) as u32 * 16u32
}

/// Returns the high bits of a run, the first in bit 0; 0 if codes are not split. `base` is the
/// first word of the group.
#[cube]
pub(crate) fn high_bits(
    words: &[u32],
    base: usize,
    stride: usize,
    run: usize,
    #[comptime] spec: QuantSpec,
) -> u32 {
    if comptime!(spec.splits_codes()) {
        words[base + high_word(run) * stride] >> high_shift(run)
    } else {
        0u32.runtime()
    }
}

/// Returns code `index` of a run from its word of low bits and its [high bits](high_bits).
#[cube]
pub(crate) fn code_in(low: u32, high: u32, index: usize, #[comptime] spec: QuantSpec) -> u32 {
    let code = code_at(low, index, spec.low_bits());
    if comptime!(spec.splits_codes()) { code | (code_at(high, index, 1u32) << 2u32) } else { code }
}

/// Returns the number that [code](code_in) `index` of a run stands for, before scale and offset.
/// Codes of float formats must be finite, as all stored codes are.
#[cube]
pub(crate) fn element(
    low: u32,
    high: u32,
    #[comptime] index: usize,
    #[comptime] spec: QuantSpec,
) -> f32 {
    let float = comptime!(spec.format.float());
    #[comptime]
    match float {
        Some(float) => minifloat::element(low, index, float),
        None => value(code_in(low, high, index, spec), spec),
    }
}

/// Returns the number that a code is restored to.
#[cube]
pub(crate) fn restore(code: u32, scale: f32, offset: f32, #[comptime] spec: QuantSpec) -> f32 {
    let value = value(code, spec);
    if comptime!(spec.format.has_offset()) { value * scale + offset } else { value * scale }
}

/// Returns the root mean square of a group from the sum of its squares.
#[cube]
pub(crate) fn root_mean_square(squares: f32, #[comptime] spec: QuantSpec) -> f32 {
    (squares / comptime!(spec.group_size as f32)).sqrt()
}

/// Returns the parameter with which a group of this root mean square is restored from codes, given
/// the sum of the squares of the numbers that they stand for.
#[cube]
pub(crate) fn parameter_of_norm(rms: f32, of_codes: f32, #[comptime] spec: QuantSpec) -> u32 {
    let scale = rms / root_mean_square(of_codes, spec);
    parameter(-scale, scale, spec)
}

/// Clamps `x` to the [limit](Codec::limit) of the format. NaN stays NaN, which `clamp` does not
/// guarantee.
#[cube]
pub(crate) fn limited(x: f32, #[comptime] spec: QuantSpec) -> f32 {
    let high = f32::new(comptime!(spec.format.limit()));
    let low = f32::new(comptime!(-spec.format.limit()));
    select(x > high, high, select(x < low, low, x))
}
