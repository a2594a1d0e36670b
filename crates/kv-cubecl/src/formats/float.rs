//! What of a cache stays in float: sinks, window, sides that are not quantized.

use burn::tensor::DType;
#[cfg(feature = "flex")]
use burn_flex::FlexTensor;
use serde::{Deserialize, Serialize};

/// Storage type of everything that stays in float: sinks, residual window, unquantized sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum CacheFloat {
    /// 32-bit float.
    #[default]
    F32,
    /// IEEE half precision; keys and values are rounded to it when they enter the cache.
    F16,
    /// bfloat16, with the range of f32; keys and values are rounded to it when they enter the cache.
    Bf16,
}

impl CacheFloat {
    /// All there are.
    pub const ALL: &[Self] = &[Self::F32, Self::F16, Self::Bf16];

    fn format(self) -> &'static dyn FloatFormat {
        match self {
            Self::F32 => &super::f32::F32,
            Self::F16 => &super::f16::F16,
            Self::Bf16 => &super::bf16::Bf16,
        }
    }

    /// What it is called in the short names of configurations, and in files.
    pub fn name(self) -> &'static str {
        self.format().name()
    }

    /// The type of its tensors.
    pub fn dtype(self) -> DType {
        self.format().dtype()
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        self.dtype().size()
    }

    /// What `x` is stored as: the nearest number of the format. Where its range is less than that of f32,
    /// larger numbers and infinities become the largest that it has. NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        self.format().round(x)
    }

    /// [`round`](Self::round) of each.
    #[cfg(feature = "flex")]
    pub(crate) fn round_all(self, row: &mut [f32]) {
        self.format().round_all(row);
    }

    /// Whether its range is less than that of f32.
    #[cfg(feature = "cube")]
    pub(crate) fn saturates(self) -> bool {
        self.round(f32::INFINITY).is_finite()
    }

    /// Its type in kernels.
    #[cfg(feature = "cube")]
    pub(crate) fn elem(self) -> cubecl::ir::ElemType {
        cubecl::ir::ElemType::Float(self.format().kind())
    }

    /// Fills `out` with elements of a tensor's `bytes`, from `start` on, in f32.
    #[cfg(feature = "flex")]
    pub(crate) fn read(self, bytes: &[u8], start: usize, out: &mut [f32]) {
        self.format().read(bytes, start, out);
    }

    /// Stores rows in a tensor, each from an element on.
    #[cfg(feature = "flex")]
    pub(crate) fn write<'a>(
        self,
        tensor: &mut FlexTensor,
        mut rows: impl Iterator<Item = (usize, &'a [f32])>,
    ) {
        self.format().write(tensor, &mut rows);
    }
}

/// What a format has to say.
pub(super) trait FloatFormat {
    /// See [`CacheFloat::name`].
    fn name(&self) -> &'static str;

    /// See [`CacheFloat::dtype`].
    fn dtype(&self) -> DType;

    /// See [`CacheFloat::round`]. The reference uses it; a backend converts by its own means.
    fn round(&self, x: f32) -> f32;

    /// [`round`](Self::round) of each, with one call for all of them.
    #[cfg(feature = "flex")]
    fn round_all(&self, row: &mut [f32]) {
        row.iter_mut().for_each(|x| *x = self.round(*x));
    }

    /// The type in kernels.
    #[cfg(feature = "cube")]
    fn kind(&self) -> cubecl::ir::FloatKind;

    /// See [`CacheFloat::read`].
    #[cfg(feature = "flex")]
    fn read(&self, bytes: &[u8], start: usize, out: &mut [f32]);

    /// See [`CacheFloat::write`].
    #[cfg(feature = "flex")]
    fn write(&self, tensor: &mut FlexTensor, rows: &mut dyn Iterator<Item = (usize, &[f32])>);
}
