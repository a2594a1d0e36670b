//! The interface of a float type that a cache stores rows in.

use burn::tensor::DType;
#[cfg(feature = "flex")]
use burn_flex::FlexTensor;

/// A float type of stored rows.
pub(super) trait FloatFormat {
    /// See [`CacheFloat::name`](super::CacheFloat::name).
    fn name(&self) -> &'static str;

    /// See [`CacheFloat::dtype`](super::CacheFloat::dtype).
    fn dtype(&self) -> DType;

    /// See [`CacheFloat::round`](super::CacheFloat::round). The reference uses it; a backend converts by its own means.
    fn round(&self, x: f32) -> f32;

    /// [`round`](Self::round) of each, with one call for all of them.
    #[cfg(feature = "flex")]
    fn round_all(&self, row: &mut [f32]) {
        row.iter_mut().for_each(|x| *x = self.round(*x));
    }

    /// The type in kernels.
    #[cfg(feature = "cube")]
    fn kind(&self) -> cubecl::ir::FloatKind;

    /// See [`CacheFloat::read`](super::CacheFloat::read).
    #[cfg(feature = "flex")]
    fn read(&self, bytes: &[u8], start: usize, out: &mut [f32]);

    /// See [`CacheFloat::write`](super::CacheFloat::write).
    #[cfg(feature = "flex")]
    fn write(&self, tensor: &mut FlexTensor, rows: &mut dyn Iterator<Item = (usize, &[f32])>);
}
