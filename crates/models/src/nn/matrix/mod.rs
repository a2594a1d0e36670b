//! The type of all matrices of a model.

mod heads;
mod module;
mod packed;

use std::{collections::BTreeSet, ops::Range};

use burn::{
    module::{Param, ParamId},
    tensor::{DType, Device, Int, Tensor, TensorData, module::embedding},
};
use kv_weights::{Activations, Fused, PackedMatrix};
use tracing::span::EnteredSpan;

use self::{heads::PackedHeads, packed::Packed};
pub(crate) use self::{module::PACKED, packed::PackedSize};
use super::{low_rank::LowRank, norm::RmsNorm, project::project};
use crate::{
    error::{Error, Result},
    spans,
};

/// A matrix of weights, `[rows, columns]`. Its rows are multiplied, looked up, or both.
///
/// This type alone decides how weights are stored: as f32, f16, bf16, or blocks of a file. As a
/// Burn module it is its parameter, without a name of its own: in `Llama.layers.0.qkv.weight` it is
/// `weight`. Packed weights are not trained and have no parameter.
/// [`LanguageModel::adapt`](crate::LanguageModel::adapt) adds an adapter with the parameters
/// `adapter.a` and `adapter.b`.
#[derive(Clone, Debug)]
pub struct Matrix(Stored);

#[derive(Clone, Debug)]
enum Stored {
    Dense(Param<Tensor<2>>),
    Packed(Packed),
    Heads(Box<PackedHeads>),
}

impl Matrix {
    /// Creates a matrix with the rows of all `parts`, which are not trained.
    ///
    /// # Errors
    /// Fails if there are no parts, if they have different widths, or if the device does not
    /// multiply packed weights.
    pub fn packed(parts: Vec<PackedMatrix>, activations: Activations) -> Result<Self> {
        let widths: BTreeSet<usize> = parts.iter().map(|part| part.dims()[1]).collect();
        let Some(first) = parts.first().filter(|_| widths.len() == 1) else {
            let widths = format!("of widths {widths:?}");
            return Err(Error::argument("parts", widths, "must be of one width"));
        };
        kv_weights::check_device("packed weights", &first.device())?;
        Ok(Self(Stored::Packed(Packed { id: ParamId::new(), parts, activations, adapter: None })))
    }

    /// Joins the packed matrices of heads: `[n_heads * rank, plain]` with the transposed rows of
    /// keys, and `[n_heads * value, rank]` with the rows of values. The result has for each head
    /// the rows of keys, then of values, `[n_heads * (plain + value), rank]`. Returns `None` for
    /// matrices that are not packed or have several parts.
    pub(crate) fn of_heads(sides: [Self; 2], n_heads: usize) -> Option<Self> {
        let [Self(Stored::Packed(keys)), Self(Stored::Packed(values))] = sides else { return None };
        PackedHeads::new([keys, values], n_heads).map(|heads| Self(Stored::Heads(Box::new(heads))))
    }

    /// Returns the packed matrices of heads; `None` for a matrix that is stored as a whole.
    pub(crate) fn heads(&self) -> Option<&PackedHeads> {
        match &self.0 {
            Stored::Heads(heads) => Some(heads),
            _ => None,
        }
    }

    /// Identifies the parameter, or the packed weights, among those of a model.
    pub fn id(&self) -> ParamId {
        match &self.0 {
            Stored::Dense(param) => param.id,
            Stored::Packed(packed) => packed.id,
            Stored::Heads(heads) => heads.id,
        }
    }

    /// Returns the parameter, which training updates; `None` for packed weights.
    pub fn param(&self) -> Option<&Param<Tensor<2>>> {
        match &self.0 {
            Stored::Dense(param) => Some(param),
            Stored::Packed(_) | Stored::Heads(_) => None,
        }
    }

    /// Returns whether weights are packed and have no adapter.
    pub(crate) fn is_only_packed(&self) -> bool {
        matches!(&self.0, Stored::Packed(Packed { adapter: None, .. }))
    }

    /// Adds a trainable adapter to packed weights, which adds zero at first and replaces any
    /// earlier one. Returns whether the weights are packed.
    pub(crate) fn adapt(&mut self, rank: usize, scale: f64, device: &Device) -> bool {
        let dims = self.dims();
        let Stored::Packed(packed) = &mut self.0 else { return false };
        packed.adapter = Some(LowRank::new(dims, rank, scale, device));
        true
    }

