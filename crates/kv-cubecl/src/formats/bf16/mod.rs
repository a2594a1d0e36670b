//! bfloat16: the upper half of an f32, with the range of f32 and 7 bits of mantissa.

use burn::tensor::DType;
#[cfg(feature = "flex")]
use half::{bf16, slice::HalfFloatSliceExt};

use super::float::FloatFormat;

/// The float type of [this module](self).
pub(super) struct Bf16;

impl FloatFormat for Bf16 {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn dtype(&self) -> DType {
        DType::BF16
    }

    /// Rounds the bits, ties to even. Numbers nearer to `2^128` than to the largest number become
    /// infinite.
    fn round(&self, x: f32) -> f32 {
        let bits = x.to_bits();
        match x.is_nan() {
            true => x,
            false => {
                let rounded = u64::from(bits) + 0x7fff + u64::from(bits >> 16 & 1);
                f32::from_bits(rounded as u32 & 0xffff_0000)
            }
        }
    }

    #[cfg(feature = "cube")]
    fn kind(&self) -> cubecl::ir::FloatKind {
        cubecl::ir::FloatKind::BF16
    }

    #[cfg(feature = "flex")]
    fn read(&self, bytes: &[u8], start: usize, out: &mut [f32]) {
        let halves: &[bf16] = &bytemuck::cast_slice(bytes)[start..start + out.len()];
        halves.convert_to_f32_slice(out);
    }

    #[cfg(feature = "flex")]
    fn write(
        &self,
        tensor: &mut burn_flex::FlexTensor,
        rows: &mut dyn Iterator<Item = (usize, &[f32])>,
    ) {
        let halves = tensor.storage_mut::<bf16>();
        rows.for_each(|(start, row)| {
            halves[start..start + row.len()].convert_from_f32_slice(row);
        });
    }
}
