//! MXFP4: blocks of 32 numbers of 4 bits (E2M1) with a power of two, as the Open Compute Project's
//! "Microscaling Formats" has them.

/// Numbers of a block.
pub(crate) const BLOCK: usize = 32;
/// Bytes of a block in a GGUF file: the scale, then codes, those of the first half of the numbers in the lower
/// halves of the bytes.
pub(crate) const BLOCK_BYTES: usize = 1 + BLOCK / 2;

/// 32 codes of two to a byte, the first of two in its lower half, as 16 bytes whose lower halves have the first 16.
pub(crate) fn halves(codes: &[u8]) -> [u8; BLOCK / 2] {
    let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
    core::array::from_fn(|at| code(at) | code(at + BLOCK / 2) << 4)
}

/// The opposite of [`halves`].
pub(crate) fn pairs(codes: &[u8]) -> [u8; BLOCK / 2] {
    let code = |i: usize| codes[i % (BLOCK / 2)] >> (i / (BLOCK / 2) * 4) & 15;
    core::array::from_fn(|at| code(2 * at) | code(2 * at + 1) << 4)
}

/// A block of a GGUF file from one of a Hugging Face file, in which neighbors share a byte and scales are apart.
pub(crate) fn gguf_block(codes: &[u8], scale: u8) -> [u8; BLOCK_BYTES] {
    let mut block = [scale; BLOCK_BYTES];
    block[1..].copy_from_slice(&halves(codes));
    block
}
