//! How many tokens are guessed.

/// The time that the first guess adds to a pass, as a share of the time of a step, besides that of
/// its row: a step has launches of its own for one row.
const FIRST: f32 = 0.4;

/// The time that another row adds to a pass, as a share of the time of a step. A row of
/// SmolLM2-135M with 1,100 tokens takes 0.36 of a step on two CPU cores, and more with a quantized
/// cache, whose steps take less. Larger models take less, because their steps wait for memory.
pub(super) const ROW: f32 = 0.4;

/// The least gain in speed. Shares are estimates, and a wrong guess costs more than a
/// right one that is not made.
const GAIN: f32 = 1.2;

/// The part of its distance that a share moves with each guess, right or wrong.
const RATE: f32 = 1.0 / 16.0;

/// The share of guesses that were right.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share(pub(super) f32);

impl Share {
    /// Adds a guess.
    pub(super) fn add(&mut self, is_right: bool) {
        self.0 += RATE * (f32::from(u8::from(is_right)) - self.0);
    }
}

/// Returns the number of guesses with the most tokens for the time of their pass; 0 unless they
/// come clearly faster than by steps. `shares` are the probabilities that a guess is right if those
/// before it are, and making and verifying one takes `guess` steps.
pub(super) fn best(shares: impl IntoIterator<Item = f32>, guess: f32) -> usize {
    let (mut tokens, mut time, mut all_right) = (1.0, 1.0 + FIRST, 1.0);
    let (mut best, mut most) = (0, GAIN);
    for (i, share) in shares.into_iter().enumerate() {
        all_right *= share;
        tokens += all_right;
        time += guess;
        if tokens / time > most {
            (best, most) = (i + 1, tokens / time);
        }
    }
    best
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
                let found = best([share as f32; 15], guess as f32);
                assert_eq!(found as i32, expected, "{guess} {share}");
            }
        }
        assert_eq!(best([0.9, 0.9, 0.01, 0.9], 0.1), 2);
        assert_eq!(best([], 0.1), 0);
    }

    #[test]
    fn shares_follow_the_guesses() {
        let mut share = Share(0.5);
        (0..100).for_each(|_| share.add(true));
        assert!(share.0 > 0.99, "{share:?}");
        (0..100).for_each(|i| share.add(i % 4 == 0));
        assert!((0.1..0.4).contains(&share.0), "{share:?}");
    }
}
