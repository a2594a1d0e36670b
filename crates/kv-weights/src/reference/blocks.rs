use half::f16;

use crate::WeightFormat;

/// Restores whole blocks. An incomplete last block is ignored.
pub fn restore(format: WeightFormat, blocks: &[u8]) -> Vec<f32> {
    let numbers = format.block_numbers();
    let number = |block: &[u8], i| number(format, block, i);
    blocks
        .chunks_exact(format.block_bytes())
        .flat_map(|block| (0..numbers).map(move |i| number(block, i)))
        .collect()
}

/// Returns number `i` of a block, as defined by `dequantize_row_*` in `ggml-quants.c`.
fn number(format: WeightFormat, block: &[u8], i: usize) -> f32 {
    match format {
        WeightFormat::Q4_0 => f(block, 0) * signed(nibble(&block[2..], i), 8),
        WeightFormat::Q4_1 => f(block, 0) * f32::from(nibble(&block[4..], i)) + f(block, 2),
        WeightFormat::Q5_0 => {
            f(block, 0) * signed(nibble(&block[6..], i) + 16 * bit(&block[2..], i), 16)
        }
        WeightFormat::Q5_1 => {
            let code = nibble(&block[8..], i) + 16 * bit(&block[4..], i);
            f(block, 0) * f32::from(code) + f(block, 2)
        }
        WeightFormat::Q8_0 => f(block, 0) * f32::from(block[2 + i] as i8),
        WeightFormat::Q4K => {
            let code = super_nibble(&block[16..], i);
            let (scale, min) = scale_and_min(&block[4..], i / 32);
            f(block, 0) * scale * f32::from(code) - f(block, 2) * min
        }
        WeightFormat::Q5K => {
            let code = super_nibble(&block[48..], i) + 16 * (block[16 + i % 32] >> (i / 32) & 1);
            let (scale, min) = scale_and_min(&block[4..], i / 32);
            f(block, 0) * scale * f32::from(code) - f(block, 2) * min
        }
        WeightFormat::Q6K => {
            let (half, quarter, at) = (i / 128, i % 128 / 32, i % 32);
            let low = block[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter / 2)) & 15;
            let high = block[128 + 32 * half + at] >> (2 * quarter) & 3;
            let scale = block[192 + i / 16] as i8;
            f(block, 208) * f32::from(scale) * signed(low + 16 * high, 32)
        }
        WeightFormat::Mxfp4 => {
            let code = nibble(&block[1..], i);
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
            let scale = 2f64.powi(i32::from(block[0]) - 127);
            let product = (magnitude * scale) as f32;
            // Code 8 is 0, not -0.
            if code > 8 { -product } else { product }
        }
        WeightFormat::Int4(_) => {
            let code = nibble(&block[4 + i / 32 * 16..], i % 32);
            // Adding 0 turns -0 into 0.
            f(block, 0) * signed(code, zero(block)) + 0.0
        }
        WeightFormat::Int8(_) => f(block, 0) * signed(block[4 + i], zero(block)) + 0.0,
        WeightFormat::F16 => float(short(block, i), 5) as f32,
        WeightFormat::Bf16 => float(short(block, i), 8) as f32,
    }
}

fn short(block: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([block[2 * i], block[2 * i + 1]])
}

/// Returns the value of a 16-bit IEEE 754 number: a sign, `exponent_bits` bits of exponent, and a
/// fraction.
fn float(bits: u16, exponent_bits: u32) -> f64 {
    let fraction_bits = 15 - exponent_bits;
    let exponent = i32::from(bits & 0x7fff) >> fraction_bits;
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
    let (largest, bias) = ((1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1);
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ if exponent < largest => (1.0 + fraction) * 2f64.powi(exponent - bias),
        _ if fraction == 0.0 => f64::INFINITY,
        _ => f64::NAN,
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

fn f(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn signed(code: u8, zero: i16) -> f32 {
    f32::from(i16::from(code) - zero)
}

fn zero(group: &[u8]) -> i16 {
    i16::from_le_bytes([group[2], group[3]])
}

/// Returns code `i` of 32. The first half is in the lower halves of the bytes.
fn nibble(codes: &[u8], i: usize) -> u8 {
    if i < 16 { codes[i] % 16 } else { codes[i - 16] / 16 }
}

/// Returns code `i` of 256. Each 32 bytes hold 32 codes in their lower halves, then 32 in their
/// upper halves.
fn super_nibble(codes: &[u8], i: usize) -> u8 {
    let byte = codes[i / 64 * 32 + i % 32];
    if i % 64 < 32 { byte % 16 } else { byte / 16 }
}

fn bit(bits: &[u8], i: usize) -> u8 {
    bits[i / 8] >> (i % 8) & 1
}

/// Reads scale and minimum of a group, as `get_scale_min_k4` in `ggml-quants.c`.
fn scale_and_min(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, min) = match group {
        0..4 => (packed[group] % 64, packed[group + 4] % 64),
        _ => (
            packed[group + 4] % 16 + packed[group - 4] / 64 * 16,
            packed[group + 4] / 16 + packed[group] / 64 * 16,
        ),
    };
    (f32::from(scale), f32::from(min))
}
