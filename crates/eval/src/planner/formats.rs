//! The caches that a plan compares by default.

use kv_cubecl::{CacheFloat, KvCacheConfig, KvFormat};

/// Returns the caches of a plan that names none: every float type, then every packed format for
/// both sides. Float tokens of packed caches are f16, which every device supports.
pub fn formats() -> Vec<KvCacheConfig> {
    let floats = CacheFloat::ALL.iter().map(|&float| KvCacheConfig::float().with_float(float));
    let packed = KvFormat::ALL.iter().filter(|format| format.is_quantized());
    let packed = packed.map(|&format| KvCacheConfig::new(format, format));
    floats.chain(packed.map(|config| config.with_float(CacheFloat::F16))).collect()
}
