//! Quantized KV caches you can train with, for [Burn](https://burn.dev).
//!
//! The keys and values of attention are kept in 2 to 8 bits and read where they lie, on the CPU,
//! WGPU and CUDA. The same quantization is a differentiable operation, so a model can be fine-tuned
//! for the cache that will serve it.
//!
//! ```
//! use burn::tensor::{Distribution, Tensor};
//! use burn_kv::prelude::*;
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
//! # Ok::<(), burn_kv::cache::Error>(())
//! ```
//!
//! # Parts and features
//!
//! | module | feature | contents |
//! |---|---|---|
//! | [`cache`] | | caches, their operations, backends as type parameters |
//! | [`models`] | `models` | language models that take a cache: load, generate, save |
//! | [`weights`] | `models` | matrices that stay packed: GGUF blocks, int4, int8, MXFP4 |
//! | [`world_model`] | `models` | GameRFT, a world model with a cache of frames |
//! | [`eval`] | `eval` | perplexity and divergence by cache, speed, memory plans |
//! | [`train`] | `train` | fine-tuning for a cache: prepare, train, convert |
//!
//! | feature | adds |
//! |---|---|
//! | `flex` (on by default) | Burn's CPU backend |
//! | `wgpu` | WGPU: Vulkan, Metal, DirectX 12 |
//! | `cuda` | CUDA, which ran once, on an H200 |
//! | `autodiff` | gradients; `eval` and `train` turn it on |
//! | `fusion` | Burn's lazy execution on GPUs |
//! | `remote` | devices of other machines, through burn-remote |
//!
//! Guides, one page a task, are in the folder `docs/guide` of the repository: quickstart, cache
//! formats, per-layer policies, fine-tuning, packed weights, evaluation, generation, GPUs.

#![cfg_attr(
    feature = "models",
    doc = r#"
# With a model

```no_run
use burn_kv::prelude::*;

let device = Flex::open()?;
let loaded = burn_kv::models::load("SmolLM2-135M-Instruct.Q4_1.gguf", &device)?;
let cache: KvCacheConfig = "k4v4".parse()?;
let mut cache = loaded.model.new_cache(cache, 1, &device)?;
# Ok::<(), burn_kv::models::Error>(())
```
"#
)]

pub use kv_cubecl as cache;
#[cfg(feature = "eval")]
pub use kv_eval as eval;
#[cfg(feature = "models")]
pub use kv_models as models;
#[cfg(feature = "models")]
pub use kv_models::kv_weights as weights;
#[cfg(feature = "train")]
pub use kv_train as train;
#[cfg(feature = "models")]
pub use kv_world_model as world_model;

/// The names that most programs need.
pub mod prelude {
    #[cfg(feature = "autodiff")]
    pub use kv_cubecl::Autodiff;
    #[cfg(feature = "cuda")]
    pub use kv_cubecl::Cuda;
    #[cfg(feature = "flex")]
    pub use kv_cubecl::Flex;
    #[cfg(feature = "remote")]
    pub use kv_cubecl::Remote;
    #[cfg(feature = "wgpu")]
    pub use kv_cubecl::Wgpu;
    pub use kv_cubecl::{
        CacheShape, Flush, KvCache, KvCacheConfig, KvFormat, On, RopeTable, Side, Target,
        streaming_attention,
    };
    #[cfg(feature = "models")]
    pub use kv_models::{
        GenerateOptions, LanguageModel, LoadOptions, ModelCacheConfig, SaveOptions, Tokenizer,
    };
    #[cfg(feature = "train")]
    pub use kv_train::{
        QatConfig, Run, Schedule, Texts, TrainConfig,
        data::{Source, TokenFile},
    };

    /// The names that a decoder of your own needs.
    #[cfg(feature = "models")]
    pub mod decoder {
        pub use kv_models::{
            ConfigJson, DecoderConfig, DecoderLayer, DecoderStack, Error, JsonFields, LayerContext,
            LayerSource, LayerSpec, LayerVisitor, ModelSpec, Result, Role,
            checkpoint::Names,
            fields::{head_dim, positive, sizes},
            nn::{LayerNorm, Linear, RmsNorm, Rope, RopeScaling, in_f32},
        };
    }
}
