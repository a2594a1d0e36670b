//! What the caches of a model's layers store: [`ModelCacheConfig`].

mod file;
mod layers;
mod presets;
mod rule;

use core::{fmt, str::FromStr};

use kv_cubecl::{KvCacheConfig, KvFormat, Side};

pub use self::{
    file::KV_CACHE_FILE,
    layers::Layers,
    rule::{LayerRule, Stores},
};
use crate::{Error, ModelSpec, Result};

/// The layer policy: which cache every layer of a model has, by rules that are followed in their order, so that of
/// several rules for a layer the last one has the last word. Layers of no rule stay in float.
///
/// The cache of all layers alike is a policy of one rule, which any [`KvCacheConfig`] becomes. [Files](Self::read) are
/// of JSON or TOML:
///
/// ```
/// use kv_models::{LayerSpec, Layers, ModelCacheConfig, ModelSpec};
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
///     start = 64               # quantized from this token on: those before it stay in float for good
/// "#)?;
/// let k2v2_s4: KvCacheConfig = "k2v2-s4".parse()?;
/// let built = ModelCacheConfig::from(k2v2_s4)
///     .with_cache("0..2,-1".parse::<Layers>()?, KvCacheConfig::float())
///     .with_format("-4..-1".parse::<Layers>()?, Side::Keys, KvFormat::Affine4)
///     .with_start(2..5, 64);
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
    rules: Vec<LayerRule>,
    /// Tokens a streaming cache is allocated for, the same in all layers. The closed form does not read it, but for the
    /// frequencies of rotary encodings that depend on the length.
    pub capacity: usize,
}

/// The capacity of what does not say it, and in the rules, where it means nothing.
const CAPACITY: usize = KvCacheConfig::float().capacity;

impl ModelCacheConfig {
    /// A policy of these rules, for 4096 tokens.
    pub fn new(rules: impl IntoIterator<Item = LayerRule>) -> Self {
        let none = Self { name: None, rules: vec![], capacity: CAPACITY };
        rules.into_iter().fold(none, Self::with_rule)
    }

    /// The policy with one rule more, which has the last word.
    #[must_use]
    pub fn with_rule(mut self, rule: LayerRule) -> Self {
        let stores = match rule.stores {
            Stores::Cache(cache) => Stores::Cache(cache.with_capacity(CAPACITY)),
            format => format,
        };
        self.rules.push(LayerRule { stores, ..rule });
        self
    }

    /// The same with another cache in some layers.
    #[must_use]
    pub fn with_cache(self, layers: impl Into<Layers>, cache: KvCacheConfig) -> Self {
        self.with_rule(LayerRule::new(layers, Stores::Cache(cache)))
    }

    /// The same with another format of a side, or of both, in some layers.
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

    /// The same with these layers quantized from token `tokens` on: those before it stay in float for good.
    #[must_use]
    pub fn with_start(self, layers: impl Into<Layers>, tokens: usize) -> Self {
        self.with_rule(LayerRule::new(layers, Stores::Start(tokens)))
    }

    /// The same with keys and values of these layers in float.
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

    /// The same with caches for so many tokens.
    #[must_use]
    pub fn with_capacity(self, capacity: usize) -> Self {
        Self { capacity, ..self }
    }

    /// The same policy called `name` where it is shown, instead of its rules.
    ///
    /// # Errors
    ///
    /// A name that is not of letters, digits, `-`, `_` and `.`, or that is the name of another cache.
    pub fn with_name(self, name: &str) -> Result<Self> {
        match name_rule(name) {
            Ok(()) => Ok(Self { name: Some(name.into()), ..self }),
            Err(rule) => Err(Error::argument("name", name, rule)),
        }
    }

    /// The rules, the one with the last word last.
    pub fn rules(&self) -> &[LayerRule] {
        &self.rules
    }

    /// What it is called, if it has a name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The cache of all layers, where they are all alike by one rule.
    pub fn uniform(&self) -> Option<KvCacheConfig> {
        match &self.rules[..] {
            [LayerRule { layers, stores: Stores::Cache(cache) }] if layers.is_all() => {
                Some(cache.with_capacity(self.capacity))
            }
            _ => None,
        }
    }

