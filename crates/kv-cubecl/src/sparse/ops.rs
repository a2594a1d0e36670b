//! The backend extension trait [`SparseOps`].

#![cfg_attr(
    feature = "fusion",
    allow(missing_debug_implementations, reason = "the derived metadata type has none")
)]

use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use super::{AttendPlan, Compression, PoolPlan, RowLayout, Stride};
#[cfg(feature = "fusion")]
use crate::shapes::fusion as shapes;

/// The tensors of a store of rows, see [`RowLayout`]. Operations take them by value and return
/// them: if nobody else holds them, they are written in place.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Rows<B: Backend> {
    /// Code words, u32 of one axis.
    pub codes: IntTensor<B>,
    /// Channels without codes.
    pub floats: FloatTensor<B>,
}

/// The inputs of [`SparseOps::pool_windows`].
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PoolInputs<B: Backend> {
    /// f32 `[batch, slots, lanes * width]`.
    pub content: FloatTensor<B>,
    /// As `content`.
    pub gate: FloatTensor<B>,
    /// f32 `[ratio, lanes * width]`.
    pub position_bias: FloatTensor<B>,
    /// f32 `[width]`.
    pub gain: FloatTensor<B>,
    /// f32 `[positions, rotary_dim]`, the table of a [`RopeTable`](crate::RopeTable).
    pub rope: FloatTensor<B>,
}

/// The inputs of [`SparseOps::attend_rows`].
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttendInputs<B: Backend> {
    /// f32 `[batch, n_heads, tokens, head_dim]`.
    pub query: FloatTensor<B>,
    /// The ring of recent tokens, the call's among them.
    #[extension_type]
    pub window: Rows<B>,
    /// The entries.
    #[extension_type]
    pub entries: Rows<B>,
    /// i32 `[batch, tokens, top_k]`, read if the plan [selects](super::AttendPlan::selects).
    pub selected: IntTensor<B>,
    /// f32 `[n_heads]`; `-inf` for a head without a sink.
    pub sink_logits: FloatTensor<B>,
}

/// Operations of sparse attention over stores of rows. They record no gradient: training uses
/// [`sparse_attention`](super::sparse_attention) and the compressors.
///
/// `span`, i32 `[2, batch]`, describes the tokens of a call: for each sequence, how many it held
/// before, and how many come. A sequence with a number below 0 takes no part.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Remote: cfg(feature = "remote"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SparseOps: Backend {
    /// Stores rows of a call, f32 `[batch, most rows, width]`, where the span and the stride say.
    /// Of more rows than slots only the last are stored.
    #[fusion(meta = |store, _rows, _span, _layout, _stride| store.clone())]
    fn put_rows(
        #[extension_type] store: Rows<Self>,
        rows: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        stride: Stride,
    ) -> Rows<Self>;

    /// Returns a ring of `slots` slots with the `back` rows before each sequence's start. `layout`
    /// describes `store`, which has no codes; its rows need not fill the new ring.
    #[fusion(meta = |store, _span, layout, _back, slots| shapes::ring(store, layout, *slots))]
    fn tail_rows(
        store: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        back: usize,
        slots: usize,
    ) -> FloatTensor<Self>;

    /// Computes the entries that a call completes, f32 `[batch, plan.entries, width]`, from rings
    /// that hold all their tokens: softmax over tokens for each channel, weighted sum, norm, rope.
    /// Rows after the last entry of a sequence are 0.
    #[fusion(meta = |inputs, _span, plan| {
        shapes::pooled(inputs.content.shape.dims::<3>()[0], plan)
    })]
    fn pool_windows(
        #[extension_type] inputs: PoolInputs<Self>,
        span: IntTensor<Self>,
        plan: PoolPlan,
    ) -> FloatTensor<Self>;

    /// Returns the scores of the first `n` keys, f32 `[batch, tokens, n]`: see
    /// [`index_scores`](super::index_scores). `query` is f32 `[batch, heads, tokens, width]`,
    /// `weights` f32 `[batch, tokens, heads]`.
    #[fusion(meta = |query, _weights, _keys, _layout, n| shapes::index_scores(query, *n))]
    fn score_keys(
        query: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        #[extension_type] keys: Rows<Self>,
        layout: RowLayout,
        n: usize,
    ) -> FloatTensor<Self>;

    /// Selects the `top_k` highest of the `scores` that each token of the call sees, i32
    /// `[batch, tokens, top_k]`, in ascending order of entries, with -1 after the last. Of equal
    /// scores, the first entries win, so that the result is the same on every device.
    #[fusion(meta = |scores, _span, _compression, top_k| shapes::selected(scores, *top_k))]
    fn top_entries(
        scores: FloatTensor<Self>,
        span: IntTensor<Self>,
        compression: Compression,
        top_k: usize,
    ) -> IntTensor<Self>;

    /// Attends to recent tokens and entries in one softmax, reading both where they are stored.
    /// Returns f32 `[batch, n_heads, tokens, head_dim]`; 0 for tokens that are not part of the
    /// call.
    #[fusion(meta = |inputs, _span, _plan| inputs.query.clone())]
    fn attend_rows(
        #[extension_type] inputs: AttendInputs<Self>,
        span: IntTensor<Self>,
        plan: AttendPlan,
    ) -> FloatTensor<Self>;
}
