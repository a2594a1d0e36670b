//! The short name of a cache that is nearest to a mistyped one.

use strsim::osa_distance;

use super::KvCacheConfig;
use crate::formats::{CacheFloat, KvFormat};

/// The nearest name that can be read; `None` where none is near.
pub(super) fn nearest(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let mut parts = text.split(['-', '_', ' ']);
    let first = parts.next().unwrap_or_default();
    let sides = || KvFormat::ALL.iter().map(|format| format.name());
    // Of names that are as near, the first is found: one of both sides alike.
    let alike = sides().map(|side| format!("k{side}v{side}"));
    let others = sides().flat_map(|keys| sides().map(move |values| format!("k{keys}v{values}")));
    let mut name = closest(first, alike.chain(others).chain(["float".into()]))?;
    for part in parts.filter_map(part) {
        let longer = format!("{name}-{part}");
        // A part that is there already is left out.
        if KvCacheConfig::read(&longer).is_ok() {
            name = longer;
        }
    }
    Some(name)
}

/// The part behind a `-` that is nearest.
fn part(text: &str) -> Option<String> {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let letter = text.chars().next().filter(|letter| "grsw".contains(*letter));
    if let (Some(letter), Ok(number)) = (letter, digits.parse::<usize>()) {
        return Some(format!("{letter}{number}"));
    }
    let words = ["before", "after", "gflush", "hadv", "hadk"].into_iter();
    let floats = CacheFloat::ALL.iter().map(|float| float.name());
    closest(text, words.chain(floats).map(str::to_string))
}

/// Returns the candidate that takes the fewest edits, if these are at most half of the text.
fn closest(text: &str, candidates: impl Iterator<Item = String>) -> Option<String> {
    let distances = candidates.map(|candidate| (osa_distance(text, &candidate), candidate));
    let (edits, candidate) = distances.min_by_key(|(edits, _)| *edits)?;
    (2 * edits <= text.len()).then_some(candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typing_mistakes_lead_to_what_was_meant() {
        for (typed, meant) in [
            ("k4v44", "k4v4"),
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
        ] {
            assert_eq!(nearest(typed).as_deref(), Some(meant), "{typed}");
        }
        for nothing in ["", "policy", "nonsense-g64", "é"] {
            assert_eq!(nearest(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn an_error_names_the_nearest_form_and_no_grammar() {
        for (typed, meant) in [("k5v2-g64", "k2v2-g64"), ("k4v4-g", "k4v4"), ("k4v4-x", "k4v4")] {
            let error = typed.parse::<KvCacheConfig>().unwrap_err().to_string();
            assert!(error.contains(&format!("(did you mean {meant}?)")), "{error}");
            assert!(error.len() < 200, "{error}");
        }
        let error = "nonsense".parse::<KvCacheConfig>().unwrap_err().to_string();
        assert!(error.contains("as in k4v4-g64") && error.len() < 200, "{error}");
    }
}
