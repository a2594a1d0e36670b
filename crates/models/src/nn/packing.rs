//! [`Packing`]: passes over a batch without its padding.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The places of tokens in a batch `[batch, seq]` that is padded.
///
/// A free slot of a batch, and a text with fewer tokens than another, have padding in each
/// operation of a pass. With a packing, the pass computes `n` tokens as `n` sequences of one, and
/// only attention, which needs to know their sequences, sees the batch.
#[derive(Clone, Debug)]
pub struct Packing {
    /// The index of each token among the `batch * seq` of the batch, `[n]` i32.
    tokens: Tensor<1, Int>,
    /// For each place in the batch the index of its token, or 0 for padding, `[batch * seq]` i32.
    places: Tensor<1, Int>,
    batch: usize,
    seq: usize,
}

impl Packing {
    /// Returns the places of the first `tokens[i]` tokens of each sequence; at least one has a
    /// token.
    pub(crate) fn new(tokens: &[usize], seq: usize, device: &Device) -> Self {
        let (mut at, mut places) = (vec![], vec![]);
        for (i, &n) in tokens.iter().enumerate() {
            for j in 0..seq {
                places.push(if j < n { at.len() as i32 } else { 0 });
                if j < n {
                    at.push((i * seq + j) as i32);
                }
            }
        }
        let tensor = |indices: Vec<i32>| {
            let shape = [indices.len()];
            Tensor::from_data(TensorData::new(indices, shape), (device, DType::I32))
        };
        Self { tokens: tensor(at), places: tensor(places), batch: tokens.len(), seq }
    }

    /// Returns the tokens per sequence in the batch.
    pub(crate) fn seq(&self) -> usize {
        self.seq
    }

    /// Takes the tokens' rows from `[batch * seq, ..]`; returns `[n, ..]`.
    pub(crate) fn pack<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        x.select(0, self.tokens.clone())
    }

    /// Takes the tokens' ids or positions from `[batch * seq]`; returns `[n]`.
    pub(crate) fn pack_ids(&self, ids: Tensor<1, Int>) -> Tensor<1, Int> {
        ids.select(0, self.tokens.clone())
    }

    /// Puts rows `[n, ..]` back into a batch, `[batch * seq, ..]`. Padding gets the first row.
    pub(crate) fn pad<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        x.select(0, self.places.clone())
    }

    /// Puts the heads of the tokens, `[n, heads, 1, head_dim]`, back into a batch
    /// `[batch, heads, seq, head_dim]`.
    pub(crate) fn pad_heads(&self, x: Tensor<4>) -> Tensor<4> {
        let [_, heads, _, head_dim] = x.dims();
        let x = self.pad(x).reshape([self.batch, self.seq, heads, head_dim]);
        x.swap_dims(1, 2)
    }

    /// Takes the heads of the tokens, `[n, heads, 1, head_dim]`, from a batch
    /// `[batch, heads, seq, head_dim]`.
    pub(crate) fn pack_heads(&self, x: Tensor<4>) -> Tensor<4> {
        let [_, heads, _, head_dim] = x.dims();
        self.pack(x.swap_dims(1, 2).reshape([self.batch * self.seq, heads, 1, head_dim]))
    }
}
