//! Rules of arguments, which a server checks when it reads them.

use kv_device::remote::Argument;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    AttentionOptions, CacheFloat, CacheShape, GroupOptions, KvCacheConfig, KvFormat, Result, Side,
    SteGradient, Tile,
    delta::DeltaConfig,
    error::invalid,
    layout::{CacheLayout, QuantSpec, Schedule, StreamSpec},
    sparse::{AttendPlan, Compression, PoolPlan, RowLayout, Stride},
};

/// The most tokens, rows or channels of an argument.
const MOST: usize = 1 << 32;

impl Argument for CacheFloat {}
impl Argument for SteGradient {}

/// The inputs from which a [`CacheLayout`] is computed.
#[derive(Serialize, Deserialize)]
struct LayoutInputs {
    config: KvCacheConfig,
    shape: CacheShape,
    newest: usize,
}

impl Serialize for CacheLayout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (config, shape, newest) = (*self.config(), self.shape(), self.newest());
        LayoutInputs { config, shape, newest }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for CacheLayout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let LayoutInputs { config, shape, newest } = LayoutInputs::deserialize(deserializer)?;
        within("newest", newest, 0).map_err(de::Error::custom)?;
        Self::with_overwrite(&config, shape, newest).map_err(de::Error::custom)
    }
}

impl Argument for CacheLayout {}

impl Argument for QuantSpec {
    fn check(&self) -> Result<(), String> {
        match self.has_format() {
            true => Ok(()),
            false => Err(format!("no format of a cache has {self:?}")),
        }
    }
}

impl QuantSpec {
    /// Returns whether a format, with some options, is stored like this, in whole words.
    fn has_format(&self) -> bool {
        let Self { group_size, range, tile, .. } = *self;
        if group_size == 0 || group_size > MOST || tile.is_some_and(|tile| tile.validate().is_err())
        {
            return false;
        }
        let options = GroupOptions { group_size, range, tile: tile.unwrap_or(Tile::KVARN) };
        let mut formats = KvFormat::ALL.iter().chain(KvFormat::FRAME_ONLY);
        // A format that has one group for a token has as many channels as a group.
        formats.any(|format| {
            Side::BOTH.into_iter().any(|side| {
                format.spec(side, group_size, options) == Some(*self)
                    && format.with_token_scales().validate(side, group_size, options).is_ok()
            })
        })
    }
}

impl Argument for AttentionOptions {
    fn check(&self) -> Result<(), String> {
        named(self.validate())
    }
}

impl Argument for StreamSpec {
    fn check(&self) -> Result<(), String> {
        let Self { schedule, first_query, first_key } = *self;
        let Schedule { sides, sink_tokens, sliding_window, .. } = schedule;
        for side in sides.into_array() {
            named(within("step", side.step, 1))?;
            named(within("keep", side.keep, 0))?;
        }
        named(within("sink_tokens", sink_tokens, 0))?;
        named(within("sliding_window", sliding_window.unwrap_or(1), 1))?;
        named(within("first_query", first_query, 0))?;
        match first_key <= first_query {
            true => Ok(()),
            false => Err(format!("first_key {first_key}: must be at most {first_query}")),
        }
    }
}

impl Argument for DeltaConfig {
    fn check(&self) -> Result<(), String> {
        named(self.validate())
    }
}

impl Argument for Compression {
    fn check(&self) -> Result<(), String> {
        named(within("ratio", self.ratio, 1))
    }
}

impl Argument for Stride {
    fn check(&self) -> Result<(), String> {
        named(within("stride", self.0, 1))
    }
}

impl Argument for RowLayout {
    fn check(&self) -> Result<(), String> {
        let Self { batch, slots, width, format } = *self;
        for (field, value) in [("batch", batch), ("slots", slots), ("width", width)] {
            named(within(field, value, 1))?;
        }
        named(format.validate("rows", width))?;
        // In u128 the product does not overflow.
        match batch as u128 * slots as u128 * width as u128 >= u128::from(u32::MAX) {
            true => Err(format!("slots {slots}: too large for one buffer of 2^32 elements")),
            false => Ok(()),
        }
    }
}

impl Argument for PoolPlan {
    fn check(&self) -> Result<(), String> {
        self.compression.check()?;
        named(within("width", self.width, 1))?;
        named(within("entries", self.entries, 0))
    }
}

impl Argument for AttendPlan {
    fn check(&self) -> Result<(), String> {
        self.window.check()?;
        named(within("sliding_window", self.sliding_window, 1))?;
        match self.compression {
            Some(compression) => {
                compression.check()?;
                self.entries.check()
            }
            None => Ok(()),
        }
    }
}

/// Checks that a number is at least `least`, and small enough that sums do not overflow.
fn within(field: &'static str, value: usize, least: usize) -> Result<()> {
    match value {
        value if value < least => Err(invalid(field, value, format!("must be at least {least}"))),
        value if value > MOST => Err(invalid(field, value, format!("must be at most {MOST}"))),
        _ => Ok(()),
    }
}

/// The message of an error.
fn named(checked: Result<()>) -> Result<(), String> {
    checked.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Granularity;

    #[test]
    fn every_format_of_a_cache_is_accepted_and_no_other() {
        for format in KvFormat::ALL.iter().chain(KvFormat::FRAME_ONLY) {
            for side in Side::BOTH {
                let options = GroupOptions::new(32);
                let Some(spec) = format.spec(side, 64, options) else { continue };
                assert!(spec.check().is_ok(), "{format} {side}: {:?}", spec.check());
                assert!(QuantSpec { n_bits: 5, ..spec }.check().is_err());
                assert!(QuantSpec { group_size: 0, ..spec }.check().is_err());
            }
        }
        let spec = QuantSpec::new(Granularity::PerToken, KvFormat::Affine2, 32).unwrap();
        assert!(QuantSpec { group_size: 7, ..spec }.check().is_err());
    }
}
