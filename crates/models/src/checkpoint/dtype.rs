//! The type that a checkpoint's tensors are read in.

use burn::tensor::DType;

use super::weights::Weights;
use crate::{
    dtype::WeightDtype,
    error::{Error, Result},
};

impl Weights {
    /// Says in which type all tensors are handed to the device, once all have been added.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a device without the type.
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
            let why = format!("the device does not compute in {name}, but in f32");
            return Err(Error::unsupported(what, why));
        }
        if asked == WeightDtype::Auto && self.matrices().any(|(dtype, _)| dtype != chosen) {
            let path = self.path.display();
            let rest = "those of other types are rounded to it";
            self.notes.push(format!("{path}: most of its matrices are {name}; {rest}"));
        }
        Ok(())
    }

    /// The type that most elements of matrices have; of equals f32, then f16.
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

    /// Type and number of elements of every float tensor of two dimensions.
    fn matrices(&self) -> impl Iterator<Item = (DType, usize)> {
        let tensors = self.tensors.values().map(|entry| &entry.tensor);
        tensors
            .filter(|tensor| {
                tensor.shape.num_dims() == 2 && WeightDtype::of(tensor.dtype).is_some()
            })
            .map(|tensor| (tensor.dtype, tensor.shape.num_elements()))
    }
}
