//! Finds the valid name of a policy that is nearest to a mistyped one.

use kv_cubecl::{CacheFloat, KvCacheConfig, KvFormat};
use strsim::osa_distance;

use super::ModelCacheConfig;

/// Returns the nearest preset or short name of a cache; `None` if none is near.
pub(super) fn nearest(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let mut presets = ModelCacheConfig::PRESETS.iter();
    if let Some(preset) = presets.find(|preset| osa_distance(&text, preset) <= 2) {
        return Some(preset.to_string());
    }
    // Of several names in one value, the first counts.
    let mut parts = text.split(['-', '_', ' ', ',']);
    let first = parts.next().unwrap_or_default();
    let sides = || KvFormat::ALL.iter().map(|format| format.name());
    // The first of equally near names wins, so names with equal sides come first.
    let alike = sides().map(|side| format!("k{side}v{side}"));
    let others = sides().flat_map(|keys| sides().map(move |values| format!("k{keys}v{values}")));
    let mut name = closest(first, alike.chain(others).chain(["float".into()]))?;
    for part in parts.filter_map(part) {
        let longer = format!("{name}-{part}");
        // A part that the name already has makes it invalid, and is dropped.
        if longer.parse::<KvCacheConfig>().is_ok() {
            name = longer;
        }
    }
    Some(name)
}

/// Returns the nearest valid part behind a `-`.
fn part(text: &str) -> Option<String> {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let letter = text.chars().next().filter(|letter| "grsw".contains(*letter));
    if let (Some(letter), Ok(number)) = (letter, digits.parse::<usize>()) {
        return Some(format!("{letter}{number}"));
    }
    let words = ["before", "after", "gflush", "stagger", "hadv", "hadk"].into_iter();
    let floats = CacheFloat::ALL.iter().map(|float| float.name());
    closest(text, words.chain(floats).map(str::to_string))
}

/// Returns the candidate at the smallest edit distance, if that is at most half the text's length.
fn closest(text: &str, candidates: impl Iterator<Item = String>) -> Option<String> {
    let distances = candidates.map(|candidate| (osa_distance(text, &candidate), candidate));
    let (edits, candidate) = distances.min_by_key(|(edits, _)| *edits)?;
    (2 * edits <= text.len()).then_some(candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_names_have_nearest_names() {
        for (typed, meant) in [
            ("k4v44", "k4v4"),
            ("k3v3,k4v4", "k3v3"),
            ("K4V4", "k4v4"),
            ("kv4", "k4v4"),
            ("flaot", "float"),
            ("kint8vint", "kint8vint8"),
            ("k4v4-g64x", "k4v4-g64"),
            ("k4v4_g64", "k4v4-g64"),
            ("k4v4-aftr-r64", "k4v4-after-r64"),
            ("k4v4-gfulsh-bf1", "k4v4-gflush-bf16"),
            ("k4v4-g64-g32", "k4v4-g64"),
            ("k4v4-?", "k4v4"),
            ("Saef", "safe"),
        ] {
            assert_eq!(nearest(typed).as_deref(), Some(meant), "{typed}");
        }
        for nothing in ["", "policy", "nonsense-g64", "é"] {
            assert_eq!(nearest(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn errors_name_the_nearest_form() {
        for (typed, meant) in [("k5v2-g64", "k2v2-g64"), ("k4v4-g", "k4v4"), ("k4v4-x", "k4v4")] {
            let error = ModelCacheConfig::find(typed).unwrap_err().to_string();
            assert!(error.contains(&format!("(did you mean {meant}?)")), "{error}");
            assert!(error.len() < 220, "{error}");
        }
        let error = ModelCacheConfig::find("nonsense").unwrap_err().to_string();
        assert!(error.contains("as in k4v4-g64") && error.len() < 200, "{error}");
    }
}
