//! The table of [`KvCacheOps`].

use kv_device::remote::{Arg, Float, Int, spec as tensor};

use super::wire::{Cache, DecodeToken, cache};
use crate::{
    AttentionOptions, CacheFloat, KvCacheOps, SteGradient,
    layout::{CacheLayout, QuantSpec, StreamSpec},
    shapes::fusion as shapes,
};

kv_device::remote_ops! {
    "kv_cubecl", KvCacheOps, serve_cache;

    fn quantize(input: Float, spec: Arg<QuantSpec>) -> Int {
        shapes::quantize(&tensor(&input), &spec)
    }

    fn dequantize(packed: Int, spec: Arg<QuantSpec>, shape: Arg<[usize; 4]>) -> Float {
        shapes::dequantize(shape)
    }

    fn fake_quantize(
        input: Float,
        spec: Arg<QuantSpec>,
        skip: Arg<usize>,
        gradient: Arg<SteGradient>,
    ) -> Float {
        tensor(&input)
    }

    fn fake_quantize_backward(
        input: Float,
        grad: Float,
        spec: Arg<QuantSpec>,
        skip: Arg<usize>,
    ) -> Float {
        tensor(&grad)
    }

    fn round_to(input: Float, float: Arg<CacheFloat>) -> Float {
        tensor(&input)
    }

    fn hadamard(input: Float) -> Float {
        tensor(&input)
    }

    fn write(
        state: Cache,
        key: Float,
        value: Float,
        layout: Arg<CacheLayout>,
        len: Arg<usize>,
    ) -> Cache {
        cache(&state, &layout)
    }

    fn decode_attention(
        query: Float,
        state: Cache,
        layout: Arg<CacheLayout>,
        len: Arg<usize>,
        tokens: Arg<usize>,
        options: Arg<AttentionOptions>,
    ) -> (Float, Float) {
        {
            cache(&state, &layout);
            shapes::attention(&tensor(&query), layout.shape().head_dim.values)
        }
    }

    fn decode_attention_at(
        query: Float,
        state: Cache,
        position: Int,
        layout: Arg<CacheLayout>,
        options: Arg<AttentionOptions>,
    ) -> (Float, Float) {
        {
            cache(&state, &layout);
            shapes::attention(&tensor(&query), layout.shape().head_dim.values)
        }
    }

    fn step(
        state: Cache,
        token: DecodeToken,
        layout: Arg<CacheLayout>,
        len: Arg<usize>,
        options: Arg<AttentionOptions>,
    ) -> (Cache, Float, Float) {
        (
            cache(&state, &layout),
            shapes::attention(&tensor(&token.query), layout.shape().head_dim.values),
        )
    }

    fn streaming_attention(
        query: Float,
        key: Float,
        key_hat: Float,
        value: Float,
        value_hat: Float,
        spec: Arg<StreamSpec>,
        options: Arg<AttentionOptions>,
    ) -> (Float, Float) {
        shapes::attention(&tensor(&query), tensor(&value).shape.dims::<4>()[3])
    }

    fn add_sinks(output: Float, lse: Float, sink_logits: Float) -> (Float, Float) {
        (tensor(&output), tensor(&lse))
    }

    fn streaming_attention_with_sinks(
        query: Float,
        key: Float,
        key_hat: Float,
        value: Float,
        value_hat: Float,
        sink_logits: Float,
        spec: Arg<StreamSpec>,
        options: Arg<AttentionOptions>,
    ) -> (Float, Float) {
        shapes::attention(&tensor(&query), tensor(&value).shape.dims::<4>()[3])
    }

    fn streaming_attention_backward(
        query: Float,
        key: Float,
        key_hat: Float,
        value: Float,
        value_hat: Float,
        output: Float,
        lse: Float,
        grad: Float,
        spec: Arg<StreamSpec>,
        options: Arg<AttentionOptions>,
    ) -> (Float, Float, Float, Float, Float) {
        vec![
            tensor(&query),
            tensor(&key),
            tensor(&key_hat),
            tensor(&value),
            tensor(&value_hat),
        ]
    }
}
