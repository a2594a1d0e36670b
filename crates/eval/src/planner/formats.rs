//! What caches can store, side by side.

use kv_cubecl::{CacheFloat, KvCacheConfig, KvFormat};

/// The caches of a plan that names none: every float type for all tokens, then every format of
/// packed tokens on both sides, with what stays in float in the 16 bits that every device has.
pub fn formats() -> Vec<KvCacheConfig> {
    let floats = CacheFloat::ALL.iter().map(|&float| KvCacheConfig::float().with_float(float));
    let packed = KvFormat::ALL.iter().filter(|format| format.is_quantized());
    let packed = packed.map(|&format| KvCacheConfig::new(format, format));
    floats.chain(packed.map(|config| config.with_float(CacheFloat::F16))).collect()
}
