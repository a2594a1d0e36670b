//! The one type of a model's matrices.

use burn::{
    module::{
        Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor, Param,
    },
    tensor::{DType, Device, Int, Tensor, module::embedding},
};

use super::project;

/// A matrix of weights, `[rows, columns]`: its rows are multiplied with, looked up, or both.
///
/// Projections, embeddings and the head read their weights by its methods alone, so that how weights
/// are stored (f32, f16 or bf16) is decided here. As a Burn module it is its parameter, without a name
/// of its own: in `Llama.layers.0.qkv.weight` it is `weight`.
#[derive(Clone, Debug)]
pub struct Matrix(Param<Tensor<2>>);

impl Matrix {
    /// The matrix as a parameter, which training updates.
    pub fn param(&self) -> &Param<Tensor<2>> {
        &self.0
    }

    /// Replaces the parameter by what `f` makes of its tensor.
    #[must_use]
    pub fn map_tensor(self, f: impl FnOnce(Tensor<2>) -> Tensor<2>) -> Self {
        Self(self.0.map(f))
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        self.0.lazy_shape().dims()
    }

    /// The type that it is stored in, which is that of what is looked up and of what is multiplied.
    pub fn dtype(&self) -> DType {
        self.0.dtype()
    }

    /// Products of `x` with every row, `x W^T`.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, columns]`, in the type of the matrix
    /// - output: `[batch, seq, rows]`, in the same type; sums are f32
    pub fn project(&self, x: Tensor<3>) -> Tensor<3> {
        project(x, self.0.val())
    }

    /// The rows of these numbers.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, columns]`
    pub fn lookup(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        embedding(self.0.val(), ids)
    }

    /// `n` rows from `start` on, `[n, columns]`.
    pub fn rows(&self, start: usize, n: usize) -> Tensor<2> {
        self.0.val().narrow(0, start, n)
    }

    /// The rows of these numbers, `[n]`, as `[n, columns]`; one past the end is the last row.
    pub fn rows_at(&self, numbers: &Tensor<1, Int>) -> Tensor<2> {
        let last = self.dims()[0] as i32 - 1;
        self.0.val().select(0, numbers.clone().clamp_max(last))
    }
}

impl From<Param<Tensor<2>>> for Matrix {
    fn from(param: Param<Tensor<2>>) -> Self {
        Self(param)
    }
}

impl Module for Matrix {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        Self(Module::to_device(self.0, device))
    }

    fn train(self) -> Self {
        Self(self.0.train())
    }

    fn valid(&self) -> Self {
        Self(self.0.valid())
    }

    fn materialize(self) -> Self {
        Self(self.0.materialize())
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self(Module::map(self.0, mapper))
    }
}

impl ModuleDisplayDefault for Matrix {
    fn content(&self, content: Content) -> Option<Content> {
        self.0.content(content)
    }
}

impl ModuleDisplay for Matrix {
    fn format(&self, settings: DisplaySettings) -> String {
        self.0.format(settings)
    }
}
