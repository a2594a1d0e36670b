//! What activations are multiplied as.

/// What the numbers that weights are multiplied with are taken for. Sums are f32 in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activations {
    /// As they are: products have the error of sums in f32.
    #[default]
    Exact,
    /// Rounded to bytes, 32 numbers at a time: `round(x * (1 / d))` with `d = max |x| / 127`, as in GGML's Q8_0. A
    /// product of the rounded numbers is exact, and an activation is off by at most `d / 2`.
    Bytes,
}
