//! The projections of all experts of a layer, selected by number.

use burn::tensor::{Device, Int, Tensor};
use kv_weights::{Activations, PackedExperts, project_picked};

/// One projection of all experts of a layer, packed on a GPU. The experts are selected on the
/// device, so that a step does not wait for the selection.
#[derive(Clone, Debug)]
pub struct ExpertStack {
    /// Rows of every expert; all parts have one width.
    parts: Vec<PackedExperts>,
    /// `[n_experts, rows of all parts]`.
    biases: Tensor<2>,
    activations: Activations,
}

impl ExpertStack {
    pub(crate) fn new(
        parts: Vec<PackedExperts>,
        biases: Tensor<2>,
        activations: Activations,
    ) -> Self {
        Self { parts, biases, activations }
    }

    /// Returns the device of the weights.
    pub fn device(&self) -> Device {
        self.biases.device()
    }

    /// Returns products with the experts selected for each token, plus their biases.
    ///
    /// # Shapes
    /// - x: `[n, 1, columns]`, the same for all experts of a token, or `[n, per_token, columns]`
    /// - picked: `[n, per_token]`
    /// - output: `[n, per_token, rows]`
    ///
    /// # Panics
    /// Panics for other shapes, and for tensors on another device.
    pub fn project(&self, x: Tensor<3>, picked: &Tensor<2, Int>) -> Tensor<3> {
        let product = |part| {
            project_picked(x.clone(), part, picked.clone(), self.activations)
                .expect("the loader has checked shapes and the device")
        };
        let products: Vec<_> = self.parts.iter().map(product).collect();
        let products = match products.len() {
            1 => products.into_iter().next().expect("there is one"),
            _ => Tensor::cat(products, 2),
        };
        let biases = self.biases.clone().select(0, picked.clone().flatten(0, 1));
        let shape = products.dims();
        products + biases.reshape(shape)
    }
}
