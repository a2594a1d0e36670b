//! [`ModelCacheConfig`]: the cache formats of a model's layers.

mod file;
mod file_fields;
mod layers;
mod nearest;
mod presets;
mod rule;
mod text;
mod validate;

use kv_cubecl::{KvCacheConfig, KvFormat, Side};

use self::rule::{Kind, Place};
pub use self::{
    file::KV_CACHE_FILE,
    layers::Layers,
    rule::{LayerRule, Stores},
};
use crate::{
    error::{Error, Result},
    spec::{AttentionKind, ModelSpec},
};

/// The layer policy: the cache of every layer of a model. Its rules are applied in order, and later
/// rules override earlier ones. Layers without a rule stay in float.
///
/// Any [`KvCacheConfig`] becomes a policy of one rule, which gives all layers the same cache.
/// [Files](Self::read) are JSON or TOML:
///
/// ```
/// use kv_models::{
///     AttentionKind, LayerRule, LayerSpec, Layers, ModelCacheConfig, ModelSpec, Stores,
/// };
/// use kv_models::kv_cubecl::{KvCacheConfig, Side, KvFormat};
///
/// let policy = ModelCacheConfig::from_toml(r#"
///     [[rules]]                # all layers
///     cache = "k2v2-s4"
///     [[rules]]
///     layers = "0..2,-1"       # the first two and the last
///     cache = "float"
///     [[rules]]
///     layers = "-4..-1"
///     side = "keys"            # or "values"; without it both
///     format = 4               # 2, 3, 4, 8, 16 for float, or a name such as "int8"
///     [[rules]]
///     layers = "2..5"
///     attention = "global"     # only in a model that has sliding layers, too; or "sliding"
///     start = 64               # quantized from this token on; earlier ones stay in float
/// "#)?;
/// let k2v2_s4: KvCacheConfig = "k2v2-s4".parse()?;
/// let built = ModelCacheConfig::from(k2v2_s4)
///     .with_cache("0..2,-1".parse::<Layers>()?, KvCacheConfig::float())
///     .with_format("-4..-1".parse::<Layers>()?, Side::Keys, KvFormat::Affine4)
///     .with_rule(LayerRule::new(2..5, Stores::Start(64)).with_attention(AttentionKind::Global));
/// assert_eq!(policy, built);
///
/// let layer = LayerSpec::new(9, 3, 64).with_sliding_window(Some(512));
/// let model = ModelSpec::new(1000, 576, 2048, vec![layer; 10]);
/// let cache = |layer| policy.layer(&model, layer).to_string();
/// // A layer with a window of its own keeps no sinks.
/// assert_eq!([cache(1), cache(2), cache(7)], ["float-w512", "k2v2-w512", "k4v2-w512"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCacheConfig {
    name: Option<String>,
    /// The number of layers that the rules are written for; `None` if they are not scaled.
    n_layers: Option<usize>,
    rules: Vec<LayerRule>,
    /// The tokens that a streaming cache is allocated for, the same in all layers. The parallel
    /// form ignores it, except for ropes whose frequencies depend on the length.
    pub capacity: usize,
}

const LAYERS: &str = "must be 1 to 10000 layers";

/// The default capacity. Rules contain it too, but it has no effect there.
const CAPACITY: usize = KvCacheConfig::float().capacity;

impl ModelCacheConfig {
    /// Creates a policy of these rules, for 4096 tokens.
    pub fn new(rules: impl IntoIterator<Item = LayerRule>) -> Self {
        let none = Self { name: None, n_layers: None, rules: vec![], capacity: CAPACITY };
        rules.into_iter().fold(none, Self::with_rule)
    }

    /// Adds a rule that overrides earlier ones.
    #[must_use]
    pub fn with_rule(mut self, rule: LayerRule) -> Self {
        let stores = match rule.stores {
            Stores::Cache(cache) => Stores::Cache(cache.with_capacity(CAPACITY)),
            format => format,
        };
        self.rules.push(LayerRule { stores, ..rule });
        self
    }

