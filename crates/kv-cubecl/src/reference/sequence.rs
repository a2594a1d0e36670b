//! A whole sequence through the streaming cache.

use super::stream::StreamOracle;
use crate::{CacheShape, KvCacheConfig, QuantizedCounts, Sides};

/// A whole sequence, token by token.
#[derive(Clone, Debug)]
pub struct Streamed {
    /// Outputs, in the shape of the query, with the channels of a value.
    pub output: Vec<f64>,
    /// Number of quantized tokens that each query saw.
    pub counts: Vec<QuantizedCounts>,
}

/// Feeds a whole sequence to a [`StreamOracle`] token by token. Query `[batch, n_heads, tokens,
/// head_dim]`, key and value `[batch, n_kv_heads, tokens, head_dim]`, where a value may have
/// another head_dim.
pub fn stream(
    (query, query_shape): (&[f32], [usize; 4]),
    (key, key_shape): (&[f32], [usize; 4]),
    value: &[f32],
    config: &KvCacheConfig,
) -> Streamed {
    let [batch, n_kv_heads, tokens, head_dim] = key_shape;
    let value_shape = with_dim(key_shape, value.len());
    let [_, _, _, value_dim] = value_shape;
    let head_dim = Sides { keys: head_dim, values: value_dim };
    let mut oracle = StreamOracle::new(config, CacheShape::new(batch, n_kv_heads, head_dim));
    let n_rows = query_shape[..3].iter().product::<usize>();
    let mut run = Streamed { output: vec![0.0; n_rows * value_dim], counts: Vec::new() };
    for t in 0..tokens {
        let (query, key) = (token(query, query_shape, t), token(key, key_shape, t));
        let (output, counts) = oracle.step(&query, &key, &token(value, value_shape, t));
        run.counts.push(counts);
        for (slice, row) in output.chunks(value_dim).enumerate() {
            run.output[(slice * tokens + t) * value_dim..][..value_dim].copy_from_slice(row);
        }
    }
    run
}

/// The shape of a tensor of `len` elements that differs from `shape` in head_dim at most.
pub(super) fn with_dim([batch, heads, tokens, _]: [usize; 4], len: usize) -> [usize; 4] {
    [batch, heads, tokens, len / (batch * heads * tokens)]
}

/// Token `t` of a `[batch, heads, tokens, head_dim]` tensor, `[batch, heads, head_dim]`.
pub(super) fn token<T: Copy>(x: &[T], shape: [usize; 4], t: usize) -> Vec<T> {
    let [_, _, tokens, head_dim] = shape;
    let slices = x.chunks(tokens * head_dim);
    slices.flat_map(|slice| slice[t * head_dim..][..head_dim].iter().copied()).collect()
}
