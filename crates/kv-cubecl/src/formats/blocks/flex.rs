//! Blocks on the CPU.

use super::{E2m1Blocks, E4m3Blocks, MANTISSA, Mxfp4, Rule};
use crate::formats::{Codec, scaled::flex::Scaled};

impl Rule {
    /// Returns the exponent of a block's scale, plus 127.
    fn parameter(self, amax: f32) -> u32 {
        let bits = amax.max(self.floor).to_bits();
        let exponent = (bits >> 23) as i32 + i32::from(bits & MANTISSA > self.most);
        (exponent - self.exponent).max(0) as u32
    }
}

macro_rules! scaled {
    ($Format:ident, $RULE:ident) => {
        impl Scaled for $Format {
            const FORMAT: Codec = Codec::$Format;
            const LARGEST: Option<f32> = None;

            fn parameter(amax: f32) -> u32 {
                Rule::$RULE.parameter(amax)
            }

            #[inline(always)]
            fn scale(parameter: u32) -> f32 {
                // The power 2^-127 is subnormal.
                f32::from_bits(if parameter == 0 { 1 << 22 } else { parameter << 23 })
            }

            #[inline(always)]
            fn encode(steps: f32) -> u8 {
                Rule::$RULE.float.encode(steps)
            }

            #[inline(always)]
            fn value(code: u8) -> f32 {
                Rule::$RULE.float.value(code)
            }

            fn half_step(value: f32) -> f32 {
                Rule::$RULE.float.half_step(value)
            }
        }
    };
}

scaled!(E4m3Blocks, E4M3);
scaled!(E2m1Blocks, E2M1);
scaled!(Mxfp4, MXFP4);
