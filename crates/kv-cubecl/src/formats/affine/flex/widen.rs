//! Widens split codes of 3 bits to whole codes of 4 bits, in scratch memory of attention.
//!
//! A vector of codes is then read with one mask and one conversion to floats. Split codes took two
//! of each, and their sum. Widening takes one or two instructions for each vector, and serves all
//! query rows.

/// Codes of a word after widening.
pub(super) const WIDENED: usize = 8;

/// Codes that share two words of low bits and one of high bits.
pub(super) const RUN: usize = 32;

/// Words of a run before widening.
const SPLIT_WORDS: usize = 3;

/// Words of a run after widening.
pub(super) const WHOLE_WORDS: usize = RUN / WIDENED;

/// Returns the words that `n` words take once they are widened.
pub(super) const fn widened(n: usize) -> usize {
    n / SPLIT_WORDS * WHOLE_WORDS
}

/// Widens the first `n` words of each line of `width` words, and writes them without the rest of
/// the line. The words of a run are adjacent.
pub(super) fn widen_lines(lines: &[u32], width: usize, n: usize, wide: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions that the function is compiled for.
        return unsafe { avx2::widen_lines(lines, width, n, wide) };
    }
    let wide = wide.chunks_exact_mut(widened(n));
    for (line, wide) in lines.chunks_exact(width).zip(wide) {
        widen_runs(&line[..n], wide);
    }
}

fn widen_runs(words: &[u32], wide: &mut [u32]) {
    for (&run, wide) in words.as_chunks().0.iter().zip(wide.as_chunks_mut().0) {
        *wide = widen_run(run);
    }
}

/// Widens `n` runs, which are the columns of three rows of `n` words. The words of a widened run
/// are adjacent.
pub(super) fn widen_columns(words: &[u32], n: usize, wide: &mut [u32]) {
    let (words, wide) = (&words[..SPLIT_WORDS * n], &mut wide[..WHOLE_WORDS * n]);
    let done = 0;
    #[cfg(target_arch = "x86_64")]
    let done = match is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions that the function is compiled for.
        true => unsafe { avx2::widen_columns(words, n, wide) },
        false => done,
    };
    for (i, wide) in wide.as_chunks_mut().0.iter_mut().enumerate().skip(done) {
        *wide = widen_run([words[i], words[n + i], words[2 * n + i]]);
    }
}

#[inline(always)]
fn widen_run([even, odd, high]: [u32; SPLIT_WORDS]) -> [u32; WHOLE_WORDS] {
    [
        widen(even, high),
        widen(even >> 16, high >> 8),
        widen(odd, high >> 16),
        widen(odd >> 16, high >> 24),
    ]
}

/// Joins the lowest 8 codes of `low`, 2 bits each, with the lowest 8 bits of `high`. Each step
/// halves the parts and moves the upper halves to their place.
#[inline(always)]
const fn widen(low: u32, high: u32) -> u32 {
    let low = low & 0xffff;
    let low = (low | low << 8) & 0x00ff_00ff;
    let low = (low | low << 4) & 0x0f0f_0f0f;
    let low = (low | low << 2) & 0x3333_3333;
    let high = high & 0xff;
    let high = (high | high << 12) & 0x000f_000f;
    let high = (high | high << 6) & 0x0303_0303;
    let high = (high | high << 3) & 0x1111_1111;
    low | high << 2
}

