//! Packed formats in kernels: the functions of [`CubeCodec`] for the codec of a [`QuantSpec`].

use cubecl::prelude::*;

pub(crate) use super::in_kernels::{code_at, greater, lesser, saturate};
use super::{Codec, QuantSpec, in_kernels::CubeCodec, minifloat, table::codecs};

/// The functions of [`CubeCodec`], for the format of a [`QuantSpec`].
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
                $(Codec::$Format => $Format::value(code),)+
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

/// What code `index` of a word stands for, before scale and offset. Codes of floats are those of finite numbers, as all
/// that are stored.
#[cube]
pub(crate) fn element(word: u32, #[comptime] index: usize, #[comptime] spec: QuantSpec) -> f32 {
    let float = comptime!(spec.format.float());
    #[comptime]
    match float {
        Some(float) => minifloat::element(word, index, float),
        None => value(code_at(word, index, spec.n_bits), spec),
    }
}

/// What a code restores to.
#[cube]
pub(crate) fn restore(code: u32, scale: f32, offset: f32, #[comptime] spec: QuantSpec) -> f32 {
    let value = value(code, spec);
    if comptime!(spec.format.has_offset()) { value * scale + offset } else { value * scale }
}

/// `x`, at most as large as the format takes it: infinities are finite then. NaN stays NaN, which `clamp` does not
/// promise.
#[cube]
pub(crate) fn limited(x: f32, #[comptime] spec: QuantSpec) -> f32 {
    let high = f32::new(comptime!(spec.format.limit()));
    let low = f32::new(comptime!(-spec.format.limit()));
    select(x > high, high, select(x < low, low, x))
}
