//! The projections of all experts of a layer, selected by number.

use burn::{
    module::ParamId,
    tensor::{Device, Int, Tensor},
};
use kv_weights::{Activations, PackedExperts, project_picked};

use super::{linear::Linear, routed::Routed};
use crate::spans;

/// One projection of all experts of a layer, packed. A GPU selects the experts itself, so that a
/// step does not wait for the selection. The CPU multiplies with all of them in one operation.
#[derive(Clone, Debug)]
pub struct ExpertStack {
    /// Rows of every expert; all parts have one width.
    parts: Vec<PackedExperts>,
    /// `[n_experts, rows of all parts]`.
    biases: Option<Tensor<2>>,
    activations: Activations,
    device: Device,
    /// Identifies the projection of the first expert, by whose name a profile calls all of them.
    first: ParamId,
}

impl ExpertStack {
    pub(crate) fn new(
        parts: Vec<PackedExperts>,
        biases: Option<Tensor<2>>,
        activations: Activations,
        device: Device,
        first: ParamId,
    ) -> Self {
        Self { parts, biases, activations, device, first }
    }

    /// Returns products with the experts selected for each token, plus their biases, if there are
    /// any.
    ///
    /// # Shapes
    /// - x: `[n, 1, columns]`, the same for all experts of a token, or `[n, per_token, columns]`
    /// - picked: `[n, per_token]`
    /// - output: `[n, per_token, rows]`
    ///
    /// # Panics
    /// Panics for other shapes, and for tensors on another device.
    pub fn project(&self, x: Tensor<3>, picked: &Tensor<2, Int>) -> Tensor<3> {
        let _span = spans::reading(self.first, || self.bytes(picked.dims()));
        let product = |part: &PackedExperts| {
            project_picked(x.clone(), part, picked.clone(), self.activations)
                .expect("the loader has checked shapes and the device")
        };
        let products: Vec<_> = self.parts.iter().map(product).collect();
        let products = match products.len() {
            1 => products.into_iter().next().expect("there is one"),
            _ => Tensor::cat(products, 2),
        };
        let Some(biases) = self.biases.clone() else { return products };
        let shape = products.dims();
        products + biases.select(0, picked.clone().flatten(0, 1)).reshape(shape)
    }

    /// Returns the bytes of the experts of `n` tokens, as if all of them were different.
    fn bytes(&self, [n, per_token]: [usize; 2]) -> usize {
        let bytes = |part: &PackedExperts| part.layout().bytes() * part.len().min(n * per_token);
        self.parts.iter().map(bytes).sum()
    }
}

/// The projections of all experts of a layer, as one matrix each.
#[derive(Clone, Debug)]
pub struct ExpertStacks {
    /// The rows of gate and up projections.
    pub gate_up: ExpertStack,
    /// The output projections.
    pub down: ExpertStack,
}

/// The most tokens for which each selection reads its expert separately. With more tokens, several
/// share the rows of an expert.
const FEW: usize = 8;

impl ExpertStacks {
    /// Returns whether the experts selected for `x`, `[1, n, hidden]`, should be computed from the
    /// stacks: there are few tokens or the host must not read the selection (`on_device`), `x` is
    /// on the device of the stacks and needs no gradient, and the experts' `projections` are as
    /// they were loaded.
    pub fn can_compute<'a>(
        &self,
        x: &Tensor<3>,
        on_device: bool,
        projections: impl IntoIterator<Item = &'a Linear>,
    ) -> bool {
        (on_device || x.dims()[1] <= FEW)
            && self.down.device == x.device()
            && !x.is_autodiff()
            && projections.into_iter().all(|linear| linear.weight.is_only_packed())
    }

    /// Returns the weighted sum of the outputs of the selected experts. `gate` applies the gate:
    /// `[_, _, 2 * intermediate]` to `[_, _, intermediate]`.
    ///
    /// # Shapes
    /// - x: `[1, n, hidden]`
    /// - output: `[n, 1, hidden]`
    pub fn sum(
        &self,
        x: Tensor<3>,
        Routed { picked, weights }: Routed,
        gate: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let gate_up = self.gate_up.project(x.swap_dims(0, 1), &picked);
        let y = self.down.project(gate(gate_up), &picked); // [n, per_token, hidden]
        (y * weights.unsqueeze_dim::<3>(2)).sum_dim(1)
    }
}
