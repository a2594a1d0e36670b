//! Named policies, chosen by measurement: `docs/results/policy.md`.

use super::ModelCacheConfig;
use crate::error::Result;

/// The name and the file of each preset.
const PRESETS: [(&str, &str); 3] = [
    ("safe", include_str!("presets/safe.toml")),
    ("balanced", include_str!("presets/balanced.toml")),
    ("small", include_str!("presets/small.toml")),
];

impl ModelCacheConfig {
    /// The names of the presets, largest first.
    pub const PRESETS: [&'static str; 3] = [PRESETS[0].0, PRESETS[1].0, PRESETS[2].0];

    /// Returns the preset of this name; `None` if there is none.
    pub fn preset(name: &str) -> Option<Result<Self>> {
        let (name, text) = PRESETS.iter().find(|(preset, _)| *preset == name)?;
        Some(Self::from_toml(text).and_then(|policy| policy.with_name(name)))
    }
}
