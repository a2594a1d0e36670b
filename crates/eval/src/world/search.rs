//! The search for the formats of a world model's layers within a byte budget.

use kv_cubecl::{KvCacheConfig, KvFormat, On, Side, Sides, Target};
use kv_models::{Layers, ModelCacheConfig, spans::PHASE};
use serde::Serialize;
use tracing::trace_span;

use super::{
    RolloutPlan, Truth, World,
    compare::{difference, velocities},
};
use crate::{
    Error, Result,
    search::front::{Choice, sum, within},
};

/// The settings of a search.
#[derive(Clone, Debug)]
pub struct WorldSearch {
    /// Options of all layers except the formats: groups, residual, hadamard and float type.
    pub base: KvCacheConfig,
    /// Formats to choose from, in addition to float.
    pub formats: Vec<KvFormat>,
    /// Byte budget of the caches of one game.
    pub bytes: usize,
    /// Name of the policy.
    pub name: String,
}

/// The error from quantizing one side of one layer, with the rest in float.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WorldSensitivity {
    /// The layer, counted from 0.
    pub layer: usize,
    /// `keys` or `values`.
    #[serde(serialize_with = "shown")]
    pub side: Side,
    /// The format.
    pub format: KvFormat,
    /// Relative error of the model's predictions, compared with a float cache on the same frames.
    pub velocity_error: f64,
}

fn shown<S: serde::Serializer>(side: &Side, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(side)
}

/// The result of [`search`].
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct WorldFound {
    /// The policy.
    pub policy: ModelCacheConfig,
    /// Bytes of its caches for one game.
    pub bytes: usize,
    /// The relative error of its predictions, if squared errors add up.
    pub predicted: f64,
    /// The error from each side, layer and format.
    pub sensitivities: Vec<WorldSensitivity>,
}

impl WorldSearch {
    /// Returns the formats to choose from, float first.
    fn choices(&self) -> Vec<KvFormat> {
        let others = self.formats.iter().copied().filter(|format| format.is_quantized());
        [KvFormat::Float].into_iter().chain(others).collect()
    }

    /// Returns the caches to choose from for a layer: each pair of formats of keys and values.
    fn caches(&self, head_dim: usize) -> Vec<(Sides<usize>, KvCacheConfig)> {
        let formats = self.choices();
        let pair = |keys: usize, values: usize| {
            let cache = match keys + values {
                0 => KvCacheConfig::float().with_float(self.base.float),
                _ => self.base.with_formats(formats[keys], formats[values]),
            };
            // A residual is a large part of a short ring, so only formats that need one have it.
            let without = cache.with_residual_length(0);
            let cache = if without.validate(head_dim).is_ok() { without } else { cache };
            (Sides { keys, values }, cache)
        };
        let n = formats.len();
        (0..n).flat_map(|keys| (0..n).map(move |values| pair(keys, values))).collect()
    }

    /// Returns the policy of these caches: a rule for the layers of each cache.
    fn policy(&self, formats: &[KvCacheConfig]) -> Result<ModelCacheConfig> {
        let mut policy = ModelCacheConfig::new([]);
        for (i, cache) in formats.iter().enumerate() {
            if !formats[..i].contains(cache) {
                let layers = (i..formats.len()).filter(|&layer| formats[layer] == *cache);
                policy = policy.with_cache(Layers::runs(layers), *cache);
            }
        }
        Ok(policy.with_name(&self.name)?)
    }
}

