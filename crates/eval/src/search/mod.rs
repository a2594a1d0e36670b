//! The search for the best layer policy within a byte budget.
//!
//! 1. It measures sensitivities: the divergence from the float cache with one side of one layer
//!    quantized, for every layer, side and format.
//! 2. The divergence of a policy is about the sum of its sensitivities, and its bytes are a sum as
//!    well. The best policies for all byte budgets follow: the [front](Found::front).
//! 3. It measures the policy for the budget, and caches within the budget that use the same formats
//!    in all layers, on the text of the search and on an unseen text.
//! 4. For comparison, it measures caches shared by all layers with other settings and formats:
//!    [all](Found::alike) on the text of the search, and the best of them on the unseen text.

mod alike;
pub(crate) mod front;
mod measure;
mod report;

use core::ops::ControlFlow;

use kv_cubecl::{KvCacheConfig, KvFormat, Side, Target};
use kv_models::{LanguageModel, LayerRule, LayerSpec, Layers, ModelCacheConfig, ModelSpec, Stores};
use serde::Serialize;

pub use self::{alike::Alike, measure::Score};
use self::{
    front::{Assignment, Choice},
    measure::measure,
};
use crate::{Devices, Error, Plan, Result};

/// The settings of a search, and its texts.
#[derive(Clone, Debug)]
pub struct SearchPlan {
    /// Options of all layers except the formats: groups, residual, sinks, hadamard and float type.
    /// `bytes` apply to its `capacity`.
    pub base: KvCacheConfig,
    /// Formats to choose from, in addition to float.
    pub formats: Vec<KvFormat>,
    /// Byte budget of the caches of all layers for one sequence.
    pub bytes: usize,
    /// Name of the policy.
    pub name: String,
    /// The text of the search. Its mode and caches are ignored.
    pub seen: Plan,
    /// A text that the search does not see.
    pub unseen: Plan,
}

/// Loss of one side of one layer in one format, with the rest in float.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Sensitivity {
    /// The layer, counted from 0.
    pub layer: usize,
    /// `keys` or `values`.
    #[serde(serialize_with = "shown")]
    pub side: Side,
    /// The format.
    pub format: KvFormat,
    /// Its score on the text of the search.
    pub score: Score,
}

fn shown<S: serde::Serializer>(side: &Side, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(side)
}

/// The best policy for its bytes, if sensitivities add up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Predicted {
    /// Bytes of the caches of all layers.
    pub bytes: usize,
    /// The sum of its sensitivities in nats.
    pub kl: f64,
}

/// The measurement of a cache.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Measured {
    /// Its name.
    pub cache: String,
    /// Bytes of the caches of all layers.
    pub bytes: usize,
    /// Score on the text of the search.
    pub seen: Score,
    /// Score on the unseen text.
    pub unseen: Score,
}

/// The result of [`search`].
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Found {
    /// The policy.
    pub policy: ModelCacheConfig,
    /// The byte budget.
    pub bytes: usize,
    /// Tokens that the budget applies to.
    pub context: usize,
    /// Bytes of an unquantized cache of the same float type.
    pub float_bytes: usize,
    /// Scores of the float cache on both texts.
    pub float: [Score; 2],
    /// Loss of each side, layer and format.
    pub sensitivities: Vec<Sensitivity>,
    /// Bytes and costs of the best policies, the largest first.
    pub front: Vec<Predicted>,
    /// Other caches shared by all layers within the budget, in ascending order of divergence on the
    /// text of the search.
    pub alike: Vec<Alike>,
    /// The policy, then the caches within the budget that use formats of the search in all layers,
    /// then the [`BEST`] others.
    pub measured: Vec<Measured>,
}

/// Number of [other caches](Found::alike) measured on the unseen text.
pub const BEST: usize = 3;

/// Progress of a search.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SearchProgress {
    /// Number of processed eval windows.
    pub done: usize,
    /// Total number of eval windows of all caches.
    pub of: usize,
}

