//! Reads configurations from files of this and of earlier versions.

use serde::{Deserialize, Deserializer};

use super::{Flush, KvCacheConfig};
use crate::formats::{CacheFloat, GroupRange, KvFormat, Tile};

/// Defines the fields of a configuration, and lists those that earlier versions named differently.
macro_rules! fields {
    ($($(#[$attribute:meta])* $name:ident: $type:ty $(, formerly $old:literal)?;)*) => {
        /// The fields of a configuration under their current and former names.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields, rename = "KvCacheConfig")]
        struct Fields {
            $($(#[$attribute])* $(#[serde(alias = $old)])? $name: $type,)*
        }

        impl KvCacheConfig {
            /// Lists the fields that earlier versions named differently: the former name and the
            /// current one.
            // For kv-models, which reads the fields one by one.
            #[doc(hidden)]
            pub const FORMER_FIELDS: &[(&str, &str)] = &[$($(($old, stringify!($name)),)?)*];
        }
    };
}

fields! {
    key_format: KvFormat, formerly "key_bits";
    value_format: KvFormat, formerly "value_bits";
    group_size: usize;
    residual_length: usize;
    flush: Flush;
    sink_tokens: usize;
    capacity: usize;
    float: CacheFloat;
    /// The former spelling of `flush: group`.
    #[serde(default)]
    sliding: bool;
    #[serde(default)]
    hadamard_values: bool, formerly "rotate_values";
    #[serde(default)]
    hadamard_keys: bool, formerly "rotate_keys";
    #[serde(default)]
    sliding_window: Option<usize>, formerly "window";
    #[serde(default)]
    tile: Tile;
    #[serde(default)]
    stagger: bool;
    #[serde(default)]
    key_range: GroupRange;
    #[serde(default)]
    value_range: GroupRange;
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
            tile: fields.tile,
            stagger: fields.stagger,
            key_range: fields.key_range,
            value_range: fields.value_range,
        })
    }
}
