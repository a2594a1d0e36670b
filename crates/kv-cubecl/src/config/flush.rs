//! [`Flush`]: when tokens are quantized.

use serde::{Deserialize, Serialize};

/// The schedule by which tokens leave the float residual and are quantized.
///
/// A schedule has two parts: how many keys leave at once, and whether the newest token's query
/// still sees them in float. Values leave one token at a time in every schedule; values in tiles
/// leave as keys do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flush {
    /// Algorithm 1 of the KIVI paper: the residual's keys are quantized together when it is full,
    /// before attention, so the newest token's query sees them quantized.
    #[default]
    #[serde(rename = "before")]
    BeforeAttention,
    /// The KIVI authors' released code: the same after attention, so the newest token's query sees
    /// the keys in float.
    #[serde(rename = "after")]
    AfterAttention,
    /// The oldest group of keys is quantized before attention, whenever the residual is full.
    /// `residual_length - group_size` to `residual_length - 1` keys stay in float, in the same
    /// memory.
    #[serde(rename = "group")]
    GroupBeforeAttention,
    /// One group of keys at a time, after attention.
    #[serde(rename = "group-after")]
    GroupAfterAttention,
}

impl Flush {
    /// Returns whether tokens are quantized after attention, so that the newest query sees them in
    /// float.
    pub const fn is_after(self) -> bool {
        matches!(self, Self::AfterAttention | Self::GroupAfterAttention)
    }

    /// Returns whether keys leave the residual one group at a time.
    pub const fn is_by_group(self) -> bool {
        matches!(self, Self::GroupBeforeAttention | Self::GroupAfterAttention)
    }

    /// Returns the schedule with keys leaving one group at a time if `by_group`, else all at once.
    #[must_use]
    pub const fn with_groups(self, by_group: bool) -> Self {
        Self::new(self.is_after(), by_group)
    }

    /// Returns the schedule that quantizes after attention if `after`, else before it, and one
    /// group of keys at a time if `by_group`, else all at once.
    pub const fn new(after: bool, by_group: bool) -> Self {
        match (after, by_group) {
            (false, false) => Self::BeforeAttention,
            (true, false) => Self::AfterAttention,
            (false, true) => Self::GroupBeforeAttention,
            (true, true) => Self::GroupAfterAttention,
        }
    }
}
