//! Models without weights. The tensors that an importer requests are listed; nothing is read or
//! allocated.

use burn::{
    module::{Param, ParamId},
    tensor::{DType, Device, Shape, Tensor},
};
use burn_store::{bridge, burn_pack::Error as PackError};

use super::{
    entry::Entry,
    observer::Planned,
    weights::{Outline, Weights},
};
use crate::{
    error::{Error, Result},
    exports::Names,
    mxfp4::BLOCK,
    spec::ModelSpec,
};

impl Weights {
    /// Lists tensors from here on instead of taking them.
    pub(crate) fn outline(&mut self, outline: Outline) {
        self.outline = Some(outline);
    }

    pub(super) fn is_outline(&self) -> bool {
        self.outline.is_some()
    }

    /// Keeps names and sizes until all tensors are listed.
    pub(super) fn begin_outline(&mut self, names: &'static Names, spec: &ModelSpec) {
        if let Some(outline) = &mut self.outline {
            outline.model = Some((names, spec.clone()));
        }
    }

    /// Reports the model to the observer, after all tensors have been listed.
    pub(super) fn finish_outline(&mut self) -> Result<()> {
        let model = self.outline.as_mut().and_then(|outline| outline.model.take());
        let Some((names, spec)) = model else { return Ok(()) };
        self.find_head(names)?;
        let weights = self.sizes(names);
        self.watcher.begin(&Planned::new(&spec, &weights, self.cache.as_ref()))
    }

    pub(super) fn list(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<()> {
        /// The most bytes of a tensor. It keeps the sum over all tensors from overflowing.
        const MOST: u64 = 1 << 40;
        let numbers = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim as u64));
        // A restored number takes at most four bytes.
        if numbers.is_none_or(|numbers| numbers > MOST / size_of::<f32>() as u64) {
            let why = format!("would have shape {shape:?}, more than 2^40 bytes in f32");
            return Err(Error::Tensor { path: self.path.clone(), tensor: name.into(), why });
        }
        let absent = || Err(PackError::ValidationError("only its shape is known".into()));
        let shape = Shape::from(shape.to_vec());
        let tensor = bridge::deferred(name.into(), dtype, shape, None, absent);
        self.add(name.into(), Entry::new(tensor, self.path.clone(), None))
    }

    pub(super) fn list_floats(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        let stored = self.outline.as_ref().map_or(DType::F32, |outline| outline.stored);
        self.list(name, shape, stored)
    }

    /// Lists tensors with these numbers of rows, and returns a stand-in for the joined tensor.
    /// `row` is the shape of a row.
    pub(super) fn list_joined<const D: usize>(
        &mut self,
        parts: &[(String, usize)],
        row: &[usize],
    ) -> Result<Param<Tensor<D>>> {
        for (name, rows) in parts {
            self.list_floats(name, &[&[*rows], row].concat())?;
        }
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        Ok(self.stand_in([&[rows], row].concat()))
    }

    /// Returns a parameter of this shape. It is allocated only when it is used.
    pub(super) fn stand_in<const D: usize>(&self, shape: Vec<usize>) -> Param<Tensor<D>> {
        let (dtype, shape) = (self.dtype, Shape::from(shape));
        let zeros = shape.clone();
        let init = move |device: &Device, _| Tensor::zeros(zeros, (device, dtype));
        Param::uninitialized(ParamId::new(), init, self.device.clone(), false, shape)
    }

    /// Lists matrices and biases of experts, `[experts, rows, columns]`, as in Hugging Face
    /// checkpoints.
    pub(super) fn list_experts(
        &mut self,
        name: &str,
        [n, rows, columns]: [usize; 3],
        bias: bool,
    ) -> Result<()> {
        if self.outline.as_ref().is_some_and(|outline| outline.mxfp4) {
            let blocks = [n, rows, columns / BLOCK];
            self.list(&format!("{name}_blocks"), &[&blocks[..], &[BLOCK / 2]].concat(), DType::U8)?;
            self.list(&format!("{name}_scales"), &blocks, DType::U8)?;
        } else {
            self.list_floats(name, &[n, columns, rows])?;
        }
        match bias {
            true => self.list_floats(&format!("{name}_bias"), &[n, rows]),
            false => Ok(()),
        }
    }
}
