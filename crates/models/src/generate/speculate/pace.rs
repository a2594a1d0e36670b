//! The number of tokens that are guessed.

use burn::tensor::Device;

use crate::device_use::is_cpu;

/// The times of passes, as shares of the time of a step of one text.
#[derive(Clone, Copy, Debug)]
pub(in crate::generate) struct Pace {
    /// The time that the first guess of a single text adds to a pass, besides its row: a step of
    /// one row has kernels of its own.
    first: f32,
    /// The time that another row adds to a pass of few rows.
    row: f32,
    /// The time that another row adds to a pass of [`FEW`] rows or more.
    more: f32,
    /// The texts of the pass, which wait for each other's guesses.
    texts: usize,
}

impl Pace {
    /// Returns the pace of passes with `texts` texts, at least one, on a device.
    pub(in crate::generate) fn new(texts: usize, device: &Device) -> Self {
        match is_cpu(device) {
            // SmolLM2-135M with 850 tokens, and a model of 1B alike, on two cores: 2 rows take 1.4
            // to 1.5 steps, 4 rows 2.1, 8 rows 3 to 3.5, 12 rows 4, and 16 rows 4.6.
            true => Self { first: 0.2, row: 0.3, more: 0.15, texts },
            // A step waits for the weights and for its launches, few rows take hardly longer. Not
            // measured.
            false => Self { first: 0.1, row: 0.05, more: 0.05, texts },
        }
    }

    /// Returns the time that another row adds to a pass of this many.
    fn another(self, rows: usize) -> f32 {
        if rows < FEW { self.row } else { self.more }
    }

    /// Returns the number of guesses for one text with the most tokens for the time of their pass;
    /// 0 unless all texts together get tokens clearly faster than by steps. `shares` are the
    /// probabilities that a guess is right if those before it are, and making one takes `draft`
    /// steps.
    pub(super) fn best(self, shares: impl IntoIterator<Item = f32>, draft: f32) -> usize {
        let step = 1.0 + (1..self.texts).map(|rows| self.another(rows)).sum::<f32>();
        let mut tokens = self.texts as f32;
        let mut most = GAIN * tokens / step;
        let mut time = step + if self.texts == 1 { self.first } else { 0.0 };
        let (mut best, mut all_right) = (0, 1.0);
        for (i, share) in shares.into_iter().enumerate() {
            all_right *= share;
            tokens += all_right;
            time += self.another(self.texts + i) + draft;
            if tokens / time > most {
                (best, most) = (i + 1, tokens / time);
            }
        }
        best
    }
}

/// Rows from which on weights are unpacked once for all rows.
const FEW: usize = 8;

/// The least gain in speed. Shares are estimates, and a wrong guess costs more than a
/// right one that is not made.
const GAIN: f32 = 1.2;

/// The weight of the earlier guesses in a share, at most: each guess moves it by a sixteenth.
const MEMORY: u8 = 16;

/// The share of guesses that were right.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    right: f32,
    /// The number of guesses so far, at most [`MEMORY`].
    guesses: u8,
}

impl Share {
    /// Returns a share that later guesses move slowly.
    pub(super) fn known(right: f32) -> Self {
        Self { right, guesses: MEMORY }
    }

    /// Returns a share that counts as much as one guess.
    pub(super) fn unknown(right: f32) -> Self {
        Self { right, guesses: 1 }
    }

    pub(super) fn right(self) -> f32 {
        self.right
    }

    /// Adds a guess.
    pub(super) fn add(&mut self, is_right: bool) {
        self.guesses = (self.guesses + 1).min(MEMORY);
        self.right += (f32::from(u8::from(is_right)) - self.right) / f32::from(self.guesses);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula of Leviathan et al., theorem 3.8, with a pass that takes `1.4 + guess * n`.
    #[test]
    fn the_number_of_guesses_has_the_most_tokens_for_the_time() {
        for guess in [0.07, 0.13, 0.26, 0.6] {
            for share in [0.02, 0.11, 0.33, 0.52, 0.71, 0.93, 0.99] {
                let rate = |n: i32| match n {
                    0 => 1.2,
                    n => {
                        (1.0 - f64::powi(share, n + 1))
                            / (1.0 - share)
                            / (1.4 + guess * f64::from(n))
                    }
                };
                let expected = (0..=15).max_by(|&a, &b| rate(a).total_cmp(&rate(b))).unwrap_or(0);
                let row = guess as f32;
                let pace = Pace { first: 0.4, row, more: row, texts: 1 };
                let found = pace.best([share as f32; 15], 0.0);
                assert_eq!(found as i32, expected, "{guess} {share}");
            }
        }
        let pace = Pace { first: 0.4, row: 0.05, more: 0.05, texts: 1 };
        assert_eq!(pace.best([0.9, 0.9, 0.01, 0.9], 0.05), 2);
        assert_eq!(pace.best([], 0.05), 0);
        // 6 guesses make 5.2 tokens in 3 steps; 12 make 7.5, in 4.1 steps if rows after the 8th
        // take half of the time, and in 4.8 if they do not.
        let pace = Pace { first: 0.2, row: 0.3, more: 0.3, texts: 1 };
        assert_eq!(pace.best([0.9; 15], 0.0), 6);
        assert_eq!(Pace { more: 0.15, ..pace }.best([0.9; 15], 0.0), 12);
    }

    /// A pass of 8 texts with rows of 0.4 steps takes 3.8 steps for 8 tokens. A guess adds at most
    /// one token in 0.4 steps, which is hardly faster.
    #[test]
    fn texts_together_get_fewer_guesses() {
        let n = [1, 2, 3, 4, 8].map(|texts| {
            let pace = Pace { first: 0.4, row: 0.4, more: 0.4, texts };
            pace.best([0.99; 15], 0.0)
        });
        assert_eq!(n[4], 0, "{n:?}");
        assert!(n[0] > 8 && n[1] > 3, "{n:?}");
        // 4 texts share 15 guesses.
        let pace = Pace { first: 0.1, row: 0.05, more: 0.05, texts: 4 };
        assert_eq!(pace.best([0.99; 3], 0.0), 3);
    }

    #[test]
    fn shares_follow_the_guesses() {
        let mut share = Share::known(0.5);
        (0..100).for_each(|_| share.add(true));
        assert!(share.right() > 0.99, "{share:?}");
        (0..100).for_each(|i| share.add(i % 4 == 0));
        assert!((0.1..0.4).contains(&share.right()), "{share:?}");
        let mut share = Share::unknown(0.7);
        (0..4).for_each(|_| share.add(true));
        assert!(share.right() > 0.93, "{share:?}");
    }
}
