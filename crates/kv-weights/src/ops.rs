//! The backend extension trait [`WeightOps`]: all that a backend must provide.
//!
//! Users call the tensor functions of this crate, which check shapes and dispatch here.

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

/// Operations of a backend with packed weights.
///
/// Float tensors are f32 and may be views. `words` are the blocks of a matrix, u32, one axis, as
/// [`PackedLayout`] has them; what is after the last row in the last word must not matter.
#[cfg_attr(
    not(any(feature = "flex", feature = "cube")),
    allow(unused_variables, reason = "without a backend nothing is dispatched")
)]
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait WeightOps: Backend {
    /// `x W^T` for `x` `[n, columns]`, `[n, rows]`.
    #[fusion(meta = |x, _words, layout, _activations| shapes::project(x, layout))]
    fn packed_project(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
        activations: Activations,
    ) -> FloatTensor<Self>;

    /// [`project_fused`](crate::project_fused) of `x` `[n, columns]`, `[n, outputs]`: norm, products, bias, gate,
    /// addition. The parts are of one format and width, and if there are two and a gate, of equal size; with three there is none.
    #[fusion(meta = |x, _inputs, plan| shapes::fused(x, plan))]
    fn packed_fused(
        x: FloatTensor<Self>,
        #[extension_type] inputs: FusedInputs<Self>,
        plan: FusedPlan,
    ) -> FloatTensor<Self> {
        composed::fused::<Self>(x, inputs, &plan, Self::packed_project, Self::packed_gate)
    }

    /// [`project_picked`](crate::project_picked): for every number of `picked`, i32 `[n]`, the product of a row of `x`
    /// `[n / picks.shared, columns]` with the rows of that expert, `[n, rows]`. The layout is that of each.
    #[fusion(meta = |_x, _words, picked, layout, _picks| shapes::picked(picked, layout))]
    fn packed_picked(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        picked: IntTensor<Self>,
        layout: PackedLayout,
        picks: ExpertSelection,
    ) -> FloatTensor<Self>;

    /// `f(a) * b` of the halves `a` and `b` of the rows of `x`, `[n, 2 * outputs]`: `[n, outputs]`. An infinite or
    /// undefined number makes what it is part of infinite or undefined.
    #[fusion(meta = |x, _gate| shapes::gate(x))]
    fn packed_gate(x: FloatTensor<Self>, gate: Gate) -> FloatTensor<Self> {
        composed::gate::<Self>(x, gate)
    }

    /// `grad W` for `grad` `[n, rows]`, `[n, columns]`: the gradient of [`packed_project`](Self::packed_project)
    /// with respect to `x`, for either kind of activations.
    #[fusion(meta = |grad, _words, layout| shapes::project_backward(grad, layout))]
    fn packed_project_backward(
        grad: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self>;

    /// The rows of these numbers, `[n]`, all below `rows`, restored: `[n, columns]`.
    #[fusion(meta = |_words, ids, layout| shapes::rows(ids, layout))]
    fn packed_rows(
        words: IntTensor<Self>,
        ids: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self>;

    /// `n` rows from `start` on, restored: `[n, columns]`.
    #[fusion(meta = |_words, layout, _start, n| shapes::floats([*n, layout.columns()]))]
    fn packed_restore(
        words: IntTensor<Self>,
        layout: PackedLayout,
        start: usize,
        n: usize,
    ) -> FloatTensor<Self>;
}
