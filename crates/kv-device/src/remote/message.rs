//! Messages of an operation: [`Outgoing`] on the client, [`Incoming`] and [`Answer`] on the server.

use core::{fmt, slice};

use burn::backend::{
    Remote, RemoteDevice, TensorMetadata,
    ir::{BackendIr, HandleContainer, TensorIr},
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::custom::TensorSpec;

use super::{
    arguments::{Argument, append, take},
    malformed::Malformed,
};

/// Returns shape and type of a tensor.
pub fn spec(tensor: &impl TensorMetadata) -> TensorSpec {
    TensorSpec::new(tensor.shape(), tensor.dtype())
}

/// Shapes and types of the outputs of an operation, in their order.
pub trait Outputs {
    /// Lists them.
    fn into_specs(self) -> Vec<TensorSpec>;
}

impl Outputs for TensorSpec {
    fn into_specs(self) -> Vec<TensorSpec> {
        vec![self]
    }
}

impl Outputs for Vec<TensorSpec> {
    fn into_specs(self) -> Vec<TensorSpec> {
        self
    }
}

impl<A: Outputs, B: Outputs> Outputs for (A, B) {
    fn into_specs(self) -> Vec<TensorSpec> {
        [self.0.into_specs(), self.1.into_specs()].concat()
    }
}

/// An operation that a client describes.
#[derive(Debug, Default)]
pub struct Outgoing {
    pub(super) device: Option<RemoteDevice>,
    pub(super) inputs: Vec<TensorIr>,
    pub(super) arguments: Vec<u8>,
}

impl Outgoing {
    /// Creates a message without inputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor, of any kind.
    pub(super) fn tensor(&mut self, tensor: FloatTensor<Remote>) {
        self.device.get_or_insert_with(|| tensor.device());
        self.inputs.push(tensor.into_ir());
    }

    /// Adds another argument.
    pub(super) fn argument(&mut self, value: &impl Argument) {
        append(&mut self.arguments, value);
    }
}

/// An operation that a server reads.
pub struct Incoming<'a, B: BackendIr> {
    handles: &'a mut HandleContainer<B::Handle>,
    inputs: slice::Iter<'a, TensorIr>,
    outputs: &'a [TensorIr],
    arguments: &'a [u8],
}

impl<B: BackendIr> fmt::Debug for Incoming<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incoming").field("inputs", &self.inputs.len()).finish_non_exhaustive()
    }
}

impl<'a, B: BackendIr> Incoming<'a, B> {
    pub(super) fn new(
        handles: &'a mut HandleContainer<B::Handle>,
        inputs: &'a [TensorIr],
        outputs: &'a [TensorIr],
        arguments: &'a [u8],
    ) -> Self {
        Self { handles, inputs: inputs.iter(), outputs, arguments }
    }

    fn input(&mut self) -> Result<&'a TensorIr, Malformed> {
        let input = self.inputs.next().ok_or_else(|| Malformed::new("an input is missing"))?;
        match self.handles.has_handle(&input.id) {
            true => Ok(input),
            false => Err(Malformed::new(format!("there is no tensor {:?}", input.id))),
        }
    }

    pub(super) fn float(&mut self) -> Result<FloatTensor<B>, Malformed> {
        let input = self.input()?;
        Ok(self.handles.get_float_tensor::<B>(input))
    }

    pub(super) fn int(&mut self) -> Result<IntTensor<B>, Malformed> {
        let input = self.input()?;
        Ok(self.handles.get_int_tensor::<B>(input))
    }

    pub(super) fn argument<T: Argument>(&mut self) -> Result<T, Malformed> {
        take(&mut self.arguments)
    }

    /// Checks that all inputs and arguments were read.
    ///
    /// # Errors
    /// A message with more of them.
    pub fn finish(&self) -> Result<(), Malformed> {
        match (self.inputs.len(), self.arguments.len()) {
            (0, 0) => Ok(()),
            (tensors, bytes) => Err(Malformed::new(format!(
                "{tensors} inputs and {bytes} bytes of arguments are left; build client and \
                 server from the same version"
            ))),
        }
    }

    /// Checks that the client expects outputs of these shapes and types.
    ///
    /// # Errors
    /// A client that expects others.
    pub fn check(&self, outputs: &[TensorSpec]) -> Result<(), Malformed> {
        let same = |(ours, theirs): (&TensorSpec, &TensorIr)| {
            ours.shape == theirs.shape && ours.dtype == theirs.dtype
        };
        match outputs.len() == self.outputs.len() && outputs.iter().zip(self.outputs).all(same) {
            true => Ok(()),
            false => Err(Malformed::new(format!(
                "the outputs are {outputs:?}, but the client expects {:?}",
                self.outputs
            ))),
        }
    }

    /// Starts the answer of this operation.
    pub(super) fn answer(&mut self) -> Answer<'_, B> {
        Answer { handles: &mut *self.handles, outputs: self.outputs.iter() }
    }
}

/// The outputs of an operation that a server ran.
pub struct Answer<'a, B: BackendIr> {
    handles: &'a mut HandleContainer<B::Handle>,
    outputs: slice::Iter<'a, TensorIr>,
}

impl<B: BackendIr> fmt::Debug for Answer<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("outputs", &self.outputs.len()).finish_non_exhaustive()
    }
}

impl<'a, B: BackendIr> Answer<'a, B> {
    fn next(&mut self) -> Result<&'a TensorIr, Malformed> {
        self.outputs.next().ok_or_else(|| Malformed::new("the client expects fewer outputs"))
    }

    pub(super) fn float(&mut self, tensor: FloatTensor<B>) -> Result<(), Malformed> {
        let output = self.next()?;
        self.handles.register_float_tensor::<B>(&output.id, tensor);
        Ok(())
    }

    pub(super) fn int(&mut self, tensor: IntTensor<B>) -> Result<(), Malformed> {
        let output = self.next()?;
        self.handles.register_int_tensor::<B>(&output.id, tensor);
        Ok(())
    }
}
