//! [`StopStrings`]: strings that end a text.

use crate::error::{Error, Result};

/// Finds the first of several strings in a text that arrives in pieces of any length.
///
/// The possible start of a stop string is held back, so that no part of one is passed on.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    found: Option<String>,
}

impl StopStrings {
    /// Creates a search for `stops`.
    ///
    /// # Errors
    /// Fails for an empty string, which every text contains.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.iter().any(String::is_empty) {
            return Err(Error::argument("stop", "\"\"", "must have at least one character"));
        }
        Ok(Self { stops, held: String::new(), found: None })
    }

    /// Appends a piece of the text. Returns the text that certainly precedes any stop string;
    /// nothing once one was [found](Self::found).
    pub fn push(&mut self, piece: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held += piece;
        // The stop string that is complete first wins, as if the text came character by character.
        // A search prepares the whole stop string, so it is not worth it for a longer one.
        let stops = self.stops.iter().filter(|stop| stop.len() <= self.held.len());
        let matches = stops.filter_map(|stop| Some((self.held.find(stop)?, stop)));
        if let Some((at, stop)) = matches.min_by_key(|(at, stop)| (at + stop.len(), *at)) {
            self.found = Some(stop.clone());
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let kept = self.held.split_off(self.held.len() - self.undecided());
        std::mem::replace(&mut self.held, kept)
    }

    /// Returns the stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.found.as_deref()
    }

    /// Returns the text that is still held back, when no stop string can follow.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Returns the number of bytes at the end of the text that a stop string may begin with.
    fn undecided(&self) -> usize {
        let begins = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            let lengths = (1..=most).rev().filter(|n| stop.is_char_boundary(*n));
            lengths.into_iter().find(|n| self.held.ends_with(&stop[..*n]))
        };
        self.stops.iter().filter_map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use std::time::{Duration, Instant};

    use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;

    #[test]
    fn possible_stop_strings_are_held_back() {
        let mut stops = StopStrings::new(["<end>", "\n\n"]).unwrap();
        for (piece, passed) in
            [("a<", "a"), ("e", ""), ("x<", "<ex"), ("end", ""), ("\n", "<end"), ("b", "\nb")]
        {
            assert_eq!((stops.push(piece), stops.found()), (passed.to_string(), None), "{piece:?}");
        }
        assert_eq!((stops.push("c<end"), stops.push(">d")), ("c".into(), String::new()));
        assert_eq!(stops.found(), Some("<end>"));
        assert_eq!((stops.push("more"), stops.finish()), (String::new(), String::new()));

        let mut stops = StopStrings::new(["<end>"]).unwrap();
        assert_eq!((stops.push("x<en"), stops.finish()), ("x".into(), "<en".into()));
        let mut none = StopStrings::new([""; 0]).unwrap();
        assert_eq!((none.push("x"), none.found()), ("x".into(), None));
        assert!(StopStrings::new(["a", ""]).unwrap_err().to_string().starts_with("stop = "));
    }

    /// The work for a piece depends on the held text, not on the length of a stop string.
    #[test]
    fn long_stop_strings_take_no_time() {
        let mut stops = StopStrings::new(["y".repeat(4 << 20)]).unwrap();
        let start = Instant::now();
        for _ in 0..2000 {
            assert_eq!((stops.push("yx"), stops.push("y")), ("yx".into(), String::new()));
            assert_eq!(stops.push("x"), "yx");
        }
        let time = start.elapsed();
        assert!(time < Duration::from_secs(2), "{time:?}");
    }

    /// A text in any pieces ends at the same position as the whole text.
    #[test]
    fn pieces_make_no_difference() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        let letters = ['a', 'b', 'é', '🦀'];
        let mut text = |n: usize| -> String {
            (0..n).map(|_| letters[rng.random_range(0..letters.len())]).collect()
        };
        let mut ended = 0;
        for round in 0..2000 {
            let whole = text(12);
            let stops = [text(1 + round % 3), text(3)];
            let matches = stops.iter().filter_map(|stop| Some((whole.find(stop)?, stop)));
            let want = matches.map(|(at, stop)| (at + stop.len(), at)).min().map(|(_, at)| at);
            let mut found = StopStrings::new(stops.clone()).unwrap();
            let mut passed = String::new();
            for piece in whole.split_inclusive(|c: char| c != 'a') {
                passed += &found.push(piece);
                assert!(whole.starts_with(&passed), "{stops:?} in {whole}: {passed}");
                assert!(
                    passed.len() <= want.unwrap_or(whole.len()),
                    "{stops:?} in {whole}: {passed}"
                );
            }
            assert_eq!(found.found().is_some(), want.is_some());
            passed += &found.finish();
            assert_eq!(passed, whole[..want.unwrap_or(whole.len())], "{stops:?} in {whole}");
            ended += usize::from(want.is_some());
        }
        assert!((500..1900).contains(&ended), "{ended} of 2000 texts have a stop string");
    }
}
