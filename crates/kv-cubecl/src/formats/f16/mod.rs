//! IEEE half precision: 5 bits of exponent and 10 of mantissa.

#[cfg(feature = "flex")]
mod flex;

use burn::tensor::DType;
use half::f16;

use super::float::FloatFormat;

/// The float type of [this module](self).
pub(super) struct F16;

impl FloatFormat for F16 {
    fn name(&self) -> &'static str {
        "f16"
    }

    fn dtype(&self) -> DType {
        DType::F16
    }

    fn round(&self, x: f32) -> f32 {
        f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_f32()
    }

    #[cfg(feature = "cube")]
    fn kind(&self) -> cubecl::ir::FloatKind {
        cubecl::ir::FloatKind::F16
    }

    #[cfg(feature = "flex")]
    fn read(&self, bytes: &[u8], start: usize, out: &mut [f32]) {
        flex::widen(&bytemuck::cast_slice(bytes)[start..start + out.len()], out);
    }

    #[cfg(feature = "flex")]
    fn write(
        &self,
        tensor: &mut burn_flex::FlexTensor,
        rows: &mut dyn Iterator<Item = (usize, &[f32])>,
    ) {
        let halves = tensor.storage_mut::<f16>();
        for (start, row) in rows {
            for (half, &x) in halves[start..].iter_mut().zip(row) {
                *half = f16::from_f32(self.round(x));
            }
        }
    }
}
