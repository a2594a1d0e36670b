//! Guesses from earlier occurrences of the last tokens in the text.

use std::collections::HashMap;

use super::{
    drafter::Drafter,
    pace::{Pace, Share},
};
use crate::error::Result;

/// The most tokens whose equality is counted.
const LONGEST: usize = 32;

/// Guesses that the text goes on as it did after the longest earlier occurrence of its last
/// tokens, the latest of equally long ones. After a long one that ends in a wrong guess, it may go
/// on after the token that has changed. If a token changed before, as in code with a variable
/// renamed, it may change again in the same way.
///
/// Each token of the text says whether such a guess was right, even if it was not made. So the
/// shares of right guesses, by the number of equal tokens, are known without cost, and prose is
/// not slowed down.
#[derive(Debug)]
pub(super) struct Lookup {
    pub(super) text: Vec<u32>,
    found: Option<Occurrence>,
    /// By [`Occurrence::class`].
    shares: [Share; 7],
    /// For tokens of long occurrences that changed, what came instead the last time.
    changes: HashMap<u32, u32>,
    /// The share of such tokens that change in the same way, of those that do so or stay.
    change_again: Share,
}

/// An earlier occurrence of the last tokens.
#[derive(Clone, Copy, Debug)]
struct Occurrence {
    /// The index of the token after it.
    next: usize,
    /// The number of equal tokens.
    len: usize,
    /// True if a changed token comes before them, and a long occurrence before that.
    after_change: bool,
}

/// The fewest equal tokens of a long occurrence.
const LONG: usize = 9;

impl Occurrence {
    /// Returns the class of the next guess: by the number of equal tokens, 1, 2, 3 and 4, 5 to 8,
    /// or more; and after a changed token none, or 1 to 8.
    fn class(&self) -> usize {
        match (self.len, self.after_change) {
            (0, _) => 5,
            (1..LONG, true) => 6,
            (1, _) => 0,
            (2, _) => 1,
            (3..=4, _) => 2,
            (5..LONG, _) => 3,
            _ => 4,
        }
    }

    /// Returns the occurrence that goes on by an equal token.
    fn next(self) -> Self {
        Self { next: self.next + 1, len: (self.len + 1).min(LONGEST), ..self }
    }

    /// Returns the occurrence that goes on after a token that has changed.
    fn changed(self) -> Self {
        Self { next: self.next + 1, len: 0, after_change: true }
    }
}

impl Lookup {
    pub(super) fn new(text: &[u32]) -> Self {
        let mut lookup = Self {
            text: text.to_vec(),
            found: None,
            // Too low for a guess, so that a text that does not repeat itself is not slowed down.
            shares: [0.05, 0.1, 0.3, 0.4, 0.6, 0.65, 0.75].map(Share::known),
            changes: HashMap::new(),
            change_again: Share::unknown(0.5),
        };
        lookup.found = lookup.search();
        lookup
    }

    /// Returns whether tokens that changed once are expected to change again.
    fn expects_changes(&self) -> bool {
        self.change_again.right() >= 0.5
    }

    /// Finds the longest earlier occurrence of the last tokens.
    fn search(&self) -> Option<Occurrence> {
        let (&last, before) = self.text.split_last()?;
        let mut found: Option<Occurrence> = None;
        for end in (0..before.len()).rev().filter(|&end| self.text[end] == last) {
            let equal = |(a, b): &(&u32, &u32)| a == b;
            let pairs = self.text[..end].iter().rev().zip(before.iter().rev());
            let len = 1 + pairs.take(LONGEST - 1).take_while(equal).count();
            if found.is_none_or(|found| len > found.len) {
                found = Some(Occurrence { next: end + 1, len, after_change: false });
            }
            if len == LONGEST {
                break;
            }
        }
        found
    }
}

impl Drafter for Lookup {
    fn push(&mut self, id: u32) {
        let expected = self.found.map(|found| (found, self.text[found.next]));
        self.text.push(id);
        let Some((found, old)) = expected else {
            self.found = self.search();
            return;
        };
        let new = self.changes.get(&old).copied();
        if new.is_none() || !self.expects_changes() {
            self.shares[found.class()].add(old == id);
        }
        if new.is_some() && [Some(old), new].contains(&Some(id)) {
            self.change_again.add(new == Some(id));
        }
        self.found = if id == old {
            self.changes.remove(&old);
            // No other occurrence can be longer, except after a change.
            Some(found.next())
        } else if new == Some(id) {
            Some(found.changed())
        } else {
            let another = self.search();
            match another.is_none_or(|another| another.len <= 2) && found.len >= LONG {
                true => {
                    self.changes.insert(old, id);
                    Some(found.changed())
                }
                false => another,
            }
        };
    }

