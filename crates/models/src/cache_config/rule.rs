//! What some layers store: [`LayerRule`].

use core::fmt;

use kv_cubecl::{KvCacheConfig, KvFormat, Side};

use super::Layers;

/// What the caches of some layers store. Where several rules name a layer, they are followed in their order, so that
/// the last one has the last word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRule {
    /// The layers.
    pub layers: Layers,
    /// What they store.
    pub stores: Stores,
}

/// What a [`LayerRule`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stores {
    /// All of it. The capacity does not count: it is the same in all layers.
    Cache(KvCacheConfig),
    /// The format of a side or of both; the rest stays as the rules before have it. Where that is float and no window
    /// was asked for, there is the window that the formats have of themselves.
    Format {
        /// The side; `None` for both.
        side: Option<Side>,
        /// Its format.
        format: KvFormat,
        /// Whether it is rotated by a Hadamard matrix before it is quantized.
        hadamard: bool,
    },
    /// From which token on both sides are quantized: so many tokens at the start stay in float for good, which are the
    /// cache's [sinks](KvCacheConfig::sink_tokens); the rest stays as the rules before have it.
    Start(usize),
}

impl Stores {
    /// Keys and values in float.
    pub(super) const FLOAT: Self =
        Self::Format { side: None, format: KvFormat::Float, hadamard: false };

    /// What a layer stores that stored `before` by the rules before.
    pub(super) fn after(&self, before: KvCacheConfig) -> KvCacheConfig {
        let (side, format, hadamard) = match *self {
            Self::Cache(cache) => return cache,
            Self::Start(tokens) => return before.with_sink_tokens(tokens),
            Self::Format { side, format, hadamard } => (side, format, hadamard),
        };
        let is = |of: Side| side.is_none_or(|side| side == of);
        let keys = if is(Side::Keys) { format } else { before.keys };
        let values = if is(Side::Values) { format } else { before.values };
        let unsaid = !before.is_quantized()
            && before.residual_length == KvCacheConfig::float().residual_length;
        let before = match unsaid {
            true => {
                let own = KvCacheConfig::new(keys, values);
                before.with_residual_length(own.residual_length)
            }
            false => before,
        };
        // What is said of KIVI's groups means nothing to other formats, which refuse it: it goes.
        let mut cache = before.with_formats(keys, values);
        if is(Side::Keys) {
            cache = cache.with_hadamard_keys(hadamard);
        }
        if is(Side::Values) {
            cache = cache.with_hadamard_values(hadamard);
        }
        cache
    }
}

impl LayerRule {
    /// A rule for some layers.
    pub fn new(layers: impl Into<Layers>, stores: Stores) -> Self {
        Self { layers: layers.into(), stores }
    }

    /// Whether it says that its layers are in float, and nothing else.
    pub(super) fn is_float(&self) -> bool {
        self.stores == Stores::FLOAT
    }
}

impl fmt::Display for LayerRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layers.is_all() {
            true => write!(f, "all: {}", self.stores),
            false => write!(f, "layers {}: {}", self.layers, self.stores),
        }
    }
}

impl fmt::Display for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache(cache) => write!(f, "{cache}"),
            Self::Start(tokens) => write!(f, "from token {tokens} on"),
            Self::Format { side, format, hadamard } => {
                if let Some(side) = side {
                    write!(f, "{side} ")?;
                }
                match format {
                    KvFormat::Float => write!(f, "float")?,
                    format => write!(f, "as {format}")?,
                }
                if *hadamard { write!(f, " hadamard") } else { Ok(()) }
            }
        }
    }
}
