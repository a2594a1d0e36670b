//! Differences between a float cache and a quantized one, by step and by layer.

use core::fmt;

use burn::tensor::{DType, Tensor};
use kv_cubecl::{Counters, KvCacheConfig, On, Sides, Target};
use kv_models::{
    AttentionTrace, LanguageModel, LayerCache, ModelCache, ModelCacheConfig, ModelSpec,
    ids_to_tensor, spans::PHASE,
};
use kv_report::Table;
use serde::Serialize;
use tracing::trace_span;

use crate::{
    Error, Result, ids,
    score::{Divergence, divergence, negative_log_likelihood},
};

/// The comparison of two caches on one text, a token at a time.
#[derive(Clone, Debug, Serialize)]
pub struct Twin {
    /// The quantized cache's short name.
    pub cache: String,
    /// Results of each token, in order.
    pub steps: Vec<TwinStep>,
    /// The divergence at which to stop, if one was given.
    pub stop: Option<f64>,
    /// Set if the last step exceeds it.
    pub stopped: bool,
    /// Each layer over all steps, and the contents of its cache after the last.
    pub layers: Vec<TwinLayer>,
}

/// A step of both caches.
#[derive(Clone, Debug, Serialize)]
pub struct TwinStep {
    /// The token, counted from 0.
    pub token: usize,
    /// Divergence of the next token's distribution from that of the float cache, nats.
    pub kl: f32,
    /// Set if both have the same most likely token.
    pub same_top: bool,
    /// For each layer of attention, in the order of [`Twin::layers`], `rms(output - float) /
    /// rms(float)` of its attention. It includes the errors of the layers before it.
    pub layers: Vec<f64>,
}

/// A layer over all steps.
#[derive(Clone, Debug, Serialize)]
pub struct TwinLayer {
    /// The layer, counted from 0.
    pub layer: usize,
    /// Mean of [`TwinStep::layers`].
    pub mean: f64,
    /// The largest of them.
    pub largest: f64,
    /// The first token with that one.
    pub largest_at: usize,
    /// Contents of its cache.
    pub counters: LayerCounters,
}

/// [`Counters`] of a layer; `None` for a side without quantized tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LayerCounters {
    /// Counters of the keys.
    pub keys: Option<SideCounters>,
    /// Counters of the values.
    pub values: Option<SideCounters>,
    /// Bytes of the float tensors that quantized keys and values were restored to, over all steps;
    /// `None` if they were not counted.
    pub restored: Option<RestoredBytes>,
}

/// [`KvCache::restored_bytes`](kv_cubecl::KvCache::restored_bytes) of a layer, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RestoredBytes {
    /// Bytes of the restored keys.
    pub keys: usize,
    /// Bytes of the restored values.
    pub values: usize,
}

/// [`Counters`] for reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SideCounters {
    /// Share of codes at an end of the range.
    pub extreme: f64,
    /// Share of groups whose codes all represent one number.
    pub constant: f64,
    /// The smallest scale of the other groups.
    pub scale_min: f32,
    /// The mean of these scales.
    pub scale_mean: f64,
    /// The largest of them.
    pub scale_max: f32,
}

impl From<Counters> for SideCounters {
    fn from(counters: Counters) -> Self {
        let Counters { codes, extreme, groups, constant, scale_min, scale_mean, scale_max, .. } =
            counters;
        let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
        let (extreme, constant) = (share(extreme, codes), share(constant, groups));
        Self { extreme, constant, scale_min, scale_mean, scale_max }
    }
}

