//! The packed weights of a matrix.

use burn::{
    module::ParamId,
    tensor::{Int, Tensor},
};
use kv_weights::{Activations, Fused, PackedMatrix, WeightFormat, project_fused};

use crate::nn::low_rank::LowRank;

/// Rows of blocks, with an optional adapter.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    /// Identifies the weights among the parameters of a model.
    pub(super) id: ParamId,
    /// Matrices of equal width with consecutive rows; at least one.
    pub(super) parts: Vec<PackedMatrix>,
    pub(super) activations: Activations,
    /// The trained addition.
    pub(super) adapter: Option<LowRank>,
}

impl Packed {
    pub(super) fn dims(&self) -> [usize; 2] {
        let rows = self.parts.iter().map(|part| part.dims()[0]).sum();
        [rows, self.parts[0].dims()[1]]
    }

    pub(super) fn rows(&self, start: usize, n: usize) -> Tensor<2> {
        let (mut first, end) = (0, start + n);
        let mut found = vec![];
        for part in &self.parts {
            let next = first + part.dims()[0];
            let (from, to) = (start.max(first), end.min(next));
            if from < to {
                found.push(served(part.restore_rows(from - first, to - from)));
            }
            first = next;
        }
        let rows = match found.len() {
            1 => found.swap_remove(0),
            _ => Tensor::cat(found, 0),
        };
        match &self.adapter {
            Some(adapter) => rows + adapter.rows(start, n),
            None => rows,
        }
    }

    pub(super) fn project(&self, x: &Tensor<3>) -> Tensor<3> {
        let products = self.project_fused(x.clone(), Fused::default());
        match &self.adapter {
            Some(adapter) => products + adapter.project(x.clone()),
            None => products,
        }
    }

    /// Returns the products with all parts and the operations `around` them, without the adapter.
    pub(super) fn project_fused(&self, x: Tensor<3>, around: Fused) -> Tensor<3> {
        let parts: Vec<_> = self.parts.iter().collect();
        served(project_fused(x, &parts, self.activations, around))
    }

    pub(super) fn back_project(&self, y: &Tensor<3>) -> Tensor<3> {
        let (mut first, mut sum) = (0, self.adapter.as_ref().map(|a| a.back_project(y.clone())));
        for part in &self.parts {
            let rows = part.dims()[0];
            let of_part = served(kv_weights::back_project(y.clone().narrow(2, first, rows), part));
            sum = Some(match sum {
                Some(sum) => sum + of_part,
                None => of_part,
            });
            first += rows;
        }
        sum.expect("there is a part")
    }

    pub(super) fn lookup(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let parts: Vec<_> = self.parts.iter().collect();
        let rows = served(kv_weights::lookup_parts(ids.clone(), &parts));
        match &self.adapter {
            Some(adapter) => rows + adapter.lookup(ids),
            None => rows,
        }
    }

    pub(super) fn map(
        self,
        f: impl Fn(PackedMatrix) -> PackedMatrix,
        adapter: impl FnOnce(LowRank) -> LowRank,
    ) -> Self {
        let parts = self.parts.into_iter().map(f).collect();
        Self { parts, adapter: self.adapter.map(adapter), ..self }
    }
}

/// Unwraps a result. Devices, types and widths were checked when the matrix was made.
pub(super) fn served<T>(result: kv_weights::Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("packed weights: {error}"))
}

/// The size of packed weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PackedSize {
    pub(crate) bytes: usize,
    pub(crate) numbers: usize,
    /// The number of matrices with an adapter.
    pub(crate) adapters: usize,
    /// Bytes of each of [`WeightFormat::ALL`].
    pub(crate) formats: [usize; WeightFormat::ALL.len()],
}

impl PackedSize {
    /// Adds numbers that take this many bytes in a format.
    pub(crate) fn add(&mut self, format: WeightFormat, bytes: usize, numbers: usize) {
        self.bytes += bytes;
        self.numbers += numbers;
        let place = WeightFormat::ALL.iter().position(|other| *other == format);
        if let Some(place) = place {
            self.formats[place] += bytes;
        }
    }

    pub(crate) fn subtract(&mut self, other: &Self) {
        self.bytes -= other.bytes;
        self.numbers -= other.numbers;
        self.adapters -= other.adapters;
        self.formats.iter_mut().zip(other.formats).for_each(|(bytes, less)| *bytes -= less);
    }
}
