//! Checks a policy against a model.

use super::{ModelCacheConfig, Stores, rule::Place};
use crate::{
    error::{Error, Result},
    spec::ModelSpec,
};

impl ModelCacheConfig {
    /// Checks that the policy fits `model`.
    ///
    /// # Errors
    /// Fails for a rule without a layer or with a layer that the model does not have, for a rule of
    /// layers without a cache of their own, for a start in layers that all have their own
    /// sliding window and so keep no sinks, and for a cache that does not fit the heads of a layer.
    pub fn validate(&self, model: impl AsRef<ModelSpec>) -> Result<()> {
        let spec = model.as_ref();
        spec.check_shared()?;
        let n = spec.layers.len();
        for (i, rule) in self.rules.iter().enumerate() {
            self.check_rule(i, n)?;
            let lacking = if self.n_layers.is_none() && rule.lacks_caches(spec) {
                "none of its layers has a cache of its own: recurrent layers have a state, and \
                 others share the cache of an earlier layer, which a rule must name"
            } else if matches!(rule.stores, Stores::Start(1..))
                && rule.lacks_sinks(spec, self.n_layers)
            {
                "all of its layers have their own sliding window and keep no sinks"
            } else {
                continue;
            };
            let (field, value) = (format!("rules[{i}]"), rule.to_string());
            return Err(Error::Rule { field, value, rule: lacking.into() });
        }
        for (i, layer) in spec.owners() {
            let (own, stored) = (self.ruled(Place::new(spec, i)), self.layer(spec, i));
            if let Some(delta) = layer.delta_config(&stored) {
                delta.validate()?;
                continue;
            }
            if layer.sparse.is_some() {
                if layer.sliding_window.is_none() {
                    let rule = format!("layer {i} has sparse attention, which needs one");
                    return Err(Error::argument("sliding_window", "none", rule));
                }
                if own.hadamard_keys || own.hadamard_values {
                    let why = format!(
                        "layer {i} has sparse attention, which stores rows without a Hadamard \
                         transform"
                    );
                    return Err(Error::unsupported(format!("the cache {own}"), why));
                }
            }
            let shape = layer.cache_shape(1);
            let fits =
                own.validate_shape(shape).and_then(|()| match layer.sparse_config(&stored) {
                    Some(sparse) => sparse.validate(),
                    None => stored.validate_shape(shape),
                });
            fits.map_err(|error| self.in_rule(i, spec, error))?;
        }
        Ok(())
    }

    /// Adds the last rule of a layer to an error of its cache, unless there is only one rule.
    fn in_rule(&self, index: usize, spec: &ModelSpec, error: kv_cubecl::Error) -> Error {
        let place = Place::new(spec, index);
        let last = self.rules.iter().rposition(|rule| rule.is_for(place, self.n_layers));
        match last.filter(|_| self.rules.len() > 1) {
            None => error.into(),
            Some(last) => Error::Rule {
                field: format!("rules[{last}]"),
                value: self.rules[last].stores.to_string(),
                rule: format!("gives layer {index} the cache {}: {error}", self.ruled(place)),
            },
        }
    }
}
