//! Quantized KV caches you can train with.
//!
//! KIVI grouped quantization (Liu et al., 2024, <https://arxiv.org/abs/2402.02750>) as
//! [Burn](https://burn.dev) operations: keys per channel in groups of tokens, values per token in
//! groups of channels, 2, 3, 4 or 8 bits, a float residual, on the CPU, WGPU and CUDA.
//!
//! ```
//! use burn::tensor::{Distribution, Tensor};
//! use kv_cubecl::{CacheShape, Flex, KvCache, KvCacheConfig, Target, streaming_attention};
//!
//! let device = Flex::open()?;
//! let [q, k, v] = [(); 3].map(|()| {
//!     // [batch, heads, tokens, head_dim]
//!     Tensor::<4>::random([1, 2, 200, 64], Distribution::Default, &device)
//! });
//! let config: KvCacheConfig = "k4v2".parse()?;
//!
//! // Serving: append tokens, one by one or many at once, and attend.
//! let shape = CacheShape::new(1, 2, 64);
//! let mut cache = KvCache::new(&config.with_capacity(256), shape, &device)?;
//! let streamed = cache.attend(q.clone(), k.clone(), v.clone())?.output;
//!
//! // Training and evaluation: the same numbers for the whole sequence at once, with gradients.
//! let parallel = streaming_attention(q, k, v, &config)?.output;
//! assert!((streamed - parallel).abs().max().into_scalar::<f32>() < 1e-5);
//! # Ok::<(), kv_cubecl::Error>(())
//! ```
//!
//! No backend is enabled by default: choose `flex`, `wgpu` or `cuda`, and `autodiff` to train.

mod attention;
mod backends;
mod cache;
mod config;
pub mod delta;
mod error;
mod formats;
mod frame_count;
mod frames;
mod functions;
#[cfg(feature = "cube")]
mod kernels;
pub mod layout;
mod memory;
mod ops;
pub mod reference;
#[cfg(feature = "remote")]
pub mod remote;
mod rope;
mod running;
mod scores;
mod sequences;
mod shapes;
mod sides;
#[cfg(feature = "flex")]
mod simd;
pub mod sparse;
mod target;
mod training;
mod zeros;

/// The target of the [`tracing`] events with which each launch of attention on a GPU tells its
/// `kernel` and the `bytes` of the cache that it reads, where the host knows its length. Without a
/// subscriber an event is one load and one branch.
pub const READ: &str = "kv::read";

pub use attention::{Attention, AttentionOptions};
pub use cache::{CacheParts, Counters, Drafted, FrameCache, KvCache};
pub use config::{Flush, KvCacheConfig};
pub use error::{Error, Result};
pub use formats::{CacheFloat, GroupOptions, GroupRange, KvFormat, Tile};
pub use frame_count::Frames;
pub use frames::FrameConfig;
pub use functions::{
    Logical, Packed, ensure_finite, fake_quantize, fake_quantize_side, fake_quantize_with,
    frame_attention, hadamard, quantize, quantize_side, streaming_attention,
    streaming_attention_latent, streaming_attention_with, streaming_attention_with_sinks,
};
pub use kv_device::DeviceMemory;
pub use layout::{CacheShape, Granularity, MemoryBytes, QuantizedCounts};
pub use memory::{KvMemory, SharedKv};
pub use ops::{CacheState, KvCacheOps, Token, TokenPosition, TokenRope};
pub use rope::RopeTable;
pub use running::{RunningCounters, RunningScale};
pub use sides::{Side, Sides};
#[cfg(feature = "autodiff")]
pub use target::Autodiff;
#[cfg(feature = "cuda")]
pub use target::Cuda;
#[cfg(feature = "flex")]
pub use target::Flex;
#[cfg(feature = "remote")]
pub use target::Remote;
#[cfg(feature = "wgpu")]
pub use target::Wgpu;
pub use target::{On, Target};
pub use training::{FakeQuantOptions, SteGradient};
