//! The projections of all experts of a layer, multiplied with by number.

use burn::tensor::{Device, Int, Tensor};
use kv_weights::{Activations, PackedExperts, project_picked};

/// The same projection of all experts of a layer, packed on a GPU: which of them are multiplied
/// with is told there, so that a step waits for no choice.
#[derive(Clone, Debug)]
pub struct ExpertStack {
    /// Rows of every expert, parts of one width.
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

    /// The device that the weights are on.
    pub fn device(&self) -> Device {
        self.biases.device()
    }

    /// Products with the experts that are picked for each token, and their biases.
    ///
    /// # Shapes
    ///
    /// - x: `[n, 1, columns]`, the same for all experts of a token, or `[n, per_token, columns]`
    /// - picked: `[n, per_token]`
    /// - output: `[n, per_token, rows]`
    ///
    /// # Panics
    ///
    /// For other shapes, and for tensors of another device.
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
