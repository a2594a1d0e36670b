//! Tensors that hold a matrix for each expert of a mixture.

use burn::{
    module::Param,
    tensor::{DType, Tensor, TensorData},
};

use super::Weights;
use crate::{
    Error, Result,
    mxfp4::{self, BLOCK},
    nn::Linear,
};

impl Weights {
    /// Whether the tensors are those of a GGUF file.
    pub(crate) fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// Takes the matrices `[rows, columns]` and the biases `[rows]` of experts, in f32 on the host. The shape
    /// is `[experts, rows, columns]`. GGUF files have matrices of this layout; Hugging Face ones have transposed
    /// floats, or blocks of MXFP4 (`NAME_blocks`, `NAME_scales`) that are not transposed.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub(crate) fn experts(
        &mut self,
        name: &str,
        [n, rows, columns]: [usize; 3],
    ) -> Result<Vec<(Vec<f32>, Vec<f32>)>> {
        let (weight, bias) = match self.is_gguf() {
            true => (format!("{name}.weight"), format!("{name}.bias")),
            false => (name.to_string(), format!("{name}_bias")),
        };
        let blocks = format!("{name}_blocks");
        let mut values = vec![];
        if self.contains(&blocks) {
            values = self.mxfp4(name, [n, rows, columns])?;
        } else if self.is_gguf() {
            self.read(&weight, &[n, rows, columns], &mut values)?;
        } else {
            let mut stored: Vec<f32> = vec![];
            self.read(&weight, &[n, columns, rows], &mut stored)?;
            values.reserve_exact(stored.len());
            for expert in stored.chunks_exact(rows * columns) {
                for row in 0..rows {
                    values.extend(expert.iter().skip(row).step_by(rows));
                }
            }
        }
        let mut biases = vec![];
        self.read(&bias, &[n, rows], &mut biases)?;
        let matrices = values.chunks_exact(rows * columns).map(<[f32]>::to_vec);
        Ok(matrices.zip(biases.chunks_exact(rows).map(<[f32]>::to_vec)).collect())
    }

    fn mxfp4(&mut self, name: &str, [n, rows, columns]: [usize; 3]) -> Result<Vec<f32>> {
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        let per_row = columns / BLOCK;
        let blocks = self.bytes(&blocks, &[n, rows, per_row, BLOCK / 2])?;
        let scales = self.bytes(&scales, &[n, rows, per_row])?;
        let mut values = Vec::with_capacity(n * rows * columns);
        for (codes, scale) in blocks.chunks_exact(BLOCK / 2).zip(&scales) {
            let scale = mxfp4::scale(*scale);
            // Neighbors share a byte, the first of them in its lower half.
            let pair = |byte: &u8| [byte & 15, byte >> 4].map(|code| mxfp4::value(code) * scale);
            values.extend(codes.iter().flat_map(pair));
        }
        Ok(values)
    }

    /// Takes a tensor of bytes.
    fn bytes(&mut self, name: &str, expected: &[usize]) -> Result<Vec<u8>> {
        let entry = self.tensors.remove(name).ok_or_else(|| self.missing(name))?;
        let (path, tensor) = (entry.path.clone(), entry.name.clone());
        let actual = entry.tensor.shape.to_vec();
        if actual != expected {
            return Err(Error::Shape { path, tensor, actual, expected: expected.to_vec() });
        }
        if entry.tensor.dtype != DType::U8 {
            let why = format!("has type {:?}, codes are U8", entry.tensor.dtype);
            return Err(Error::Tensor { path, tensor, why });
        }
        Ok(entry.bytes()?.to_vec())
    }

    /// A projection of these values and this bias, in the model's type.
    pub(crate) fn linear_of(&self, (values, bias): (Vec<f32>, Vec<f32>), columns: usize) -> Linear {
        let rows = bias.len();
        let param = |data: TensorData| self.param::<2>(data.convert_dtype(self.dtype));
        let weight = param(TensorData::new(values, [rows, columns])).into();
        let bias = self.param(TensorData::new(bias, [rows]).convert_dtype(self.dtype));
        Linear { weight, bias: Some(bias) }
    }

    /// Takes a vector.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn parameter(&mut self, name: &str, len: usize) -> Result<Param<Tensor<1>>> {
        self.vector(&[(name.into(), len)])
    }
}
