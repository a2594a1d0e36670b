//! The backend extension trait [`WeightOps`]: the operations that a backend provides.
//!
//! Users call the tensor functions of this crate, which check their arguments and dispatch here.

use burn::backend::{
    Backend, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

#[cfg(feature = "fusion")]
use crate::shapes;
use crate::{
    Activations, ExpertSelection, Gate, PackedLayout,
    backends::composed,
    fused::{FusedInputs, FusedPlan},
};

/// Operations on packed weights.
///
/// Float tensors are f32 and may be views. `words` are the blocks of a matrix as [`PackedLayout`]
/// defines them, u32, with one axis. Bytes after the last row must not affect results.
#[cfg_attr(
    not(any(feature = "flex", feature = "cube", feature = "remote")),
    allow(unused_variables, reason = "without a backend nothing is dispatched")
)]
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Remote: cfg(feature = "remote"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait WeightOps: Backend {
    /// Computes `x W^T`, `[n, rows]`, from `x`, `[n, columns]`.
    #[fusion(meta = |x, _words, layout, _activations| shapes::project(x, layout))]
    fn packed_project(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
        activations: Activations,
    ) -> FloatTensor<Self>;

    /// Computes [`project_fused`](crate::project_fused), `[n, outputs]`, from `x`, `[n, columns]`:
    /// norm, products, bias, gate, residual. The parts have one format and width. With a gate,
    /// there are at most two, of equal size.
    #[fusion(meta = |x, _inputs, plan| shapes::fused(x, plan))]
    fn packed_fused(
        x: FloatTensor<Self>,
        #[extension_type] inputs: FusedInputs<Self>,
        plan: FusedPlan,
    ) -> FloatTensor<Self> {
        composed::fused::<Self>(x, inputs, &plan, Self::packed_project, Self::packed_gate)
    }

    /// Computes [`project_picked`](crate::project_picked), `[n, rows]`.
    ///
    /// For each number in `picked`, i32 `[n]`, multiplies a row of `x`,
    /// `[n / picks.shared, columns]`, with the rows of that expert. All experts have this layout.
    #[fusion(meta = |_x, _words, picked, layout, _picks| shapes::picked(picked, layout))]
    fn packed_picked(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        picked: IntTensor<Self>,
        layout: PackedLayout,
        picks: ExpertSelection,
    ) -> FloatTensor<Self>;

    /// Computes `f(a) * b`, `[n, outputs]`, for the halves `a` and `b` of the rows of `x`,
    /// `[n, 2 * outputs]`. Infinite and NaN inputs make the affected outputs infinite or NaN.
    #[fusion(meta = |x, _gate| shapes::gate(x))]
    fn packed_gate(x: FloatTensor<Self>, gate: Gate) -> FloatTensor<Self> {
        composed::gate::<Self>(x, gate)
    }

    /// Computes `grad W`, `[n, columns]`, from `grad`, `[n, rows]`: the gradient of
    /// [`packed_project`](Self::packed_project) with respect to `x`, for every precision of
    /// activations.
    #[fusion(meta = |grad, _words, layout| shapes::project_backward(grad, layout))]
    fn packed_project_backward(
        grad: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self>;

    /// Restores the rows with these numbers, `[n]`, all below `rows`, as `[n, columns]`.
    #[fusion(meta = |_words, ids, layout| shapes::rows(ids, layout))]
    fn packed_rows(
        words: IntTensor<Self>,
        ids: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self>;

    /// Restores `n` rows from `start` on, as `[n, columns]`.
    #[fusion(meta = |_words, layout, _start, n| shapes::floats([*n, layout.columns()]))]
    fn packed_restore(
        words: IntTensor<Self>,
        layout: PackedLayout,
        start: usize,
        n: usize,
    ) -> FloatTensor<Self>;
}
