//! Converts codes of packed words to vectors of bytes, and sums their products with digits.

use core::arch::x86_64::*;

use super::super::codes::{CodeLayout, Terms};
use crate::simd::vnni::{DIGITS, LANES, QUAD, join_digits};

/// Constants for each lane of a vector, for words of `CODES` codes.
struct Lanes<const CODES: usize>;

impl<const CODES: usize> Lanes<CODES> {
    const N_BITS: usize = 32 / CODES;

    /// The byte that holds each lane's code, in each of the four words of a quad.
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

    /// The bits of these bytes that are each lane's code.
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

/// The byte that holds each lane's bit, for either half of a word of 32 bits, in each of the four
/// words of a quad.
const BYTES_OF_BITS: [[[u8; QUAD]; LANES]; 2] = {
    let mut halves = [[[0; QUAD]; LANES]; 2];
    let mut i = 0;
    while i < 2 * LANES * QUAD {
        let (half, lane, word) = (i / QUAD / LANES, i / QUAD % LANES, i % QUAD);
        halves[half][lane][word] = (QUAD * word + 2 * half + lane / 8) as u8;
        i += 1;
    }
    halves
};

/// The rotations to the right that move the parts of split codes to their place in a byte: in each
/// lane, low bits to bits 0 and 1, and the high bit to bit 2.
const ROTATIONS: [[u32; LANES]; 2] = {
    let mut rotations = [[0; LANES]; 2];
    let mut lane = 0;
    while lane < LANES {
        rotations[0][lane] = (lane % 4 * 2) as u32;
        rotations[1][lane] = ((lane % 8 + 30) % 32) as u32;
        lane += 1;
    }
    rotations
};

/// A reader of the codes of 16 consecutive elements, one per lane.
pub(super) struct Codes<const BITS: usize> {
    bytes: __m512i,
    mask: __m512i,
    place: __m512,
}

impl<const BITS: usize> Codes<BITS> {
    /// The number of words that the low bits of one term come from.
    const WORDS: usize = LANES.div_ceil(CodeLayout::<BITS>::CODES);

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn new() -> Self {
        match CodeLayout::<BITS>::CODES {
            16 if CodeLayout::<BITS>::SPLIT => {
                Self { mask: _mm512_set1_epi8(3), place: _mm512_set1_ps(1.0), ..Self::of::<16>() }
            }
            16 => Self::of::<16>(),
            8 => Self::of::<8>(),
            _ => Self::of::<4>(),
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn of<const CODES: usize>() -> Self {
        Self {
            bytes: load(Lanes::<CODES>::BYTES.as_flattened()),
            mask: load(Lanes::<CODES>::MASK.as_flattened()),
            place: _mm512_castsi512_ps(load(&Lanes::<CODES>::PLACE)),
        }
    }

    /// Returns, for each query row, the sum over all terms of factor times codes. Whole codes count
    /// 2^k times, as they are not shifted down.
    ///
    /// A step is a quad of terms. Its factors are digits, as
    /// [`to_digits`](crate::simd::vnni::to_digits) writes them. `high` is the index of the word
    /// with the high bits of split codes; 0 if codes are whole.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn sums<const ROWS: usize>(&self, terms: &Terms<'_>, high: usize) -> [__m512; ROWS] {
        terms.check(Self::WORDS.max(high + 1), ROWS, QUAD);
        let half = usize::from(high == 1);
        let bytes_of_bits = load(BYTES_OF_BITS[half].as_flattened());
        let [rotate_low, rotate_high] = [load(&ROTATIONS[0]), load(&ROTATIONS[1])];
        let mut sums = [[_mm512_setzero_si512(); DIGITS]; ROWS];
        for quad in 0..terms.n {
            // SAFETY: the words of each quad are in the slice, as `check` asserts.
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
            codes = _mm512_shuffle_epi8(codes, self.bytes);
            if CodeLayout::<BITS>::SPLIT {
                codes = _mm512_rorv_epi32(codes, rotate_low);
            }
            codes = _mm512_and_si512(codes, self.mask);
            if CodeLayout::<BITS>::SPLIT {
                let bits = _mm512_broadcast_i32x4(words(high));
                let bits = _mm512_shuffle_epi8(bits, bytes_of_bits);
                let bits = _mm512_rorv_epi32(bits, rotate_high);
                codes = _mm512_or_si512(codes, _mm512_and_si512(bits, _mm512_set1_epi8(4)));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                for (digit, sum) in sums.iter_mut().enumerate() {
                    let i = row * terms.row_stride + quad * QUAD + digit;
                    // SAFETY: the digits of each quad are in the slice, as `check` asserts.
                    let digits = unsafe { terms.factors.get_unchecked(i) }.to_bits();
                    *sum = _mm512_dpbusd_epi32(*sum, codes, _mm512_set1_epi32(digits as i32));
                }
            }
        }
        let mut totals = [_mm512_setzero_ps(); ROWS];
        for (total, digits) in totals.iter_mut().zip(sums) {
            *total = join_digits(digits);
        }
        totals
    }

    /// Converts `sum`, one of [`sums`](Self::sums), to the sum of codes times factors, and adds
    /// `base`. `unit` is the factor that the integer 1 stands for.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn restore(&self, sum: __m512, unit: f32, base: f32) -> __m512 {
        let unit = _mm512_mul_ps(self.place, _mm512_set1_ps(unit));
        _mm512_fmadd_ps(sum, unit, _mm512_set1_ps(base))
    }
}

/// Loads the first 64 bytes of `x`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn load<T: Copy>(x: &[T]) -> __m512i {
    assert!(size_of_val(x) >= size_of::<__m512i>());
    // SAFETY: the slice has at least the bytes of a vector, and T is a plain number.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}
