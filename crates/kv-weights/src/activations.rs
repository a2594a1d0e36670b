//! What activations are multiplied as.

/// What the numbers that weights are multiplied with are taken for. Sums are f32 in any case. On WGPU and CUDA, where
/// integers are not faster than floats, all are taken as they are, and so are those that weights in f16 and bf16 are
/// multiplied with anywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activations {
    /// As they are. A product of `n` numbers is off by less than `n * 2^-23` of the sum of their
    /// `|w x|`, as any sum in f32 is, however far apart the activations are.
    #[default]
    Exact,
    /// Rounded to integers of 16 bits, 32 numbers at a time: `round(x * (1 / d))` with
    /// `d = max |x| / 32639`, the largest whose two bytes are both signed digits. An activation is
    /// off by at most `d / 2`: one that is far smaller than the largest of its 32 is lost. Products
    /// of codes and rounded activations are added up in integers, and these sums and minima in f32.
    Int16,
    /// Rounded to bytes, 32 numbers at a time, with `d = max |x| / 127`, as in GGML's Q8_0.
    Int8,
}

impl Activations {
    /// The integer that the largest of 32 numbers becomes.
    pub(crate) fn largest(self) -> Option<f32> {
        match self {
            Self::Exact => None,
            Self::Int16 => Some(32639.0),
            Self::Int8 => Some(127.0),
        }
    }
}
