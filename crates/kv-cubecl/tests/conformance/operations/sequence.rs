//! A list of tokens, attended to by the oracle.

use kv_cubecl::{CacheShape, KvCacheConfig, QuantizedCounts, reference::StreamOracle};

use super::{HEAD_DIM, N_KV_HEADS};

/// The keys and values of one sequence, token by token, each `[n_kv_heads, head_dim]`.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    pub(super) keys: Vec<Vec<f32>>,
    pub(super) values: Vec<Vec<f32>>,
}

impl Sequence {
    /// Returns the oracle's output for the last `queries`, each `[n_heads, head_dim]`, as `[tokens,
    /// n_heads, head_dim]`, and its counts after the last token.
    pub(super) fn attend(
        &self,
        config: &KvCacheConfig,
        queries: &[Vec<f32>],
    ) -> (Vec<f64>, QuantizedCounts) {
        let shape = CacheShape::new(1, N_KV_HEADS, HEAD_DIM);
        let mut oracle = StreamOracle::new(config, shape);
        let first = self.keys.len() - queries.len();
        let (mut output, mut counts) = (Vec::new(), QuantizedCounts::default());
        for (t, (key, value)) in self.keys.iter().zip(&self.values).enumerate() {
            counts = match t.checked_sub(first) {
                Some(row) => {
                    let (rows, counts) = oracle.step(&queries[row], key, value);
                    output.extend(rows);
                    counts
                }
                None => oracle.append(key, value),
            };
        }
        (output, counts)
    }

    /// The keys and values of all tokens as the last of them sees them.
    pub(super) fn seen(&self, config: &KvCacheConfig) -> Sequence {
        let mut oracle = StreamOracle::new(config, CacheShape::new(1, N_KV_HEADS, HEAD_DIM));
        let mut seen = Sequence::default();
        for (t, (key, value)) in self.keys.iter().zip(&self.values).enumerate() {
            oracle.step_with(key, value, |lanes| {
                if t + 1 == self.keys.len() {
                    let all: Vec<usize> = (0..=t).collect();
                    let f32s = |row: &&[f64]| row.iter().map(|&x| x as f32).collect();
                    seen.keys = lanes[0].keys(&all).iter().map(f32s).collect();
                    seen.values = lanes[0].values(&all).iter().map(f32s).collect();
                }
            });
        }
        seen
    }
}
