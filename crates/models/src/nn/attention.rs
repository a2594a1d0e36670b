//! Attention heads and the memory of their keys and values.

use std::fmt;

use burn::tensor::{DType, Int, Tensor};
use kv_cubecl::{
    AttentionOptions, Drafted, KvMemory, RopeTable, SharedKv,
    delta::DeltaMemory,
    sparse::{SparseCache, SparseConfig, SparseMemory, SparseTrace},
};
use tracing::{span::EnteredSpan, trace_span};

use super::{packing::Packing, rope::RopeRows};
use crate::{
    error::{Error, Result},
    spans::OPERATION,
};

/// The attention of one layer in one pass.
#[derive(Clone, Debug)]
pub struct AttentionTrace {
    /// The layer, counted from 0.
    pub layer: usize,
    /// Its inputs and its output.
    pub kind: TraceKind,
}

/// The inputs and the output of attention of either kind.
#[derive(Clone, Debug)]
pub enum TraceKind {
    /// Attention to keys and values.
    Kv(Box<KvTrace>),
    /// Sparse attention to recent tokens and entries.
    Sparse(Box<SparseTrace>),
}

/// The inputs and the output of attention to keys and values.
#[derive(Clone, Debug)]
pub struct KvTrace {
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

impl AttentionTrace {
    /// Returns the trace of attention to keys and values; `None` for sparse attention.
    pub fn kv(&self) -> Option<&KvTrace> {
        match &self.kind {
            TraceKind::Kv(trace) => Some(trace),
            TraceKind::Sparse(_) => None,
        }
    }

    /// Returns the trace of sparse attention; `None` for attention to keys and values.
    pub fn sparse(&self) -> Option<&SparseTrace> {
        match &self.kind {
            TraceKind::Kv(_) => None,
            TraceKind::Sparse(trace) => Some(trace),
        }
    }

    /// Returns the output before the heads are joined, `[batch, n_heads, seq, head_dim]`; of sparse
    /// attention before rope is undone.
    pub fn output(&self) -> &Tensor<4> {
        match &self.kind {
            TraceKind::Kv(trace) => &trace.output,
            TraceKind::Sparse(trace) => &trace.output,
        }
    }
}

/// A callback that receives every layer's attention, first layer first.
pub type AttentionObserver<'a> = dyn FnMut(AttentionTrace) + 'a;

/// The memory of one layer's earlier tokens, and an optional observer of its attention.
#[derive(Debug)]
pub struct Memory<'a> {
    stored: Stored<'a>,
    sink_logits: Option<Tensor<1>>,
    observer: Option<Observer<'a>>,
    sharing: Sharing<'a>,
    /// The places of the pass's tokens in the batch, if the pass computes them without padding.
    packing: Option<&'a Packing>,
}

/// The part of a layer in a cache that several layers share.
#[derive(Debug, Default)]
enum Sharing<'a> {
    /// No other layer attends to the layer's tokens.
    #[default]
    Alone,
    /// The layer owns the cache and leaves its tokens here for the others.
    Owner(&'a mut Option<SharedKv>),
    /// The layer attends to these tokens of another.
    Reader(&'a SharedKv),
    /// The layer's tokens may be removed again; what this takes is left here.
    Drafting(&'a mut Option<Drafted>),
}

/// A layer's earlier tokens.
#[derive(Debug)]
enum Stored<'a> {
    /// Keys and values.
    Kv(KvMemory<'a>),
    /// Rows of recent tokens and compressed entries.
    Sparse(SparsePlace<'a>),
    /// A recurrent state.
    Delta(DeltaMemory<'a>),
}

/// The access of a layer of sparse attention to earlier tokens.
#[derive(Debug)]
pub(crate) enum SparsePlace<'a> {
    /// In the same pass, which computes whole sequences as a cache of this configuration would.
    Parallel(SparseConfig),
    /// In a cache, to which the pass appends its tokens.
    Cached(&'a mut SparseCache),
    /// In a cache, to which the pass appends these numbers of tokens.
    Ragged(&'a mut SparseCache, &'a [usize]),
    /// In a cache, to which the pass appends one token at a position on the device.
    At(&'a mut SparseCache, &'a Tensor<1, Int>),
}

impl<'a> Stored<'a> {
    fn kv(self) -> Result<KvMemory<'a>> {
        match self {
            Self::Kv(kv) => Ok(kv),
            Self::Sparse(_) => {
                let why = "the layer's memory holds rows and entries; use Memory::sparse";
                Err(Error::unsupported("attention to keys and values", why))
            }
            Self::Delta(_) => {
                let why = "the layer's memory is a recurrent state; use Memory::delta";
                Err(Error::unsupported("attention to keys and values", why))
            }
        }
    }

    fn applies_rope(&self) -> bool {
        matches!(self, Self::Kv(kv) if kv.applies_rope())
    }
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
        Self::of(Stored::Kv(kv))
    }
}

impl<'a> From<SparsePlace<'a>> for Memory<'a> {
    fn from(sparse: SparsePlace<'a>) -> Self {
        Self::of(Stored::Sparse(sparse))
    }
}

impl<'a> From<DeltaMemory<'a>> for Memory<'a> {
    fn from(delta: DeltaMemory<'a>) -> Self {
        Self::of(Stored::Delta(delta))
    }
}