/// Widens by lookup: a byte shuffle finds the byte of 4 bits in a table of 16 bytes.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use core::arch::x86_64::*;

    use super::{SPLIT_WORDS, WHOLE_WORDS, widen, widen_runs, widened};

    /// Words of a vector.
    const LANES: usize = 8;

    /// The bytes of 4 bits: of two codes' low bits, and of the high bits of two codes, which are
    /// the lower or the upper two bits.
    const LOW: [u8; 16] = table(true, 0);
    const HIGH: [[u8; 16]; 2] = [table(false, 0), table(false, 2)];

    const fn table(low: bool, from: u32) -> [u8; 16] {
        let mut table = [0; 16];
        let mut bits = 0;
        while bits < 16 {
            let word = if low { widen(bits, 0) } else { widen(0, bits >> from & 3) };
            table[bits as usize] = word as u8;
            bits += 1;
        }
        table
    }

    struct Tables {
        low: __m256i,
        high: [__m256i; 2],
    }

    // No closures here, as in other vector code (see `simd`): the compiler would build them without
    // AVX2, and each instruction in them would become a call.
    impl Tables {
        #[inline]
        #[target_feature(enable = "avx2")]
        fn new() -> Self {
            Self { low: broadcast(&LOW), high: [broadcast(&HIGH[0]), broadcast(&HIGH[1])] }
        }

        /// Returns the bytes of low bits, for each the lower and the upper 4 bits of a byte.
        #[inline]
        #[target_feature(enable = "avx2")]
        fn low(&self, [lower, upper]: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_shuffle_epi8(self.low, lower), _mm256_shuffle_epi8(self.low, upper)]
        }

        /// Returns the bytes of high bits for 4 bits each: of the lower and the upper two.
        #[inline]
        #[target_feature(enable = "avx2")]
        fn high(&self, bits: __m256i) -> [__m256i; 2] {
            let [lower, upper] = self.high;
            [_mm256_shuffle_epi8(lower, bits), _mm256_shuffle_epi8(upper, bits)]
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn broadcast(table: &[u8; 16]) -> __m256i {
        // SAFETY: the table has 16 bytes.
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
    }

    /// Returns the lower and the upper 4 bits of each byte.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn nibbles(words: __m256i) -> [__m256i; 2] {
        let nibble = _mm256_set1_epi8(15);
        let upper = _mm256_srli_epi16::<4>(words);
        [_mm256_and_si256(words, nibble), _mm256_and_si256(upper, nibble)]
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn widen_lines(lines: &[u32], width: usize, n: usize, wide: &mut [u32]) {
        let tables = Tables::new();
        let count = lines.len() / width;
        let (pairs, stride) = (n / (2 * SPLIT_WORDS), widened(n));
        // A run is read with the word after it. A line has one after its last run, too: the
        // parameters of a group.
        assert!(n < width && wide.len() >= count * stride);
        for i in 0..count {
            for pair in 0..pairs {
                // SAFETY: the words of the pair, the one after it, and the place for the whole
                // codes are in the slices, as asserted.
                unsafe {
                    let first = lines.as_ptr().add(i * width + pair * 2 * SPLIT_WORDS);
                    let runs = _mm256_loadu2_m128i(first.add(SPLIT_WORDS).cast(), first.cast());
                    let [lower, upper] = nibbles(runs);
                    let [low, _] = bytes(tables.low([lower, upper]));
                    let [_, high] = bytes([lower, upper]);
                    let [high, _] = bytes(tables.high(high));
                    let whole = _mm256_or_si256(low, high);
                    let out = wide.as_mut_ptr().add(i * stride + pair * LANES);
                    _mm256_storeu_si256(out.cast(), whole);
                }
            }
            if !n.is_multiple_of(2 * SPLIT_WORDS) {
                let last = &lines[i * width + n - SPLIT_WORDS..][..SPLIT_WORDS];
                widen_runs(last, &mut wide[(i + 1) * stride - WHOLE_WORDS..]);
            }
        }
    }

    /// Widens as many columns as whole vectors have, and returns their number.
    #[target_feature(enable = "avx2")]
    pub(super) fn widen_columns(words: &[u32], n: usize, wide: &mut [u32]) -> usize {
        assert!(words.len() == SPLIT_WORDS * n && wide.len() == WHOLE_WORDS * n);
        let tables = Tables::new();
        let whole = n / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            // SAFETY: each of the three rows has a vector's words from `first` on, as asserted.
            let [even, odd, high] = unsafe {
                let words = words.as_ptr().add(first);
                [
                    _mm256_loadu_si256(words.cast()),
                    _mm256_loadu_si256(words.add(n).cast()),
                    _mm256_loadu_si256(words.add(2 * n).cast()),
                ]
            };
            // Half a vector each: two words of low bits for each of two columns.
            let [a, b] = bytes(tables.low(nibbles(even)));
            let [c, d] = bytes(tables.low(nibbles(odd)));
            let [lower, upper] = nibbles(high);
            let [lower, upper] = [bytes(tables.high(lower)), bytes(tables.high(upper))];
            // SAFETY: each column has room for four words, as asserted.
            unsafe {
                let mut wide = wide.as_mut_ptr().add(first * WHOLE_WORDS);
                for (low, high) in [
                    (_mm256_unpacklo_epi64(a, c), _mm256_unpacklo_epi16(lower[0], upper[0])),
                    (_mm256_unpackhi_epi64(a, c), _mm256_unpackhi_epi16(lower[0], upper[0])),
                    (_mm256_unpacklo_epi64(b, d), _mm256_unpacklo_epi16(lower[1], upper[1])),
                    (_mm256_unpackhi_epi64(b, d), _mm256_unpackhi_epi16(lower[1], upper[1])),
                ] {
                    // Column i is in the lower half, column i + 4 in the upper half.
                    let both = _mm256_or_si256(low, high);
                    let far = wide.add(LANES / 2 * WHOLE_WORDS);
                    _mm256_storeu2_m128i(far.cast(), wide.cast(), both);
                    wide = wide.add(WHOLE_WORDS);
                }
            }
        }
        whole
    }

    /// Joins bytes: the first of `lower`, the first of `upper`, the second ones and so on.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn bytes([lower, upper]: [__m256i; 2]) -> [__m256i; 2] {
        [_mm256_unpacklo_epi8(lower, upper), _mm256_unpackhi_epi8(lower, upper)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of some runs, and the words that hold each code in 4 bits.
    fn runs(n: usize) -> (Vec<u32>, Vec<u32>) {
        let mut words = vec![0u32; SPLIT_WORDS * n];
        let mut wide = vec![0u32; WHOLE_WORDS * n];
        for i in 0..RUN * n {
            let code = (i * i / 7 + i / 3) as u32 % 8;
            let (run, i) = (i / RUN, i % RUN);
            words[SPLIT_WORDS * run + i / 16] |= (code & 3) << (2 * (i % 16));
            words[SPLIT_WORDS * run + 2] |= code >> 2 << i;
            wide[WHOLE_WORDS * run + i / WIDENED] |= code << (4 * (i % WIDENED));
        }
        (words, wide)
    }

    #[test]
    fn columns() {
        for n in [1, 7, 8, 20, 64] {
            let (words, expected) = runs(n);
            let rows: Vec<u32> =
                (0..words.len()).map(|i| words[i % n * SPLIT_WORDS + i / n]).collect();
            let mut wide = vec![u32::MAX; expected.len()];
            widen_columns(&rows, n, &mut wide);
            assert_eq!(wide, expected, "{n} columns");
        }
    }

    #[test]
    fn lines() {
        for in_line in 1..6 {
            let (words, expected) = runs(3 * in_line);
            let n = SPLIT_WORDS * in_line;
            let lines: Vec<u32> =
                words.chunks(n).flat_map(|line| [line, &[u32::MAX]].concat()).collect();
            let mut wide = vec![u32::MAX; expected.len()];
            widen_lines(&lines, n + 1, n, &mut wide);
            assert_eq!(wide, expected, "{in_line} runs in a line");
            wide.fill(u32::MAX);
            widen_runs(&words, &mut wide);
            assert_eq!(wide, expected, "without AVX2");
        }
    }
}
