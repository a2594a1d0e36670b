//! Gradients of sparse attention, compared with finite differences of its definition in f64.

use burn::tensor::Tensor;
use kv_cubecl::{On, Target, sparse::Compression};

use crate::{
    common::{CLOSE, Host, Rng, close, slopes, stamp_autodiff},
    sparse_inputs::{Attended, Index, Projections, scores},
};

stamp_autodiff!(compressed_entries, scores_of_entries, attention_to_entries);

/// Compares the gradients of `sum(function(inputs) * weight)` with central differences of
/// `definition`. These have a step of 1e-5, so their own error is about 1e-9.
#[track_caller]
pub(crate) fn check<T: Target, const N: usize>(
    on: &On<T>,
    what: &str,
    inputs: &[Host; N],
    names: [&str; N],
    function: impl FnOnce([Tensor<4>; N]) -> Tensor<4>,
    definition: impl Fn(&[Vec<f64>; N]) -> Vec<f64>,
) {
    let leaves = inputs.clone().map(|input| input.on(on).require_grad());
    let output = function(leaves.clone());
    let weight = Host::normal(&mut Rng::new(409), output.dims());
    let grads = (output * weight.on(on)).sum().backward();
    let inputs = inputs.clone().map(|input| input.f64());
    let loss = |inputs: &[Vec<f64>; N]| -> f64 {
        definition(inputs).iter().zip(weight.f64()).map(|(output, weight)| output * weight).sum()
    };
    for (which, leaf) in leaves.iter().enumerate() {
        let expected = slopes(&inputs, which, 1e-5, loss);
        let name = format!("{what}: {}", names[which]);
        let got = leaf.grad(&grads).unwrap_or_else(|| panic!("{name} has no gradient"));
        close(name, &Host::of(got), &expected, CLOSE);
    }
}

/// Tokens after the last whole window are among the inputs, and so are the channels that the last
/// window has for the next one: their gradients are 0.
fn compressed_entries<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(410);
    for (compression, tokens, hadamard) in [
        (Compression::new(4), 9, false),
        (Compression::overlapping(4), 9, false),
        (Compression::overlapping(4), 4, false),
        (Compression::overlapping(3), 11, true),
        (Compression::new(7), 15, true),
        (Compression::overlapping(1), 3, false),
    ] {
        let mut text = Projections::new(&mut rng, compression, [2, tokens, 8, 2]);
        text.hadamard = hadamard;
        check(
            on,
            &format!("{compression:?}, {tokens} tokens, Hadamard {hadamard}"),
            &text.parts,
            ["content", "gate", "position_bias", "gain"],
            |parts| text.entries(parts).unwrap(),
            |parts| text.expected(parts),
        );
    }
}

/// Products of queries and keys are far enough from 0, where ReLU has a kink, that no step of a
/// difference crosses it: a step moves them by 1e-5 times a number of order 1.
fn scores_of_entries<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(411);
    for sizes in [[1, 1, 5, 2, 4], [2, 3, 7, 3, 8], [1, 2, 70, 2, 4]] {
        let index = core::iter::repeat_with(|| Index::new(&mut rng, sizes))
            .find(|index| index.nearest_to_kink(&index.f64()) > 1e-3)
            .unwrap();
        check(
            on,
            &format!("{sizes:?}"),
            &index.parts,
            ["query", "weights", "keys"],
            |parts| scores(parts).unsqueeze(),
            |parts| index.expected(parts),
        );
    }
}

fn attention_to_entries<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(412);
    for (compression, sizes, window) in [
        (Compression::overlapping(4), [2, 2, 13, 8], 3),
        (Compression::new(3), [1, 3, 11, 4], 20),
        (Compression::overlapping(7), [1, 1, 70, 4], 5),
    ] {
        let mut layer = Attended::new(&mut rng, compression, sizes);
        layer.sliding_window = window;
        for top_k in [None, Some(2)] {
            if let Some(top_k) = top_k {
                layer.select(&mut rng, top_k);
            }
            check(
                on,
                &format!("{compression:?}, {sizes:?}, window {window}, top {top_k:?}"),
                &layer.parts,
                ["query", "rows", "entries", "sinks"],
                |parts| layer.output(parts),
                |parts| layer.expected(parts),
            );
        }
    }
}
