//! Which numbers share the parameter of a group.

/// What shares a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Groups {
    /// As KIVI has them, of the configuration's group size: tokens for keys, channels for values.
    Kivi,
    /// All channels of a token.
    Token,
    /// So many channels of a token.
    Blocks(usize),
    /// All tokens of a head of a frame, each of which has the parameter for itself.
    Frame(OfFrames),
}

/// Of which magnitude of a frame a scale is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OfFrames {
    /// The largest.
    Largest,
    /// One that most do not exceed.
    Percentile,
}
