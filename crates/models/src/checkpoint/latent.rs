//! The projections of latent rows to the keys and values of heads.

use burn::tensor::TensorData;
use kv_cubecl::Sides;

use super::weights::Weights;
use crate::{error::Result, nn::Linear};

impl Weights {
    /// Takes the rows of keys and of values of every head from the two tensors in GGUF files:
    /// `[n_heads, rank, rows of keys]`, which is transposed, and `[n_heads, rows of values, rank]`.
    /// Returns for each head its rows of keys, then of values, `[_, rank]`, as in Hugging Face
    /// files.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub(crate) fn rows_of_heads(
        &mut self,
        [key, value]: &[String; 2],
        n_heads: usize,
        rows: Sides<usize>,
        rank: usize,
    ) -> Result<Linear> {
        [key, value].into_iter().for_each(|name| self.count_restored(name));
        let (mut keys, mut values) = (Vec::<f32>::new(), Vec::<f32>::new());
        self.read(key, &[n_heads, rank, rows.keys], &mut keys)?;
        self.read(value, &[n_heads, rows.values, rank], &mut values)?;
        let mut joined = Vec::with_capacity(keys.len() + values.len());
        let heads =
            keys.chunks_exact(rank * rows.keys).zip(values.chunks_exact(rows.values * rank));
        for (keys, values) in heads {
            for row in 0..rows.keys {
                joined.extend(keys.iter().skip(row).step_by(rows.keys));
            }
            joined.extend_from_slice(values);
        }
        let data = TensorData::new(joined, [n_heads * (rows.keys + rows.values), rank]);
        let weight = self.param(data.convert_dtype(self.dtype)).into();
        Ok(Linear { weight, bias: None })
    }
}
