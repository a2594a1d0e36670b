//! Tests of this crate in one program, which links Burn once. A test has its own program only if
//! it counts what the whole process does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bad_gguf;
mod bad_input;
mod batch;
mod batch_texts;
mod cache_config;
mod chat;
mod common;
mod decoders;
mod deepseek_v3;
mod deepseek_v4;
mod deepseek_v4_bugs;
mod deepseek_v4_cache;
mod deepseek_v4_official;
mod deepseek_v4_published;
mod footprint;
mod formats;
mod gemma4;
mod generate;
mod golden_models;
mod moe;
mod packed;
mod parameter_paths;
mod policy;
mod policy_files;
mod prefix_cache;
mod prefix_cache_files;
mod prefix_cache_oracle;
mod prompt_cache;
mod quantize;
mod qwen3_5;
mod rope_fields;
mod save;
mod saved_cache;
mod saved_cache_files;
mod sixteen_bits;
mod speculate;
mod tokenizer;
mod tokenizer_bos;
mod tokenizer_stream;