impl<'a> Memory<'a> {
    fn of(stored: Stored<'a>) -> Self {
        Self { stored, sink_logits: None, observer: None, sharing: Sharing::Alone, packing: None }
    }

    /// Adds a learned sink to every query head, `[n_heads]`: a term `exp(sink_logit)` in the
    /// denominator of the softmax that adds no value.
    #[must_use]
    pub fn with_sinks(self, sink_logits: Tensor<1>) -> Self {
        Self { sink_logits: Some(sink_logits), ..self }
    }

    /// Leaves the keys and values of the pass in `tokens`, for later layers that share the cache.
    pub(crate) fn sharing_with(self, tokens: &'a mut Option<SharedKv>) -> Self {
        Self { sharing: Sharing::Owner(tokens), ..self }
    }

    /// Leaves in `tokens` what removes the tokens of the pass again.
    pub(crate) fn drafting(self, tokens: &'a mut Option<Drafted>) -> Self {
        Self { sharing: Sharing::Drafting(tokens), ..self }
    }

    /// Takes queries, keys and values of tokens without padding.
    pub(crate) fn packed(self, packing: Option<&'a Packing>) -> Self {
        Self { packing, ..self }
    }

    /// Attends to the `tokens` of the layer that owns the cache.
    pub(crate) fn sharing(self, tokens: &'a SharedKv) -> Self {
        Self { sharing: Sharing::Reader(tokens), ..self }
    }

    /// Returns whether this is a decode step for graph capture, which cannot wait for the host.
    pub fn is_captured(&self) -> bool {
        match &self.stored {
            Stored::Kv(kv) => matches!(kv, KvMemory::At(..)),
            Stored::Sparse(sparse) => matches!(sparse, SparsePlace::At(..)),
            Stored::Delta(delta) => matches!(delta, DeltaMemory::At(..)),
        }
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

    /// Returns the memory of a layer with sparse attention, for a pass of `seq` tokens.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for a layer whose [`LayerSpec`](crate::LayerSpec) has keys
    /// and values. Fails for more tokens than fit into the cache.
    pub fn sparse(self, seq: usize) -> Result<SparseMemory<'a>> {
        let Stored::Sparse(place) = self.stored else {
            let why = "the layer's memory holds keys and values; set sparse in its LayerSpec";
            return Err(Error::unsupported("sparse attention", why));
        };
        let memory = match place {
            SparsePlace::Parallel(config) => SparseMemory::parallel(config),
            SparsePlace::Cached(cache) => {
                let added = vec![seq; cache.lens().len()];
                SparseMemory::cached(cache, &added)?
            }
            SparsePlace::Ragged(cache, tokens) => SparseMemory::cached(cache, tokens)?,
            SparsePlace::At(cache, position) => SparseMemory::at(cache, position),
        };
        Ok(match self.observer {
            None => memory,
            Some(Observer { layer, observe, .. }) => memory.shown_to(move |trace| {
                observe(AttentionTrace { layer, kind: TraceKind::Sparse(Box::new(trace)) });
            }),
        })
    }