    /// Adds a rule with a cache for some layers.
    #[must_use]
    pub fn with_cache(self, layers: impl Into<Layers>, cache: KvCacheConfig) -> Self {
        self.with_rule(LayerRule::new(layers, Stores::Cache(cache)))
    }

    /// Adds a rule with a format for one side, or for both, of some layers.
    #[must_use]
    pub fn with_format(
        self,
        layers: impl Into<Layers>,
        side: impl Into<Option<Side>>,
        format: KvFormat,
    ) -> Self {
        let side = side.into();
        self.with_rule(LayerRule::new(layers, Stores::Format { side, format, hadamard: false }))
    }

    /// Adds a rule that quantizes these layers from token `tokens` on; the tokens before it stay in
    /// float.
    #[must_use]
    pub fn with_start(self, layers: impl Into<Layers>, tokens: usize) -> Self {
        self.with_rule(LayerRule::new(layers, Stores::Start(tokens)))
    }

    /// Adds a rule with keys and values of these layers in float.
    #[must_use]
    pub fn with_float_layers(self, layers: impl IntoIterator<Item = usize>) -> Self {
        let mut layers: Vec<usize> = layers.into_iter().collect();
        layers.sort_unstable();
        layers.dedup();
        match layers.is_empty() {
            true => self,
            false => self.with_rule(LayerRule::new(Layers::from_iter(layers), Stores::FLOAT)),
        }
    }

    /// Returns the same policy with this capacity.
    #[must_use]
    pub fn with_capacity(self, capacity: usize) -> Self {
        Self { capacity, ..self }
    }

    /// Returns the same policy with rules that are written for `n_layers` layers. In a model of
    /// another number n, layer i has the rules of layer `(i + 1/2) * n_layers / n`, rounded down,
    /// which is at the same relative depth.
    ///
    /// # Errors
    /// Fails for 0 and for more than 10,000 layers.
    pub fn with_n_layers(self, n_layers: usize) -> Result<Self> {
        match (1..=10_000).contains(&n_layers) {
            true => Ok(Self { n_layers: Some(n_layers), ..self }),
            false => Err(Error::argument("n_layers", n_layers, LAYERS)),
        }
    }

    /// Returns the same policy with a name, which is displayed instead of its rules.
    ///
    /// # Errors
    /// Fails for a name with characters other than letters, digits, `-`, `_` and `.`, and for the
    /// name of another cache.
    pub fn with_name(self, name: &str) -> Result<Self> {
        match name_rule(name) {
            Ok(()) => Ok(Self { name: Some(name.into()), ..self }),
            Err(rule) => Err(Error::argument("name", name, rule)),
        }
    }

    /// Returns the rules; later ones override earlier ones.
    pub fn rules(&self) -> &[LayerRule] {
        &self.rules
    }