/// Runs the model on `ids` with a float cache and with `config`, a token at a time. Stops after the
/// first step whose divergence is above `stop`. `progress` receives every step.
///
/// # Errors
/// [`Error::Plan`] for no ids or one the model does not know, or a threshold below 0,
/// [`Error::NonFinite`] for logits of either cache that are not finite, and the model's and the
/// cache's errors, such as more ids than the model has positions.
pub fn twin<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    ids: &[u32],
    config: impl Into<ModelCacheConfig>,
    stop: Option<f64>,
    mut progress: impl FnMut(&TwinStep),
) -> Result<Twin> {
    let mut config = config.into();
    ids::check(ids, model)?;
    if ids.is_empty() {
        return Err(Error::plan("tokens", 0, "must be at least 1"));
    }
    if let Some(stop) = stop.filter(|&stop| stop.is_nan() || stop < 0.0) {
        return Err(Error::plan("stop", stop, "must be a divergence in nats, 0 or more"));
    }
    config.capacity = ids.len();
    let float = KvCacheConfig::float().with_capacity(ids.len());
    let name = config.to_string();
    let mut caches = [model.new_cache(float, 1, device)?, model.new_cache(&config, 1, device)?];
    caches[1].count_restored();
    let mut steps = Vec::new();
    let mut stopped = false;
    for (token, &id) in ids.iter().enumerate() {
        let _phase = trace_span!(target: PHASE, "step", n = token, cache = %name).entered();
        let [float, other] = &mut caches;
        let float = step(device, model, id, float, "float")?;
        let other = step(device, model, id, other, &name)?;
        let [Divergence { kl, same_top }] =
            divergence(&float.logits, &other.logits, model.vocab_size())[..]
        else {
            let why = "logits of a step are not those of one token".to_string();
            return Err(Error::Device { cache: name, why });
        };
        // The loss of the next token, or of the last one again, detects a logit that is NaN.
        let next = ids.get(token + 1).copied().unwrap_or(id);
        check_finite("float", token, &negative_log_likelihood(&float.logits, &[next]))?;
        check_finite(&name, token, &negative_log_likelihood(&other.logits, &[next]))?;
        // Logits may be too far apart for f32, or one is an infinity that no loss detects.
        check_finite(&name, token, &[kl])?;
        let pairs = other.layers.iter().zip(&float.layers);
        let layers = pairs.map(|(other, float)| relative(other, float)).collect();
        let step = TwinStep { token, kl, same_top, layers };
        progress(&step);
        steps.push(step);
        if stop.is_some_and(|stop| f64::from(kl) > stop) {
            stopped = true;
            break;
        }
    }
    let layers = of_layers(&steps, &caches[1], model.spec());
    Ok(Twin { cache: name, steps, stop, stopped, layers })
}

/// Checks the losses of a token with a cache.
fn check_finite(cache: &str, token: usize, values: &[f32]) -> Result<()> {
    match values.iter().find(|value| !value.is_finite()) {
        Some(&value) => Err(Error::NonFinite { cache: cache.into(), token, value }),
        None => Ok(()),
    }
}

/// Output of a step with one cache.
struct Step {
    logits: Vec<f32>,
    /// The attention of each layer.
    layers: Vec<Vec<f32>>,
}

fn step<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    id: u32,
    cache: &mut ModelCache,
    name: &str,
) -> Result<Step> {
    let mut shown = Vec::with_capacity(model.n_layers());
    let mut observe = |trace: AttentionTrace| shown.push(trace.output().clone());
    let ids = ids_to_tensor(&[id], [1, 1], device);
    let hidden = model.hidden_step_with(ids, cache, &mut observe)?;
    let logits = read(model.head(hidden), name)?;
    let layers = shown.into_iter().map(|output| read(output.cast(DType::F32), name));
    Ok(Step { logits, layers: layers.collect::<Result<_>>()? })
}

fn read<const D: usize>(tensor: Tensor<D>, name: &str) -> Result<Vec<f32>> {
    let fail = |why: String| Error::Device { cache: name.to_string(), why };
    let data = tensor.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    data.try_into_vec().map_err(|error| fail(format!("{error:?}")))
}

