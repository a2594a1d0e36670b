//! Codes of packed words as vectors of bytes, and sums of their products with digits.

use core::arch::x86_64::*;

use super::{DIGITS, LANES, QUAD, Terms};

/// Constants for each lane of a vector, for words of `CODES` codes.
struct Lanes<const CODES: usize>;

impl<const CODES: usize> Lanes<CODES> {
    const N_BITS: usize = 32 / CODES;

    /// For each lane, the byte that holds its code, in each of the four words of a quad.
    const BYTES: [[u8; QUAD]; LANES] = {
        let mut lanes = [[0; QUAD]; LANES];
        let mut i = 0;
        while i < LANES * QUAD {
            let (lane, word) = (i / QUAD, i % QUAD);
            lanes[lane][word] = (QUAD * word + lane % CODES * Self::N_BITS / 8) as u8;
            i += 1;
        }
        lanes
    };

    /// For each lane, which bits of these bytes are the code.
    const MASK: [[u8; QUAD]; LANES] = {
        let mut lanes = [[0; QUAD]; LANES];
        let mut i = 0;
        while i < LANES {
            let code = ((1u32 << Self::N_BITS) - 1) << Self::place(i);
            lanes[i] = [code as u8; QUAD];
            i += 1;
        }
        lanes
    };

    /// `2^-k`, where k is the bit offset of a lane's code within its byte.
    const PLACE: [f32; LANES] = {
        let mut lanes = [0.0; LANES];
        let mut i = 0;
        while i < LANES {
            lanes[i] = 1.0 / (1u32 << Self::place(i)) as f32;
            i += 1;
        }
        lanes
    };

    const fn place(lane: usize) -> usize {
        lane * Self::N_BITS % 8
    }
}

/// Reads the codes of 16 consecutive elements, one per lane.
pub(super) struct Codes<const CODES: usize> {
    bytes: __m512i,
    mask: __m512i,
    place: __m512,
}

impl<const CODES: usize> Codes<CODES> {
    /// Number of words that the codes of one term come from.
    const WORDS: usize = LANES.div_ceil(CODES);

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn new() -> Self {
        Self {
            bytes: load(Lanes::<CODES>::BYTES.as_flattened()),
            mask: load(Lanes::<CODES>::MASK.as_flattened()),
            place: _mm512_castsi512_ps(load(&Lanes::<CODES>::PLACE)),
        }
    }

    /// For each query row, the sum over all terms of factor times codes, where a code counts 2^k times
    /// as it was not shifted down. A step is a quad of terms, whose factors are digits as
    /// [`to_digits`](super::to_digits) writes them.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn sums<const ROWS: usize>(&self, terms: &Terms<'_>) -> [__m512; ROWS] {
        terms.check(Self::WORDS, ROWS, QUAD);
        let mut sums = [[_mm512_setzero_si512(); DIGITS]; ROWS];
        for quad in 0..terms.n {
            // SAFETY: `check` has seen that the words of each quad are in the slice.
            let words = |i: usize| unsafe {
                let words =
                    terms.words.get_unchecked(quad * terms.stride + i * terms.word_stride..);
                _mm_loadu_si128(words.as_ptr().cast())
            };
            let mut codes = _mm512_broadcast_i32x4(words(0));
            if Self::WORDS == 2 {
                codes = _mm512_mask_broadcast_i32x4(codes, 0xff00, words(1));
            } else if Self::WORDS == 4 {
                codes = _mm512_mask_broadcast_i32x4(codes, 0x00f0, words(1));
                codes = _mm512_mask_broadcast_i32x4(codes, 0x0f00, words(2));
                codes = _mm512_mask_broadcast_i32x4(codes, 0xf000, words(3));
            }
            codes = _mm512_and_si512(_mm512_shuffle_epi8(codes, self.bytes), self.mask);
            for (row, sums) in sums.iter_mut().enumerate() {
                for (digit, sum) in sums.iter_mut().enumerate() {
                    let i = row * terms.row_stride + quad * QUAD + digit;
                    // SAFETY: `check` has seen that the digits of each quad are in the slice.
                    let digits = unsafe { terms.factors.get_unchecked(i) }.to_bits();
                    *sum = _mm512_dpbusd_epi32(*sum, codes, _mm512_set1_epi32(digits as i32));
                }
            }
        }
        let base = _mm512_set1_ps(256.0);
        let mut totals = [_mm512_setzero_ps(); ROWS];
        for (total, [low, middle, high]) in totals.iter_mut().zip(sums) {
            let upper = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), base, _mm512_cvtepi32_ps(middle));
            *total = _mm512_fmadd_ps(upper, base, _mm512_cvtepi32_ps(low));
        }
        totals
    }

    /// Turns one of [`sums`](Self::sums) into the sum of codes times factors, and adds `base`. `unit` is
    /// the factor that the integer 1 stands for.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn restore(&self, sum: __m512, unit: f32, base: f32) -> __m512 {
        let unit = _mm512_mul_ps(self.place, _mm512_set1_ps(unit));
        _mm512_fmadd_ps(sum, unit, _mm512_set1_ps(base))
    }
}

/// The first 64 bytes of `x`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn load<T: Copy>(x: &[T]) -> __m512i {
    assert!(size_of_val(x) >= size_of::<__m512i>());
    // SAFETY: the slice has at least the bytes of a vector, and T is a plain number.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}
