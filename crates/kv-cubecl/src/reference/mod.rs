//! The oracle: plain host code that follows the KIVI paper word by word, for tests to compare with.
//!
//! Slow and literal on purpose, and independent of everything it checks: the quantizer is one group
//! at a time in f32 ([`quantize_group`], [`scaled_group`]), attention is one row at a time in f64
//! ([`attend_row`]), and the streaming cache is a list of tokens from which a window takes the
//! oldest ([`StreamOracle`]), not the formulas of [`crate::layout`]. Sparse attention is one token
//! at a time in f64 ([`CompressorOracle`], [`attend_sparse_row`]), and so is the gated delta rule
//! ([`DeltaOracle`]). No tensor library.
//!
//! Tensors are slices in row-major order with their shape
//! `[batch, heads, tokens, head_dim]` beside them. Wrong sizes panic.
//!
//! ```
//! use kv_cubecl::{KvCacheConfig, reference};
//!
//! let config: KvCacheConfig = "k2v2-g16-r16".parse()?;
//! let shape = [1, 1, 40, 16]; // [batch, heads, tokens, head_dim]
//! let x: Vec<f32> = (0..640).map(|i| (i as f32).sin()).collect();
//! let run = reference::stream((&x, shape), (&x, shape), &x, &config);
//! assert_eq!((run.counts[39].keys, run.counts[39].values), (32, 24));
//! # Ok::<(), kv_cubecl::Error>(())
//! ```

mod attention;
mod delta;
mod formats;
mod gradient;
mod hadamard;
mod lloyd_max;
mod quantizer;
mod running;
mod sequence;
mod sparse;
mod stream;
mod tensor;
mod tile;

pub use attention::{
    Row, RowGradients, RowOptions, attend_row, attend_row_backward, attend_row_with,
    causal_attention,
};
pub use delta::{DeltaOracle, DeltaOracleWeights, delta_rule_step};
pub use formats::{
    Numbers, ScaledGroup, fake_quantize_group, numbers, restore_scaled, row_group, scaled_group,
    scaled_group_backward,
};
pub use gradient::{StreamGradients, stream_gradients, stream_gradients_with};
pub use hadamard::hadamard;
pub use quantizer::{
    F16_MAX, QuantizedGroup, dequantize_group, fake_quantize_group_backward, quantize_group,
    quantize_group_in,
};
pub use running::{restore_with, running_amax};
pub use sequence::{Streamed, stream};
pub use sparse::{
    CompressorOracle, CompressorWeights, attend_sparse_row, highest_scores, index_score, rms_norm,
    rope_pairs, stored_row,
};
pub use stream::{Lane, StreamOracle};
pub use tensor::{
    dequantize, fake_quantize, fake_quantize_side, fake_quantize_side_backward, quantize,
    quantize_side,
};
pub use tile::{QuantizedTile, TileOptions, dequantize_tile, quantize_tile, tile_backward};