    /// What each of the `n_layers` layers of a model stores whose layers have no windows of their
    /// own.
    ///
    /// # Errors
    ///
    /// [`Error::Rule`] for a rule for a layer that the model does not have.
    pub fn of_layers(&self, n_layers: usize) -> Result<Vec<KvCacheConfig>> {
        for i in 0..self.rules.len() {
            self.check_rule(i, n_layers)?;
        }
        Ok((0..n_layers).map(|layer| self.own(layer, n_layers)).collect())
    }

    /// Checks that the layers of a rule are there.
    fn check_rule(&self, i: usize, n_layers: usize) -> Result<()> {
        let layers = &self.rules[i].layers;
        let named = layers.check_any().and_then(|()| layers.check(n_layers));
        named.map_err(|rule| {
            let field = format!("rules[{i}].layers");
            Error::Rule { field, value: layers.to_string(), rule }
        })
    }

    /// What the rules say of layer `index` of `n_layers`.
    fn own(&self, index: usize, n_layers: usize) -> KvCacheConfig {
        let rules = self.rules.iter().filter(|rule| rule.layers.contains(index, n_layers));
        let cache = rules.fold(KvCacheConfig::float(), |cache, rule| rule.stores.after(cache));
        cache.with_capacity(self.capacity)
    }

    /// What the cache of layer `index` of `model` stores. The window is the layer's, or that of the rules if it is
    /// shorter. A layer with a window of its own keeps no sinks: it was trained without its first tokens.
    ///
    /// # Panics
    ///
    /// When the model has no such layer.
    pub fn layer(&self, model: &ModelSpec, index: usize) -> KvCacheConfig {
        let layers = &model.layers;
        let cache = self.own(index, layers.len());
        match layers[index].sliding_window {
            None => cache,
            Some(window) => {
                let window = cache.sliding_window.map_or(window, |asked| asked.min(window));
                cache.with_sliding_window(Some(window)).with_sink_tokens(0)
            }
        }
    }

    /// What the caches of all layers of `model` store, first layer first.
    pub fn layers(&self, model: &ModelSpec) -> impl Iterator<Item = KvCacheConfig> {
        (0..model.layers.len()).map(move |index| self.layer(model, index))
    }

    /// Whether any layer of `model` is quantized.
    pub fn is_quantized(&self, model: &ModelSpec) -> bool {
        self.layers(model).any(|cache| cache.is_quantized())
    }

    /// Whether all layers of `model` are in f32 and see all that the model lets them see.
    pub fn is_float(&self, model: &ModelSpec) -> bool {
        let float = Self::from(KvCacheConfig::float().with_capacity(self.capacity));
        float
            .layers(model)
            .zip(self.layers(model))
            .all(|(float, cache)| cache.to_string() == float.to_string())
    }

    /// Every cache that some layer of some model may have by these rules.
    pub fn candidates(&self) -> Vec<KvCacheConfig> {
        let mut all = vec![KvCacheConfig::float()];
        for rule in &self.rules {
            let after: Vec<_> = all.iter().map(|cache| rule.stores.after(*cache)).collect();
            if rule.layers.is_all() {
                all.clear();
            }
            all.extend(after);
            let mut seen = std::collections::HashSet::new();
            all.retain(|cache| seen.insert(*cache));
        }
        all.into_iter().map(|cache| cache.with_capacity(self.capacity)).collect()
    }

    /// The same policy with what each of its rules stores turned into others, one after the other; without a name, since
    /// it is another policy.
    fn map<I: IntoIterator<Item = Stores>>(&self, change: impl Fn(Stores) -> I) -> Self {
        let changed = |rule: &LayerRule| {
            let stores = change(rule.stores).into_iter();
            stores.map(|it| LayerRule::new(rule.layers.clone(), it)).collect::<Vec<_>>()
        };
        let rules: Vec<LayerRule> = self.rules.iter().flat_map(changed).collect();
        let name = if rules == self.rules { self.name.clone() } else { None };
        Self { name, rules, capacity: self.capacity }
    }

