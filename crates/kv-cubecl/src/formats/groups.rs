//! How the numbers of a side form groups, each with one parameter.

/// The numbers that share one parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Groups {
    /// KIVI's groups, of the configuration's group size: tokens for keys, channels for values.
    Kivi,
    /// All channels of one token.
    Token,
    /// A block of `n` channels of one token.
    Blocks(usize),
    /// All tokens of one head of a frame. Each token stores its own copy of the parameter.
    Frame(FrameScale),
}

/// The magnitude of a frame from which its scale follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameScale {
    /// The largest magnitude.
    Largest,
    /// A percentile of the magnitudes.
    Percentile,
}
