use std::sync::{Arc, Mutex, PoisonError};

use super::DataError;

/// The order in which training visits windows. Each pass over the data is a permutation that
/// depends only on the seed and the number of the pass.
///
/// Any position can be looked up at any time, so a run needs only its position to resume. The
/// permutation is a Fisher-Yates shuffle (Knuth's Algorithm P) driven by SplitMix64 (Steele, Lea
/// and Flood, 2014) without modulo bias (Lemire, 2019). It is uniform and the same on every
/// machine. Clones share the last permutation, which takes 4 bytes per window.
#[derive(Clone, Debug)]
pub struct Order {
    seed: u64,
    n_windows: usize,
    last: Arc<Mutex<Option<Pass>>>,
}

#[derive(Debug)]
struct Pass {
    number: u64,
    /// The window at each position of the pass.
    windows: Vec<u32>,
}

impl Order {
    /// Creates the order of `n_windows` windows for `seed`.
    ///
    /// # Errors
    /// [`DataError::Argument`] if `n_windows` is 0 or above 2^32.
    pub fn new(seed: u64, n_windows: usize) -> Result<Self, DataError> {
        if n_windows == 0 || u32::try_from(n_windows - 1).is_err() {
            return Err(DataError::argument("n_windows", n_windows, "must be from 1 to 2^32"));
        }
        Ok(Self { seed, n_windows, last: Arc::default() })
    }

    /// Returns the same order with its own permutation in memory.
    pub(super) fn detached(&self) -> Self {
        Self { last: Arc::default(), ..*self }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Windows per pass.
    pub fn n_windows(&self) -> usize {
        self.n_windows
    }

    /// Returns the index, below [`n_windows`](Self::n_windows), of the window at a position counted
    /// from the start of training. Position `n_windows` starts the second pass.
    pub fn window_at(&self, position: u64) -> usize {
        let n = self.n_windows as u64;
        let (number, index) = (position / n, (position % n) as usize);
        // A pass is only replaced as a whole, so a poisoned lock still holds a valid one.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let pass = match last.take() {
            Some(pass) if pass.number == number => pass,
            _ => self.pass(number),
        };
        last.insert(pass).windows[index] as usize
    }

    fn pass(&self, number: u64) -> Pass {
        // Both seed and number pass through the generator, so neighboring seeds share no pass.
        let mut random = SplitMix64(SplitMix64(self.seed).next() ^ number);
        random = SplitMix64(random.next());
        let mut windows: Vec<u32> = (0..self.n_windows).map(|i| i as u32).collect();
        for i in (1..windows.len()).rev() {
            windows.swap(i, random.below(i as u64 + 1) as usize);
        }
        Pass { number, windows }
    }
}

struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws a number uniformly from `0..n`; `n` must be above 0.
    fn below(&mut self, n: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(n);
            // Without this rejection, some results would be more likely than others (Lemire, 2019).
            if (product as u64) >= n.wrapping_neg() % n {
                return (product >> 64) as u64;
            }
        }
    }
}
