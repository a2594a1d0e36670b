//! Attention heads and the memory of their keys and values.

use std::fmt;

use burn::tensor::{DType, Tensor};
use kv_cubecl::{AttentionOptions, KvMemory, RopeTable};
use tracing::trace_span;

use super::rope::RopeRows;
use crate::{error::Result, spans::OPERATION};

/// The inputs and the output of one layer's attention.
#[derive(Clone, Debug)]
pub struct AttentionTrace {
    /// The layer, counted from 0.
    pub layer: usize,
    /// Queries after the rope, `[batch, n_heads, seq, head_dim]`.
    pub query: Tensor<4>,
    /// Keys after the rope, `[batch, n_kv_heads, seq, head_dim]`.
    pub key: Tensor<4>,
    /// Values, `[batch, n_kv_heads, seq, head_dim]`.
    pub value: Tensor<4>,
    /// Attention before the heads are joined, `[batch, n_heads, seq, head_dim]`.
    pub output: Tensor<4>,
    /// The options of the attention.
    pub options: AttentionOptions,
    /// The learned sink of every query head, `[n_heads]`, if the model has them.
    pub sink_logits: Option<Tensor<1>>,
}

/// A callback that receives every layer's attention, first layer first.
pub type AttentionObserver<'a> = dyn FnMut(AttentionTrace) + 'a;

/// The memory of one layer's keys and values, and an optional observer of its attention.
#[derive(Debug)]
pub struct Memory<'a> {
    kv: KvMemory<'a>,
    sink_logits: Option<Tensor<1>>,
    observer: Option<Observer<'a>>,
}

/// An [`AttentionObserver`] and its layer.
struct Observer<'a> {
    layer: usize,
    options: AttentionOptions,
    observe: &'a mut AttentionObserver<'a>,
}

impl fmt::Debug for Observer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl<'a> From<KvMemory<'a>> for Memory<'a> {
    fn from(kv: KvMemory<'a>) -> Self {
        Self { kv, sink_logits: None, observer: None }
    }
}

impl<'a> Memory<'a> {
    /// Adds a learned sink to every query head, `[n_heads]`: a term `exp(sink_logit)` in the
    /// denominator of the softmax that adds no value.
    #[must_use]
    pub fn with_sinks(self, sink_logits: Tensor<1>) -> Self {
        Self { sink_logits: Some(sink_logits), ..self }
    }

    /// Returns whether this is a decode step for graph capture, which cannot wait for the host.
    pub fn is_captured(&self) -> bool {
        matches!(self.kv, KvMemory::At(..))
    }

    /// Passes the attention of this layer to `observe`.
    #[must_use]
    pub fn shown_to(
        self,
        observe: &'a mut AttentionObserver<'a>,
        layer: usize,
        options: AttentionOptions,
    ) -> Self {
        Self { observer: Some(Observer { layer, options, observe }), ..self }
    }

    /// Attends causally to the tokens in memory and to the new ones.
    ///
    /// # Shapes
    /// - q: `[batch, n_heads, seq, head_dim]`
    /// - k, v: `[batch, n_kv_heads, seq, head_dim]`, k after the rope
    /// - output: `[batch, n_heads, seq, head_dim]`
    ///
    /// # Errors
    /// Fails as the cache does, if its configuration does not fit the head or its capacity is
    /// exceeded.
    pub fn attend(self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Result<Tensor<4>> {
        let _span = trace_span!(target: OPERATION, "attend").entered();
        let Self { kv, sink_logits, observer } = self;
        let Some(Observer { layer, options, observe }) = observer else {
            return Ok(kv.attend_with_sinks(q, k, v, sink_logits)?.output);
        };
        let (query, key, value) = (q.clone(), k.clone(), v.clone());
        let output = kv.attend_with_sinks(q, k, v, sink_logits.clone())?.output;
        let shown = output.clone();
        observe(AttentionTrace { layer, query, key, value, output: shown, options, sink_logits });
        Ok(output)
    }

    /// Returns the table for [`attend_with_rope`](Self::attend_with_rope) if that serves queries
    /// and keys of `dtype`.
    pub(crate) fn rope_table<'r>(&self, rope: &'r RopeRows, dtype: DType) -> Option<&'r RopeTable> {
        let applies = self.observer.is_none() && self.kv.applies_rope() && dtype == DType::F32;
        rope.table().filter(|_| applies)
    }

    /// Attends with one token before rope, which the launches that append and attend apply.
    /// [`rope_table`](Self::rope_table) returns `rope_table`.
    pub(crate) fn attend_with_rope(
        self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        rope_table: &RopeTable,
    ) -> Result<Tensor<4>> {
        let _span = trace_span!(target: OPERATION, "attend").entered();
        Ok(self.kv.attend_with_rope(q, k, v, rope_table, self.sink_logits)?.output)
    }
}
