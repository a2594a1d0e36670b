//! Vectors of the CPU.
//!
//! macerator compiles a function marked `with_simd` once per vector extension and picks one when it
//! runs. Such a function uses its vectors, or loops over slices, which the compiler vectorizes with
//! the same extension. Vectors must not be touched in closures that are handed to an iterator or to
//! `from_fn`: those are functions of their own, compiled without the extension, where every
//! operation is a call.

use macerator::{Scalar, Simd, Vector};

/// Most 32-bit lanes of a vector.
pub(super) const MAX_LANES: usize = 16;

/// 32-bit lanes of this CPU's vectors.
#[macerator::with_simd]
pub(super) fn lanes<S: Simd>() -> usize {
    f32::lanes::<S>()
}

/// The first elements of `x`.
#[inline(always)]
pub(super) fn load<S: Simd, T: Scalar>(x: &[T]) -> Vector<S, T> {
    assert!(x.len() >= T::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vload_unaligned(x.as_ptr()) }
}

/// Overwrites the first elements of `x`.
#[inline(always)]
pub(super) fn store<S: Simd, T: Scalar>(x: &mut [T], vector: Vector<S, T>) {
    assert!(x.len() >= T::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vstore_unaligned(x.as_mut_ptr(), vector) }
}

/// Dot product.
#[inline(always)]
pub(super) fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let lanes = f32::lanes::<S>();
    let (a, b) = (a.chunks_exact(lanes), b.chunks_exact(lanes));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    let mut sum = 0.0f32.splat::<S>();
    for (a, b) in a.zip(b) {
        sum = load::<S, f32>(a).mul_add(load(b), sum);
    }
    sum.reduce_add() + rest
}

/// Sum of the elements.
#[inline(always)]
pub(super) fn sum<S: Simd>(x: &[f32]) -> f32 {
    let chunks = x.chunks_exact(f32::lanes::<S>());
    let rest: f32 = chunks.remainder().iter().sum();
    let mut sum = 0.0f32.splat::<S>();
    for x in chunks {
        sum += load::<S, f32>(x);
    }
    sum.reduce_add() + rest
}

/// `e^x` for `x <= 0`, within 2 ulp; 0 below -87. Branch-free, so that loops over it vectorize.
///
/// Cody-Waite reduction to `|r| <= ln2 / 2` and the degree-6 minimax polynomial of Cephes `expf`.
#[inline(always)]
pub(super) fn exp_nonpositive(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.max(-87.0);
    let n = (clamped * core::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    let scaled = f32::from_bits(((n as i32 + 127) as u32) << 23) * y;
    if x < -87.0 { 0.0 } else { scaled }
}

/// Independent partial results of a reduction, so that it vectorizes.
pub(super) const LANES: usize = 16;

/// Largest element, `-inf` of none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Dot products of `a` with four rows, sharing its loads and the reduction.
#[inline(always)]
pub(super) fn dot4(a: &[f32], rows: [&[f32]; 4]) -> [f32; 4] {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let [r0, r1, r2, r3] = rows.map(|row| row.as_chunks::<LANES>());
    let mut lanes = [[0.0; LANES]; 4];
    let chunks = a_chunks.iter().zip(r0.0).zip(r1.0).zip(r2.0).zip(r3.0);
    for ((((a, b0), b1), b2), b3) in chunks {
        for i in 0..LANES {
            lanes[0][i] += a[i] * b0[i];
            lanes[1][i] += a[i] * b1[i];
            lanes[2][i] += a[i] * b2[i];
            lanes[3][i] += a[i] * b3[i];
        }
    }
    let mut quarters = [[0.0; 4]; 4];
    for (quarter, lanes) in quarters.iter_mut().zip(&lanes) {
        for i in 0..4 {
            quarter[i] = (lanes[i] + lanes[i + 4]) + (lanes[i + 8] + lanes[i + 12]);
        }
    }
    let mut sums = [0.0; 4];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = (quarters[i][0] + quarters[i][1]) + (quarters[i][2] + quarters[i][3]);
    }
    for (sum, rest) in sums.iter_mut().zip([r0.1, r1.1, r2.1, r3.1]) {
        *sum += a_rest.iter().zip(rest).map(|(x, y)| x * y).sum::<f32>();
    }
    sums
}

#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Replaces each score by `e^(score - maximum)` and returns their sum.
#[macerator::with_simd]
pub(in crate::backends::flex) fn exp_minus_max<S: Simd>(scores: &mut [f32], maximum: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *score = exp_nonpositive(*score - maximum);
            *lane += *score;
        }
    }
    let mut sum = sum_lanes(lanes);
    for score in rest {
        *score = exp_nonpositive(*score - maximum);
        sum += *score;
    }
    sum
}

/// Largest element, `-inf` of none.
#[macerator::with_simd]
pub(in crate::backends::flex) fn maximum<S: Simd>(x: &[f32]) -> f32 {
    max(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_of_f64() {
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let expected = (x as f64).exp();
            let relative = (exp_nonpositive(x) as f64 - expected).abs() / expected;
            // 2 ulp of f32: 2 * 2^-23.
            assert!(relative <= 2.4e-7, "exp({x}): relative error {relative}");
        }
        assert_eq!(exp_nonpositive(-88.0), 0.0);
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive(0.0), 1.0);
    }

    #[macerator::with_simd]
    fn dot_and_sum<S: Simd>(x: &[f32]) -> [f32; 2] {
        [dot::<S>(x, x), sum::<S>(x)]
    }

    #[test]
    fn reductions_cover_every_length() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(maximum(&x), largest);
            let squares: f32 = x.iter().map(|v| v * v).sum();
            let total: f32 = x.iter().sum();
            assert_eq!(dot_and_sum(&x), [squares, total], "small integers add exactly");
            let mut e = x.clone();
            let sum = exp_minus_max(&mut e, largest);
            let expected: f64 = x.iter().map(|&v| ((v - largest) as f64).exp()).sum();
            assert!((sum as f64 - expected).abs() <= 1e-5 * expected.max(1.0));
        }
    }
}
