//! A policy as text for users.

use core::{fmt, str::FromStr};

use kv_cubecl::KvCacheConfig;

use super::{LayerRule, Layers, ModelCacheConfig, Stores, rule::Place};
use crate::{
    error::{Error, Result},
    spec::{LayerSpec, ModelSpec},
};

impl ModelCacheConfig {
    /// Returns notes for the user on layers of a model of `spec` that ignore sinks or a longer
    /// window of the policy, because they have their own sliding window, and on keys with a bias
    /// that are stored in few bits after a Hadamard transform. Layers whose values are channels of
    /// keys ignore what the policy says of values.
    pub fn notes(&self, spec: &ModelSpec) -> Vec<String> {
        type Asked = fn(&LayerSpec, KvCacheConfig) -> bool;
        let sinks: Asked = |layer, cache| layer.sliding_window.is_some() && cache.sink_tokens > 0;
        let longer: Asked = |layer, cache| {
            layer.sliding_window.is_some_and(|own| cache.sliding_window.is_some_and(|it| it > own))
        };
        let biased: Asked =
            |layer, cache| layer.key_bias && cache.uses_hadamard_keys() && cache.keys.n_bits() <= 4;
        let note = |asked: Asked, rule| {
            let layers = spec.layers.iter().enumerate();
            let asked = |(i, layer): &(usize, &LayerSpec)| {
                layer.has_cache() && asked(layer, self.ruled(Place::new(spec, *i)))
            };
            let found: Vec<usize> = layers.filter(asked).map(|(i, _)| i).collect();
            let (n, all) = (found.len(), spec.layers.len());
            let layers = Layers::runs(found);
            (n > 0).then(|| format!("{self}: {n} of {all} layers ({layers}) {rule}"))
        };
        let windowed = note(sinks, "have their own sliding window and keep no sinks")
            .or_else(|| note(longer, "have their own sliding window and keep no more tokens"));
        let biased = note(
            biased,
            "have a bias in the projection of keys, which the Hadamard transform of keys spreads \
             over all channels; keys without it (k2, k3, k4) lose far less",
        );
        let unused: Asked = |layer, cache| {
            layer.shares_values() && (cache.hadamard_values || cache.values != cache.keys)
        };
        let shared =
            note(unused, "read values from their keys; what is said of values has no effect");
        windowed.into_iter().chain(biased).chain(shared).collect()
    }

    /// Lists the caches of a model of `spec`, equal layers together. Returns `None` if all layers
    /// are equal and [`Display`](fmt::Display) shows their cache.
    pub fn in_full(&self, spec: &ModelSpec) -> Option<String> {
        if self.name.is_none() && self.uniform().is_some() {
            return None;
        }
        let n = spec.layers.len();
        let mut runs: Vec<(usize, usize, String)> = vec![];
        for layer in 0..n {
            let LayerSpec { shared, delta, .. } = spec.layers[layer];
            let cache = match (shared, delta) {
                (Some(owner), _) => format!("shared with layer {owner}"),
                (None, Some(_)) => "state".into(),
                (None, None) => self.ruled(Place::new(spec, layer)).to_string(),
            };
            match runs.last_mut() {
                Some((_, end, last)) if *last == cache => *end = layer + 1,
                _ => runs.push((layer, layer + 1, cache)),
            }
        }
        let listed = runs.into_iter().map(|(start, end, cache)| match end - start {
            1 => format!("layer {start} {cache}"),
            _ => format!("layers {start}..{end} {cache}"),
        });
        let name = self.name.as_deref().unwrap_or("caches by layer");
        Some(format!("{name}: {}", listed.collect::<Vec<_>>().join(", ")))
    }
}

impl FromStr for ModelCacheConfig {
    type Err = Error;

    /// Parses the short name of a cache, or the name of a [preset](Self::preset).
    fn from_str(name: &str) -> Result<Self> {
        match Self::preset(name) {
            Some(preset) => preset,
            None => Ok(name.parse::<KvCacheConfig>()?.into()),
        }
    }
}

impl fmt::Display for ModelCacheConfig {
    /// Writes the name, or the short name of the cache of all layers, followed by the other rules.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            return write!(f, "{name}");
        }
        let rest = match &self.rules[..] {
            [first @ LayerRule { stores: Stores::Cache(cache), .. }, rest @ ..]
                if first.is_for_all() =>
            {
                write!(f, "{cache}")?;
                rest
            }
            rest => {
                write!(f, "float")?;
                rest
            }
        };
        for rule in rest {
            match rule.is_float() && !rule.layers.is_all() && rule.is_for_any_kind() {
                true => write!(f, " float layers {}", rule.layers)?,
                false => write!(f, "; {rule}")?,
            }
        }
        if let (Some(n), None) = (self.n_layers, self.uniform()) {
            write!(f, " (layers of {n})")?;
        }
        Ok(())
    }
}