    /// Replaces packed weights with an adapter by a parameter, their sum. Returns the size of the
    /// packed weights.
    pub(crate) fn merge(&mut self) -> PackedSize {
        let Stored::Packed(packed) = &self.0 else { return PackedSize::default() };
        if packed.adapter.is_none() {
            return PackedSize::default();
        }
        let mut size = PackedSize { adapters: 1, ..PackedSize::default() };
        for layout in packed.parts.iter().map(|part| part.layout()) {
            size.add(layout.format(), layout.bytes(), layout.rows() * layout.columns());
        }
        let merged = Param::from_tensor(self.val().detach());
        self.0 = Stored::Dense(merged);
        size
    }

    /// Returns the numbers, `[rows, columns]`; packed weights are restored to f32.
    pub fn val(&self) -> Tensor<2> {
        match &self.0 {
            Stored::Dense(param) => param.val(),
            Stored::Packed(packed) => packed.rows(0, packed.dims()[0]),
            Stored::Heads(heads) => heads.rows(),
        }
    }

    /// Returns the device of the matrix.
    pub fn device(&self) -> Device {
        match &self.0 {
            Stored::Dense(param) => param.lazy_device(),
            Stored::Packed(packed) => packed.parts[0].device(),
            Stored::Heads(heads) => heads.parts[0].device(),
        }
    }

    /// Applies `f` to the numbers; packed weights are restored first.
    #[must_use]
    pub fn map_tensor(self, f: impl FnOnce(Tensor<2>) -> Tensor<2>) -> Self {
        Self(Stored::Dense(match self.0 {
            Stored::Dense(param) => param.map(f),
            Stored::Packed(_) | Stored::Heads(_) => Param::from_tensor(f(self.val())),
        }))
    }

