//! The one type of a model's matrices.

mod module;
mod packed;

use std::{collections::BTreeSet, ops::Range};

use burn::{
    module::{Param, ParamId},
    tensor::{DType, Device, Int, Tensor, TensorData, module::embedding},
};
use kv_weights::{Activations, Fused, PackedMatrix};

use self::packed::Packed;
pub(crate) use self::{module::PACKED, packed::PackedSize};
use super::{low_rank::LowRank, norm::RmsNorm, project::project};
use crate::error::{Error, Result};

/// A matrix of weights, `[rows, columns]`: its rows are multiplied with, looked up, or both.
///
/// Projections, embeddings and the head read their weights by its methods alone, so that how
/// weights are stored (f32, f16, bf16, or the blocks of a file) is decided here. As a Burn module
/// it is its parameter, without a name of its own: in `Llama.layers.0.qkv.weight` it is `weight`.
/// Packed weights are not trained and have no parameter, but those of an adapter, `adapter.a` and
/// `adapter.b`, where [`LanguageModel::adapt`](crate::LanguageModel::adapt) has put one.
#[derive(Clone, Debug)]
pub struct Matrix(Stored);

#[derive(Clone, Debug)]
enum Stored {
    Dense(Param<Tensor<2>>),
    Packed(Packed),
}

impl Matrix {
    /// The matrix of the rows of all `parts`, which are not trained.
    ///
    /// # Errors
    ///
    /// No parts or parts of different widths, and a device that does not multiply packed weights.
    pub fn packed(parts: Vec<PackedMatrix>, activations: Activations) -> Result<Self> {
        let widths: BTreeSet<usize> = parts.iter().map(|part| part.dims()[1]).collect();
        let Some(first) = parts.first().filter(|_| widths.len() == 1) else {
            let widths = format!("of widths {widths:?}");
            return Err(Error::argument("parts", widths, "must be of one width"));
        };
        kv_weights::check_device("packed weights", &first.device())?;
        Ok(Self(Stored::Packed(Packed { id: ParamId::new(), parts, activations, adapter: None })))
    }

    /// Identifies the parameter, or the packed weights, among those of a model.
    pub fn id(&self) -> ParamId {
        match &self.0 {
            Stored::Dense(param) => param.id,
            Stored::Packed(packed) => packed.id,
        }
    }

    /// The matrix as a parameter, which training updates; `None` for packed weights.
    pub fn param(&self) -> Option<&Param<Tensor<2>>> {
        match &self.0 {
            Stored::Dense(param) => Some(param),
            Stored::Packed(_) => None,
        }
    }

    /// Whether weights are packed and nothing is added to them.
    pub(crate) fn is_only_packed(&self) -> bool {
        matches!(&self.0, Stored::Packed(Packed { adapter: None, .. }))
    }

    /// Adds an adapter to packed weights, which adds nothing yet and is trained, in place of one
    /// that was there. Returns whether they are packed.
    pub(crate) fn adapt(&mut self, rank: usize, scale: f64, device: &Device) -> bool {
        let dims = self.dims();
        let Stored::Packed(packed) = &mut self.0 else { return false };
        packed.adapter = Some(LowRank::new(dims, rank, scale, device));
        true
    }

    /// Packed weights with an adapter become a parameter, their sum. Returns what was packed.
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

    /// The numbers, `[rows, columns]`; packed weights are restored to f32.
    pub fn val(&self) -> Tensor<2> {
        match &self.0 {
            Stored::Dense(param) => param.val(),
            Stored::Packed(packed) => packed.rows(0, packed.dims()[0]),
        }
    }

    /// The device that it is on.
    pub fn device(&self) -> Device {
        match &self.0 {
            Stored::Dense(param) => param.lazy_device(),
            Stored::Packed(packed) => packed.parts[0].device(),
        }
    }

    /// Replaces the numbers by what `f` makes of them; packed weights are restored for it.
    #[must_use]
    pub fn map_tensor(self, f: impl FnOnce(Tensor<2>) -> Tensor<2>) -> Self {
        Self(Stored::Dense(match self.0 {
            Stored::Dense(param) => param.map(f),
            Stored::Packed(_) => Param::from_tensor(f(self.val())),
        }))
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        match &self.0 {
            Stored::Dense(param) => param.lazy_shape().dims(),
            Stored::Packed(packed) => packed.dims(),
        }
    }