    /// The caches of the same float types and capacity that quantize nothing and see all.
    #[must_use]
    pub fn in_float(&self) -> Self {
        self.map(|stores| match stores {
            Stores::Cache(cache) => {
                Some(Stores::Cache(KvCacheConfig::float().with_float(cache.float)))
            }
            Stores::Format { .. } | Stores::Start(_) => None,
        })
    }

    /// The same in KIVI's formats of so many bits on all layers, but for those that a rule has in float; with the
    /// windows and sinks of the first rule, and the tokens that rules after it start at.
    #[must_use]
    pub fn with_formats(&self, keys: KvFormat, values: KvFormat) -> Self {
        let first = self.rules.iter().enumerate().find_map(|(i, rule)| match rule.stores {
            Stores::Cache(cache) if rule.layers.is_all() => Some((i, cache)),
            _ => None,
        });
        let (first, cache) = first.unwrap_or((0, KvCacheConfig::float()));
        let kept = self.rules.iter().enumerate().filter(|(i, rule)| match rule.stores {
            Stores::Start(_) => *i >= first,
            _ => rule.is_float() && !rule.layers.is_all(),
        });
        let base = Self::from(cache.with_formats(keys, values).with_capacity(self.capacity));
        kept.fold(base, |policy, (_, rule)| policy.with_rule(rule.clone()))
    }

    /// The same without rotations of values.
    pub(crate) fn without_hadamard_values(&self) -> Self {
        let side =
            |side: Side, format, hadamard| Stores::Format { side: Some(side), format, hadamard };
        self.map(|stores| match stores {
            Stores::Cache(cache) => vec![Stores::Cache(cache.with_hadamard_values(false))],
            Stores::Format { side: Some(Side::Values), format, .. } => {
                vec![side(Side::Values, format, false)]
            }
            // Keys are as they were, which one rule of both sides cannot say.
            Stores::Format { side: None, format, hadamard: true } => {
                vec![side(Side::Keys, format, true), side(Side::Values, format, false)]
            }
            others => vec![others],
        })
    }

    /// What a user should know of the caches of a model of `spec`: layers with a window of their own keep no sinks
    /// and no tokens beyond it.
    pub fn note(&self, spec: &ModelSpec) -> Option<String> {
        let all = spec.layers.len();
        let windowed = |asked: fn(KvCacheConfig, usize) -> bool| -> Vec<usize> {
            let layers = spec.layers.iter().enumerate();
            layers
                .filter(|(i, layer)| {
                    layer.sliding_window.is_some_and(|own| asked(self.own(*i, all), own))
                })
                .map(|(i, _)| i)
                .collect()
        };
        let sinks = windowed(|cache, _| cache.sink_tokens > 0);
        let longer = windowed(|cache, own| cache.sliding_window.is_some_and(|it| it > own));
        let (layers, rule) = match (sinks.is_empty(), longer.is_empty()) {
            (true, true) => return None,
            (true, false) => (longer, "keep no more than that"),
            (false, _) => (sinks, "keep no sinks"),
        };
        let (n, layers) = (layers.len(), Layers::runs(layers));
        Some(format!(
            "{self}: {n} of {all} layers ({layers}) have a window of their own and {rule}"
        ))
    }

    /// The caches of a model of `spec` in full, layers that are alike together; `None` where they are all alike and
    /// [shown](fmt::Display) by what they store.
    pub fn in_full(&self, spec: &ModelSpec) -> Option<String> {
        if self.name.is_none() && self.uniform().is_some() {
            return None;
        }
        let n = spec.layers.len();
        let mut runs: Vec<(usize, usize, KvCacheConfig)> = vec![];
        for layer in 0..n {
            let cache = self.own(layer, n);
            match runs.last_mut() {
                Some((_, end, last)) if *last == cache => *end = layer + 1,
                _ => runs.push((layer, layer + 1, cache)),
            }
        }
        let told = runs.into_iter().map(|(start, end, cache)| match end - start {
            1 => format!("layer {start} {cache}"),
            _ => format!("layers {start}..{end} {cache}"),
        });
        let name = self.name.as_deref().unwrap_or("caches by layer");
        Some(format!("{name}: {}", told.collect::<Vec<_>>().join(", ")))
    }