impl SearchPlan {
    fn choices(&self) -> Vec<KvFormat> {
        let others = self.formats.iter().copied().filter(|format| format.is_quantized());
        [KvFormat::Float].into_iter().chain(others).collect()
    }

    /// Returns the rule for a side of some layers, with the Hadamard transform of the base.
    fn rule(&self, layers: Layers, side: Side, format: KvFormat) -> LayerRule {
        let hadamard = format.is_quantized()
            && match side {
                Side::Keys => self.base.hadamard_keys && !format.is_grouped(),
                Side::Values => self.base.hadamard_values,
            };
        LayerRule::new(layers, Stores::Format { side: Some(side), format, hadamard })
    }

    /// Returns the policy of an assignment. Cells are the keys and the values of each layer; those
    /// of recurrent layers, which have no cache, do not matter.
    fn policy(&self, spec: &ModelSpec, assignment: &[usize]) -> ModelCacheConfig {
        let choices = self.choices();
        let mut policy = ModelCacheConfig::from(self.base);
        for (which, side) in Side::BOTH.into_iter().enumerate() {
            let stores = match side {
                Side::Keys => LayerSpec::has_cache,
                Side::Values => LayerSpec::stores_values,
            };
            let n_caches = spec.layers.iter().filter(|layer| stores(layer)).count();
            for (choice, &format) in choices.iter().enumerate() {
                let cells = assignment.iter().skip(which).step_by(2).enumerate();
                let layers: Vec<usize> = cells
                    .filter(|&(layer, &chosen)| chosen == choice && stores(&spec.layers[layer]))
                    .map(|(layer, _)| layer)
                    .collect();
                let own = format == self.base.format(side);
                if !layers.is_empty() && !own {
                    let all = layers.len() == n_caches;
                    let layers = if all { Layers::all() } else { Layers::runs(layers) };
                    policy = policy.with_rule(self.rule(layers, side, format));
                }
            }
        }
        policy
    }

    /// Returns the cache with these choices in all layers.
    fn uniform(&self, spec: &ModelSpec, [keys, values]: [usize; 2]) -> Option<ModelCacheConfig> {
        let layers = spec.layers.iter().map(|layer| layer.with_sliding_window(None)).collect();
        let plain = ModelSpec::new(spec.vocab_size, spec.hidden_size, spec.max_positions, layers);
        let assignment = [keys, values].repeat(spec.layers.len());
        let cache = self.policy(&plain, &assignment).layers(&plain).next()?;
        Some(cache.into())
    }

    /// Returns the policy with one choice of one cell, and the rest in float.
    fn single(&self, spec: &ModelSpec, cell: usize, choice: usize) -> ModelCacheConfig {
        let mut assignment = vec![0; 2 * spec.layers.len()];
        assignment[cell] = choice;
        self.policy(spec, &assignment)
    }

    /// Returns the bytes of the float cache, and of every choice of each cell, with costs of 0.
    fn cells(&self, spec: &ModelSpec) -> Result<(usize, Vec<Vec<Choice>>)> {
        let n_cells = 2 * spec.layers.len();
        let (float_bytes, of_layers) = bytes(spec, &self.policy(spec, &vec![0; n_cells]))?;
        // The bytes that a choice saves do not depend on the other side of the layer.
        let mut cells: Vec<Vec<Choice>> = of_layers
            .iter()
            .zip(&spec.layers)
            .flat_map(|(&bytes, layer)| {
                // Values that are channels of keys have no bytes of their own.
                let [keys, values] = match layer.shares_values() {
                    true => [bytes, 0],
                    false => [bytes / 2, bytes.div_ceil(2)],
                };
                let (own_keys, own_values) = (layer.has_cache(), layer.stores_values());
                [(keys, own_keys), (values, own_values)]
            })
            .map(|(bytes, is_stored)| {
                let n_choices = if is_stored { self.choices().len() } else { 1 };
                vec![Choice { bytes, cost: 0.0 }; n_choices]
            })
            .collect();
        for (cell, of_cell) in cells.iter_mut().enumerate() {
            for (choice, at) in of_cell.iter_mut().enumerate().skip(1) {
                let (all, _) = bytes(spec, &self.single(spec, cell, choice))?;
                at.bytes = (at.bytes + all).saturating_sub(float_bytes);
            }
        }
        let fewest: usize =
            cells.iter().map(|of| of.iter().map(|at| at.bytes).min().unwrap_or(0)).sum();
        if fewest > self.bytes {
            let rule = format!(
                "a cache of {} tokens in these formats takes at least {fewest} bytes",
                self.base.capacity
            );
            return Err(Error::plan("bytes", self.bytes, rule));
        }
        Ok((float_bytes, cells))
    }

