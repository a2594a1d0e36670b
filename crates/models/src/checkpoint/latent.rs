//! The projections of latent rows to the keys and values of heads.

use burn::tensor::TensorData;
use kv_cubecl::Sides;
use kv_weights::PackedLayout;

use super::{packed::reads_mapped, weights::Weights};
use crate::{
    error::Result,
    nn::{Linear, Matrix},
};

/// The ends of the names of the two tensors that GGUF files have.
pub(crate) const OF_HEADS: [&str; 2] = ["self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"];

impl Weights {
    /// Takes the rows of keys and of values of every head from the two tensors in GGUF files:
    /// `[n_heads, rank, rows of keys]`, which is transposed, and `[n_heads, rows of values, rank]`.
    /// Returns for each head its rows of keys, then of values, `[_, rank]`, as in Hugging Face
    /// files. On the CPU they stay packed if both tensors are stored as blocks.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub(crate) fn rows_of_heads(
        &mut self,
        names: &[String; 2],
        n_heads: usize,
        rows: Sides<usize>,
        rank: usize,
    ) -> Result<Linear> {
        let shapes = [[n_heads, rank, rows.keys], [n_heads, rows.values, rank]];
        if let Some(weight) = self.packed_heads(names, shapes)? {
            return Ok(Linear { weight, bias: None });
        }
        let (mut keys, mut values) = (Vec::<f32>::new(), Vec::<f32>::new());
        for ((name, shape), numbers) in names.iter().zip(shapes).zip([&mut keys, &mut values]) {
            self.count_restored(name);
            self.read(name, &shape, numbers)?;
        }
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

    /// Takes both tensors as packed matrices, if they have these shapes and stay packed.
    fn packed_heads(
        &mut self,
        names: &[String; 2],
        shapes: [[usize; 3]; 2],
    ) -> Result<Option<Matrix>> {
        let matches = |(name, shape): (&String, [usize; 3])| {
            self.tensors.get(name).is_some_and(|entry| entry.tensor.shape.to_vec() == shape)
        };
        let matches = names.iter().zip(shapes).all(matches);
        if self.packed.is_none() || !matches || self.restores_heads(&names[0]) {
            return Ok(None);
        }
        let mut sides = Vec::with_capacity(names.len());
        for (name, [n_heads, rows, columns]) in names.iter().zip(shapes) {
            if let Some(entry) = self.tensors.get_mut(name) {
                entry.tensor.shape = [n_heads * rows, columns].into();
            }
            sides.extend(self.take_packed(&[(name.clone(), n_heads * rows)], columns)?);
        }
        let sides = <[Matrix; 2]>::try_from(sides).ok();
        Ok(sides.and_then(|sides| Matrix::of_heads(sides, shapes[0][0])))
    }

    /// Returns whether a tensor is one of [`OF_HEADS`] and is restored although packed weights are
    /// requested: on a GPU, or if either tensor is not stored as blocks. Call it before either is
    /// taken.
    pub(super) fn restores_heads(&self, name: &str) -> bool {
        let Some(layer) = OF_HEADS.iter().find_map(|part| name.strip_suffix(part)) else {
            return false;
        };
        let stays = |part: &&str| {
            let Some(entry) = self.tensors.get(&format!("{layer}{part}")) else { return false };
            let [n_heads, rows, columns] = entry.tensor.shape.to_vec()[..] else { return false };
            let format = entry.packed_format();
            let layout = format.and_then(|format| PackedLayout::new(format, [rows, columns]).ok());
            // The matrix of every head begins at a word, and all of them are in one buffer.
            layout.map(|layout| layout.bytes()).is_some_and(|bytes| {
                let most = self.largest_buffer.unwrap_or(u64::MAX);
                bytes.is_multiple_of(size_of::<u32>()) && (n_heads * bytes) as u64 <= most
            })
        };
        !reads_mapped(&self.device) || !OF_HEADS.iter().all(stays)
    }
}
