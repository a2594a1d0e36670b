//! The interface of a float type in which a cache stores rows.

use burn::tensor::DType;
#[cfg(feature = "flex")]
use burn_flex::FlexTensor;

/// A float type of stored rows.
pub(super) trait FloatFormat {
    /// See [`CacheFloat::name`](super::CacheFloat::name).
    fn name(&self) -> &'static str;

    /// See [`CacheFloat::dtype`](super::CacheFloat::dtype).
    fn dtype(&self) -> DType;

    /// See [`CacheFloat::round`](super::CacheFloat::round). The reference uses it; backends have
    /// conversions of their own.
    fn round(&self, x: f32) -> f32;

    /// [Rounds](Self::round) a whole row, so that a row takes one virtual call.
    #[cfg(feature = "flex")]
    fn round_all(&self, row: &mut [f32]) {
        row.iter_mut().for_each(|x| *x = self.round(*x));
    }

    /// Returns the type in kernels.
    #[cfg(feature = "cube")]
    fn kind(&self) -> cubecl::ir::FloatKind;

    /// See [`CacheFloat::read`](super::CacheFloat::read).
    #[cfg(feature = "flex")]
    fn read(&self, bytes: &[u8], start: usize, out: &mut [f32]);

    /// See [`CacheFloat::write`](super::CacheFloat::write).
    #[cfg(feature = "flex")]
    fn write(&self, tensor: &mut FlexTensor, rows: &mut dyn Iterator<Item = (usize, &[f32])>);
}