    /// Returns the state of a recurrent layer. Observers see nothing of it, because it is not
    /// attention.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for a layer that has a cache.
    pub fn delta(self) -> Result<DeltaMemory<'a>> {
        match self.stored {
            Stored::Delta(delta) => Ok(delta),
            _ => {
                let why = "the layer's memory is a cache; set delta in its LayerSpec";
                Err(Error::unsupported("the gated delta rule", why))
            }
        }
    }

    /// Enters the operation that attends with `seq` new tokens, until the end of the scope. Its
    /// bytes are the cache with these tokens, each once, as if all sequences were as long as the
    /// longest.
    fn attending(&self, seq: usize) -> EnteredSpan {
        let seq = self.packing.map_or(seq, Packing::seq);
        let bytes = || match &self.stored {
            Stored::Kv(KvMemory::Cached(cache) | KvMemory::Ragged(cache, _)) => {
                let most = cache.lens().iter().copied().max().unwrap_or(0);
                cache.layout().bytes_read((most + seq).min(cache.capacity()))
            }
            Stored::Kv(_) | Stored::Sparse(_) | Stored::Delta(_) => 0,
        };
        trace_span!(target: OPERATION, "attend", bytes = bytes() as u64).entered()
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
    /// exceeded, and for a layer with sparse attention.
    pub fn attend(self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Result<Tensor<4>> {
        let _span = self.attending(q.dims()[2]);
        let Self { stored, sink_logits, observer, sharing, packing } = self;
        let kv = stored.kv()?;
        let sinks = sink_logits.clone();
        let attend = |q, k, v| match sharing {
            Sharing::Owner(tokens) => {
                let (attention, shared) = kv.attend_and_share(q, k, v, sinks)?;
                *tokens = Some(shared);
                Ok(attention.output)
            }
            Sharing::Drafting(tokens) => {
                let (attention, drafted) = kv.draft(q, k, v, sinks)?;
                *tokens = Some(drafted);
                Ok(attention.output)
            }
            Sharing::Alone | Sharing::Reader(_) => Ok(kv.attend_with_sinks(q, k, v, sinks)?.output),
        };
        padded(packing, [q, k, v], |heads| shown(observer, heads, sink_logits, attend))
    }

    /// Attends to the tokens of the layer that owns the cache, with queries after the rope.
    ///
    /// # Shapes
    /// - q: `[batch, n_heads, seq, head_dim]`
    /// - output: the same
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for a layer that shares no cache. Fails as
    /// [`attend`](Self::attend) does.
    pub fn attend_shared(self, q: Tensor<4>) -> Result<Tensor<4>> {
        let _span = self.attending(q.dims()[2]);
        let Self { stored, sink_logits, observer, sharing, packing } = self;
        let Sharing::Reader(tokens) = sharing else {
            let why = "the layer has keys and values; set shared in its LayerSpec";
            return Err(Error::unsupported("attention to a shared cache", why));
        };
        let (kv, (k, v), sinks) = (stored.kv()?, tokens.key_value(), sink_logits.clone());
        padded(packing, [q], |[q]| {
            shown(observer, [q, k.clone(), v.clone()], sink_logits, |q, _, _| {
                Ok(kv.attend_shared(q, tokens, sinks)?.output)
            })
        })
    }

    /// Attends as [`attend`](Self::attend) does where a value is the first `value_dim` channels of
    /// its key.
    ///
    /// # Errors
    /// Fails as [`attend`](Self::attend) does, and for a layer whose cache stores values.
    pub fn attend_latent(self, q: Tensor<4>, k: Tensor<4>, value_dim: usize) -> Result<Tensor<4>> {
        let _span = self.attending(q.dims()[2]);
        let Self { stored, sink_logits, observer, sharing, packing } = self;
        let kv = stored.kv()?;
        let attend = |q, k, v| match sharing {
            Sharing::Drafting(tokens) => {
                let (attention, drafted) = kv.draft(q, k, v, None)?;
                *tokens = Some(drafted);
                Ok(attention.output)
            }
            _ => Ok(kv.attend_latent(q, k, value_dim)?.output),
        };
        padded(packing, [q, k], |[q, k]| {
            let v = k.clone().narrow(3, 0, value_dim);
            shown(observer, [q, k, v], sink_logits, attend)
        })
    }

    /// Returns the table for [`attend_with_rope`](Self::attend_with_rope) if that serves queries
    /// and keys of `dtype`.
    pub(crate) fn rope_table<'r>(&self, rope: &'r RopeRows, dtype: DType) -> Option<&'r RopeTable> {
        let applies = self.observer.is_none() && self.stored.applies_rope() && dtype == DType::F32;
        let is_single = self.packing.is_none_or(|packing| packing.seq() == 1);
        rope.table().filter(|_| applies && is_single)
    }

    /// Attends with one token before rope, which the launches of the step apply.
    /// [`rope_table`](Self::rope_table) returns `rope_table`.
    pub(crate) fn attend_with_rope(
        self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        rope_table: &RopeTable,
    ) -> Result<Tensor<4>> {
        let _span = self.attending(1);
        let kv = self.stored.kv()?;
        padded(self.packing, [q, k, v], |[q, k, v]| {
            if let Sharing::Owner(tokens) = self.sharing {
                // The cache holds the key after rope; the others do not read this one.
                *tokens = Some(SharedKv::appended(k.clone(), v.clone()));
            }
            Ok(kv.attend_with_rope(q, k, v, rope_table, self.sink_logits)?.output)
        })
    }
}

/// Attends with heads in the batch of the cache. Without a packing, they are there already.
fn padded<const N: usize>(
    packing: Option<&Packing>,
    heads: [Tensor<4>; N],
    attend: impl FnOnce([Tensor<4>; N]) -> Result<Tensor<4>>,
) -> Result<Tensor<4>> {
    match packing {
        None => attend(heads),
        Some(packing) => Ok(packing.pack_heads(attend(heads.map(|x| packing.pad_heads(x)))?)),
    }
}

/// Attends, and shows inputs and output to the observer, if there is one.
fn shown(
    observer: Option<Observer<'_>>,
    [q, k, v]: [Tensor<4>; 3],
    sink_logits: Option<Tensor<1>>,
    attend: impl FnOnce(Tensor<4>, Tensor<4>, Tensor<4>) -> Result<Tensor<4>>,
) -> Result<Tensor<4>> {
    let Some(Observer { layer, options, observe }) = observer else {
        return attend(q, k, v);
    };
    let (query, key, value) = (q.clone(), k.clone(), v.clone());
    let output = attend(q, k, v)?;
    let shown = output.clone();
    let trace = KvTrace { query, key, value, output: shown, options, sink_logits };
    observe(AttentionTrace { layer, kind: TraceKind::Kv(Box::new(trace)) });
    Ok(output)
}
