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

/// One element, by a load of its own: a gather of several, which the compiler would make of a loop,
/// is slower.
#[inline(always)]
pub(super) fn load_alone(x: &u32) -> u32 {
    // SAFETY: a reference is valid to read from.
    unsafe { core::ptr::from_ref(x).read_volatile() }
}

/// Asks for `len` elements of `x` from `start` on, as far as there are so many, to be brought into
/// the first-level cache.
#[inline(always)]
pub(super) fn prefetch<T>(x: &[T], start: usize, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        /// Bytes of a cache line.
        const LINE: usize = 64;
        let end = x.len().min(start + len);
        for line in x[start.min(end)..end].chunks(LINE / size_of::<T>()) {
            // SAFETY: a prefetch is a hint and every x86-64 processor has it.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, start, len);
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

/// `e^x` for `x` up to 87, within 2 ulp; 0 below -87.
///
/// Cody-Waite reduction to `|r| <= ln2 / 2` and the degree-6 minimax polynomial of Cephes `expf`.
#[inline(always)]
fn exp<S: Simd>(x: Vector<S, f32>) -> Vector<S, f32> {
    const LOWEST: f32 = -87.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 5] =
        [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // Adding 1.5 * 2^23 rounds to the nearest integer, whose low bits are then the float's.
    let round = 12_582_912.0.splat();
    // In this order NaN stays NaN on x86.
    let clamped = LOWEST.splat::<S>().max(x);
    let rounded = clamped.mul_add(core::f32::consts::LOG2_E.splat(), round);
    let n = rounded - round;
    let r = n.mul_add((-LN2_HIGH).splat(), clamped);
    let r = n.mul_add((-LN2_LOW).splat(), r);
    let mut p = 1.987_569_1e-4f32.splat::<S>();
    for coefficient in POLYNOMIAL {
        p = p.mul_add(r, coefficient.splat());
    }
    let y = p.mul_add(r * r, r + 1.0.splat());
    let exponent = (rounded.reinterpret::<u32>() << 23) + (127u32 << 23).splat();
    x.lt(LOWEST.splat()).select(0.0.splat(), exponent.reinterpret::<f32>() * y)
}

/// Dot products of `a` with four rows, sharing its loads and the reduction.
#[inline(always)]
pub(super) fn dot4(a: &[f32], rows: [&[f32]; 4]) -> [f32; 4] {
    let (a_chunks, a_rest) = a.as_chunks::<MAX_LANES>();
    let [r0, r1, r2, r3] = rows.map(|row| row.as_chunks::<MAX_LANES>());
    let mut lanes = [[0.0; MAX_LANES]; 4];
    let chunks = a_chunks.iter().zip(r0.0).zip(r1.0).zip(r2.0).zip(r3.0);
    for ((((a, b0), b1), b2), b3) in chunks {
        for i in 0..MAX_LANES {
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

/// Replaces each score by `e^(score - maximum)` and returns their sum.
#[macerator::with_simd]
pub(in crate::backends::flex) fn exp_minus_max<S: Simd>(scores: &mut [f32], maximum: f32) -> f32 {
    let maximum = maximum.splat::<S>();
    let mut sum = 0.0f32.splat::<S>();
    let mut chunks = scores.chunks_exact_mut(f32::lanes::<S>());
    for chunk in &mut chunks {
        let e = exp(load(chunk) - maximum);
        store(chunk, e);
        sum += e;
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; MAX_LANES];
        last[..rest.len()].copy_from_slice(rest);
        let e = exp(load(&last) - maximum);
        store(&mut last, e);
        rest.copy_from_slice(&last[..rest.len()]);
        sum += e;
    }
    sum.reduce_add()
}

/// Largest element, `-inf` of none.
#[macerator::with_simd]
pub(in crate::backends::flex) fn maximum<S: Simd>(x: &[f32]) -> f32 {
    let mut largest = f32::NEG_INFINITY.splat::<S>();
    let chunks = x.chunks_exact(f32::lanes::<S>());
    let rest = chunks.remainder().iter().copied();
    for chunk in chunks {
        largest = load::<S, f32>(chunk).max(largest);
    }
    rest.fold(largest.reduce_max(), f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_of_f64() {
        let mut e: Vec<f32> = (0..870_000).map(|i| -(i as f32) * 1e-4).collect();
        exp_minus_max(&mut e, 0.0);
        for (i, e) in e.into_iter().enumerate() {
            let expected = f64::from(-(i as f32) * 1e-4).exp();
            let relative = (f64::from(e) - expected).abs() / expected;
            // 2 ulp of f32: 2 * 2^-23.
            assert!(relative <= 2.4e-7, "exp(-{i}e-4): relative error {relative}");
        }
        let mut edges = [-88.0, f32::NEG_INFINITY, 0.0];
        assert_eq!(exp_minus_max(&mut edges, 0.0), 1.0);
        assert_eq!(edges, [0.0, 0.0, 1.0]);
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
