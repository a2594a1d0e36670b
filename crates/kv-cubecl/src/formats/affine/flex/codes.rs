//! Converts codes of packed words to vectors of floats, and sums their products with factors.

use macerator::{Scalar, Simd, Vector};

use super::widen::WIDENED;
use crate::simd::{MAX_LANES, load};

/// Constants for each lane of a vector, for words of `CODES` codes.
struct Lanes<const CODES: usize>;

impl<const CODES: usize> Lanes<CODES> {
    const N_BITS: usize = 32 / CODES;

    /// Entry i masks the bits of code `i % CODES` of a word. The pattern is twice as long as a
    /// vector, so a vector of masks can be loaded from any code on.
    const MASK: [u32; 2 * MAX_LANES] = {
        let mut lanes = [0; 2 * MAX_LANES];
        let mut i = 0;
        while i < lanes.len() {
            lanes[i] = (((1u64 << Self::N_BITS) - 1) as u32) << (Self::N_BITS * (i % CODES));
            i += 1;
        }
        lanes
    };

    /// The masks of each word, for vectors that span several words; zero in the lanes of other
    /// words.
    const MASK_OF_WORD: [[u32; MAX_LANES]; MAX_LANES / 4] = {
        let mut words = [[0; MAX_LANES]; MAX_LANES / 4];
        let mut i = 0;
        while i < MAX_LANES {
            words[i / CODES][i] = Self::MASK[i];
            i += 1;
        }
        words
    };

    /// The bit to flip in each lane: the sign bit if the lane holds the last code of a word, else
    /// none.
    ///
    /// The last code contains bit 31, so its upper half would become negative when converted as a
    /// signed integer. With bit 31 flipped, the signed integer is exactly the code minus half its
    /// range; [`FLIPPED`](Self::FLIPPED) adds that half back.
    const FLIP: [u32; 2 * MAX_LANES] = {
        let mut lanes = [0; 2 * MAX_LANES];
        let mut i = CODES - 1;
        while i < lanes.len() {
            lanes[i] = 1 << 31;
            i += CODES;
        }
        lanes
    };

    /// The number that flipping with [`FLIP`](Self::FLIP) subtracts from a code.
    const FLIPPED: [f32; 2 * MAX_LANES] = {
        let mut lanes = [0.0; 2 * MAX_LANES];
        let mut i = CODES - 1;
        while i < lanes.len() {
            lanes[i] = (1u64 << (Self::N_BITS - 1)) as f32;
            i += CODES;
        }
        lanes
    };

    /// `2^-k` for the bit offset k of each lane's code.
    const PLACE: [f32; 2 * MAX_LANES] = {
        let mut lanes = [0.0; 2 * MAX_LANES];
        let mut i = 0;
        while i < lanes.len() {
            lanes[i] = 1.0 / (1u64 << (Self::N_BITS * (i % CODES))) as f32;
            i += 1;
        }
        lanes
    };
}

/// The places of a group's codes, as in [`QuantSpec`](crate::layout::QuantSpec), for a number of
/// bits known at compile time.
pub(super) struct CodeLayout<const BITS: usize>;

impl<const BITS: usize> CodeLayout<BITS> {
    /// True if the high bit of each code is in another word.
    pub(super) const SPLIT: bool = BITS == 3;

    /// The number of codes whose low bits share a word.
    pub(super) const CODES: usize = if Self::SPLIT { 16 } else { 32 / BITS };

    /// Returns the number of words that the codes of `n` elements take.
    pub(super) const fn words(n: usize) -> usize {
        n * BITS / 32
    }

    /// Returns the word with the low bits of code `first`.
    pub(super) const fn low(first: usize) -> usize {
        let run = first / Self::CODES;
        if Self::SPLIT { run / 2 * 3 + run % 2 } else { run }
    }

    /// Returns the distance from [`low`](Self::low) to the word with the high bits; 0 if codes are
    /// whole.
    pub(super) const fn high(first: usize) -> usize {
        if Self::SPLIT { 2 - first / Self::CODES % 2 } else { 0 }
    }
}

/// The operands of a sum of products over packed words and factors, in `n` steps.
///
/// A step has one term, or four adjacent terms in the integer kernels. A term is a vector of codes
/// and, for each query row, one factor that multiplies all of them.
pub(super) struct Terms<'a> {
    pub(super) words: &'a [u32],
    /// Distance in `words` from one step to the next.
    pub(super) stride: usize,
    /// Distance in `words` between the words of one term.
    pub(super) word_stride: usize,
    pub(super) factors: &'a [f32],
    /// Distance in `factors` from one query row to the next.
    pub(super) row_stride: usize,
    pub(super) n: usize,
}

impl Terms<'_> {
    /// Checks that every word and factor is within its slice, for steps of `abreast` terms of
    /// `words` words each and for `rows` query rows.
    ///
    /// # Panics
    /// Panics if one is not.
    #[inline(always)]
    pub(super) fn check(&self, words: usize, rows: usize, abreast: usize) {
        let last = self.n.saturating_sub(1);
        let last_word = last * self.stride + (words - 1) * self.word_stride;
        assert!(last_word + abreast <= self.words.len());
        assert!((rows - 1) * self.row_stride + (last + 1) * abreast <= self.factors.len());
    }
}

