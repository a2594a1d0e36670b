//! The backend extension trait [`KvCacheOps`]: all that a backend must provide.
//!
//! Users call the tensor functions of this crate, which check shapes and dispatch here.

#![cfg_attr(
    feature = "fusion",
    allow(missing_debug_implementations, reason = "the derived metadata type has none")
)]

use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

#[cfg(feature = "fusion")]
use crate::shapes::fusion as shapes;
use crate::{
    AttentionOptions, CacheFloat, SteGradient,
    layout::{CacheLayout, QuantSpec, StreamSpec},
};

/// The tensors of a cache. Operations take it by value and return it: if nobody else holds the
/// tensors, they are written in place; if the cache was cloned, the first write copies them.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct CacheState<B: Backend> {
    /// Packed keys, u32, one axis, see [`SideLayout::words`](crate::layout::SideLayout::words).
    pub keys: IntTensor<B>,
    /// Packed values, u32, one axis, as the keys.
    pub values: IntTensor<B>,
    /// Sinks and rings, of the cache's float type, see
    /// [`CacheLayout::float_shape`].
    pub floats: FloatTensor<B>,
}

/// One token for the caches of a batch: what is appended, and what attends. On the CPU it may be
/// several, with counted positions and without rope.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Token<B: Backend> {
    /// `[batch, n_heads, tokens, head_dim]`.
    pub query: FloatTensor<B>,
    /// `[batch, n_kv_heads, tokens, head_dim]`.
    pub key: FloatTensor<B>,
    /// As the key, with the channels of values.
    pub value: FloatTensor<B>,
    /// The position of the token in its sequence.
    #[extension_type]
    pub position: TokenPosition<B>,
    /// Rope table for query and key.
    #[extension_type]
    pub rope: TokenRope<B>,
}

/// The position of a [`Token`] in its sequence.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum TokenPosition<B: Backend> {
    /// After the number of tokens that the operation is given.
    Counted,
    /// The positions in this tensor when the kernels run, i32 `[1]` for all sequences or `[batch]`,
    /// one for each.
    Stored(IntTensor<B>),
}

impl<B: Backend> TokenPosition<B> {
    /// The positions, where they are stored.
    pub fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::Counted => None,
            Self::Stored(positions) => Some(positions),
        }
    }
}

/// Rope table for the query and the key of a [`Token`].
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum TokenRope<B: Backend> {
    /// No table: they come after the position encoding, or have none.
    Absent,
    /// The table of a [`RopeTable`](crate::RopeTable), f32 `[positions, rotary_dim]`.
    Table(FloatTensor<B>),
}

impl<B: Backend> TokenRope<B> {
    /// The table, if there is one.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Table(table) => Some(table),
        }
    }
}

