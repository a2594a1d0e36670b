//! String functions that give Python's results, which differ from Rust's.

/// Returns whether Python's `str.isspace` holds for a character. Rust leaves out four separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Computes `str.strip`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Computes `str.capitalize`: the first character in title case, all others in lower case.
pub(super) fn capitalize(text: &str) -> String {
    let Some(first) = text.chars().next() else { return String::new() };
    // The whole text decides whether a sigma is a final one.
    let lower = text.to_lowercase();
    title(first).chain(lower.chars().skip(first.to_lowercase().count())).collect()
}

/// Returns a character in title case (Unicode, `SpecialCasing.txt`).
fn title(c: char) -> impl Iterator<Item = char> {
    /// A letter that is below vowels in title case, and a capital beside them in upper case.
    const IOTA: char = '\u{399}';
    let upper: Vec<char> = c.to_uppercase().collect();
    match (c, &upper[..]) {
        // Letters that look like two, such as the digraph dz with caron.
        ('\u{1c4}'..='\u{1c6}', _) => vec!['\u{1c5}'],
        ('\u{1c7}'..='\u{1c9}', _) => vec!['\u{1c8}'],
        ('\u{1ca}'..='\u{1cc}', _) => vec!['\u{1cb}'],
        ('\u{1f1}'..='\u{1f3}', _) => vec!['\u{1f2}'],
        // Georgian uses its capitals only for whole words.
        ('\u{10d0}'..='\u{10ff}', _) => vec![c],
        // An apostrophe and a capital N.
        ('\u{149}', _) => upper,
        ('\u{1f80}'..='\u{1faf}', _) => char::from_u32(c as u32 | 8).into_iter().collect(),
        ('\u{1fb3}' | '\u{1fbc}', _) => vec!['\u{1fbc}'],
        ('\u{1fc3}' | '\u{1fcc}', _) => vec!['\u{1fcc}'],
        ('\u{1ff3}' | '\u{1ffc}', _) => vec!['\u{1ffc}'],
        (_, [start @ .., IOTA]) if !start.is_empty() => [start, &['\u{345}']].concat(),
        (_, [first, rest @ ..]) => {
            let rest = rest.iter().flat_map(|c| c.to_lowercase());
            core::iter::once(*first).chain(rest).collect()
        }
        (_, []) => vec![c],
    }
    .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are from Python 3.11.
    #[test]
    fn texts_are_capitalized_as_by_python() {
        for (text, expected) in [
            ("", ""),
            ("he asks Bob McFly", "He asks bob mcfly"),
            ("HE ASKS", "He asks"),
            (" leading", " leading"),
            ("1st A", "1st a"),
            ("\u{e9}t\u{c9}", "\u{c9}t\u{e9}"),
            ("\u{df}A", "Ssa"),
            ("\u{fb01}X", "Fix"),
            ("\u{1c4}\u{1c4}", "\u{1c5}\u{1c6}"),
            ("\u{10d0}\u{10d0}", "\u{10d0}\u{10d0}"),
            ("\u{1fb2}x", "\u{1fba}\u{345}x"),
            ("\u{1f80}x", "\u{1f88}x"),
            ("\u{149}X", "\u{2bc}Nx"),
            ("\u{130}A", "\u{130}a"),
            ("A\u{3a3}", "A\u{3c2}"),
            ("A\u{3a3}B", "A\u{3c3}b"),
            ("\u{3a3}", "\u{3a3}"),
            ("x\u{130}", "Xi\u{307}"),
        ] {
            assert_eq!(capitalize(text), expected, "{text:?}");
        }
        assert_eq!(strip("\u{1f} \u{85}\u{a0}\n a b\u{2003}\u{1c}"), "a b");
        assert_eq!(strip("\u{200b}a\u{feff}"), "\u{200b}a\u{feff}");
    }
}
