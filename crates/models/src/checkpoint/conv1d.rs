//! Projections that are stored transposed.

use burn::tensor::TensorData;
use half::{bf16, f16};
use kv_weights::WeightFormat;

use super::{entry::Entry, weights::Weights};
use crate::{
    error::Result,
    float::{Float, with_float},
    nn::{Linear, Matrix},
};

impl Weights {
    /// Takes the projection `name` with its bias. Unless it is quantized, Hugging Face files store
    /// it as `[d_input, d_output]` ("Conv1D"). GGUF files store it like every other projection.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn conv1d(&mut self, name: &str, d_input: usize, d_output: usize) -> Result<Linear> {
        let weight = format!("{name}.weight");
        if self.is_outline() {
            self.list_floats(&weight, &[d_input, d_output])?;
            let bias = Some(self.vector(&[(format!("{name}.bias"), d_output)])?);
            return Ok(Linear { weight: self.stand_in::<2>(vec![d_output, d_input]).into(), bias });
        }
        let quantized = self.tensors.get(&weight).is_some_and(|entry| entry.blocks.is_some());
        if self.gguf.is_some() || quantized {
            return self.linear(&[(name.into(), d_output)], d_input, true);
        }
        let weight = match self.take_packed_transposed(&weight, d_input, d_output)? {
            Some(matrix) => matrix,
            None => {
                self.count_restored(&weight);
                let data = with_float!(
                    self.dtype,
                    T => self.transposed::<T>(&weight, d_input, d_output)?,
                    else unreachable!("set_dtype takes floats")
                );
                self.param(data).into()
            }
        };
        let bias = Some(self.vector(&[(format!("{name}.bias"), d_output)])?);
        Ok(Linear { weight, bias })
    }

    /// Takes a matrix that is stored as `[columns, rows]` in 16 bits, if it is to stay packed.
    fn take_packed_transposed(
        &mut self,
        name: &str,
        columns: usize,
        rows: usize,
    ) -> Result<Option<Matrix>> {
        let Some(activations) = self.packed else { return Ok(None) };
        let format = self.tensors.get(name).and_then(Entry::packed_type).and_then(|(_, f)| f);
        let Some(format) = format.filter(|f| columns.is_multiple_of(f.block_numbers())) else {
            return Ok(None);
        };
        let data = match format {
            WeightFormat::F16 => self.transposed::<f16>(name, columns, rows)?,
            WeightFormat::Bf16 => self.transposed::<bf16>(name, columns, rows)?,
            _ => return Ok(None),
        };
        let parts = self.pack_bytes(data.into_bytes(), format, [rows, columns])?;
        Matrix::packed(parts, activations).map(Some)
    }

    fn transposed<T: Float>(
        &mut self,
        name: &str,
        columns: usize,
        rows: usize,
    ) -> Result<TensorData> {
        let mut stored = Vec::<T>::new();
        self.read(name, &[columns, rows], &mut stored)?;
        let mut values = stored.clone();
        for (c, stored) in stored.chunks_exact(rows).enumerate() {
            for (r, value) in stored.iter().enumerate() {
                values[r * columns + c] = *value;
            }
        }
        Ok(TensorData::new(values, [rows, columns]))
    }
}
