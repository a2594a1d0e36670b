//! Unpacks keys to bf16.

use core::arch::x86_64::*;

use crate::{
    formats::{
        Codec,
        scaled::flex::avx512::{Rows, Scaled},
    },
    simd::amx::{DEPTH, Row},
};

/// Tiles of the widest key.
pub(super) const WIDEST_TILES: usize = 8;

/// Channels of the widest key. All widths are multiples of [`MULTIPLE`].
pub(super) const WIDEST: usize = WIDEST_TILES * DEPTH;

/// Channels that fill a vector as E2M1 codes, and two as E4M3 codes.
pub(super) const MULTIPLE: usize = 128;

/// Bytes of a vector.
const BYTES: usize = 64;

/// The smallest exponent of a scale. Smaller scales count as it, so that the smallest number is
/// normal in bf16; AMX takes others as 0. The error is below 2^-107.
const LOWEST: i8 = -117;

/// Tables that turn the codes of tokens into bf16.
pub(super) struct Unpack {
    /// By vector of codes: which byte of a token's exponents each lane of 16 bits takes.
    scales: [__m512i; WIDEST / BYTES],
    /// The low bytes of the numbers of 128 codes.
    low: [__m512i; 2],
    /// The high bytes.
    high: [__m512i; 2],
    /// The numbers of E2M1's 16 codes, twice.
    few: __m512i,
}

impl Unpack {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn new<F: Scaled>(rows: &Rows<'_>) -> Self {
        let bf16 = |code| half::bf16::from_f32(F::value(code)).to_le_bytes();
        let (mut low, mut high, mut few) = ([[0; BYTES]; 2], [[0; BYTES]; 2], [0; DEPTH]);
        let bytes = low.as_flattened_mut().iter_mut().zip(high.as_flattened_mut());
        for (code, (low, high)) in (0..).zip(bytes) {
            [*low, *high] = bf16(code);
        }
        for (code, few) in (0..).zip(&mut few) {
            *few = u16::from_le_bytes(bf16(code % 16));
        }
        let group_size = rows.head_dim / rows.groups;
        let codes = BYTES * rows.head_dim / rows.width;
        let mut scales = [_mm512_setzero_si512(); WIDEST / BYTES];
        for (nth, scales) in scales.iter_mut().enumerate() {
            let mut bytes = [0u16; DEPTH];
            for (lane, byte) in bytes.iter_mut().enumerate() {
                let group = channel(F::FORMAT, nth * codes + lane) / group_size;
                // The exponent goes to the upper byte, and the lower one is cleared.
                *byte = (group as u16) << 8 | 0x80;
            }
            *scales = load(bytemuck::cast_ref(&bytes));
        }
        Self {
            scales,
            low: [load(&low[0]), load(&low[1])],
            high: [load(&high[0]), load(&high[1])],
            few: load(bytemuck::cast_ref(&few)),
        }
    }

    /// Unpacks a token.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    pub(super) fn key<F: Scaled>(&self, rows: &Rows<'_>, token: usize, to: &mut [Row]) {
        let exponents = exponents(rows, token);
        let codes = rows.codes[token * rows.width..][..rows.width].as_chunks().0;
        let each = to.len() / codes.len();
        for (nth, (codes, to)) in codes.iter().zip(to.chunks_exact_mut(each)).enumerate() {
            let codes = load(codes);
            let exponents = _mm512_shuffle_epi8(exponents, self.scales[nth]);
            // The exponents of bf16 begin at bit 7.
            let exponents = _mm512_srai_epi16::<1>(exponents);
            match F::FORMAT {
                Codec::E4m3Blocks => store_scaled(self.e4m3(codes), exponents, to),
                _ => store_scaled(self.e2m1(codes), exponents, to),
            }
        }
    }

    /// Returns the numbers of 64 E4M3 codes: first the low halves of the 128-bit lanes, then the
    /// high halves.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn e4m3(&self, codes: __m512i) -> [__m512i; 2] {
        // The instruction reads the low seven bits of an index; the eighth is the sign.
        let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
        let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
        let high = _mm512_or_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8(i8::MIN)));
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }

    /// Returns the numbers of 128 E2M1 codes: the first of each 16 bits, the second, and so on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn e2m1(&self, codes: __m512i) -> [__m512i; 4] {
        // The instruction reads the low five bits of an index, and the table repeats.
        [
            _mm512_permutexvar_epi16(codes, self.few),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(codes), self.few),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), self.few),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(codes), self.few),
        ]
    }
}

/// Returns the channel of a number of an unpacked key.
pub(super) fn channel(format: Codec, at: usize) -> usize {
    let (start, at) = (at / MULTIPLE * MULTIPLE, at % MULTIPLE);
    let (vector, lane) = (at / DEPTH, at % DEPTH);
    start
        + match format {
            // A vector has the low or high bytes of the 128-bit lanes of 64 codes.
            Codec::E4m3Blocks => vector / 2 * 64 + lane / 8 * 16 + vector % 2 * 8 + lane % 8,
            // A vector has one of four codes of each 16 bits.
            _ => lane * 4 + vector,
        }
}

/// Returns the exponents of a token's scales as bytes, twice in each lane of 128 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn exponents(rows: &Rows<'_>, token: usize) -> __m512i {
    let bytes = &rows.parameters[token * rows.groups..];
    let scales = bytes.first_chunk().copied().unwrap_or_else(|| {
        let mut scales = [0; 8];
        scales[..bytes.len()].copy_from_slice(bytes);
        scales
    });
    let scales = _mm512_set1_epi64(i64::from_le_bytes(scales));
    let exponents = _mm512_sub_epi8(scales, _mm512_set1_epi8(127));
    _mm512_max_epi8(exponents, _mm512_set1_epi8(LOWEST))
}

/// Multiplies numbers in bf16 with powers of two and stores them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store_scaled<const N: usize>(numbers: [__m512i; N], exponents: __m512i, to: &mut [Row]) {
    for (numbers, to) in numbers.into_iter().zip(to) {
        let nonzero = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(i16::MAX));
        let numbers = _mm512_maskz_add_epi16(nonzero, numbers, exponents);
        // SAFETY: a row has 64 bytes.
        unsafe { _mm512_storeu_si512(to.0.as_mut_ptr().cast(), numbers) };
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; BYTES]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}
