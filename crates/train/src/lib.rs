//! Reserved for quantization-aware fine-tuning with the cache a model will be served with.
//!
//! Nothing is public yet. The differentiable operation it builds on is
//! `kv_cubecl::streaming_attention`.
