//! Fused operations composed of separate operations of a backend.

use burn::{
    backend::{
        Backend, Scalar, TensorMetadata,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Shape, Slice},
};

use crate::{
    Activations, Gate, PackedLayout,
    fused::{FusedInputs, FusedPlan},
};

/// Computes `packed_fused` as separate operations, from `packed_project` and `packed_gate`.
pub(crate) fn fused<B: Backend>(
    x: FloatTensor<B>,
    inputs: FusedInputs<B>,
    plan: &FusedPlan,
    project: impl Fn(FloatTensor<B>, IntTensor<B>, PackedLayout, Activations) -> FloatTensor<B>,
    gated: impl Fn(FloatTensor<B>, Gate) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let products = |x: FloatTensor<B>, words: Vec<IntTensor<B>>, gate| {
        let parts = words.into_iter().zip(&plan.parts);
        let products =
            parts.map(|(words, layout)| project(x.clone(), words, *layout, plan.activations));
        let mut products: Vec<_> = products.collect();
        let y = match products.len() {
            1 => products.swap_remove(0),
            _ => B::float_cat(products, 1),
        };
        match gate {
            Some(gate) => gated(y, gate),
            None => y,
        }
    };
    fused_around::<B>(x, inputs, plan, products, &gated)
}

/// Computes `packed_fused` as separate operations around `products`.
///
/// `products` multiplies with all matrices and also applies the gate, unless a bias comes between.
pub(crate) fn fused_around<B: Backend>(
    x: FloatTensor<B>,
    inputs: FusedInputs<B>,
    plan: &FusedPlan,
    products: impl FnOnce(FloatTensor<B>, Vec<IntTensor<B>>, Option<Gate>) -> FloatTensor<B>,
    gated: impl FnOnce(FloatTensor<B>, Gate) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let columns = plan.parts[0].columns();
    let x = match inputs.norm.into_option() {
        Some(gains) => norm::<B>(x, B::float_reshape(gains, Shape::new([1, columns])), plan),
        None => x,
    };
    let words = inputs.words.into_vec();
    let y = match inputs.bias.into_option() {
        None => products(x, words, plan.gate),
        Some(bias) => {
            let bias = B::float_reshape(bias, Shape::new([1, plan.rows()]));
            let y = B::float_add(products(x, words, None), bias);
            match plan.gate {
                Some(gate) => gated(y, gate),
                None => y,
            }
        }
    };
    match inputs.residual.into_option() {
        Some(residual) => B::float_add(y, residual),
        None => y,
    }
}

/// Normalizes the rows of `x`, with gains `[1, columns]`.
fn norm<B: Backend>(x: FloatTensor<B>, gains: FloatTensor<B>, plan: &FusedPlan) -> FloatTensor<B> {
    let squares = B::float_mul(x.clone(), x.clone());
    let mean = B::float_mean_dim(squares, 1);
    let root = B::float_sqrt(B::float_add_scalar(mean, Scalar::from(plan.epsilon)));
    let gains = match plan.plus_one {
        true => B::float_add_scalar(gains, Scalar::from(1.0f64)),
        false => gains,
    };
    B::float_mul(B::float_div(x, root), gains)
}

/// Computes `packed_gate` as separate operations.
pub(crate) fn gate<B: Backend>(x: FloatTensor<B>, gate: Gate) -> FloatTensor<B> {
    let [_, width] = x.shape().dims();
    let half = |start: usize| {
        let slices = [Slice::full(), Slice::from(start..start + width / 2)];
        B::float_slice(x.clone(), &slices)
    };
    B::float_mul(opened::<B>(half(0), gate), half(width / 2))
}

fn opened<B: Backend>(x: FloatTensor<B>, gate: Gate) -> FloatTensor<B> {
    let z = match gate {
        Gate::Silu => x.clone(),
        // (1 + tanh(z)) / 2 is the logistic function of 2 z.
        Gate::GeluTanh => {
            let square = B::float_mul(x.clone(), x.clone());
            let cube = B::float_mul(square, x.clone());
            let sum =
                B::float_add(x.clone(), B::float_mul_scalar(cube, Scalar::from(0.044_715f64)));
            B::float_mul_scalar(sum, Scalar::from(1.595_769_121_605_730_6f64))
        }
    };
    B::float_mul(x, B::sigmoid(z))
}
