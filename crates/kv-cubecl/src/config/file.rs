//! Reads configurations from files of this and of earlier versions.

use serde::{Deserialize, Deserializer};

use super::{Flush, KvCacheConfig};
use crate::formats::{CacheFloat, KvFormat};

/// The fields of a configuration under their current and former names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename = "KvCacheConfig")]
struct Fields {
    #[serde(alias = "key_bits")]
    key_format: KvFormat,
    #[serde(alias = "value_bits")]
    value_format: KvFormat,
    group_size: usize,
    residual_length: usize,
    flush: Flush,
    sink_tokens: usize,
    capacity: usize,
    float: CacheFloat,
    /// The former spelling of `flush: group`.
    #[serde(default)]
    sliding: bool,
    #[serde(default, alias = "rotate_values")]
    hadamard_values: bool,
    #[serde(default, alias = "rotate_keys")]
    hadamard_keys: bool,
    #[serde(default, alias = "window")]
    sliding_window: Option<usize>,
}

impl<'de> Deserialize<'de> for KvCacheConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Fields::deserialize(deserializer)?;
        Ok(Self {
            keys: fields.key_format,
            values: fields.value_format,
            group_size: fields.group_size,
            residual_length: fields.residual_length,
            flush: fields.flush.with_groups(fields.sliding || fields.flush.is_by_group()),
            sink_tokens: fields.sink_tokens,
            capacity: fields.capacity,
            float: fields.float,
            hadamard_values: fields.hadamard_values,
            hadamard_keys: fields.hadamard_keys,
            sliding_window: fields.sliding_window,
        })
    }
}
