//! The caches of a world model's layers.

use core::{fmt, str::FromStr};

use kv_cubecl::{KvCacheConfig, KvFormat, Sides};
use kv_models::ModelCacheConfig;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The caches of a world model's layers: a cache or policy in all layers, or in the last few with
/// float in the others.
///
/// It is parsed from the name of a cache, a preset or a policy file. A suffix selects the last
/// layers of a side or of both: `kint8vint8@2` quantizes the last two layers, `kint8vint8@k2`
/// values in all layers and keys in the last two, `kint8vint8@k2v4` keys in two and values in four.
/// The layers of a policy's rules are the model's, whatever the suffix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCaches {
    /// The cache or policy.
    pub cache: ModelCacheConfig,
    /// Number of last layers that use it for a side; `None` for all.
    pub last: Sides<Option<usize>>,
}

impl Default for LayerCaches {
    /// Float in all layers.
    fn default() -> Self {
        ModelCacheConfig::from(KvCacheConfig::float()).into()
    }
}

impl From<ModelCacheConfig> for LayerCaches {
    fn from(cache: ModelCacheConfig) -> Self {
        Self { cache, last: Sides::default() }
    }
}

impl LayerCaches {
    /// Returns the format of each of `layers` layers.
    ///
    /// # Errors
    /// [`Error::Plan`] for more layers than the model has.
    pub fn formats(&self, layers: usize) -> Result<Vec<KvCacheConfig>> {
        if self.last.into_array().into_iter().flatten().any(|last| last > layers) {
            let rule = format!("selects more than the model's {layers} layers");
            return Err(Error::plan("cache", self, rule));
        }
        let first = self.last.map(|last| layers - last.unwrap_or(layers));
        let formats = self.cache.of_layers(layers)?.into_iter().enumerate();
        let in_layer = |(i, cache): (usize, KvCacheConfig)| {
            match [i < first.keys, i < first.values] {
                [false, false] => cache,
                [true, false] => cache.with_formats(KvFormat::Float, cache.values),
                [false, true] => cache.with_formats(cache.keys, KvFormat::Float),
                // Nothing of the cache applies.
                [true, true] => KvCacheConfig::float(),
            }
        };
        Ok(formats.map(in_layer).collect())
    }
}

impl fmt::Display for LayerCaches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cache.fmt(f)?;
        match self.last {
            Sides { keys: None, values: None } => Ok(()),
            Sides { keys: Some(keys), values: Some(values) } if keys == values => {
                write!(f, "@{keys}")
            }
            Sides { keys, values } => {
                f.write_str("@")?;
                keys.map_or(Ok(()), |last| write!(f, "k{last}"))?;
                values.map_or(Ok(()), |last| write!(f, "v{last}"))
            }
        }
    }
}

impl FromStr for LayerCaches {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((cache, last)) = text.split_once('@') else {
            return Ok(ModelCacheConfig::find(text)?.into());
        };
        let last = last_layers(last).ok_or_else(|| {
            let rule =
                "must have a number of layers, at least 1, after @, such as @2, @k2 or @k2v4";
            Error::plan("cache", format!("{text:?}"), rule)
        })?;
        Ok(Self { cache: ModelCacheConfig::find(cache)?, last })
    }
}

/// Parses `2`, `k2`, `v2` or `k2v4`.
fn last_layers(text: &str) -> Option<Sides<Option<usize>>> {
    let number = |digits: &str| digits.parse().ok().filter(|&last: &usize| last > 0).map(Some);
    let Some(keys) = text.strip_prefix('k') else {
        return match text.strip_prefix('v') {
            Some(values) => Some(Sides { keys: None, values: number(values)? }),
            None => number(text).map(|last| Sides { keys: last, values: last }),
        };
    };
    match keys.split_once('v') {
        Some((keys, values)) => Some(Sides { keys: number(keys)?, values: number(values)? }),
        None => Some(Sides { keys: number(keys)?, values: None }),
    }
}