/// A reader of the codes of consecutive elements, one per lane of a vector. Split codes are read
/// after [`widen`](super::widen).
pub(super) struct Codes<S: Simd, const BITS: usize> {
    masks: [Vector<S, u32>; MAX_LANES / 4],
    flip: Vector<S, u32>,
    flipped: Vector<S, f32>,
    place: Vector<S, f32>,
}

impl<S: Simd, const BITS: usize> Codes<S, BITS> {
    /// The codes of a word.
    pub(super) const CODES: usize = if CodeLayout::<BITS>::SPLIT { WIDENED } else { 32 / BITS };

    /// Returns the number of words that one vector comes from.
    #[inline(always)]
    fn words() -> usize {
        (u32::lanes::<S>() / Self::CODES).max(1)
    }

    /// Makes a reader for vectors that start at element `first`, a multiple of the lanes.
    #[inline(always)]
    pub(super) fn at(first: usize) -> Self {
        match Self::CODES {
            16 => Self::of::<16>(first),
            8 => Self::of::<8>(first),
            _ => Self::of::<4>(first),
        }
    }

    #[inline(always)]
    fn of<const CODES: usize>(first: usize) -> Self {
        let code = first % CODES;
        let mut masks = [load(&Lanes::<CODES>::MASK[code..]); MAX_LANES / 4];
        if u32::lanes::<S>() > CODES {
            for (mask, lanes) in masks.iter_mut().zip(&Lanes::<CODES>::MASK_OF_WORD) {
                *mask = load(lanes);
            }
        }
        Self {
            masks,
            flip: load(&Lanes::<CODES>::FLIP[code..]),
            flipped: load(&Lanes::<CODES>::FLIPPED[code..]),
            place: load(&Lanes::<CODES>::PLACE[code..]),
        }
    }

    /// Returns the codes times 2^k, as floats. In lanes where [`Lanes::FLIP`] flips a bit, half the
    /// range of a code is missing. [`restore`](Self::restore) corrects both in a sum.
    #[inline(always)]
    fn read(&self, word: impl Fn(usize) -> u32) -> Vector<S, f32> {
        let mut codes = word(0).splat::<S>() & self.masks[0];
        for i in 1..Self::words() {
            codes |= word(i).splat::<S>() & self.masks[i];
        }
        // A split code leaves bit 31 empty, so its sign needs no care.
        if !CodeLayout::<BITS>::SPLIT {
            codes ^= self.flip;
        }
        codes.reinterpret::<i32>().to_float()
    }

    /// Returns, for each query row, the sum over all terms of factor times codes as
    /// [`read`](Self::read) returns them.
    ///
    /// Takes one vector of codes at a time, because a factor that is used once is a memory operand
    /// of its multiplication. Sharing a factor between two vectors needs a separate load, which was
    /// slower on Zen 4.
    #[inline(always)]
    pub(super) fn sums<const ROWS: usize>(&self, terms: &Terms<'_>) -> [Vector<S, f32>; ROWS] {
        terms.check(Self::words(), ROWS, 1);
        let mut even = [0.0f32.splat::<S>(); ROWS];
        let mut odd = even;
        for i in 0..terms.n / 2 {
            self.add(terms, 2 * i, &mut even);
            self.add(terms, 2 * i + 1, &mut odd);
        }
        if terms.n % 2 == 1 {
            self.add(terms, terms.n - 1, &mut even);
        }
        for (even, odd) in even.iter_mut().zip(odd) {
            *even += odd;
        }
        even
    }

    /// Adds the products of term `i` to `sums`. The caller has called [`Terms::check`].
    #[inline(always)]
    fn add<const ROWS: usize>(
        &self,
        terms: &Terms<'_>,
        i: usize,
        sums: &mut [Vector<S, f32>; ROWS],
    ) {
        // SAFETY: the words and factors of every term are in the slices, as the caller has checked.
        let codes = self.read(|word| unsafe {
            *terms.words.get_unchecked(i * terms.stride + word * terms.word_stride)
        });
        // SAFETY: as above.
        let factor = |row| unsafe { *terms.factors.get_unchecked(row * terms.row_stride + i) };
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = codes.mul_add(factor(r).splat(), *sum);
        }
    }

    /// Corrects `sum`, one of [`sums`](Self::sums), for the form in which [`read`](Self::read)
    /// returns codes, and adds `base`. `factors` is the sum of the factors in `sum`.
    #[inline(always)]
    pub(super) fn restore(&self, sum: Vector<S, f32>, factors: f32, base: f32) -> Vector<S, f32> {
        let mut base = base.splat();
        if !CodeLayout::<BITS>::SPLIT {
            base = self.flipped.mul_add(factors.splat(), base);
        }
        sum.mul_add(self.place, base)
    }
}
