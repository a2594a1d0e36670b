//! Public tensor functions: check, dispatch, wrap. The only callers of `Dispatch`.

mod attention;
mod quantize;

pub use attention::streaming_attention;
pub(crate) use attention::{check_qkv, closed_form, merge, store, stream};
pub(crate) use quantize::fake_quantize_from;
pub use quantize::{Logical, Packed, ensure_finite, fake_quantize, quantize};
