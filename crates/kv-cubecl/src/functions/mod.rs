//! Public tensor functions, which check their arguments and call [`KvCacheOps`](crate::KvCacheOps),
//! and parts of them that the cache uses.

mod attention;
mod frames;
mod quantize;
pub(crate) mod running;

pub(crate) use attention::{
    Attend, check_qkv, floats, hadamard_query_key, hadamard_side, hadamard_values, shared_values,
    store, stream,
};
pub use attention::{
    hadamard, streaming_attention, streaming_attention_latent, streaming_attention_with,
    streaming_attention_with_sinks,
};
pub(crate) use frames::attend_frame;
pub use frames::frame_attention;
pub(crate) use quantize::fake_quantize_from;
pub use quantize::{
    Logical, Packed, ensure_finite, fake_quantize, fake_quantize_side, fake_quantize_with,
    quantize, quantize_side,
};