    /// The type of what is looked up and of what is multiplied: that which it is stored in, f32 for
    /// packed weights.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Stored::Dense(param) => param.dtype(),
            Stored::Packed(_) => DType::F32,
        }
    }

    /// Products of `x` with every row, `x W^T`.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, columns]`, in the type of the matrix
    /// - output: `[batch, seq, rows]`, in the same type; sums are f32
    pub fn project(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.0 {
            Stored::Dense(param) => project(x, param.val()),
            Stored::Packed(packed) => packed.project(&x),
        }
    }

    /// The logits of final states: products of every row with what `norm` makes of `x`, in one
    /// launch where weights are packed on a GPU and tokens few.
    ///
    /// # Shapes
    ///
    /// - as those of [`project`](Self::project)
    pub fn project_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        match self.fuses(&x) {
            true => self.project_fused(&x, Fused::default().with_norm(norm.fused())),
            false => self.project(norm.forward(x)),
        }
    }

    /// Sums of the rows weighted by `y`, `y W`: what the gradient `y` with respect to
    /// [`project`](Self::project)'s products is with respect to what they are of. That of packed
    /// weights records no gradient of its own.
    ///
    /// # Shapes
    ///
    /// - y: `[batch, seq, rows]`, in the type of the matrix
    /// - output: `[batch, seq, columns]`, in the same type
    pub fn back_project(&self, y: Tensor<3>) -> Tensor<3> {
        match &self.0 {
            Stored::Dense(param) => {
                let [batch, seq, rows] = y.dims();
                let x = y.reshape([batch * seq, rows]).matmul(param.val());
                x.reshape([batch as i32, seq as i32, -1])
            }
            Stored::Packed(packed) => packed.back_project(&y),
        }
    }

    /// Whether products of `x` and what is around them are one launch: for a few tokens, by packed
    /// weights on a GPU.
    pub(super) fn fuses(&self, x: &Tensor<3>) -> bool {
        let [batch, seq, _] = x.dims();
        matches!(&self.0, Stored::Packed(Packed { adapter: None, .. }))
            && kv_weights::fuses(batch * seq, &x.device())
    }

    /// Products of `x` with every row, and what is `around` them. Shapes are those of
    /// [`project_fused`].
    ///
    /// # Panics
    ///
    /// If weights are not packed.
    pub(super) fn project_fused(&self, x: &Tensor<3>, around: Fused) -> Tensor<3> {
        match &self.0 {
            Stored::Packed(packed) => packed.project_fused(x.clone(), around),
            Stored::Dense(_) => panic!("the matrix is not packed"),
        }
    }

    /// The rows of these numbers.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, columns]`
    pub fn lookup(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        match &self.0 {
            Stored::Dense(param) => embedding(param.val(), ids),
            Stored::Packed(packed) => packed.lookup(ids),
        }
    }

    /// `n` rows from `start` on, `[n, columns]`.
    pub fn rows(&self, start: usize, n: usize) -> Tensor<2> {
        match &self.0 {
            Stored::Dense(param) => param.val().narrow(0, start, n),
            Stored::Packed(packed) => packed.rows(start, n),
        }
    }

    /// Of these rows the first, one in the middle and the last; of packed weights without an
    /// adapter, whatever the rows, their first words and their last, which do not depend on how
    /// they are divided into buffers.
    pub(crate) fn sample(&self, rows: Range<usize>) -> Result<TensorData, String> {
        /// Words at either end.
        const WORDS: usize = 64;
        let data = match &self.0 {
            Stored::Packed(Packed { parts, adapter: None, .. }) => {
                let (first, last) = (&parts[0], &parts[parts.len() - 1]);
                let whole = |part: &PackedMatrix| part.layout().bytes() / size_of::<u32>();
                let (n, end) = (whole(first).min(WORDS), whole(last));
                let start = first.words().clone().narrow(0, 0, n);
                let n = end.min(WORDS);
                let end = last.words().clone().narrow(0, end - n, n);
                Tensor::cat(vec![start, end], 0).try_to_data()
            }
            _ if rows.is_empty() => return Ok(TensorData::new(Vec::<f32>::new(), [0])),
            _ => {
                let sampled = [rows.start, rows.start + rows.len() / 2, rows.end - 1];
                let sampled = sampled.map(|row| self.rows(row, 1).detach());
                Tensor::cat(sampled.into(), 0).try_to_data()
            }
        };
        data.map_err(|error| error.to_string())
    }

    /// The rows of these numbers, `[n]`, as `[n, columns]`; one past the end is the last row, one
    /// below 0 the first.
    pub fn rows_at(&self, numbers: &Tensor<1, Int>) -> Tensor<2> {
        let last = self.dims()[0] as i32 - 1;
        let numbers = numbers.clone().clamp(0, last);
        match &self.0 {
            Stored::Dense(param) => param.val().select(0, numbers),
            Stored::Packed(packed) => packed.lookup(numbers.unsqueeze()).squeeze_dim(0),
        }
    }
}

impl From<Param<Tensor<2>>> for Matrix {
    fn from(param: Param<Tensor<2>>) -> Self {
        Self(Stored::Dense(param))
    }
}
