//! 32-bit float: rows are stored as they are.

use burn::tensor::DType;

use super::float::FloatFormat;

/// The float type of [this module](self).
pub(super) struct F32;

impl FloatFormat for F32 {
    fn name(&self) -> &'static str {
        "f32"
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn round(&self, x: f32) -> f32 {
        x
    }

    #[cfg(feature = "flex")]
    fn round_all(&self, _: &mut [f32]) {}

    #[cfg(feature = "cube")]
    fn kind(&self) -> cubecl::ir::FloatKind {
        cubecl::ir::FloatKind::F32
    }

    #[cfg(feature = "flex")]
    fn read(&self, bytes: &[u8], start: usize, out: &mut [f32]) {
        out.copy_from_slice(&bytemuck::cast_slice(bytes)[start..start + out.len()]);
    }

    #[cfg(feature = "flex")]
    fn write(
        &self,
        tensor: &mut burn_flex::FlexTensor,
        rows: &mut dyn Iterator<Item = (usize, &[f32])>,
    ) {
        let floats = tensor.storage_mut::<f32>();
        rows.for_each(|(start, row)| floats[start..start + row.len()].copy_from_slice(row));
    }
}
