//! The type of a model's weights.

use burn::tensor::DType;

use super::weights::Weights;
use crate::{
    dtype::WeightDtype,
    error::{Error, Result},
};

impl Weights {
    /// Sets the type of all tensors on the device. Call it after all tensors have been added.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device does not support the type.
    pub(crate) fn set_dtype(&mut self, asked: WeightDtype) -> Result<()> {
        let chosen = asked.dtype().unwrap_or_else(|| self.prevailing());
        self.dtype = chosen;
        let name = WeightDtype::of(chosen).unwrap_or(asked);
        if !self.device.clone().without_autodiff().supports_dtype(chosen) {
            let of = match asked {
                WeightDtype::Auto => format!(" (auto, the type of {})", self.path.display()),
                _ => String::new(),
            };
            let what = format!("dtype {name}{of} on {:?}", self.device);
            let why = format!("the device does not support {name}; use f32");
            return Err(Error::unsupported(what, why));
        }
        if asked == WeightDtype::Auto && self.matrices().any(|(dtype, _)| dtype != chosen) {
            let path = self.path.display();
            let rest = "the others are rounded to it";
            self.notes.push(format!("{path}: most matrices are {name}; {rest}"));
        }
        Ok(())
    }

    /// Returns the type of most elements of matrices. On a tie, f32 precedes f16, and f16 bf16.
    fn prevailing(&self) -> DType {
        let elements = |dtype| -> usize {
            self.matrices().filter(|(found, _)| *found == dtype).map(|(_, n)| n).sum()
        };
        let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16].map(elements);
        match f32 >= f16.max(bf16) {
            true => DType::F32,
            false if f16 >= bf16 => DType::F16,
            false => DType::BF16,
        }
    }

    /// Returns the type and the number of elements of every float tensor with two dimensions.
    fn matrices(&self) -> impl Iterator<Item = (DType, usize)> {
        let tensors = self.tensors.values().map(|entry| &entry.tensor);
        tensors
            .filter(|tensor| {
                tensor.shape.num_dims() == 2 && WeightDtype::of(tensor.dtype).is_some()
            })
            .map(|tensor| (tensor.dtype, tensor.shape.num_elements()))
    }
}
