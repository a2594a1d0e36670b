//! A policy as text for users.

use core::{fmt, str::FromStr};

use kv_cubecl::KvCacheConfig;

use super::{LayerRule, Layers, ModelCacheConfig, Stores, rule::Place};
use crate::{
    error::{Error, Result},
    spec::ModelSpec,
};

impl ModelCacheConfig {
    /// Returns a note for the user if layers of a model of `spec` with their own sliding window
    /// ignore sinks or a longer window of the policy.
    pub fn note(&self, spec: &ModelSpec) -> Option<String> {
        let all = spec.layers.len();
        let windowed = |asked: fn(KvCacheConfig, usize) -> bool| -> Vec<usize> {
            let layers = spec.layers.iter().enumerate();
            layers
                .filter(|(i, layer)| {
                    let cache = self.ruled(Place::new(spec, *i));
                    layer.sliding_window.is_some_and(|own| asked(cache, own))
                })
                .map(|(i, _)| i)
                .collect()
        };
        let sinks = windowed(|cache, _| cache.sink_tokens > 0);
        let longer = windowed(|cache, own| cache.sliding_window.is_some_and(|it| it > own));
        let (layers, rule) = match (sinks.is_empty(), longer.is_empty()) {
            (true, true) => return None,
            (true, false) => (longer, "keep no more tokens"),
            (false, _) => (sinks, "keep no sinks"),
        };
        let (n, layers) = (layers.len(), Layers::runs(layers));
        Some(format!(
            "{self}: {n} of {all} layers ({layers}) have their own sliding window and {rule}"
        ))
    }

    /// Lists the caches of a model of `spec`, equal layers together. Returns `None` if all layers
    /// are equal and [`Display`](fmt::Display) shows their cache.
    pub fn in_full(&self, spec: &ModelSpec) -> Option<String> {
        if self.name.is_none() && self.uniform().is_some() {
            return None;
        }
        let n = spec.layers.len();
        let mut runs: Vec<(usize, usize, KvCacheConfig)> = vec![];
        for layer in 0..n {
            let cache = self.ruled(Place::new(spec, layer));
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
            match rule.is_float() && !rule.layers.is_all() && rule.attention.is_none() {
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