/// Finds the formats of keys and values of each layer that change the predictions least within a
/// byte budget. The predictions are about the frames of `truth`. Each side of each layer is
/// quantized alone, in every format, and the squared errors are taken to add up. `progress` is
/// called with the number of measured formats, and their total.
///
/// # Errors
/// [`Error::Plan`] for a budget below the smallest caches and for a format with which predictions
/// are not finite, and the errors of caches and model.
pub fn search<T: Target>(
    device: &On<T>,
    world: &World,
    truth: &Truth,
    plan: &RolloutPlan,
    search: &WorldSearch,
    mut progress: impl FnMut(usize, usize),
) -> Result<WorldFound> {
    let _phase = trace_span!(target: PHASE, "search").entered();
    plan.check(truth.frames.len())?;
    let config = world.model.config();
    let (n_layers, caches) = (config.n_layers, search.caches(config.head_dim()));
    let float = caches[0].1;
    // The bytes of each layer with each cache, exactly.
    let mut cells = vec![vec![]; n_layers];
    for (_, cache) in &caches {
        let formats = vec![*cache; n_layers];
        world.model.new_cache_with(&formats, plan.rings, 1, device)?;
        let bytes = world.model.cache_bytes_by_layer(&formats, plan.rings, 1)?;
        for (cell, bytes) in cells.iter_mut().zip(bytes) {
            cell.push(Choice { bytes, cost: 0.0 });
        }
    }
    let least = |cell: &Vec<Choice>| cell.iter().map(|choice| choice.bytes).min();
    let least: usize = cells.iter().filter_map(least).sum();
    if least > search.bytes {
        let rule = format!("must be at least {least}, the bytes of the smallest formats");
        return Err(Error::plan("search", search.bytes, rule));
    }
    let exact = velocities(world, truth, plan, &vec![float; n_layers], device)?;
    let formats = search.choices();
    let (mut sensitivities, of) = (vec![], 2 * n_layers * (formats.len() - 1));
    for (layer, cell) in cells.iter_mut().enumerate() {
        for side in Side::BOTH {
            for (choice, &format) in formats.iter().enumerate().skip(1) {
                let mut alone = Sides { keys: 0, values: 0 };
                alone[side] = choice;
                let Some((_, cache)) = caches.iter().find(|(chosen, _)| *chosen == alone) else {
                    continue;
                };
                let mut of_layers = vec![float; n_layers];
                of_layers[layer] = *cache;
                let found = velocities(world, truth, plan, &of_layers, device)?;
                let velocity_error = difference(&found, &exact);
                if !velocity_error.is_finite() {
                    let rule = format!(
                        "layer {layer}, {side}: predictions are not finite; leave out this format"
                    );
                    return Err(Error::plan("format", format, rule));
                }
                for (at, (chosen, _)) in cell.iter_mut().zip(&caches) {
                    if chosen[side] == choice {
                        at.cost += velocity_error.powi(2);
                    }
                }
                sensitivities.push(WorldSensitivity { layer, side, format, velocity_error });
                progress(sensitivities.len(), of);
            }
        }
    }
    let chosen = within(&cells, search.bytes).ok_or_else(|| {
        Error::plan("search", search.bytes, "must be at least the bytes of the smallest formats")
    })?;
    let Choice { bytes, cost } = sum(&cells, &chosen);
    let of_layers: Vec<KvCacheConfig> = chosen.iter().map(|&choice| caches[choice].1).collect();
    let policy = search.policy(&of_layers)?;
    Ok(WorldFound { policy, bytes, predicted: cost.sqrt(), sensitivities })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use kv_cubecl::Flex;
    use kv_world_model::Rings;

    use super::*;

    /// The policy fits its budget, however small, and errors fall as the budget grows.
    #[test]
    fn policies_fit_their_budgets() {
        let device = On::<Flex>::open().unwrap();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/world");
        let world = World::load(folder.as_ref(), &device).unwrap();
        let rings = Rings::new(kv_cubecl::Frames(12));
        let plan = RolloutPlan { context: 2, rings, seed: 0, inspect: None };
        let truth = Truth::new(world.maze(), 7..8, 5);
        let asked = |bytes| WorldSearch {
            base: "k4v4-r32".parse().unwrap(),
            formats: vec![KvFormat::Int8, KvFormat::Affine4],
            bytes,
            name: "found".into(),
        };
        let bytes =
            |formats: &[KvCacheConfig]| world.model.cache_bytes_with(formats, rings, 1).unwrap();
        let int8: KvCacheConfig = "kint8vint8".parse().unwrap();
        let [float, int8] = [KvCacheConfig::float(), int8].map(|cache| bytes(&[cache; 6]));
        let mut errors = vec![];
        for budget in [float, (float + int8) / 2, int8] {
            let mut calls = 0;
            let count = |done: usize, of: usize| {
                calls += 1;
                assert_eq!((done, of), (calls, 24));
            };
            let found = search(&device, &world, &truth, &plan, &asked(budget), count).unwrap();
            assert_eq!(calls, 24);
            assert_eq!((found.sensitivities.len(), found.policy.name()), (24, Some("found")));
            assert!(found.bytes <= budget, "{} of {budget}", found.bytes);
            let of_layers = found.policy.of_layers(6).unwrap();
            assert_eq!(bytes(&of_layers), found.bytes);
            let read = ModelCacheConfig::from_toml(&found.policy.to_toml()).unwrap();
            assert_eq!(read.of_layers(6).unwrap(), of_layers);
            errors.push(found.predicted);
        }
        assert_eq!(errors[0], 0.0, "all of it fits in float");
        assert!(errors[0] < errors[1] && errors[1] < errors[2], "{errors:?}");
        let error = search(&device, &world, &truth, &plan, &asked(1000), |_, _| ());
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("search 1000: must be at least ") && !error.contains('\n'),
            "{error}"
        );
    }
}
