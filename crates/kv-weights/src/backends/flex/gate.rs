//! Gates, in one pass.
//!
//! Burn's Flex backend computes an activation in several passes with the exponential of the standard library, one number
//! at a time: for prompts that is a fifth of all time, or a third with GELU.

use core::mem::MaybeUninit;

use macerator::Simd;

use super::{stacked::Stacked, threads::in_parts};
use crate::Gate;

/// Numbers that a thread computes at a time, about.
const PART: usize = 1 << 13;

/// `f(gate) * up` for rows of `n` gates and as many others.
pub(super) fn gated(gate_up: &[f32], n: usize, gate: Gate) -> Vec<f32> {
    let len = gate_up.len() / (2 * n) * n;
    // Not cleared first: that would be done by one thread.
    let mut out = Vec::with_capacity(len);
    let rows = PART.div_ceil(n);
    let room = &mut out.spare_capacity_mut()[..len];
    let parts = gate_up.chunks(rows * 2 * n).zip(room.chunks_mut(rows * n));
    in_parts(parts, len > rows * n, |(gate_up, out)| open(gate_up, out, n, gate));
    // SAFETY: all parts have been written: there are as many rows of gates as of what they make.
    unsafe { out.set_len(len) };
    out
}

/// Applies the gate, if there is one, to the halves of each row of products.
pub(super) fn gated_products(
    products: Vec<f32>,
    matrix: &Stacked<'_>,
    gate: Option<Gate>,
) -> Vec<f32> {
    match gate {
        Some(gate) => gated(&products, matrix.rows() / 2, gate),
        None => products,
    }
}

/// `f(gate) * up` for rows of `n` gates and as many others, by this thread.
pub(super) fn open(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize, gate: Gate) {
    match gate {
        Gate::Silu => silu(gate_up, out, n),
        Gate::GeluTanh => gelu_tanh(gate_up, out, n),
    }
}

/// `x * sigmoid(x)` of gates, times what is beside them.
#[macerator::with_simd]
fn silu<S: Simd>(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize) {
    each(gate_up, out, n, |x| x);
}

/// `x / 2 * (1 + tanh(y))`, which is `x * sigmoid(2 y)`, of gates, times what is beside them;
/// `y = sqrt(2 / pi) * (x + 0.044715 x^3)`.
#[macerator::with_simd]
fn gelu_tanh<S: Simd>(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize) {
    /// `2 * sqrt(2 / pi)`.
    const SCALE: f32 = 1.595_769;
    each(gate_up, out, n, |x| SCALE * x * (1.0 + 0.044_715 * x * x));
}

/// `x * sigmoid(z(x)) * up` for each gate x, by the rules of f32 for what is not finite: a gate of
/// negative infinity is no number, as in PyTorch, and so is a shut gate of what is infinite.
#[inline(always)]
fn each(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize, z: impl Fn(f32) -> f32) {
    for (gate_up, out) in gate_up.chunks_exact(2 * n).zip(out.chunks_exact_mut(n)) {
        let (gate, up) = gate_up.split_at(n);
        for ((out, &x), up) in out.iter_mut().zip(gate).zip(up) {
            out.write(x / (1.0 + exp(-z(x))) * up);
        }
    }
}

/// `e^x`, to the rounding of x in f32, where that is in 2^-126 to 2^127; 2^-126 below, and infinite
/// from 2^127.5 on, as the gate of a large negative number is 0 only if it is divided by infinity.
///
/// As a power of 2: the exponent is split into the nearest integer and a rest r with `|r| <= 1/2`. `2^r` is a polynomial
/// of degree 5, the one of least relative error among those that begin `1 + r ln 2`; the integer becomes the exponent of
/// a float. Without calls and branches, so that the compiler makes vectors of it.
#[inline(always)]
fn exp(x: f32) -> f32 {
    use core::f32::consts::{LN_2, LOG2_E};
    /// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits; 127 is the bias of an exponent.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    // At 128 the exponent's bits are those of infinity, which times `p` stays so.
    let x = (x * LOG2_E).clamp(-126.0, 128.0);
    let rounded = x + ROUND;
    let r = x - (rounded - ROUND);
    let p = 1.330_060_5e-3;
    let p = p * r + 9.669_691e-3;
    let p = p * r + 5.550_558_5e-2;
    let p = p * r + 2.402_228_3e-1;
    let p = p * r + LN_2;
    let p = p * r + 1.0;
    f32::from_bits(rounded.to_bits() << 23) * p
}
