//! Language models for [Burn](https://burn.dev) that take the KV cache as a parameter.
//!
//! GPT-2, the Llama family (Llama, Mistral, SmolLM, Qwen2 and Qwen3, Phi-3 and Phi-4-mini),
//! Qwen3-MoE, Mixtral, Qwen3.5, Gemma 3 and 4, gpt-oss and DeepSeek-V3 are read by [`load()`] from
//! Hugging Face folders, PyTorch checkpoints and GGUF files, and written by [`save()`] as Hugging
//! Face folders.
//! A model is not converted for a quantized cache. Every pass names the format of its cache, for
//! all layers or, with a [`ModelCacheConfig`], per layer. [`deepseek_v4`] is read from Hugging Face
//! folders, with weights of 16 or 32 bits.
//!
//! A [`LanguageModel`] is a [`Decoder`] of any type. Other crates can implement [`Decoder`] and
//! [`Family`]; [`register`] makes their families known to [`load()`].
//!
//! ```no_run
//! use burn::tensor::{Device, Int, Tensor};
//! use kv_models::kv_cubecl::KvCacheConfig;
//!
//! # fn main() -> kv_models::Result<()> {
//! let device = Device::default();
//! let loaded = kv_models::load("SmolLM2-135M-Instruct.Q4_1.gguf", &device)?;
//! let ids = Tensor::<2, Int>::from_ints([[3717, 446, 6356]], &device);
//!
//! let k2v2 = "k2v2".parse::<KvCacheConfig>()?;
//! let parallel = loaded.model.forward(ids.clone(), k2v2)?; // closed form, differentiable
//! let mut cache = loaded.model.new_cache(k2v2, 1, &device)?;
//! let streamed = loaded.model.step(ids, &mut cache)?; // the same numbers, from a cache
//! # Ok(())
//! # }
//! ```

mod cache;
mod cache_config;
pub mod chat;
pub mod checkpoint;
mod decoder;
pub mod deepseek_v3;
pub mod deepseek_v4;
mod device_use;
mod dtype;
mod erased;
mod error;
mod exports;
mod family;
pub mod fields;
pub mod files;
mod float;
mod footprint;
pub mod gemma3;
pub mod gemma4;
pub mod generate;
pub mod gguf;
pub mod gpt2;
pub mod gpt_oss;
mod hadamard;
pub mod llama;
pub mod load;
pub mod mixtral;
mod model;
pub mod moe;
mod mxfp4;
pub mod nn;
mod operation_names;
mod pass;
pub mod qwen3_5;
pub mod qwen3_moe;
mod registry;
#[cfg(feature = "remote")]
pub mod remote;
mod rope_config;
pub mod save;
mod shortage;
pub mod spans;
mod spec;
mod stack;
pub mod tokenizer;

pub use cache::{
    Checkpoints, LayerCache, ModelCache, ModelCacheBytes, PrefixCache, PrefixStats, PromptCache,
    SavedAs, SavedCache,
};
pub use cache_config::{KV_CACHE_FILE, LayerRule, Layers, ModelCacheConfig, Stores};
pub use chat::ChatTemplate;
pub use decoder::{Decoder, Role, Roles};
pub use device_use::DeviceUse;
pub use dtype::WeightDtype;
pub use error::{Error, Result, one_line};
pub use family::{ConfigJson, Family, JsonFields};
pub use footprint::{CacheBytes, MemoryLimit, Usage, most_that_fits};
pub use generate::{
    Batch, BatchText, CompileAhead, DecodeGraph, DraftModel, GenerateOptions, Generated, Guesses,
    Sampler, Sampling, Speculate, Steps, generate, ids_to_tensor,
};
pub use kv_cubecl;
pub use kv_sampling;
pub use kv_weights;
pub use load::{
    LoadObserver, LoadOptions, Loaded, ModelOutline, Planned, WeightBytes, load, load_observed,
    load_with, outline, outline_config, random,
};
pub use model::LanguageModel;
pub use nn::{AttentionObserver, AttentionTrace, KvTrace, TraceKind};
pub use operation_names::operation_names;
pub use pass::{Pass, PendingTokens, Ropes};
pub use registry::register;
pub use save::{QuantizeOptions, SaveOptions, check_savable, save, save_quantized};
pub use shortage::{Advice, Footprint, Shortage, decimal_size};
pub use spec::{AttentionKind, LayerSpec, ModelSpec, SharedEntries, SharedSelection, SparseLayer};
pub use stack::{
    ChannelNorm, DecoderConfig, DecoderLayer, DecoderStack, FinalNorm, LayerContext, LayerSource,
    LayerVisitor, PerLayerInputs, SlidingConfig,
};
pub use tokenizer::Tokenizer;
