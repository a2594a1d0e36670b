//! Blocks on the CPU: each format unpacks its blocks into bytes, on which all portable code builds.

use std::borrow::Cow;

use half::f16;

use super::{WeightFormat, with_blocks};

/// The most numbers in a block of any format.
pub(crate) const MOST: usize = 256;

/// A format as the CPU reads it. Number `i` of a block is `scale * (code - ZERO) + min`, computed
/// in f32. There is a scale for each [`SPAN`](Self::SPAN) numbers and, if [`MINS`](Self::MINS), a
/// minimum for each 32.
pub(crate) trait Blocks: Copy + Default + Send + Sync + 'static {
    /// Numbers in a block.
    const NUMBERS: usize;
    /// Bytes in a block.
    const BYTES: usize;
    /// The zero code.
    const ZERO: u8;
    /// Numbers that share a scale, 32 or 16.
    const SPAN: usize;
    /// True if there are minima.
    const MINS: bool;

    /// Unpacks a block of [`BYTES`](Self::BYTES) into `NUMBERS` codes, `NUMBERS / SPAN` scales and,
    /// if there are any, `NUMBERS / 32` minima.
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]);
}

/// A format of 16-bit floats.
pub(crate) trait Wide: Copy + Default + Send + Sync + 'static {
    /// Returns the number with these bits.
    fn widened(bits: u16) -> f32;

    /// Widens as many numbers as there are bits.
    #[inline(always)]
    fn widen(bits: &[u16], out: &mut [f32]) {
        for (out, &bits) in out.iter_mut().zip(bits) {
            *out = Self::widened(bits);
        }
    }
}

/// Conversion of f16 scales to f32.
pub(crate) trait Halves {
    /// Returns the number with these bits.
    fn widened(bits: u16) -> f32;
}

/// Conversion that detects the processor's instructions at each call.
#[derive(Clone, Copy)]
pub(crate) struct AnyHalves;

impl Halves for AnyHalves {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }
}

/// Reads the f16 at byte `at`.
#[inline(always)]
pub(super) fn half<H: Halves>(block: &[u8], at: usize) -> f32 {
    H::widened(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Unpacks 32 codes of 4 bits: the first half is in the lower halves of the 16 bytes.
#[inline(always)]
pub(super) fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for i in 0..16 {
        low[i] = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
}

/// Adds the fifth bits of 32 codes, stored as a word at byte `at`.
#[inline(always)]
pub(super) fn add_fifth_bits(block: &[u8], at: usize, codes: &mut [u8]) {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    for (i, code) in codes[..32].iter_mut().enumerate() {
        *code |= ((bits >> i & 1) << 4) as u8;
    }
}

/// Restores whole blocks of any format.
#[inline(always)]
pub(crate) fn restore(format: WeightFormat, blocks: &[u8], out: &mut [f32]) {
    with_blocks!(format, F => restore_blocks::<F>(blocks, out), wide W => {
        W::widen(&bits(blocks), out)
    });
}

/// Returns the bits of 16-bit floats, copied only if they are at odd addresses.
pub(crate) fn bits(blocks: &[u8]) -> Cow<'_, [u16]> {
    match bytemuck::try_cast_slice(blocks) {
        Ok(bits) => Cow::Borrowed(bits),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(blocks)),
    }
}

/// Restores whole blocks.
#[inline(always)]
pub(crate) fn restore_blocks<F: Blocks>(blocks: &[u8], out: &mut [f32]) {
    let (mut codes, mut scales, mut mins) = ([0; MOST], [0.0; MOST / 16], [0.0; MOST / 32]);
    for (block, out) in blocks.chunks_exact(F::BYTES).zip(out.chunks_exact_mut(F::NUMBERS)) {
        F::unpack::<AnyHalves>(block, &mut codes, &mut scales, &mut mins);
        for (span, out) in out.chunks_exact_mut(F::SPAN).enumerate() {
            let (codes, scale) = (&codes[span * F::SPAN..][..F::SPAN], scales[span]);
            let zero = i32::from(F::ZERO);
            if F::MINS {
                let min = mins[span * F::SPAN / 32];
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = (i32::from(code) - zero) as f32 * scale + min;
                }
            } else {
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = (i32::from(code) - zero) as f32 * scale;
                }
            }
        }
    }
}
