//! Portable vector code for the CPU.
//!
//! macerator compiles a function marked `with_simd` once for each vector extension (SSE, AVX2,
//! AVX-512, NEON) and picks one when it is called. Such a function uses macerator's vectors, or
//! plain loops over slices, which the compiler vectorizes with the same extension.
//!
//! Vectors must not be used in closures that are passed to an iterator or to `from_fn`: the
//! compiler builds such closures without the extension, and every vector operation in them becomes
//! a function call.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod delta;
mod hadamard;
mod index;
mod rows;
#[cfg(target_arch = "x86_64")]
mod transpose;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vnni;

use core::f32::consts::LN_2;

use macerator::{Scalar, Simd, Vector};

pub(crate) use delta::{HeadTokens, convolve, delta_tokens, silu};
pub(crate) use hadamard::hadamard;
pub(crate) use index::HeadLanes;
pub(crate) use rows::{add_rows, score_rows};

/// The most 32-bit lanes that a vector has: 16 with AVX-512.
pub(crate) const MAX_LANES: usize = 16;

/// 32-bit lanes of this CPU's vectors.
#[macerator::with_simd]
pub(crate) fn lanes<S: Simd>() -> usize {
    f32::lanes::<S>()
}

/// A vector of the first elements of `x`.
#[inline(always)]
pub(crate) fn load<S: Simd, T: Scalar>(x: &[T]) -> Vector<S, T> {
    assert!(x.len() >= T::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vload_unaligned(x.as_ptr()) }
}

/// Overwrites the first elements of `x` with a vector.
#[inline(always)]
pub(crate) fn store<S: Simd, T: Scalar>(x: &mut [T], vector: Vector<S, T>) {
    assert!(x.len() >= T::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vstore_unaligned(x.as_mut_ptr(), vector) }
}

/// Overwrites `x`, which is no longer than a vector, with the first lanes of `vector`.
#[inline(always)]
pub(crate) fn store_part<S: Simd>(x: &mut [f32], vector: Vector<S, f32>) {
    if x.len() == f32::lanes::<S>() {
        return store(x, vector);
    }
    let mut all = [0.0; MAX_LANES];
    store(&mut all, vector);
    x.copy_from_slice(&all[..x.len()]);
}

/// `out[i] = x[i * stride]`. Each load is volatile, which keeps the compiler from using the
/// processor's gather instruction, as that is slower.
#[inline(always)]
pub(crate) fn gather(x: &[u32], stride: usize, out: &mut [u32]) {
    assert!(out.is_empty() || (out.len() - 1) * stride < x.len());
    let mut from = x.as_ptr();
    for out in out {
        // SAFETY: the pointer is within `x`, as asserted; only past the last element it is not, and
        // is not read.
        *out = unsafe { from.read_volatile() };
        from = from.wrapping_add(stride);
    }
}