    /// Checks that the policy fits `model`.
    ///
    /// # Errors
    ///
    /// A rule for a layer that the model does not have, or without one, a start that no layer of its rule has, since
    /// all have windows of their own and keep no sinks, and a cache that does not fit the heads of a layer.
    pub fn validate(&self, model: impl AsRef<ModelSpec>) -> Result<()> {
        let spec = model.as_ref();
        let n = spec.layers.len();
        for (i, rule) in self.rules.iter().enumerate() {
            self.check_rule(i, n)?;
            if matches!(rule.stores, Stores::Start(1..)) && self.lacks_sinks(rule, spec) {
                return Err(Error::Rule {
                    field: format!("rules[{i}]"),
                    value: rule.to_string(),
                    rule: "all of its layers have a window of their own and keep no sinks".into(),
                });
            }
        }
        for (i, layer) in spec.layers.iter().enumerate() {
            let (own, stored) = (self.own(i, n), self.layer(spec, i));
            let fits = own.validate(layer.head_dim).and_then(|()| stored.validate(layer.head_dim));
            fits.map_err(|error| self.in_rule(i, n, error))?;
        }
        Ok(())
    }

    /// Whether all layers of a rule have windows of their own, where first tokens are not kept.
    fn lacks_sinks(&self, rule: &LayerRule, spec: &ModelSpec) -> bool {
        let n = spec.layers.len();
        let mut named = (0..n).filter(|&layer| rule.layers.contains(layer, n));
        named.all(|layer| spec.layers[layer].sliding_window.is_some())
    }

    /// An error of a layer's cache, with the rule that has the last word on it unless there is but one.
    fn in_rule(&self, index: usize, n: usize, error: kv_cubecl::Error) -> Error {
        let last = self.rules.iter().rposition(|rule| rule.layers.contains(index, n));
        match last.filter(|_| self.rules.len() > 1) {
            None => error.into(),
            Some(last) => Error::Rule {
                field: format!("rules[{last}]"),
                value: self.rules[last].stores.to_string(),
                rule: format!("makes {} of layer {index}: {error}", self.own(index, n)),
            },
        }
    }
}

/// The rule that a name breaks.
fn name_rule(name: &str) -> core::result::Result<(), String> {
    /// The longest that a table shows beside its numbers.
    const MOST: usize = 40;
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > MOST || !name.chars().all(allowed) {
        return Err(format!("must be 1 to {MOST} letters, digits, \"-\", \"_\" and \".\""));
    }
    match name.parse::<KvCacheConfig>() {
        Ok(cache) => Err(format!("is the name of the cache {cache} of all layers")),
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

impl FromStr for ModelCacheConfig {
    type Err = Error;

    /// The short name of a cache, or the name of a [preset](Self::preset).
    fn from_str(name: &str) -> Result<Self> {
        match Self::preset(name) {
            Some(preset) => preset,
            None => Ok(name.parse::<KvCacheConfig>()?.into()),
        }
    }
}

impl fmt::Display for ModelCacheConfig {
    /// Its name, or the short name of the cache of all layers, then what other layers store.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            return write!(f, "{name}");
        }
        let rest = match &self.rules[..] {
            [LayerRule { layers, stores: Stores::Cache(cache) }, rest @ ..] if layers.is_all() => {
                write!(f, "{cache}")?;
                rest
            }
            rest => {
                write!(f, "float")?;
                rest
            }
        };
        for rule in rest {
            match rule.is_float() && !rule.layers.is_all() {
                true => write!(f, " float layers {}", rule.layers)?,
                false => write!(f, "; {rule}")?,
            }
        }
        Ok(())
    }
}