    fn draft(&mut self, most: usize, pace: Pace) -> Result<Vec<u32>> {
        let Some(mut found) = self.found else { return Ok(vec![]) };
        let (mut guesses, mut shares) = (vec![], vec![]);
        for _ in 0..most {
            // After the end, a repetition goes on with the guesses.
            let old = match found.next.checked_sub(self.text.len()) {
                None => self.text[found.next],
                Some(guessed) => guesses[guessed],
            };
            let new = self.changes.get(&old).filter(|_| self.expects_changes());
            let (guess, share, next) = match new {
                None => (old, self.shares[found.class()], found.next()),
                Some(&new) => (new, self.change_again, found.changed()),
            };
            guesses.push(guess);
            shares.push(share.right());
            found = next;
        }
        guesses.truncate(pace.best(shares, 0.0));
        Ok(guesses)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;

    fn pace() -> Pace {
        Pace::new(1, &burn::tensor::Device::flex())
    }

    /// The definition: the longest suffix that occurs earlier, and of these the latest.
    fn longest(text: &[u32]) -> Option<(usize, usize)> {
        (1..text.len().min(LONGEST + 1)).rev().find_map(|len| {
            let suffix = &text[text.len() - len..];
            let start = text[..text.len() - 1].windows(len).rposition(|it| it == suffix)?;
            Some((start + len, len))
        })
    }

    #[test]
    fn the_longest_and_latest_occurrence_is_found() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        for _ in 0..300 {
            let ids = rng.random_range(1..6u32);
            let mut text: Vec<u32> = (0..rng.random_range(0..9)).map(|_| 0).collect();
            let mut lookup = Lookup::new(&text);
            for _ in 0..80 {
                let copies = rng.random_range(0..3) > 0;
                let copied = lookup.draft(1, pace()).unwrap().first().copied().filter(|_| copies);
                let id = copied.unwrap_or_else(|| rng.random_range(0..ids));
                text.push(id);
                lookup.push(id);
                let expected = longest(&text);
                let is_plain = |found: &Occurrence| !found.after_change;
                let found = lookup.found.filter(is_plain).map(|found| (found.next, found.len));
                if lookup.found.is_none_or(|found| !found.after_change) {
                    assert_eq!(found.map(|it| it.1), expected.map(|it| it.1), "{text:?}");
                }
                let fresh = lookup.search().map(|found| (found.next, found.len));
                assert_eq!(fresh, expected, "{text:?}");
                // While guesses are right, an older occurrence of equal length is kept.
                if let Some(Occurrence { next, len, .. }) = lookup.found {
                    assert_eq!(text[next - len..next], text[text.len() - len..], "{text:?}");
                }
            }
        }
    }

    #[test]
    fn a_copied_text_is_guessed_and_others_are_not() {
        let once: Vec<u32> = (0..60).collect();
        let mut lookup = Lookup::new(&once);
        for id in 0..30 {
            assert!(id > 12 || lookup.draft(15, pace()).unwrap().is_empty(), "too early: {id}");
            lookup.push(id);
        }
        let guesses = lookup.draft(15, pace()).unwrap();
        assert!(guesses.len() > 6, "{guesses:?}");
        assert_eq!(guesses, (30..30 + guesses.len() as u32).collect::<Vec<_>>());
        assert_eq!(lookup.draft(3, pace()).unwrap(), [30, 31, 32], "at most as many as fit");

        // Pairs repeat, and are followed by something else each time.
        let mut lookup = Lookup::new(&[]);
        let mut guesses = 0;
        for id in 100..1000 {
            for id in [1, 2, id] {
                lookup.push(id);
            }
            guesses += lookup.draft(15, pace()).unwrap().len();
        }
        assert_eq!(guesses, 0);
    }

    #[test]
    fn a_copy_goes_on_after_a_changed_token() {
        let once: Vec<u32> = (0..200).collect();
        let mut lookup = Lookup::new(&once);
        for id in (0..140).map(|id| if id % 20 == 19 { 999 } else { id }) {
            lookup.push(id);
        }
        let guesses = lookup.draft(15, pace()).unwrap();
        assert!(guesses.len() > 3, "right after the change: {guesses:?}");
        assert_eq!(guesses, (140..140 + guesses.len() as u32).collect::<Vec<_>>());
    }

    /// In the copy, 7 is 777. Where it is 7 again, later ones are expected to stay.
    #[test]
    fn a_token_that_changed_is_expected_to_change_again() {
        let once: Vec<u32> = (0..200).map(|id| if id % 20 == 19 { 7 } else { 1000 + id }).collect();
        let mut lookup = Lookup::new(&once);
        let expected = |id: u32| if id == 7 { 777 } else { id };
        once[..155].iter().for_each(|&id| lookup.push(expected(id)));
        let guesses = lookup.draft(15, pace()).unwrap();
        assert!(guesses.len() > 6, "{guesses:?}");
        let after: Vec<u32> = once[155..].iter().copied().map(expected).collect();
        assert_eq!(guesses, after[..guesses.len()], "with the change in its middle");
        once[155..190].iter().for_each(|&id| lookup.push(id));
        let guesses = lookup.draft(15, pace()).unwrap();
        assert!(guesses.len() > 9, "{guesses:?}");
        assert_eq!(guesses[..10], once[190..], "without a change");
    }

    #[test]
    fn a_repetition_goes_on_after_the_end_of_the_text() {
        let mut lookup = Lookup::new(&[7, 1, 2]);
        for id in [1, 2].repeat(15) {
            lookup.push(id);
        }
        let guesses = lookup.draft(7, pace()).unwrap();
        assert!(guesses.len() > 3, "the occurrence ends 2 tokens before the text: {guesses:?}");
        assert_eq!(guesses, [1, 2, 1, 2, 1, 2, 1][..guesses.len()]);
    }
}
