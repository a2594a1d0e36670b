use std::sync::{Arc, Mutex, PoisonError};

use super::DataError;

/// The order in which training visits windows: pass after pass over the data, each in a permutation
/// of its own that depends on the seed and the pass only.
///
/// Any position can be asked for at any time, so a run resumes from its position alone. The
/// permutation is Fisher and Yates' shuffle (Knuth's Algorithm P) driven by SplitMix64 (Steele, Lea
/// and Flood, 2014) without modulo bias (Lemire, 2019): uniform, and the same on every machine.
/// Clones share the last permutation, 4 bytes per window.
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
    /// The order of `n_windows` windows under `seed`.
    ///
    /// # Errors
    ///
    /// [`DataError::Argument`], when `n_windows` is 0 or above 2^32.
    pub fn new(seed: u64, n_windows: usize) -> Result<Self, DataError> {
        if n_windows == 0 || u32::try_from(n_windows - 1).is_err() {
            return Err(DataError::argument("n_windows", n_windows, "must be from 1 to 2^32"));
        }
        Ok(Self { seed, n_windows, last: Arc::default() })
    }

    /// The same order, with a permutation of its own in memory.
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

    /// The index of the window, below [`n_windows`](Self::n_windows), at a position counted from
    /// the start of training. Position `n_windows` starts the second pass.
    pub fn window_at(&self, position: u64) -> usize {
        let n = self.n_windows as u64;
        let (number, index) = (position / n, (position % n) as usize);
        // A pass is only ever replaced as a whole, so the one left by a thread that panicked is
        // valid.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let pass = match last.take() {
            Some(pass) if pass.number == number => pass,
            _ => self.pass(number),
        };
        last.insert(pass).windows[index] as usize
    }

    fn pass(&self, number: u64) -> Pass {
        // Both seed and number go through the generator, so that neighboring seeds share no pass.
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

    /// Uniform in `0..n`, `n > 0`.
    fn below(&mut self, n: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(n);
            // Without this rejection, some results would come up more often than others (Lemire,
            // 2019).
            if (product as u64) >= n.wrapping_neg() % n {
                return (product >> 64) as u64;
            }
        }
    }
}