    /// Returns the name, if there is one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the cache of all layers if the policy is a single rule for all of them.
    pub fn uniform(&self) -> Option<KvCacheConfig> {
        match &self.rules[..] {
            [rule] if rule.is_for_all() => match rule.stores {
                Stores::Cache(cache) => Some(cache.with_capacity(self.capacity)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the caches of `n_layers` layers with one kind of attention, no sliding window of
    /// their own and no bias of keys, before they are [staggered](KvCacheConfig::stagger).
    ///
    /// # Errors
    /// Fails with [`Error::Rule`] for a rule with a layer that the model does not have.
    pub fn of_layers(&self, n_layers: usize) -> Result<Vec<KvCacheConfig>> {
        for i in 0..self.rules.len() {
            self.check_rule(i, n_layers)?;
        }
        let place = |index| Place { index, of: n_layers, kind: Kind::default() };
        Ok((0..n_layers).map(|layer| self.ruled(place(layer))).collect())
    }

    /// Checks that the layers of a rule exist.
    fn check_rule(&self, i: usize, n_layers: usize) -> Result<()> {
        let layers = &self.rules[i].layers;
        let named = layers.check_any().and_then(|()| match self.n_layers {
            None => layers.check(n_layers, "the model"),
            Some(n) => layers.check(n, &format!("a policy of n_layers = {n}")),
        });
        named.map_err(|rule| {
            let field = format!("rules[{i}].layers");
            Error::Rule { field, value: layers.to_string(), rule }
        })
    }

    /// Applies the rules to a layer, which is not staggered yet.
    fn ruled(&self, place: Place) -> KvCacheConfig {
        let rules = self.rules.iter().filter(|rule| rule.is_for(place, self.n_layers));
        let cache = rules.fold(KvCacheConfig::float(), |cache, rule| rule.stores.after(cache));
        cache.with_capacity(self.capacity)
    }

    /// Returns the cache of layer `index` of `model`. The sliding window is the layer's own, or
    /// that of the rules if it is shorter. A layer with its own sliding window keeps no sinks,
    /// because it was trained without its first tokens. A layer that shares a cache has the cache
    /// of its owner, whatever the rules say of the layer itself.
    ///
    /// # Panics
    /// Panics when the model has no such layer.
    pub fn layer(&self, model: &ModelSpec, index: usize) -> KvCacheConfig {
        let (layers, index) = (&model.layers, model.owner(index));
        let cache = self.ruled(Place::new(model, index));
        let cache = match layers[index].sliding_window {
            None => cache,
            Some(window) => {
                let window = cache.sliding_window.map_or(window, |asked| asked.min(window));
                cache.with_sliding_window(Some(window)).with_sink_tokens(0)
            }
        };
        let cache = cache.in_layer(index, layers.len());
        if layers[index].shares_values() { cache.with_shared_values() } else { cache }
    }

    /// Returns the caches of all layers of `model`, first to last.
    pub fn layers(&self, model: &ModelSpec) -> impl Iterator<Item = KvCacheConfig> {
        (0..model.layers.len()).map(move |index| self.layer(model, index))
    }

    /// Returns the caches of the layers of `model` that have one.
    pub fn caches(&self, model: &ModelSpec) -> impl Iterator<Item = KvCacheConfig> {
        let caches = self.layers(model).zip(&model.layers);
        caches.filter(|(_, layer)| layer.has_cache()).map(|(cache, _)| cache)
    }

    /// Returns whether any layer of `model` is quantized.
    pub fn is_quantized(&self, model: &ModelSpec) -> bool {
        self.caches(model).any(|cache| cache.is_quantized())
    }

    /// Returns whether all layers of `model` are in f32 and see all tokens that the model allows.
    pub fn is_float(&self, model: &ModelSpec) -> bool {
        let float = Self::from(KvCacheConfig::float().with_capacity(self.capacity));
        float
            .caches(model)
            .zip(self.caches(model))
            .all(|(float, cache)| cache.to_string() == float.to_string())
    }

    /// Returns all caches that the rules can give a layer of any model.
    pub fn candidates(&self) -> Vec<KvCacheConfig> {
        // A layer is of one kind, so it never has the rules for two of them.
        let kinds = [None, Some(AttentionKind::Global), Some(AttentionKind::Sliding)];
        let kinds = kinds.into_iter().flat_map(|attention| {
            [false, true].map(|key_bias| self.candidates_of(Kind { attention, key_bias }))
        });
        let mut all = kinds.flatten().collect();
        keep_first(&mut all);
        all.into_iter().map(|cache| cache.with_capacity(self.capacity)).collect()
    }

    /// Returns all caches that the rules can give a layer of this kind, before the capacity is set.
    fn candidates_of(&self, kind: Kind) -> Vec<KvCacheConfig> {
        let mut all = vec![KvCacheConfig::float()];
        for rule in &self.rules {
            if !rule.is_for_kind(kind) {
                continue;
            }
            let after: Vec<_> = all.iter().map(|cache| rule.stores.after(*cache)).collect();
            if rule.layers.is_all() {
                all.clear();
            }
            all.extend(after);
            // After each rule, or the caches would double with every one.
            keep_first(&mut all);
        }
        all
    }

    /// Replaces what each rule stores by the results of `change`. The policy keeps its name only if
    /// it does not change.
    fn map<I: IntoIterator<Item = Stores>>(&self, change: impl Fn(Stores) -> I) -> Self {
        let changed = |rule: &LayerRule| {
            let stores = change(rule.stores).into_iter();
            stores.map(|stores| LayerRule { stores, ..rule.clone() }).collect::<Vec<_>>()
        };
        let rules: Vec<LayerRule> = self.rules.iter().flat_map(changed).collect();
        let name = if rules == self.rules { self.name.clone() } else { None };
        Self { name, rules, ..*self }
    }

    /// Returns a policy with the same float types and capacity that quantizes nothing and has no
    /// sliding window.
    #[must_use]
    pub fn in_float(&self) -> Self {
        self.map(|stores| match stores {
            Stores::Cache(cache) => {
                Some(Stores::Cache(KvCacheConfig::float().with_float(cache.float)))
            }
            Stores::Format { .. } | Stores::Start(_) => None,
        })
    }

    /// Returns a policy with these formats in all layers, except for layers that a rule has in
    /// float. It keeps residual, sinks and sliding window of the first rule, and the starts of
    /// later rules.
    #[must_use]
    pub fn with_formats(&self, keys: KvFormat, values: KvFormat) -> Self {
        let first = self.rules.iter().enumerate().find_map(|(i, rule)| match rule.stores {
            Stores::Cache(cache) if rule.is_for_all() => Some((i, cache)),
            _ => None,
        });
        let (first, cache) = first.unwrap_or((0, KvCacheConfig::float()));
        let kept = self.rules.iter().enumerate().filter(|(i, rule)| match rule.stores {
            Stores::Start(_) => *i >= first,
            _ => rule.is_float() && !rule.is_for_all(),
        });
        let base = Self::from(cache.with_formats(keys, values).with_capacity(self.capacity));
        kept.fold(Self { n_layers: self.n_layers, ..base }, |policy, (_, rule)| {
            policy.with_rule(rule.clone())
        })
    }

    /// Returns the same policy without Hadamard transforms of values.
    pub(crate) fn without_hadamard_values(&self) -> Self {
        let side =
            |side: Side, format, hadamard| Stores::Format { side: Some(side), format, hadamard };
        self.map(|stores| match stores {
            Stores::Cache(cache) => vec![Stores::Cache(cache.with_hadamard_values(false))],
            Stores::Format { side: Some(Side::Values), format, .. } => {
                vec![side(Side::Values, format, false)]
            }
            // Keys stay transformed, which takes a rule for each side.
            Stores::Format { side: None, format, hadamard: true } => {
                vec![side(Side::Keys, format, true), side(Side::Values, format, false)]
            }
            others => vec![others],
        })
    }
}

/// Keeps the first of equal caches.
fn keep_first(caches: &mut Vec<KvCacheConfig>) {
    let mut seen = std::collections::HashSet::new();
    caches.retain(|cache| seen.insert(*cache));
}

/// Checks a name; returns the rule that it breaks.
fn name_rule(name: &str) -> core::result::Result<(), String> {
    /// Longer names do not fit into tables.
    const MOST: usize = 40;
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > MOST || !name.chars().all(allowed) {
        return Err(format!("must be 1 to {MOST} letters, digits, \"-\", \"_\" and \".\""));
    }
    match name.parse::<KvCacheConfig>() {
        Ok(cache) => Err(format!("is the name of the cache {cache}")),
        Err(_) => Ok(()),
    }
}

impl From<KvCacheConfig> for ModelCacheConfig {
    fn from(cache: KvCacheConfig) -> Self {
        Self::new([]).with_cache(Layers::all(), cache).with_capacity(cache.capacity)
    }
}

impl From<&KvCacheConfig> for ModelCacheConfig {
    fn from(cache: &KvCacheConfig) -> Self {
        Self::from(*cache)
    }
}

impl From<&ModelCacheConfig> for ModelCacheConfig {
    fn from(config: &ModelCacheConfig) -> Self {
        config.clone()
    }
}