    fn check(&self, model: &LanguageModel) -> Result<()> {
        if !self.formats.iter().any(|format| format.is_quantized()) {
            return Err(Error::plan("format", "none", "must be at least one besides float"));
        }
        let n_layers = model.n_layers();
        for (choice, format) in self.choices().into_iter().enumerate().skip(1) {
            let policy = self.policy(model.spec(), &vec![choice; 2 * n_layers]);
            policy.validate(model).map_err(|error| {
                // The rules are the search's, not the user's.
                let why = match error {
                    kv_models::Error::Rule { rule, .. } => format!("format {format} {rule}"),
                    error => format!("with format {format}, {error}"),
                };
                Error::plan("base", self.base, format!("{why}; change the base or the formats"))
            })?;
        }
        Ok(())
    }
}

/// Returns the bytes of the caches of all layers for one sequence, and of each layer.
fn bytes(spec: &ModelSpec, cache: &ModelCacheConfig) -> Result<(usize, Vec<usize>)> {
    let layers = spec.layers.iter().zip(cache.layers(spec));
    let bytes = layers.map(|(layer, cache)| Ok(layer.cache_bytes(&cache, 1)?.total()));
    let bytes = bytes.collect::<Result<Vec<_>>>()?;
    Ok((bytes.iter().sum(), bytes))
}

/// Searches as the [module](self) describes, on one or several devices. `progress` is called after
/// every eval window, and may stop the search.
///
/// # Errors
/// [`Error::Plan`] for invalid formats or too few bytes, [`Error::Stopped`] if `progress` asks to
/// stop, and the model's and the cache's errors.
pub fn search<'a, T: Target>(
    devices: impl Into<Devices<'a, T>>,
    model: &LanguageModel,
    plan: &SearchPlan,
    mut progress: impl FnMut(SearchProgress) -> ControlFlow<()>,
) -> Result<Found> {
    let devices = devices.into();
    plan.check(model)?;
    let spec = model.spec();
    let (choices, n_cells) = (plan.choices(), 2 * spec.layers.len());
    let (float_bytes, mut cells) = plan.cells(spec)?;
    let parts: Vec<(usize, usize)> = (0..n_cells)
        .flat_map(|cell| (1..cells[cell].len()).map(move |choice| (cell, choice)))
        .collect();
    let uniform = uniforms(plan, spec)?;
    let mut others = alike::alike(spec, plan.base.capacity, plan.bytes)?;
    others.retain(|cache| !uniform.contains(cache));
    let [seen, unseen] = [&plan.seen, &plan.unseen].map(|text| text.spans().count());
    // The float cache runs again for each call of `measure`.
    let n_measured = 1 + uniform.len() + others.len().min(BEST);
    let of = seen * (parts.len() + others.len() + n_measured + 2) + unseen * (n_measured + 1);
    let mut done = 0;
    let mut step = || {
        done += 1;
        progress(SearchProgress { done, of })
    };
    let single = |&(cell, choice): &(usize, usize)| plan.single(spec, cell, choice);
    let policies: Vec<_> = parts.iter().map(single).chain(others.iter().cloned()).collect();
    let (_, mut scores) = measure(devices, model, &plan.seen, &policies, &mut step)?;
    let mut others: Vec<_> = others.into_iter().zip(scores.split_off(parts.len())).collect();
    others.sort_by(|(_, a), (_, b)| a.kl.total_cmp(&b.kl));
    let sensitivities = sensitivities(&parts, scores, &choices, &mut cells);

    let policy = plan.policy(spec, &fitting(plan, spec, &cells)?).with_name(&plan.name)?;
    let best = others.iter().take(BEST).map(|(cache, _)| cache.clone());
    let caches: Vec<_> = [policy.clone()].into_iter().chain(uniform).chain(best).collect();
    let (float_seen, seen) = measure(devices, model, &plan.seen, &caches, &mut step)?;
    let (float_unseen, unseen) = measure(devices, model, &plan.unseen, &caches, &mut step)?;
    let scores = seen.into_iter().zip(unseen);
    let measured = caches.iter().zip(scores).map(|(cache, (seen, unseen))| {
        let (bytes, _) = bytes(spec, cache)?;
        Ok(Measured { cache: cache.to_string(), bytes, seen, unseen })
    });
    let measured = measured.collect::<Result<_>>()?;
    let alike = others.iter().map(|(cache, seen)| {
        Ok(Alike { cache: cache.to_string(), bytes: bytes(spec, cache)?.0, seen: *seen })
    });
    let alike = alike.collect::<Result<_>>()?;
    Ok(Found {
        policy,
        bytes: plan.bytes,
        context: plan.base.capacity,
        float_bytes,
        float: [float_seen, float_unseen],
        sensitivities,
        front: predicted(&cells),
        alike,
        measured,
    })
}

