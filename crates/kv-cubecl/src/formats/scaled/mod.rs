//! Code shared by codecs without an offset: `value(code) * scale`, with a scale per group.

#[cfg(feature = "cube")]
pub(super) mod cube;
#[cfg(feature = "flex")]
pub(super) mod flex;
