//! The gate of a feed-forward block on the CPU, in one pass.
//!
//! Burn's Flex backend computes an activation in several passes with the exponential of the standard library, one number
//! at a time: for prompts that is a fifth of all time, or a third with GELU.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

use core::mem::MaybeUninit;

use burn::{
    backend::Flex,
    tensor::{DType, Tensor, TensorData},
};
use kv_cubecl::Target;
use kv_weights::in_parts;
use macerator::Simd;

use super::Gating;

/// Numbers that a thread computes at a time, about.
const PART: usize = 1 << 13;

/// `f(gate) * up` for rows of `gate` and `up`, `[batch, seq, 2 * n]`, both f32 on the Flex backend: `[batch, seq, n]`;
/// `None` for others.
pub(super) fn gated(gate_up: &Tensor<3>, gating: Gating) -> Option<Tensor<3>> {
    let device = gate_up.device();
    let [batch, seq, width] = gate_up.dims();
    let n = width / 2;
    if gate_up.dtype() != DType::F32 || n == 0 || !kv_cubecl::Flex::hosts(&device) {
        return None;
    }
    let gate_up = gate_up.clone().try_into_primitive::<Flex>().ok()?;
    let gate_up = if gate_up.layout().is_contiguous() { gate_up } else { gate_up.to_contiguous() };
    let start = gate_up.layout().start_offset();
    let gate_up = &gate_up.storage::<f32>()[start..start + batch * seq * width];
    // Not cleared first: that would be done by one thread.
    let mut out = Vec::with_capacity(batch * seq * n);
    let rows = PART.div_ceil(n);
    let room = &mut out.spare_capacity_mut()[..batch * seq * n];
    let parts = gate_up.chunks(rows * width).zip(room.chunks_mut(rows * n));
    in_parts(parts, batch * seq > rows, |(gate_up, out)| match gating {
        Gating::Silu => silu(gate_up, out, n),
        Gating::GeluTanh => gelu_tanh(gate_up, out, n),
    });
    // SAFETY: all parts have been written.
    unsafe { out.set_len(batch * seq * n) };
    Some(Tensor::from_data(TensorData::new(out, [batch, seq, n]), &device))
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

/// `x * sigmoid(z(x)) * up` for each gate x.
#[inline(always)]
fn each(gate_up: &[f32], out: &mut [MaybeUninit<f32>], n: usize, z: impl Fn(f32) -> f32) {
    for (gate_up, out) in gate_up.chunks_exact(2 * n).zip(out.chunks_exact_mut(n)) {
        let (gate, up) = gate_up.split_at(n);
        for ((out, &x), up) in out.iter_mut().zip(gate).zip(up) {
            out.write(x / (1.0 + exp(-z(x))) * up);
        }
    }
}

/// `e^x`, to the rounding of x in f32, where that is in 2^-126 to 2^126; one of these beyond.
///
/// As a power of 2: the exponent is split into the nearest integer and a rest r with `|r| <= 1/2`. `2^r` is a polynomial
/// of degree 5, the one of least relative error among those that begin `1 + r ln 2`; the integer becomes the exponent of
/// a float. Without calls and branches, so that the compiler makes vectors of it.
#[inline(always)]
fn exp(x: f32) -> f32 {
    use core::f32::consts::{LN_2, LOG2_E};
    /// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits; 127 is the bias of an exponent.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let x = (x * LOG2_E).clamp(-126.0, 126.0);
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

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, activation};

    use super::*;

    /// Against f64: widths below a vector and above, one row and enough for several threads, numbers of all magnitudes.
    #[test]
    fn gates_are_those_of_f64() {
        for (n, rows) in [(1, 1), (7, 3), (64, 1), (1536, 1), (129, 200)] {
            let value = |i: usize| {
                let magnitude = [1e-6, 0.1, 1.0, 3.0, 10.0, 50.0, 300.0][i % 7];
                (((i * 7919) % 2003) as f32 / 1001.0 - 1.0) * magnitude
            };
            let x: Vec<f32> = (0..2 * n * rows).map(value).collect();
            let tensor = TensorData::new(x.clone(), [1, rows, 2 * n]);
            let tensor = Tensor::<3>::from_data(tensor, &Device::flex());
            for gating in [Gating::Silu, Gating::GeluTanh] {
                let got =
                    gated(&tensor, gating).unwrap().into_data().try_into_vec::<f32>().unwrap();
                assert_eq!(got.len(), rows * n);
                for (i, got) in got.into_iter().enumerate() {
                    let at = i / n * 2 * n + i % n;
                    let (gate, up) = (f64::from(x[at]), f64::from(x[at + n]));
                    let inner = 0.797_884_560_802_865_4 * (gate + 0.044715 * gate.powi(3));
                    let expected = up
                        * match gating {
                            Gating::Silu => gate / (1.0 + (-gate).exp()),
                            Gating::GeluTanh => gate / (1.0 + (-2.0 * inner).exp()),
                        };
                    // The exponent, which is below 60 where the result is not next to 0, is rounded four times.
                    let off = (f64::from(got) - expected).abs();
                    assert!(
                        off <= 1.5e-5 * expected.abs() + 1e-30,
                        "{gating:?} {gate}: {got}, not {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_not_hidden_and_others_have_no_gate_of_this_kind() {
        let device = Device::flex();
        let x = Tensor::<3>::from_data([[[f32::NAN, f32::INFINITY, 1.0, 1.0]]], &device);
        let y = gated(&x, Gating::Silu).unwrap().into_data().try_into_vec::<f32>().unwrap();
        assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{y:?}");
        // A view, and one whose numbers are another's.
        let all =
            Tensor::<3>::from_data([[[9.0f32, 1.0, 2.0, 9.0], [9.0, 3.0, 4.0, 9.0]]], &device);
        let view = all.narrow(2, 1, 2);
        let y = gated(&view, Gating::Silu).unwrap();
        let expected = activation::silu(view.clone().narrow(2, 0, 1)) * view.narrow(2, 1, 1);
        y.into_data().assert_approx_eq::<f32>(&expected.into_data(), Default::default());
        assert!(gated(&x.cast(DType::F16), Gating::Silu).is_none());
    }
}