/// Sets the cost of each part, which is a choice of a cell, to its divergence.
fn sensitivities(
    parts: &[(usize, usize)],
    scores: Vec<Score>,
    choices: &[KvFormat],
    cells: &mut [Vec<Choice>],
) -> Vec<Sensitivity> {
    let sensitivity = |(&(cell, choice), score): (&(usize, usize), Score)| {
        // An apparent gain is noise, and the search must not save bytes for it.
        cells[cell][choice].cost = score.kl.max(0.0);
        let (layer, side) = (cell / 2, Side::BOTH[cell % 2]);
        Sensitivity { layer, side, format: choices[choice], score }
    };
    parts.iter().zip(scores).map(sensitivity).collect()
}

fn predicted(cells: &[Vec<Choice>]) -> Vec<Predicted> {
    let predicted = |assignment: &Assignment| {
        let Choice { bytes, cost } = front::sum(cells, assignment);
        Predicted { bytes, kl: cost }
    };
    front::front(cells).iter().map(predicted).collect()
}

/// Returns the best assignment whose policy is within the budget.
fn fitting(plan: &SearchPlan, spec: &ModelSpec, cells: &[Vec<Choice>]) -> Result<Assignment> {
    let mut allowed = plan.bytes;
    loop {
        let chosen = front::within(cells, allowed);
        let rule = "no policy of these formats fits";
        let chosen = chosen.ok_or_else(|| Error::plan("bytes", plan.bytes, rule))?;
        let (all, _) = bytes(spec, &plan.policy(spec, &chosen))?;
        let Some(excess) = all.checked_sub(plan.bytes).filter(|&excess| excess > 0) else {
            return Ok(chosen);
        };
        allowed = allowed.saturating_sub(excess);
    }
}

/// Lists the caches within the budget that use formats of the search in all layers.
fn uniforms(plan: &SearchPlan, spec: &ModelSpec) -> Result<Vec<ModelCacheConfig>> {
    let n = plan.choices().len();
    let mut found = vec![];
    for pair in (0..n).flat_map(|keys| (0..n).map(move |values| [keys, values])) {
        let Some(cache) = plan.uniform(spec, pair) else { continue };
        if bytes(spec, &cache)?.0 <= plan.bytes {
            found.push(cache);
        }
    }
    Ok(found)
}
