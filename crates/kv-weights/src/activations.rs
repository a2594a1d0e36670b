//! The precision of activations.

/// The precision to which activations are rounded before they are multiplied with weights.
///
/// Sums are f32 in any case. WGPU and CUDA never round, since integers are not faster there than
/// floats. Products with f16 and bf16 weights never round either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Activations {
    /// Not rounded. A product of `n` numbers is off by less than `n * 2^-23` of the sum of their
    /// `|w x|`, as any sum in f32, even if activations differ widely in size.
    #[default]
    Exact,
    /// Rounded to 16-bit integers in blocks of 32: `round(x * (1 / d))` with `d = max |x| / 32639`.
    /// 32639 is the largest integer whose two bytes are both signed digits. The error of an
    /// activation is at most `d / 2`, so activations far smaller than the largest of their block
    /// become 0. Products of codes and rounded activations are summed as integers within a block,
    /// and across blocks in f32.
    Int16,
    /// Rounded to bytes in blocks of 32, with `d = max |x| / 127`, as in GGML's Q8_0.
    Int8,
}

impl Activations {
    /// Returns the integer to which the largest of 32 numbers is rounded, or `None` if exact.
    pub(crate) fn largest(self) -> Option<f32> {
        match self {
            Self::Exact => None,
            Self::Int16 => Some(32639.0),
            Self::Int8 => Some(127.0),
        }
    }
}
