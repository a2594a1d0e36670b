//! A whole sequence through the streaming cache.

use super::stream::StreamOracle;
use crate::{CacheShape, KvCacheConfig, QuantizedCounts};

/// A whole sequence, token by token.
#[derive(Clone, Debug)]
pub struct Streamed {
    /// Outputs, in the shape of the query.
    pub output: Vec<f64>,
    /// How many tokens each query saw quantized.
    pub counts: Vec<QuantizedCounts>,
}

/// Feeds a whole sequence to a [`StreamOracle`] token by token. Query `[batch, n_heads, tokens,
/// head_dim]`, key and value `[batch, n_kv_heads, tokens, head_dim]`.
pub fn stream(
    (query, query_shape): (&[f32], [usize; 4]),
    (key, key_shape): (&[f32], [usize; 4]),
    value: &[f32],
    config: &KvCacheConfig,
) -> Streamed {
    let [batch, n_kv_heads, tokens, head_dim] = key_shape;
    let mut oracle = StreamOracle::new(config, CacheShape { batch, n_kv_heads, head_dim });
    let mut run = Streamed { output: vec![0.0; query.len()], counts: Vec::new() };
    for t in 0..tokens {
        let (query, key) = (token(query, query_shape, t), token(key, key_shape, t));
        let (output, counts) = oracle.step(&query, &key, &token(value, key_shape, t));
        run.counts.push(counts);
        for (slice, row) in output.chunks(head_dim).enumerate() {
            run.output[(slice * tokens + t) * head_dim..][..head_dim].copy_from_slice(row);
        }
    }
    run
}

/// Token `t` of a `[batch, heads, tokens, head_dim]` tensor, `[batch, heads, head_dim]`.
pub(super) fn token<T: Copy>(x: &[T], shape: [usize; 4], t: usize) -> Vec<T> {
    let [_, _, tokens, head_dim] = shape;
    let slices = x.chunks(tokens * head_dim);
    slices.flat_map(|slice| slice[t * head_dim..][..head_dim].iter().copied()).collect()
}
