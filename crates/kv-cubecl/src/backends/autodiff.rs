//! Gradients: straight through the quantizer, exact through attention.

mod delta;
mod sparse;

use burn::{
    backend::{
        Backend, TensorMetadata,
        ops::FloatTensorOps,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, FloatDType},
};
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};

use super::sinks;
use crate::{
    AttentionOptions, CacheFloat, CacheState, KvCacheOps, SteGradient, Token, TokenPosition,
    TokenRope,
    layout::{CacheLayout, QuantSpec, StreamSpec},
};

/// Straight-through estimator: the gradient passes the quantizer unchanged.
#[derive(Debug)]
struct StraightThrough;

impl<B: Backend> Backward<B, 1> for StraightThrough {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| grad);
    }
}

/// Backward pass of [`KvCacheOps::hadamard`], which is its own gradient.
#[derive(Debug)]
struct Hadamard;

impl<B: KvCacheOps> Backward<B, 1> for Hadamard {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, <B as KvCacheOps>::hadamard);
    }
}

/// [`SteGradient::ScaleMin`]; its state is the input, how it is quantized, and the number of first
/// tokens that are not.
#[derive(Debug)]
struct ThroughScale;

impl<B: KvCacheOps> Backward<B, 1> for ThroughScale {
    type State = (FloatTensor<B>, QuantSpec, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (input, spec, skip) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            <B as KvCacheOps>::fake_quantize_backward(input, grad, spec, skip)
        });
    }
}

/// [`KvCacheOps::streaming_attention`], of five inputs, and
/// [`KvCacheOps::streaming_attention_with_sinks`], of six.
#[derive(Debug)]
struct StreamingAttention;

/// State that the backward pass of [`StreamingAttention`] needs.
#[derive(Clone, Debug)]
struct Attended<B: Backend> {
    /// Query, key, key_hat, value and value_hat.
    inputs: [FloatTensor<B>; 5],
    sink_logits: Option<FloatTensor<B>>,
    output: FloatTensor<B>,
    lse: FloatTensor<B>,
    spec: StreamSpec,
    options: AttentionOptions,
}

impl<B: KvCacheOps, const N: usize> Backward<B, N> for StreamingAttention {
    type State = Attended<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let Attended { inputs, sink_logits, output, lse, spec, options } = ops.state;
        let of_sinks = sink_logits
            .map(|logits| sinks::gradient::<B>(output.clone(), lse.clone(), logits, grad.clone()));
        let [query, key, key_hat, value, value_hat] = inputs;
        let computed = <B as KvCacheOps>::streaming_attention_backward(
            query, key, key_hat, value, value_hat, output, lse, grad, spec, options,
        );
        let computed = [computed.0, computed.1, computed.2, computed.3, computed.4];
        for (parent, grad) in ops.parents.into_iter().zip(computed.into_iter().chain(of_sinks)) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

impl<B: KvCacheOps, C: CheckpointStrategy> KvCacheOps for Autodiff<B, C> {
    fn quantize(input: FloatTensor<Self>, spec: QuantSpec) -> IntTensor<Self> {
        <B as KvCacheOps>::quantize(input.into_primitive(), spec)
    }

    fn dequantize(
        packed: IntTensor<Self>,
        spec: QuantSpec,
        shape: [usize; 4],
    ) -> FloatTensor<Self> {
        constant::<B, C>(<B as KvCacheOps>::dequantize(packed, spec, shape))
    }

    fn fake_quantize(
        input: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
        gradient: SteGradient,
    ) -> FloatTensor<Self> {
        let node = input.node();
        let input = input.into_primitive();
        let forward = |input| <B as KvCacheOps>::fake_quantize(input, spec, skip, gradient);
        match gradient {
            SteGradient::Identity => {
                StraightThrough.prepare::<C>([node]).compute_bound().stateless(forward(input))
            }
            SteGradient::ScaleMin => {
                match ThroughScale.prepare::<C>([node]).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => {
                        prep.finish((input.clone(), spec, skip), forward(input))
                    }
                    OpsKind::UnTracked(prep) => prep.finish(forward(input)),
                }
            }
        }
    }

    fn fake_quantize_backward(
        input: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
    ) -> FloatTensor<Self> {
        // Gradients of gradients are not recorded.
        let (input, grad) = (input.into_primitive(), grad.into_primitive());
        constant::<B, C>(<B as KvCacheOps>::fake_quantize_backward(input, grad, spec, skip))
    }

    fn round_to(input: FloatTensor<Self>, float: CacheFloat) -> FloatTensor<Self> {
        let node = input.node();
        let rounded = <B as KvCacheOps>::round_to(input.into_primitive(), float);
        StraightThrough.prepare::<C>([node]).compute_bound().stateless(rounded)
    }

    fn hadamard(input: FloatTensor<Self>) -> FloatTensor<Self> {
        let node = input.node();
        let hadamard_values = <B as KvCacheOps>::hadamard(input.into_primitive());
        Hadamard.prepare::<C>([node]).compute_bound().stateless(hadamard_values)
    }

    /// A cache is state, not part of the graph: what is written to it records no gradient.
    fn write(
        state: CacheState<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        layout: CacheLayout,
        len: usize,
    ) -> CacheState<Self> {
        let (key, value) = (key.into_primitive(), value.into_primitive());
        wrap(<B as KvCacheOps>::write(unwrap(state), key, value, layout, len))
    }

