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

/// Overwrites all of `x`, at most a vector.
#[inline(always)]
pub(super) fn store_part<S: Simd>(x: &mut [f32], vector: Vector<S, f32>) {
    if x.len() == f32::lanes::<S>() {
        return store(x, vector);
    }
    let mut all = [0.0; MAX_LANES];
    store(&mut all, vector);
    x.copy_from_slice(&all[..x.len()]);
}

/// `out[i] = x[i * stride]`, each by a load of its own: the compiler would use the processor's gather, which
/// is slower.
#[inline(always)]
pub(super) fn gather(x: &[u32], stride: usize, out: &mut [u32]) {
    assert!(out.is_empty() || (out.len() - 1) * stride < x.len());
    let mut from = x.as_ptr();
    for out in out {
        // SAFETY: within `x`, as asserted; the pointer past the last one is not read.
        *out = unsafe { from.read_volatile() };
        from = from.wrapping_add(stride);
    }
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
        let step = LINE / size_of::<T>();
        let lines = len.min(x.len().saturating_sub(start)).div_ceil(step);
        for line in 0..lines {
            // SAFETY: within `x`, and a prefetch is a hint, which every x86-64 processor has.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().add(start + line * step).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, start, len);
}

/// Dot products of `a` with each row, sharing its loads.
#[inline(always)]
pub(super) fn dots<S: Simd, const N: usize>(a: &[f32], rows: [&[f32]; N]) -> [f32; N] {
    let lanes = f32::lanes::<S>();
    let whole = a.len() / lanes * lanes;
    let mut sums = [0.0f32.splat::<S>(); N];
    for first in (0..whole).step_by(lanes) {
        let x = load::<S, f32>(&a[first..]);
        for (sum, row) in sums.iter_mut().zip(rows) {
            *sum = x.mul_add(load(&row[first..]), *sum);
        }
    }
    let mut dots = [0.0; N];
    for (i, dot) in dots.iter_mut().enumerate() {
        let rest: f32 = a[whole..].iter().zip(&rows[i][whole..]).map(|(a, b)| a * b).sum();
        *dot = sums[i].reduce_add() + rest;
    }
    dots
}

/// `o += sum_i weights[i] * rows[i]`, with one load and store of `o`.
#[inline(always)]
pub(super) fn add_scaled<S: Simd, const N: usize>(
    weights: &[f32],
    rows: [&[f32]; N],
    o: &mut [f32],
) {
    let lanes = f32::lanes::<S>();
    let whole = o.len() / lanes * lanes;
    let weights = &weights[..N];
    for first in (0..whole).step_by(lanes) {
        let o = &mut o[first..];
        let mut sum = load::<S, f32>(o);
        for (row, weight) in rows.iter().zip(weights) {
            sum = load::<S, f32>(&row[first..]).mul_add(weight.splat(), sum);
        }
        store(o, sum);
    }
    for i in whole..o.len() {
        for (row, weight) in rows.iter().zip(weights) {
            o[i] += weight * row[i];
        }
    }
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
    fn squares<S: Simd>(x: &[f32]) -> [f32; 2] {
        dots::<S, 2>(x, [x, x])
    }

    #[test]
    fn reductions_cover_every_length() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(maximum(&x), largest);
            let expected: f32 = x.iter().map(|v| v * v).sum();
            assert_eq!(squares(&x), [expected; 2], "small integers add exactly");
            let mut e = x.clone();
            let sum = exp_minus_max(&mut e, largest);
            let expected: f64 = x.iter().map(|&v| ((v - largest) as f64).exp()).sum();
            assert!((sum as f64 - expected).abs() <= 1e-5 * expected.max(1.0));
        }
    }
}