    /// Returns rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        match &self.0 {
            Stored::Dense(param) => param.lazy_shape().dims(),
            Stored::Packed(packed) => packed.dims(),
            Stored::Heads(heads) => heads.dims(),
        }
    }

    /// Returns the type of inputs, products and looked-up rows: the stored type, or f32 for packed
    /// weights.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Stored::Dense(param) => param.dtype(),
            Stored::Packed(_) | Stored::Heads(_) => DType::F32,
        }
    }

    /// Returns the bytes of the numbers or of the blocks, without an adapter.
    pub(crate) fn bytes(&self) -> usize {
        let parts = match &self.0 {
            Stored::Dense(param) => {
                return param.lazy_shape().num_elements() * param.dtype().size();
            }
            Stored::Packed(packed) => &packed.parts[..],
            Stored::Heads(heads) => &heads.parts,
        };
        parts.iter().map(|part| part.layout().bytes()).sum()
    }

    /// Enters the operation that reads the matrix, until the end of the scope.
    pub(crate) fn read(&self) -> EnteredSpan {
        spans::reading(self.id(), || self.bytes())
    }

    /// Enters the operation that reads `n` rows, until the end of the scope.
    pub(crate) fn read_rows(&self, n: usize) -> EnteredSpan {
        spans::reading(self.id(), || self.bytes() / self.dims()[0].max(1) * n)
    }

    /// Returns the products of `x` with every row, `x W^T`.
    ///
    /// # Shapes
    /// - x: `[batch, seq, columns]`, in the type of the matrix
    /// - output: `[batch, seq, rows]`, in the same type; sums are f32
    pub fn project(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.0 {
            Stored::Packed(packed) => packed.project(&x),
            Stored::Dense(_) | Stored::Heads(_) => project(x, self.val()),
        }
    }

    /// Computes [`project`](Self::project) in f32, whatever the type of the matrix and of `x`.
    pub fn project_in_f32(&self, x: Tensor<3>) -> Tensor<3> {
        let _span = self.read();
        let x = x.cast(DType::F32);
        match self.dtype() {
            DType::F32 => self.project(x),
            _ => project(x, self.val().cast(DType::F32)),
        }
    }

    /// Applies `norm` to `x`, then returns the products with every row, such as logits. Packed
    /// weights on a GPU do this in one launch for a few tokens.
    ///
    /// # Shapes
    /// - the same as in [`project`](Self::project)
    pub fn project_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        match self.fuses(&x) {
            true => self.project_fused(&x, Fused::default().with_norm(norm.fused())),
            false => self.project(norm.forward(x)),
        }
    }

    /// Returns the sums of the rows weighted by `y`, `y W`. This turns the gradient of
    /// [`project`](Self::project)'s products into the gradient of its inputs. With packed weights,
    /// the result has no gradient of its own.
    ///
    /// # Shapes
    /// - y: `[batch, seq, rows]`, in the type of the matrix
    /// - output: `[batch, seq, columns]`, in the same type
    pub fn back_project(&self, y: Tensor<3>) -> Tensor<3> {
        match &self.0 {
            Stored::Dense(_) | Stored::Heads(_) => {
                let [batch, seq, rows] = y.dims();
                let x = y.reshape([batch * seq, rows]).matmul(self.val());
                x.reshape([batch as i32, seq as i32, -1])
            }
            Stored::Packed(packed) => packed.back_project(&y),
        }
    }

    /// Returns whether products of `x` and the operations around them are one launch: for a few
    /// tokens and packed weights on a GPU.
    pub(super) fn fuses(&self, x: &Tensor<3>) -> bool {
        let [batch, seq, _] = x.dims();
        matches!(&self.0, Stored::Packed(Packed { adapter: None, .. }))
            && kv_weights::fuses(batch * seq, &x.device())
    }

    /// Returns the products of `x` with every row, with the operations `around` them. Shapes are as
    /// in [`project_fused`](kv_weights::project_fused).
    ///
    /// # Panics
    /// Panics if the weights are not packed.
    pub(super) fn project_fused(&self, x: &Tensor<3>, around: Fused) -> Tensor<3> {
        match &self.0 {
            Stored::Packed(packed) => packed.project_fused(x.clone(), around),
            Stored::Dense(_) | Stored::Heads(_) => panic!("the matrix has no packed rows"),
        }
    }

    /// Looks up the rows of these numbers.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, columns]`
    pub fn lookup(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        match &self.0 {
            Stored::Packed(packed) => packed.lookup(ids),
            Stored::Dense(_) | Stored::Heads(_) => embedding(self.val(), ids),
        }
    }

    /// Returns `n` rows from `start` on, `[n, columns]`.
    pub fn rows(&self, start: usize, n: usize) -> Tensor<2> {
        match &self.0 {
            Stored::Packed(packed) => packed.rows(start, n),
            Stored::Dense(_) | Stored::Heads(_) => self.val().narrow(0, start, n),
        }
    }

    /// Returns the first, the middle and the last of these rows. For packed weights without an
    /// adapter, returns the first and the last words of the matrix, which do not depend on how it
    /// is divided into buffers.
    pub(crate) fn sample(&self, rows: Range<usize>) -> Result<TensorData, String> {
        /// The number of words at either end.
        const WORDS: usize = 64;
        let parts = match &self.0 {
            Stored::Packed(Packed { parts, adapter: None, .. }) => &parts[..],
            Stored::Heads(heads) => &heads.parts,
            Stored::Packed(_) | Stored::Dense(_) => &[],
        };
        let data = match parts {
            [first, ..] => {
                let last = &parts[parts.len() - 1];
                let whole = |part: &PackedMatrix| part.layout().bytes() / size_of::<u32>();
                let (n, end) = (whole(first).min(WORDS), whole(last));
                let start = first.words().clone().narrow(0, 0, n);
                let n = end.min(WORDS);
                let end = last.words().clone().narrow(0, end - n, n);
                Tensor::cat(vec![start, end], 0).try_to_data()
            }
            [] if rows.is_empty() => return Ok(TensorData::new(Vec::<f32>::new(), [0])),
            [] => {
                let sampled = [rows.start, rows.start + rows.len() / 2, rows.end - 1];
                let sampled = sampled.map(|row| self.rows(row, 1).detach());
                Tensor::cat(sampled.into(), 0).try_to_data()
            }
        };
        data.map_err(|error| error.to_string())
    }

    /// Returns the rows of these numbers, `[n]`, as `[n, columns]`. Numbers outside the matrix are
    /// clamped to the first or last row.
    pub fn rows_at(&self, numbers: &Tensor<1, Int>) -> Tensor<2> {
        let last = self.dims()[0] as i32 - 1;
        let numbers = numbers.clone().clamp(0, last);
        match &self.0 {
            Stored::Packed(packed) => packed.lookup(numbers.unsqueeze()).squeeze_dim(0),
            Stored::Dense(_) | Stored::Heads(_) => self.val().select(0, numbers),
        }
    }
}

impl From<Param<Tensor<2>>> for Matrix {
    fn from(param: Param<Tensor<2>>) -> Self {
        Self(Stored::Dense(param))
    }
}
