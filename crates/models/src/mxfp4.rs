//! MXFP4: blocks of 32 numbers of 4 bits (E2M1) that share a power of two, as defined in the Open
//! Compute Project's "Microscaling Formats".

pub(crate) const BLOCK: usize = 32;
/// Bytes of a block in a GGUF file: the scale, then codes. The lower halves of the bytes have the
/// first half of the numbers.
pub(crate) const BLOCK_BYTES: usize = 1 + BLOCK / 2;

/// Converts 32 codes from neighbors in a byte, the first in its lower half, to 16 bytes whose lower
/// halves have the first 16 codes.
pub(crate) fn halves(codes: &[u8]) -> [u8; BLOCK / 2] {
    let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
    core::array::from_fn(|at| code(at) | code(at + BLOCK / 2) << 4)
}

/// Inverts [`halves`].
pub(crate) fn pairs(codes: &[u8]) -> [u8; BLOCK / 2] {
    let code = |i: usize| codes[i % (BLOCK / 2)] >> (i / (BLOCK / 2) * 4) & 15;
    core::array::from_fn(|at| code(2 * at) | code(2 * at + 1) << 4)
}

/// Converts a block of a Hugging Face file, with neighbors in a byte and the scale apart, to a
/// block of a GGUF file.
pub(crate) fn gguf_block(codes: &[u8], scale: u8) -> [u8; BLOCK_BYTES] {
    let mut block = [scale; BLOCK_BYTES];
    block[1..].copy_from_slice(&halves(codes));
    block
}