/// Quantized KV-cache operations of a backend.
///
/// Inputs, the tensors of a cache among them, may be views: parts of larger buffers, strided or
/// broadcast. Float inputs are f32, except the float rows of an f16 cache; packed tensors are u32
/// in the layout of [`crate::layout`].
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Remote: cfg(feature = "remote"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait KvCacheOps: Backend {
    /// Quantizes `input` `[batch, n_kv_heads, tokens, head_dim]`, a whole number of groups, into
    /// `[batch, n_kv_heads, tokens / group_size * words_per_group, head_dim]` per channel, or
    /// `[batch, n_kv_heads, tokens, head_dim / group_size * words_per_group]` per token; where
    /// parameters share words ([`QuantSpec::packs_parameters`]), into `[batch, n_kv_heads, 1,
    /// words]`.
    #[fusion(meta = |input, spec| shapes::quantize(input, spec))]
    fn quantize(input: FloatTensor<Self>, spec: QuantSpec) -> IntTensor<Self>;

    /// Restores f32 `[batch, n_kv_heads, tokens, head_dim]`, which is `shape`, from what
    /// [`quantize`](Self::quantize) made.
    #[fusion(meta = |_packed, _spec, shape| shapes::dequantize(*shape))]
    fn dequantize(packed: IntTensor<Self>, spec: QuantSpec, shape: [usize; 4])
    -> FloatTensor<Self>;

    /// `dequantize(quantize(input))` in one pass, except for the first `skip` tokens and, with
    /// per-channel groups, an incomplete last group of tokens, which are returned unchanged.
    /// `gradient` matters only to backends that differentiate.
    #[fusion(meta = |input, _spec, _skip, _gradient| input.clone())]
    fn fake_quantize(
        input: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
        gradient: SteGradient,
    ) -> FloatTensor<Self>;

    /// The backward pass of [`fake_quantize`](Self::fake_quantize) under [`SteGradient::ScaleMin`]:
    /// returns the gradient of its `input` from `grad`, the gradient of its output.
    #[fusion(meta = |_input, grad, _spec, _skip| grad.clone())]
    fn fake_quantize_backward(
        input: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
    ) -> FloatTensor<Self>;

    /// Rounds as storing in a cache of this type does ([`CacheFloat::round`]), and stays f32. The
    /// gradient is that of the identity.
    #[fusion(meta = |input, _float| input.clone())]
    fn round_to(input: FloatTensor<Self>, float: CacheFloat) -> FloatTensor<Self>;

    /// Multiplies each row, the last axis of an f32 tensor and a power of two up to 256 long, by
    /// the Sylvester-Hadamard matrix divided by the root of its size: sums and differences of
    /// neighbors, then of those two apart, four apart, and so on. The matrix is its own inverse and
    /// transpose, so that the same is its gradient.
    #[fusion(meta = |input| input.clone())]
    fn hadamard(input: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Appends `key` and `value` `[batch, n_kv_heads, m, head_dim]` to a cache of `len` tokens, in
    /// place: applies the [`hadamard`](Self::hadamard) transform to the sides that the cache stores
    /// transformed, quantizes what leaves the residual, and writes the new tokens that stay in
    /// float into their slots.
    #[fusion(meta = |state, _key, _value, _layout, _len| state.clone())]
    fn write(
        #[extension_type] state: CacheState<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        layout: CacheLayout,
        len: usize,
    ) -> CacheState<Self>;

    /// Attention of `query` `[batch, n_heads, m, head_dim]` over the first `tokens` tokens of a
    /// cache of `len` tokens. There is no causal mask: every row sees all of them. The packed form
    /// is read directly, without a restored copy of the cache. Where keys are stored after the
    /// [`hadamard`](Self::hadamard) transform, the query is transformed, too; where values are, the
    /// transform is undone in the output.
    ///
    /// Returns the output `[batch, n_heads, m, head_dim]` and the log-sum-exp of the scaled scores
    /// `[batch, n_heads, m]`, by which partial results are merged.
    #[fusion(meta = |query, _state, layout, _len, _tokens, _options| {
        shapes::attention(query, layout.shape().head_dim.values)
    })]
    fn decode_attention(
        query: FloatTensor<Self>,
        #[extension_type] state: CacheState<Self>,
        layout: CacheLayout,
        len: usize,
        tokens: usize,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Attention of one query per sequence, `[batch, n_heads, 1, head_dim]`, over the tokens up to
    /// and including its position, which the cache already holds; i32, `[1]` or `[batch]`. As in
    /// [`step`](Self::step) with stored positions, launches do not depend on the length, a full
    /// cache is read whole, and a sequence whose position is below 0 takes no part.
    #[fusion(meta = |query, _state, _position, layout, _options| {
        shapes::attention(query, layout.shape().head_dim.values)
    })]
    fn decode_attention_at(
        query: FloatTensor<Self>,
        #[extension_type] state: CacheState<Self>,
        position: IntTensor<Self>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// One decode step of a cache of `len` tokens, or of as many as the token's position says when
    /// the kernels run: query and key get rope applied if there is a table, then
    /// [`write`](Self::write) of one token, then [`decode_attention`](Self::decode_attention) of
    /// the query over all. With a stored position, `len` does not matter and launches do not depend
    /// on the length, so that they can be captured once and replayed; a full cache is read and not
    /// written; and a sequence whose position is below 0 takes no part: nothing of it is written or
    /// read, its output is 0 and its log-sum-exp -inf. The CPU also takes several tokens, as if one
    /// after the other, with counted positions and without rope.
    #[fusion(meta = |state, token, layout, _len, _options| {
        let (output, lse) = shapes::attention(&token.query, layout.shape().head_dim.values);
        (state.clone(), output, lse)
    })]
    fn step(
        #[extension_type] state: CacheState<Self>,
        #[extension_type] token: Token<Self>,
        layout: CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Causal attention of a sequence, or a part of it, where each row sees keys and values
    /// quantized or in float as `spec` says. `key_hat` and `value_hat` are the fake-quantized keys
    /// and values, f32; the output is of the type of the query.
    ///
    /// Query `[batch, n_heads, m, head_dim]`, the others `[batch, n_kv_heads, n, head_dim]`.
    /// Returns the output and the log-sum-exp as [`decode_attention`](Self::decode_attention) does.
    #[fusion(meta = |query, _key, _key_hat, value, _value_hat, _spec, _options| {
        shapes::attention(query, value.shape.dims::<4>()[3])
    })]
    fn streaming_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Output and log-sum-exp of attention whose softmax has a term more in its denominator, e^s
    /// for the logit s of the head, `[n_heads]` in `sink_logits`, and no value for it; all f32.
    /// `output` and `lse` are those without it, which
    /// [`streaming_attention`](Self::streaming_attention) and the others return. Records no
    /// gradient.
    #[fusion(meta = |output, lse, _sink_logits| (output.clone(), lse.clone()))]
    fn add_sinks(
        output: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        sink_logits: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`streaming_attention`](Self::streaming_attention), then [`add_sinks`](Self::add_sinks),
    /// with the gradients of both; all f32.
    #[allow(clippy::too_many_arguments, reason = "those of streaming_attention and one more")]
    #[fusion(meta = |query, _key, _key_hat, value, _value_hat, _sink_logits, _spec, _options| {
        shapes::attention(query, value.shape.dims::<4>()[3])
    })]
    fn streaming_attention_with_sinks(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        sink_logits: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The backward pass of [`streaming_attention`](Self::streaming_attention), from its inputs and
    /// outputs and `grad`, the gradient of the output. Returns the gradients of query, key,
    /// key_hat, value and value_hat, in that order. With the outputs of
    /// [`streaming_attention_with_sinks`](Self::streaming_attention_with_sinks), whose log-sum-exp
    /// has the sink in it, these are its gradients.
    #[allow(clippy::too_many_arguments, reason = "the inputs and outputs of the forward pass")]
    #[allow(clippy::type_complexity, reason = "the macro reads tuples, not aliases")]
    #[fusion(meta = |query, key, key_hat, value, value_hat, _out, _lse, _grad, _spec, _options| {
        (query.clone(), key.clone(), key_hat.clone(), value.clone(), value_hat.clone())
    })]
    fn streaming_attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        output: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    );
}