/// Returns `rms(other - float) / rms(float)`, or 0 if both are equal.
fn relative(other: &[f32], float: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = other
        .iter()
        .zip(float)
        .map(|(&other, &float)| square(f64::from(other) - f64::from(float)))
        .sum();
    let norm: f64 = float.iter().map(|&x| square(f64::from(x))).sum();
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

fn of_layers(steps: &[TwinStep], cache: &ModelCache, spec: &ModelSpec) -> Vec<TwinLayer> {
    // Recurrent layers show no attention.
    let attending = spec.layers.iter().enumerate().filter(|(_, layer)| layer.delta.is_none());
    let layers = attending.enumerate().map(|(nth, (layer, spec))| {
        // Counts of a shared cache belong to its owner.
        let cache = spec.has_cache().then(|| cache.layer(layer)).and_then(LayerCache::kv);
        let errors = || steps.iter().map(|step| step.layers[nth]);
        let largest = errors().fold(0.0, f64::max);
        let counters = cache.map(|cache| cache.counters()).unwrap_or_default();
        let counters = counters.map(|side| side.map(SideCounters::from));
        let restored = cache.and_then(|cache| cache.restored_bytes());
        let restored = restored.map(|Sides { keys, values }| RestoredBytes { keys, values });
        TwinLayer {
            layer,
            mean: errors().sum::<f64>() / steps.len() as f64,
            largest,
            largest_at: errors().position(|error| error == largest).unwrap_or(0),
            counters: LayerCounters { keys: counters.keys, values: counters.values, restored },
        }
    });
    layers.collect()
}

impl Twin {
    /// Returns the mean divergence of the steps in nats.
    pub fn kl_mean(&self) -> f64 {
        let sum: f64 = self.steps.iter().map(|step| f64::from(step.kl)).sum();
        sum / self.steps.len() as f64
    }

    fn table(&self) -> Table {
        let mut table = Table::new([
            "layer",
            "mean",
            "largest",
            "at",
            "side",
            "restored bytes",
            "extreme",
            "constant",
            "least scale",
            "mean scale",
            "largest scale",
        ]);
        for layer in &self.layers {
            let &TwinLayer { layer, mean, largest, largest_at, counters } = layer;
            let mut row = vec![
                layer.to_string(),
                format!("{mean:.5}"),
                format!("{largest:.5}"),
                largest_at.to_string(),
            ];
            let LayerCounters { keys, values, restored } = counters;
            let restored = |side: fn(RestoredBytes) -> usize| {
                restored.map_or("-".to_string(), |bytes| side(bytes).to_string())
            };
            let sides = [
                ("keys", keys, restored(|bytes| bytes.keys)),
                ("values", values, restored(|bytes| bytes.values)),
            ];
            for (name, counters, restored) in sides {
                row.extend([name.to_string(), restored]);
                match counters {
                    Some(counters) => row.extend([
                        format!("{:.2}%", 100.0 * counters.extreme),
                        format!("{:.2}%", 100.0 * counters.constant),
                        format!("{:.3e}", counters.scale_min),
                        format!("{:.3e}", counters.scale_mean),
                        format!("{:.3e}", counters.scale_max),
                    ]),
                    None => row.resize(table.header().len(), "-".to_string()),
                }
                table.push(row);
                // Only the first row of a layer names it.
                row = vec![String::new(); 4];
            }
        }
        table
    }
}

impl fmt::Display for Twin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.steps.len();
        writeln!(f, "{} beside float, {n} steps", self.cache)?;
        writeln!(f, "{}", self.table())?;
        let same = self.steps.iter().filter(|step| step.same_top).count();
        let largest = self.steps.iter().max_by(|a, b| a.kl.total_cmp(&b.kl));
        let largest = largest.map_or((0.0, 0), |step| (step.kl, step.token));
        write!(
            f,
            "divergence: mean {:.6} nats, largest {:.6} at token {}; \
             the most likely token is the same in {same} of {n}",
            self.kl_mean(),
            largest.0,
            largest.1
        )?;
        if let (true, Some(stop)) = (self.stopped, self.stop) {
            write!(f, "\nstopped at token {}, beyond {stop} nats", n - 1)?;
        }
        Ok(())
    }
}