    /// Attention over a cache records no gradient; train with `streaming_attention`.
    fn decode_attention(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        layout: CacheLayout,
        len: usize,
        tokens: usize,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (output, lse) = <B as KvCacheOps>::decode_attention(
            query.into_primitive(),
            unwrap(state),
            layout,
            len,
            tokens,
            options,
        );
        (constant::<B, C>(output), constant::<B, C>(lse))
    }

    /// Records no gradient, like [`decode_attention`](Self::decode_attention).
    fn decode_attention_at(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        position: IntTensor<Self>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let query = query.into_primitive();
        let (output, lse) =
            <B as KvCacheOps>::decode_attention_at(query, unwrap(state), position, layout, options);
        (constant::<B, C>(output), constant::<B, C>(lse))
    }

    /// Records no gradient, like [`write`](Self::write) and
    /// [`decode_attention`](Self::decode_attention).
    fn step(
        state: CacheState<Self>,
        token: Token<Self>,
        layout: CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Token { query, key, value, position, rope } = token;
        let [query, key, value] = [query, key, value].map(|x| x.into_primitive());
        let position = position.into_option().map_or(TokenPosition::Counted, TokenPosition::Stored);
        let table = rope.into_option().map(|table| table.into_primitive());
        let rope = table.map_or(TokenRope::Absent, TokenRope::Table);
        let token = Token { query, key, value, position, rope };
        let (state, output, lse) =
            <B as KvCacheOps>::step(unwrap(state), token, layout, len, options);
        (wrap(state), constant::<B, C>(output), constant::<B, C>(lse))
    }

    fn streaming_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The gradient is that of f32, in which all is computed.
        let dtype = query.dtype();
        if dtype != DType::F32 {
            let query = Self::float_cast(query, FloatDType::F32);
            let (output, lse) = <Self as KvCacheOps>::streaming_attention(
                query, key, key_hat, value, value_hat, spec, options,
            );
            return (Self::float_cast(output, dtype.into()), lse);
        }
        let inputs = [query, key, key_hat, value, value_hat];
        let nodes = inputs.each_ref().map(|input| input.node());
        let inputs = inputs.map(|input| input.into_primitive());
        let [query, key, key_hat, value, value_hat] = inputs.clone();
        let (output, lse) = <B as KvCacheOps>::streaming_attention(
            query, key, key_hat, value, value_hat, spec, options,
        );
        let lse_out = constant::<B, C>(lse.clone());
        let output = match Backward::<B, 5>::prepare::<C>(StreamingAttention, nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let sink_logits = None;
                let attended =
                    Attended { inputs, sink_logits, output: output.clone(), lse, spec, options };
                prep.finish(attended, output)
            }
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        (output, lse_out)
    }

    /// Records no gradient;
    /// [`streaming_attention_with_sinks`](Self::streaming_attention_with_sinks) does.
    fn add_sinks(
        output: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        sink_logits: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [output, lse, logits] = [output, lse, sink_logits].map(|x| x.into_primitive());
        let (output, lse) = <B as KvCacheOps>::add_sinks(output, lse, logits);
        (constant::<B, C>(output), constant::<B, C>(lse))
    }

    fn streaming_attention_with_sinks(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        sink_logits: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let inputs = [query, key, key_hat, value, value_hat, sink_logits];
        let nodes = inputs.each_ref().map(|input| input.node());
        let [query, key, key_hat, value, value_hat, logits] = inputs.map(|x| x.into_primitive());
        let inputs = [query, key, key_hat, value, value_hat];
        let [query, key, key_hat, value, value_hat] = inputs.clone();
        let (output, lse) = <B as KvCacheOps>::streaming_attention_with_sinks(
            query,
            key,
            key_hat,
            value,
            value_hat,
            logits.clone(),
            spec,
            options,
        );
        let lse_out = constant::<B, C>(lse.clone());
        let output = match Backward::<B, 6>::prepare::<C>(StreamingAttention, nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let sink_logits = Some(logits);
                let attended =
                    Attended { inputs, sink_logits, output: output.clone(), lse, spec, options };
                prep.finish(attended, output)
            }
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        (output, lse_out)
    }

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
    ) {
        // Gradients of gradients are not recorded.
        let (a, b, c, d, e) = <B as KvCacheOps>::streaming_attention_backward(
            query.into_primitive(),
            key.into_primitive(),
            key_hat.into_primitive(),
            value.into_primitive(),
            value_hat.into_primitive(),
            output.into_primitive(),
            lse.into_primitive(),
            grad.into_primitive(),
            spec,
            options,
        );
        let wrap = constant::<B, C>;
        (wrap(a), wrap(b), wrap(c), wrap(d), wrap(e))
    }
}

/// A tensor that records no gradient.
fn constant<B: Backend, C: CheckpointStrategy>(
    tensor: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    <Autodiff<B, C> as burn::backend::AutodiffBackend>::from_inner(tensor)
}

fn unwrap<B: Backend, C: CheckpointStrategy>(state: CacheState<Autodiff<B, C>>) -> CacheState<B> {
    CacheState { keys: state.keys, values: state.values, floats: state.floats.into_primitive() }
}

fn wrap<B: Backend, C: CheckpointStrategy>(state: CacheState<B>) -> CacheState<Autodiff<B, C>> {
    CacheState { keys: state.keys, values: state.values, floats: constant::<B, C>(state.floats) }
}
