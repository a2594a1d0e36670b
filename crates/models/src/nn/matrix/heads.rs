//! Packed matrices of the heads of an attention.

use burn::{module::ParamId, tensor::Tensor};
use kv_cubecl::Side;
use kv_weights::{Activations, PackedMatrix, project_heads};

use super::packed::{Packed, served};

/// The most tokens whose products read the packed rows. For more, the rows are restored first,
/// which takes less time than the products.
const FEW: usize = 16;

/// The rows of keys and values of all heads as GGUF files have them: two matrices for each head,
/// whose rows are multiplied. [`Matrix::of_heads`](super::Matrix::of_heads) describes the parts.
#[derive(Clone, Debug)]
pub(crate) struct PackedHeads {
    /// Identifies the weights among the parameters of a model.
    pub(super) id: ParamId,
    /// The transposed rows of keys, and the rows of values.
    pub(super) parts: [PackedMatrix; 2],
    n_heads: usize,
    activations: Activations,
}

impl PackedHeads {
    /// Returns `None` if a side has several parts.
    pub(super) fn new([keys, values]: [Packed; 2], n_heads: usize) -> Option<Self> {
        let ([of_keys], [of_values]) = (&keys.parts[..], &values.parts[..]) else { return None };
        let parts = [of_keys.clone(), of_values.clone()];
        Some(Self { id: keys.id, parts, n_heads, activations: keys.activations })
    }

    /// Returns the shape of [`rows`](Self::rows).
    pub(super) fn dims(&self) -> [usize; 2] {
        let [[_, plain], [values, rank]] = self.parts.each_ref().map(PackedMatrix::dims);
        [self.n_heads * plain + values, rank]
    }

    /// Restores for each head the rows of keys, then of values.
    pub(super) fn rows(&self) -> Tensor<2> {
        let [keys, values] = self.parts.each_ref().map(|part| self.restored(part));
        Tensor::cat(vec![keys.swap_dims(1, 2), values], 1).reshape(self.dims())
    }

    /// Restores the matrices of one side, `[n_heads, rows, columns]`.
    fn restored(&self, part: &PackedMatrix) -> Tensor<3> {
        let [rows, columns] = part.dims();
        served(part.restore()).reshape([self.n_heads, rows / self.n_heads, columns])
    }

    /// Multiplies the queries of each head by its rows of keys, or its outputs by its rows of
    /// values.
    ///
    /// # Shapes
    /// - x: `[n, n_heads, plain]` for keys, `[n, n_heads, rank]` for values
    /// - output: `[n, n_heads, rank]` for keys, `[n, n_heads, value]` for values
    pub(crate) fn project(&self, x: Tensor<3>, side: Side) -> Tensor<3> {
        let [keys, values] = &self.parts;
        let part = match side {
            Side::Keys => keys,
            Side::Values => values,
        };
        if x.dims()[0] <= FEW && !x.is_autodiff() {
            return served(project_heads(x, part, self.activations));
        }
        x.swap_dims(0, 1).matmul(self.restored(part).swap_dims(1, 2)).swap_dims(0, 1)
    }

    pub(super) fn map(self, f: impl FnMut(PackedMatrix) -> PackedMatrix) -> Self {
        Self { parts: self.parts.map(f), ..self }
    }
}
