//! Language models for [Burn](https://burn.dev) that take the KV cache as a parameter.
//!
//! GPT-2 and the Llama family (Llama, SmolLM, Qwen2, and Mistral and Phi-3 in contexts up to their
//! sliding windows), read from Hugging Face folders, PyTorch checkpoints and GGUF files by
//! [`load()`] and written as Hugging Face folders by [`save()`]. A model is not converted for a
//! quantized cache: every pass says what its cache stores, the same in all layers or, with a
//! [`ModelCacheConfig`], with some layers in float.
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
mod error;
pub mod generate;
pub mod gpt2;
pub mod llama;
pub mod load;
mod model;
pub mod nn;
pub mod save;
pub mod tokenizer;

pub use cache::{ModelCache, ModelCacheBytes};
pub use cache_config::{KV_CACHE_FILE, ModelCacheConfig};
pub use chat::ChatTemplate;
pub use error::{Error, Result, one_line};
pub use generate::{
    DecodeGraph, Decoder, GenerateOptions, Generated, Sampler, Sampling, generate, ids_to_tensor,
};
pub use kv_cubecl;
pub use load::{Loaded, load};
pub use model::LanguageModel;
pub use nn::{AttentionObserver, AttentionTrace};
pub use save::{SaveDtype, SaveOptions, check_savable, save};
pub use tokenizer::Tokenizer;
