//! 8-bit floats on the CPU.

use super::{E4M3, E4m3, E5M2, E5m2};
use crate::formats::{
    Codec,
    scaled::flex::{Scaled, half_scale, half_value},
};

macro_rules! scaled {
    ($Format:ident, $FLOAT:ident) => {
        impl Scaled for $Format {
            const FORMAT: Codec = Codec::$Format;
            const LARGEST: Option<f32> = Some($FLOAT.largest);

            fn parameter(amax: f32) -> u32 {
                half_scale(amax / $FLOAT.largest).to_bits().into()
            }

            #[inline(always)]
            fn scale(parameter: u32) -> f32 {
                half_value(parameter)
            }

            #[inline(always)]
            fn encode(steps: f32) -> u8 {
                $FLOAT.encode(steps)
            }

            #[inline(always)]
            fn value(code: u8) -> f32 {
                $FLOAT.value(code)
            }

            fn half_step(value: f32) -> f32 {
                $FLOAT.half_step(value)
            }
        }
    };
}

scaled!(E4m3, E4M3);
scaled!(E5m2, E5M2);
