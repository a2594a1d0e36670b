//! Gates in a single pass.
//!
//! Burn's Flex backend computes an activation in several passes and calls the standard library's
//! exponential for every number. In prefill, that takes a fifth of all time, or a third with GELU.

use core::mem::MaybeUninit;

use kv_device::threads::in_parts;
use macerator::Simd;

use super::stacked::Stacked;
use crate::Gate;

/// Approximate count of numbers computed by a thread at a time.
const PART: usize = 1 << 13;

/// Returns `f(gate) * up` for rows of `n` gates followed by `n` ups.
pub(super) fn gated(gate_up: &[f32], n: usize, gate: Gate) -> Vec<f32> {
    let len = gate_up.len() / (2 * n) * n;
    // Not zeroed first, which one thread would have to do.
    let mut out = Vec::with_capacity(len);
    let rows = PART.div_ceil(n);
    let room = &mut out.spare_capacity_mut()[..len];
    let parts = gate_up.chunks(rows * 2 * n).zip(room.chunks_mut(rows * n));
    in_parts(parts, len > rows * n, |(gate_up, out)| open(gate_up, out, n, gate));
    // SAFETY: the parts cover all of the output, and all of them have been written.
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

/// Computes `f(gate) * up` for rows of `n` gates and `n` ups on this thread.
pub(super) fn open(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize, gate: Gate) {
    match gate {
        Gate::Silu => silu(gate_up, out, n),
        Gate::GeluTanh => gelu_tanh(gate_up, out, n),
    }
}

/// Computes `x * sigmoid(x) * up` for each gate `x`.
#[macerator::with_simd]
fn silu<S: Simd>(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize) {
    each(gate_up, out, n, |x| x);
}

/// Computes `x / 2 * (1 + tanh(y)) * up` for each gate `x`, as `x * sigmoid(2 y) * up`, with
/// `y = sqrt(2 / pi) * (x + 0.044715 x^3)`.
#[macerator::with_simd]
fn gelu_tanh<S: Simd>(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize) {
    /// `2 * sqrt(2 / pi)`.
    const SCALE: f32 = 1.595_769;
    each(gate_up, out, n, |x| SCALE * x * (1.0 + 0.044_715 * x * x));
}

/// Computes `x * sigmoid(z(x)) * up` for each gate `x`.
///
/// Infinities and NaN follow the rules of f32. As in PyTorch, the result is NaN if a gate is
/// negative infinity, or if a gate of 0 meets an infinite number.
#[inline(always)]
fn each(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize, z: impl Fn(f32) -> f32) {
    for (gate_up, out) in gate_up.chunks_exact(2 * n).zip(out.chunks_exact_mut(n)) {
        let (gate, up) = gate_up.split_at(n);
        for ((out, &x), up) in out.iter_mut().zip(gate).zip(up) {
            out.write(x / (1.0 + exp(-z(x))) * up);
        }
    }
}

/// Returns `e^x`, as precise as rounding `x` to f32 allows, for results from 2^-126 to 2^127.
///
/// The result is 2^-126 below that range and infinite from 2^127.5 on: a gate far below 0 is
/// exactly 0 only if its divisor is infinite.
///
/// `e^x` is computed as a power of 2, with the exponent split into the nearest integer and a
/// remainder `r` with `|r| <= 1/2`. `2^r` is approximated by the polynomial of degree 5 with the
/// least relative error among those that begin with `1 + r ln 2`. The integer becomes the exponent
/// of a float. Without calls and branches, the compiler vectorizes the loop.
#[inline(always)]
fn exp(x: f32) -> f32 {
    use core::f32::consts::{LN_2, LOG2_E};
    /// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits. 127 is the
    /// exponent bias.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    // At 128, the exponent bits are those of infinity, and infinity times `p` stays infinite.
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
