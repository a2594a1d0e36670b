//! Blocks in kernels.
//!
//! Each format unpacks 32 numbers at a time into bytes, four to a word, and all kernels build on
//! that. Arithmetic shared by formats is here too, in u32 and f32 only.

use cubecl::prelude::*;
pub(super) use kv_device::half::half_value;

/// Numbers unpacked at a time, a divisor of every block size.
pub(crate) const SPAN: usize = 32;
/// Words of the codes of a span, at a byte per code.
pub(crate) const SPAN_WORDS: usize = 8;

/// A format as kernels read it. Number `i` of a span is `code(i) * scale + min`, computed in f32.
#[cube]
pub(crate) trait BlocksInKernels: Send + Sync + 'static {
    /// Numbers in a block.
    const NUMBERS: usize;
    /// Bytes in a block.
    const BYTES: usize;
    /// Codes in a word: 4, or 2 numbers of 16 bits.
    const PER_WORD: usize;
    /// True if there are scales. Otherwise codes are the numbers themselves.
    const SCALES: bool;
    /// True if the second half of a span has a scale of its own.
    const HALVES: bool;
    /// True if there are minima.
    const MINS: bool;

    /// Unpacks span `index` of the block that begins at byte `at` of `words`. Leaves `high`
    /// unchanged if spans have one scale, and `min` if there are no minima.
    fn unpack(words: &[u32], at: usize, index: usize, span: &mut Span);

    /// Returns the value of code `index` of a word.
    fn code(word: u32, #[comptime] index: usize) -> f32;
}

/// 32 unpacked numbers.
#[derive(CubeType)]
pub(crate) struct Span {
    /// Codes, [`BlocksInKernels::PER_WORD`] to a word.
    pub(crate) codes: Array<u32>,
    /// The scale, or that of the first half.
    pub(crate) low: f32,
    /// The scale of the second half.
    pub(crate) high: f32,
    /// The minimum.
    pub(crate) min: f32,
}

#[cube]
pub(crate) fn new_span<F: BlocksInKernels>() -> Span {
    Span {
        codes: Array::<u32>::new(comptime!(SPAN / F::PER_WORD)),
        low: f32::new(0.0),
        high: f32::new(0.0),
        min: f32::new(0.0),
    }
}

/// Returns the first byte of the block that holds span `index` of a row.
#[cube]
pub(crate) fn block_at<F: BlocksInKernels>(row: usize, index: usize, row_bytes: usize) -> usize {
    row * row_bytes + index / comptime!(F::NUMBERS / SPAN) * comptime!(F::BYTES)
}

/// Unpacks span `index` of a row.
#[cube]
pub(crate) fn unpack_row<F: BlocksInKernels>(
    words: &[u32],
    row: usize,
    index: usize,
    row_bytes: usize,
    span: &mut Span,
) {
    let at = block_at::<F>(row, index, row_bytes);
    F::unpack(words, at, index % comptime!(F::NUMBERS / SPAN), span);
}

/// Returns the value of code `index` of an unpacked span.
#[cube]
pub(crate) fn code<F: BlocksInKernels>(span: &Span, #[comptime] index: usize) -> f32 {
    let word = span.codes[comptime!(index / F::PER_WORD)];
    F::code(word, comptime!(index % F::PER_WORD))
}

#[cube]
pub(crate) fn number<F: BlocksInKernels>(span: &Span, #[comptime] index: usize) -> f32 {
    let mut number = code::<F>(span, index);
    if comptime!(F::SCALES) {
        let mut scale = span.low;
        if comptime!(F::HALVES && index >= SPAN / 2) {
            scale = span.high;
        }
        number *= scale;
    }
    if comptime!(F::MINS) {
        number += span.min;
    }
    number
}

#[cube]
pub(super) fn byte(word: u32, #[comptime] index: usize) -> u32 {
    (word >> comptime!(8 * index as u32)) & 0xffu32
}

/// Returns the word at byte `at`, a multiple of 4.
#[cube]
pub(super) fn word(words: &[u32], at: usize) -> u32 {
    words[at / 4]
}

/// Copies `n` words from byte `at` on, a multiple of 4.
#[cube]
pub(super) fn copy_words(words: &[u32], at: usize, #[comptime] n: usize, span: &mut Span) {
    #[unroll]
    for i in 0..n {
        span.codes[i] = word(words, at + 4 * i);
    }
}

/// Returns the 16 bits at byte `at`, a multiple of 2.
#[cube]
pub(super) fn short(words: &[u32], at: usize) -> u32 {
    (words[at / 4] >> (at as u32 % 4u32 * 8u32)) & 0xffffu32
}

/// Returns `bytes` bytes from byte `at` on, as words. `at` is a multiple of `step`, which is 1 or
/// 2.
///
/// Only words that hold some of these bytes are read, if `bytes` is not a multiple of 4 or if other
/// bytes follow.
#[cube]
pub(super) fn words_at(
    words: &[u32],
    at: usize,
    #[comptime] bytes: usize,
    #[comptime] step: usize,
) -> Array<u32> {
    let n = comptime!(bytes.div_ceil(4));
    let first = at / 4;
    let shift = at as u32 % 4u32 * 8u32;
    let mut found = Array::<u32>::new(n);
    let mut low = words[first];
    #[unroll]
    for i in 0..n {
        if comptime!(i + 1 < (bytes + 4 - step).div_ceil(4)) {
            let high = words[first + i + 1];
            // Two shifts, since `high` must vanish if `shift` is 0, and a shift by 32 does nothing.
            found[i] = (low >> shift) | ((high << (31u32 - shift)) << 1u32);
            low = high;
        } else {
            found[i] = low >> shift;
        }
    }
    found
}

/// Unpacks 8 of 32 codes of 4 bits from word `index` of four. Codes of the first half of the span
/// are in the lower halves of the bytes.
#[cube]
pub(super) fn nibbles(word: u32, #[comptime] index: usize, span: &mut Span) {
    span.codes[index] = word & 0x0f0f_0f0fu32;
    span.codes[comptime!(index + 4)] = (word >> 4u32) & 0x0f0f_0f0fu32;
}

/// Adds the fifth bits of 32 codes, given as one word.
#[cube]
pub(super) fn add_fifth_bits(bits: u32, span: &mut Span) {
    #[unroll]
    for i in 0..SPAN_WORDS {
        let four = (bits >> comptime!(4 * i as u32)) & 15u32;
        // The product has copies of the four bits, 7 bits apart. The mask keeps one bit of each
        // copy.
        span.codes[i] |= ((four * 0x0020_4081u32) & 0x0101_0101u32) << 4u32;
    }
}
