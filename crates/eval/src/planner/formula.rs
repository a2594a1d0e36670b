//! Sizes of caches that this project does not implement, as a sum of parts: bytes = a + b n.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{Error, Result};

/// Bytes of a cache by its tokens.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Formula {
    /// The most tokens of a sequence.
    pub max_tokens: u64,
    /// The parts of the sum.
    pub parts: Vec<Part>,
    /// Storage of the entries.
    pub formats: Vec<Format>,
}

/// Entries in some layers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Part {
    /// Name of the layers.
    pub name: String,
    /// Number of layers with these entries.
    pub layers: u64,
    /// Tokens per entry.
    every: Option<u64>,
    /// Number of entries independent of the tokens.
    entries: Option<u64>,
    /// Parts of an entry.
    entry: Vec<String>,
}

/// Storage of the entries.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Format {
    /// The name.
    pub name: String,
    /// The bytes of everything that entries consist of.
    bytes: BTreeMap<String, u64>,
}

impl Formula {
    /// Finds a format by its name.
    ///
    /// # Errors
    /// An unknown name; the message lists all names.
    pub fn format(&self, name: &str) -> Result<&Format> {
        self.formats.iter().find(|format| format.name == name).ok_or_else(|| {
            let names: Vec<_> = self.formats.iter().map(|format| &*format.name).collect();
            Error::plan("cache", name, format!("the formula has {}", names.join(", ")))
        })
    }

    /// Returns the bytes of each part for `batch` sequences of `tokens` tokens.
    ///
    /// # Errors
    /// More bytes than a u64 holds.
    pub fn bytes(&self, format: &Format, tokens: u64, batch: u64) -> Result<Vec<(String, u64)>> {
        let too_many = || {
            let (field, value) = if batch > 1 { ("batch", batch) } else { ("context", tokens) };
            Error::plan(field, value, "the cache must take fewer than 2^64 bytes")
        };
        let mut sum = 0u64;
        let bytes = |part: &Part| {
            let entries = part.every.map_or(0, |every| tokens / every.max(1));
            let entry = part.entry.iter().try_fold(0u64, |sum, name| {
                sum.checked_add(format.bytes.get(name).copied().unwrap_or(0))
            });
            let bytes = entries
                .checked_add(part.entries.unwrap_or(0))
                .zip(entry)
                .and_then(|(entries, entry)| entries.checked_mul(entry))
                .and_then(|bytes| bytes.checked_mul(part.layers))
                .and_then(|bytes| bytes.checked_mul(batch))
                .ok_or_else(too_many)?;
            sum = sum.checked_add(bytes).ok_or_else(too_many)?;
            Ok((part.name.clone(), bytes))
        };
        self.parts.iter().map(bytes).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use super::*;
    use crate::planner::Preset;

    fn pro() -> Formula {
        Preset::find("deepseek-v4-pro").unwrap().formula().unwrap().clone()
    }

    /// Every part of an entry has bytes in every format. The number of entries is fixed or depends
    /// on the tokens.
    #[test]
    fn formulas_are_complete() {
        for preset in Preset::all() {
            let Some(formula) = preset.formula() else { continue };
            for part in &formula.parts {
                assert!(part.every.is_some() != part.entries.is_some(), "{}", part.name);
                assert_ne!(part.every, Some(0), "{}", part.name);
                for format in &formula.formats {
                    let known = part.entry.iter().all(|name| format.bytes.contains_key(name));
                    assert!(known, "{}: {}", format.name, part.name);
                }
            }
        }
    }

    #[test]
    fn what_64_bits_do_not_count_is_an_error() {
        let (formula, huge) = (pro(), 1 << 60);
        let format = formula.format("bf16").unwrap();
        let error = formula.bytes(format, huge, 1).unwrap_err().to_string();
        assert!(error.starts_with("context 1152921504606846976: "), "{error}");
        let error = formula.bytes(format, 1 << 20, 1_000_000_000_000).unwrap_err().to_string();
        assert!(error.starts_with("batch 1000000000000: "), "{error}");
        // Each part fits into a u64, but their sum does not.
        let most = u64::MAX / (30 * 1280) * 4;
        let parts = formula.bytes(format, most - (1 << 20), 1);
        assert!(parts.is_err(), "{parts:?}");
        assert!(formula.bytes(format, most / 2, 1).is_ok());
    }
}
