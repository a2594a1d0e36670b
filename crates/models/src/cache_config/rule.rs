//! [`LayerRule`]: the caches of some layers.

use core::fmt;

use kv_cubecl::{KvCacheConfig, KvFormat, Side};

use super::Layers;
use crate::spec::{AttentionKind, ModelSpec};

/// A rule for the caches of some layers. Later rules override earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRule {
    /// The layers of the rule.
    pub layers: Layers,
    /// The attention that these layers must have; `None` for any.
    pub attention: Option<AttentionKind>,
    /// True if the layers must have a bias of keys, false if they must have none; `None` for any.
    pub key_bias: Option<bool>,
    /// The setting for their caches.
    pub stores: Stores,
}

/// The setting of a [`LayerRule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stores {
    /// The whole cache. Its capacity is ignored, because all layers have the same.
    Cache(KvCacheConfig),
    /// The format of one side or of both; earlier rules set the rest, and must set a group size and
    /// a residual length that the format allows. The format's default residual length applies if
    /// they set float and no residual length, or none of whole tiles for a format of tiles.
    Format {
        /// The side; `None` for both.
        side: Option<Side>,
        /// The format of the side.
        format: KvFormat,
        /// True if a Hadamard transform precedes quantization.
        hadamard: bool,
    },
    /// The first token that is quantized on both sides. The tokens before it stay in float, as the
    /// cache's [sinks](KvCacheConfig::sink_tokens); earlier rules set the rest.
    Start(usize),
}

impl Stores {
    /// Keys and values in float.
    pub const FLOAT: Self = Self::Format { side: None, format: KvFormat::Float, hadamard: false };

    /// Returns the cache of a layer that has the cache `before` by earlier rules.
    pub(super) fn after(&self, before: KvCacheConfig) -> KvCacheConfig {
        let (side, format, hadamard) = match *self {
            Self::Cache(cache) => return cache,
            Self::Start(tokens) => return before.with_sink_tokens(tokens),
            Self::Format { side, format, hadamard } => (side, format, hadamard),
        };
        let is = |of: Side| side.is_none_or(|side| side == of);
        let keys = if is(Side::Keys) { format } else { before.keys };
        let values = if is(Side::Values) { format } else { before.values };
        let unset = !before.is_quantized()
            && before.residual_length == KvCacheConfig::float().residual_length;
        let before = match unset {
            true => {
                let own = KvCacheConfig::new(keys, values);
                before.with_residual_length(own.residual_length)
            }
            false => before,
        };
        // Other formats refuse the settings of KIVI's groups, so `with_formats` resets them. A
        // group size and a residual length that still apply are kept even if they do not fit,
        // because the user chose them: the check of the policy then names them. Tiles are longer
        // than most residuals, so they get one of whole tiles.
        let mut cache = before.with_formats(keys, values);
        if cache.is_grouped() {
            cache = cache.with_group_size(before.group_size);
        }
        if !unset && before.residual_length > 0 && !cache.has_tiles() {
            cache = cache.with_residual_length(before.residual_length);
        }
        if is(Side::Keys) {
            cache = cache.with_hadamard_keys(hadamard);
        }
        if is(Side::Values) {
            cache = cache.with_hadamard_values(hadamard);
        }
        cache
    }
}

/// The properties of a layer that rules depend on.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub index: usize,
    /// The number of the model's layers.
    pub of: usize,
    pub kind: Kind,
}

/// The properties of a layer, besides its number, that rules depend on.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kind {
    pub attention: Option<AttentionKind>,
    pub key_bias: bool,
}

impl Place {
    pub(super) fn new(model: &ModelSpec, index: usize) -> Self {
        let key_bias = model.layers[index].key_bias;
        let kind = Kind { attention: model.attention_kind(index), key_bias };
        Self { index, of: model.layers.len(), kind }
    }
}

impl LayerRule {
    /// Creates a rule for some layers.
    pub fn new(layers: impl Into<Layers>, stores: Stores) -> Self {
        Self { layers: layers.into(), attention: None, key_bias: None, stores }
    }

    /// Limits the rule to layers with this attention.
    #[must_use]
    pub fn with_attention(self, attention: AttentionKind) -> Self {
        Self { attention: Some(attention), ..self }
    }

    /// Limits the rule to layers whose projections of keys have a bias, or to those without one.
    #[must_use]
    pub fn with_key_bias(self, key_bias: bool) -> Self {
        Self { key_bias: Some(key_bias), ..self }
    }

    /// Returns whether the rule is for all kinds of layers.
    pub(super) fn is_for_any_kind(&self) -> bool {
        self.attention.is_none() && self.key_bias.is_none()
    }

    /// Returns whether the rule is for layers of this kind.
    pub(super) fn is_for_kind(&self, kind: Kind) -> bool {
        self.attention.is_none_or(|attention| kind.attention == Some(attention))
            && self.key_bias.is_none_or(|key_bias| kind.key_bias == key_bias)
    }

    /// Returns whether the rule is for all layers of any model.
    pub(super) fn is_for_all(&self) -> bool {
        self.layers.is_all() && self.is_for_any_kind()
    }

    /// Returns whether the rule applies to a layer, in a policy written for `n_layers` or for any
    /// model.
    pub(super) fn is_for(&self, place: Place, n_layers: Option<usize>) -> bool {
        let Place { index, of, kind } = place;
        let (index, of) = match n_layers {
            None => (index, of),
            // The layer that contains the middle of this one.
            Some(n) => ((2 * index + 1) * n / (2 * of), n),
        };
        self.is_for_kind(kind) && self.layers.contains(index, of)
    }

    /// Returns whether all layers of the rule have their own sliding window, where sinks are not
    /// kept.
    pub(super) fn lacks_sinks(&self, spec: &ModelSpec, n_layers: Option<usize>) -> bool {
        let applies = |&layer: &usize| self.is_for(Place::new(spec, layer), n_layers);
        let mut layers = (0..spec.layers.len()).filter(applies).peekable();
        match self.attention {
            Some(AttentionKind::Sliding) => true,
            Some(AttentionKind::Global) => false,
            None => {
                layers.peek().is_some()
                    && layers.all(|layer| spec.layers[layer].sliding_window.is_some())
            }
        }
    }

    /// Returns whether the rule names layers, and none of them has a cache.
    pub(super) fn lacks_caches(&self, spec: &ModelSpec) -> bool {
        let applies = |&layer: &usize| self.is_for(Place::new(spec, layer), None);
        let mut layers = (0..spec.layers.len()).filter(applies).peekable();
        !self.layers.is_all()
            && layers.peek().is_some()
            && layers.all(|layer| !spec.layers[layer].has_cache())
    }

    /// Returns whether the rule sets its layers to float and nothing else.
    pub(super) fn is_float(&self) -> bool {
        self.stores == Stores::FLOAT
    }
}

impl fmt::Display for LayerRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.attention {
            Some(AttentionKind::Global) => "global ",
            Some(AttentionKind::Sliding) => "sliding ",
            None => "",
        };
        match self.layers.is_all() {
            true if kind.is_empty() => write!(f, "all")?,
            true => write!(f, "{kind}layers")?,
            false => write!(f, "{kind}layers {}", self.layers)?,
        }
        match self.key_bias {
            Some(true) => write!(f, " with a key bias")?,
            Some(false) => write!(f, " without a key bias")?,
            None => {}
        }
        write!(f, ": {}", self.stores)
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