/// Prefetches `len` words of `x` from `start` on into the L1 cache; words past its end are left
/// out.
#[inline(always)]
pub(crate) fn prefetch(x: &[u32], start: usize, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        /// Words of a cache line.
        const LINE: usize = 64 / size_of::<u32>();
        let lines = len.min(x.len().saturating_sub(start)).div_ceil(LINE);
        for line in 0..lines {
            // SAFETY: the address is within `x`; a prefetch, which every x86-64 processor has,
            // changes no data.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().add(start + line * LINE).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, start, len);
}

/// Dot products of `a` with each row. `a` is loaded once for all of them.
#[inline(always)]
pub(crate) fn dots<S: Simd, const N: usize>(a: &[f32], rows: [&[f32]; N]) -> [f32; N] {
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
pub(crate) fn add_scaled<S: Simd, const N: usize>(
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

/// `2^x` for `x` up to 127, within 2 ulp; 0 below -127.
///
/// x is split into the nearest integer and a rest r with `|r| <= 1/2`. `2^r` is a polynomial of
/// degree 5, the one of least relative error (1.05e-7) among those that begin `1 + r ln 2`; the
/// integer becomes the exponent of a float.
#[inline(always)]
fn exp2<S: Simd>(x: Vector<S, f32>) -> Vector<S, f32> {
    /// At this `x` the exponent bits of the result are 0, which makes it the number 0.
    const LOWEST: f32 = -127.0;
    const POLYNOMIAL: [f32; 6] =
        [1.330_060_5e-3, 9.669_691e-3, 5.550_558_5e-2, 2.402_228_3e-1, LN_2, 1.0];
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits of the float.
    // The further 127 is the bias of a float's exponent.
    let round = (12_582_912.0 + 127.0).splat();
    // x86 returns the second operand of `max` if one is NaN, so that in this order NaN stays NaN.
    let x = LOWEST.splat::<S>().max(x);
    let rounded = x + round;
    let r = x - (rounded - round);
    let mut p = POLYNOMIAL[0].splat::<S>();
    for &coefficient in &POLYNOMIAL[1..] {
        p = p.mul_add(r, coefficient.splat());
    }
    let exponent = rounded.reinterpret::<u32>() << 23;
    exponent.reinterpret::<f32>() * p
}

/// Replaces each score by `2^(score - maximum)` and returns their sum.
///
/// Powers of 2 are cheaper than powers of e. The scores were multiplied by `log2 e` along with
/// their scale, so that the softmax is the same.
#[macerator::with_simd]
pub(crate) fn exp2_minus_max<S: Simd>(scores: &mut [f32], maximum: f32) -> f32 {
    let maximum = maximum.splat::<S>();
    let mut sum = 0.0f32.splat::<S>();
    let mut chunks = scores.chunks_exact_mut(f32::lanes::<S>());
    for chunk in &mut chunks {
        let e = exp2(load(chunk) - maximum);
        store(chunk, e);
        sum += e;
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; MAX_LANES];
        last[..rest.len()].copy_from_slice(rest);
        let e = exp2(load(&last) - maximum);
        store_part(rest, e);
        sum += e;
    }
    sum.reduce_add()
}

/// Log-sum-exp to base e, from the maximum of the scores to base 2 and the sum that
/// [`exp2_minus_max`] returned for them.
pub(crate) fn log_sum_exp(maximum: f32, sum: f32) -> f32 {
    maximum * LN_2 + sum.ln()
}

/// Returns the number to subtract from scores with this maximum before they become powers of 2.
/// That is `maximum`, or 0 where it is `-inf`: all scores are then `-inf` and must get weight 0,
/// while `-inf - -inf` is NaN.
pub(crate) fn finite_or_zero(maximum: f32) -> f32 {
    if maximum == f32::NEG_INFINITY { 0.0 } else { maximum }
}

/// Returns whether all numbers are finite. Never stops early, so the compiler can vectorize the
/// loop.
pub(crate) fn all_finite(x: &[f32]) -> bool {
    x.iter().fold(true, |finite, x| finite & x.is_finite())
}

/// Bounds scores by `cap`: `cap * tanh(score / cap)`. The libm function, since few models do it.
pub(crate) fn softcap(scores: &mut [f32], cap: f32) {
    scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
}

/// The largest element; `-inf` of an empty slice.
#[macerator::with_simd]
pub(crate) fn maximum<S: Simd>(x: &[f32]) -> f32 {
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
    fn exp2_is_within_two_ulp_of_f64() {
        let mut e: Vec<f32> = (0..1_260_000).map(|i| -(i as f32) * 1e-4).collect();
        exp2_minus_max(&mut e, 0.0);
        for (i, e) in e.into_iter().enumerate() {
            let expected = f64::from(-(i as f32) * 1e-4).exp2();
            let relative = (f64::from(e) - expected).abs() / expected;
            // 2 ulp of f32: 2 * 2^-23.
            assert!(relative <= 2.4e-7, "exp2(-{i}e-4): relative error {relative}");
        }
        let mut edges = [-128.0, f32::NEG_INFINITY, 0.0];
        assert_eq!(exp2_minus_max(&mut edges, 0.0), 1.0);
        assert_eq!(edges, [0.0, 0.0, 1.0]);
    }

    #[macerator::with_simd]
    fn squares<S: Simd>(x: &[f32]) -> [f32; 2] {
        dots::<S, 2>(x, [x, x])
    }

    #[macerator::with_simd]
    fn add_twice<S: Simd>(x: &[f32], o: &mut [f32]) {
        add_scaled::<S, 2>(&[2.0, 3.0], [x, x], o);
    }

    #[test]
    fn reductions_cover_every_length() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(maximum(&x), largest);
            let expected: f32 = x.iter().map(|v| v * v).sum();
            assert_eq!(squares(&x), [expected; 2], "small integers add exactly");
            let mut o = x.clone();
            add_twice(&x, &mut o);
            assert_eq!(o, x.iter().map(|x| 6.0 * x).collect::<Vec<_>>());
            let mut e = x.clone();
            let sum = exp2_minus_max(&mut e, largest);
            let expected: f64 = x.iter().map(|&v| ((v - largest) as f64).exp2()).sum();
            assert!((sum as f64 - expected).abs() <= 1e-5 * expected.max(1.0));
        }
    }
}
