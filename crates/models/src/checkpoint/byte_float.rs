//! Floats of one byte in safetensors files.

/// Floats of one byte, which Burn reads as [`DType::U8`](burn::tensor::DType::U8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteFloat {
    /// 4 bits of exponent and 3 of mantissa, without infinities.
    E4m3,
    /// A power of two: the exponent plus 127. 255 is NaN.
    E8m0,
}

impl ByteFloat {
    /// Returns the name in safetensors files.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "F8_E4M3",
            Self::E8m0 => "F8_E8M0",
        }
    }

    pub(super) fn value(self, code: u8) -> f32 {
        match self {
            Self::E4m3 => {
                let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
                let magnitude = match (exponent, code & 7) {
                    (0, _) => mantissa * 2f32.powi(-9),
                    (15, 7) => f32::NAN,
                    _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
                };
                if code & 128 == 0 { magnitude } else { -magnitude }
            }
            Self::E8m0 if code == 255 => f32::NAN,
            Self::E8m0 => 2f64.powi(i32::from(code) - 127) as f32,
        }
    }
}
