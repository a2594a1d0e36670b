//! What formats share whose numbers are `value(code) * scale`, with a scale for each group and no offset.

#[cfg(feature = "cube")]
pub(super) mod cube;
#[cfg(feature = "flex")]
pub(super) mod flex;
