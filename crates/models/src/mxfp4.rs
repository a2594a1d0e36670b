//! MXFP4: blocks of 32 numbers of 4 bits (E2M1) with a power of two, as the Open Compute Project's
//! "Microscaling Formats" has them.

/// Numbers of a block.
pub(crate) const BLOCK: usize = 32;
/// Bytes of a block in a GGUF file: the scale, then codes, those of the first half of the numbers in the lower
/// halves of the bytes.
pub(crate) const BLOCK_BYTES: usize = 1 + BLOCK / 2;

/// The number of a code.
pub(crate) fn value(code: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The power of two that a scale stands for.
pub(crate) fn scale(exponent: u8) -> f32 {
    2f64.powi(i32::from(exponent) - 127) as f32
}

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

/// Restores the blocks of a GGUF file.
pub(crate) fn restore(bytes: &[u8]) -> Vec<f32> {
    let mut values = Vec::with_capacity(bytes.len() / BLOCK_BYTES * BLOCK);
    for block in bytes.chunks_exact(BLOCK_BYTES) {
        let (scale, codes) = (scale(block[0]), &block[1..]);
        values.extend(codes.iter().map(|byte| value(byte & 15) * scale));
        values.extend(codes.iter().map(|byte| value(byte >> 4) * scale));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks and numbers of the package gguf 0.19: `gguf.quants.quantize` and `dequantize`.
    #[test]
    fn blocks_are_restored_as_by_the_gguf_package() {
        let bytes = [
            [121, 21, 157, 33, 153, 9, 73, 29, 153, 10, 22, 65, 153, 153, 58, 171, 153],
            [128, 20, 83, 144, 195, 63, 53, 156, 206, 17, 244, 58, 45, 224, 0, 198, 68],
        ]
        .concat();
        #[rustfmt::skip]
        let expected = [
            6.0, -6.0, 1.0, -1.0, -1.0, -1.0, -6.0, -1.0, -2.0, 8.0, 1.0, -1.0, -1.0, -2.0, -3.0, -1.0,
            1.0, -1.0, 2.0, -1.0, 0.0, 4.0, 1.0, -1.0, 0.0, 1.0, 4.0, -1.0, -1.0, 3.0, -2.0, -1.0,
        ]
        .map(|x: f32| x / 128.0);
        #[rustfmt::skip]
        let larger = [
            4.0f32, 3.0, 0.0, 3.0, -12.0, 6.0, -4.0, -8.0, 1.0, 4.0, -2.0, -6.0, 0.0, 0.0, 8.0, 4.0,
            1.0, 6.0, -1.0, -4.0, 3.0, 3.0, -1.0, -4.0, 1.0, -12.0, 3.0, 2.0, -8.0, 0.0, -4.0, 4.0,
        ];
        let restored = restore(&bytes);
        assert_eq!(restored, [expected, larger].concat());
        // The smallest scale is a subnormal number.
        assert_eq!(scale(0), 2f32.powi(-126) / 2.0);
    }
}
