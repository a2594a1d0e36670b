//! Quantization errors by layer, on the keys and values that a model computes.

use burn::tensor::{DType, Int, Tensor};
use kv_cubecl::{
    CacheFloat, FakeQuantOptions, Granularity, KvCacheConfig, KvFormat, KvMemory, On, Packed, Side,
    Target, hadamard,
    layout::{QuantSpec, Schedule},
    quantize, quantize_side,
    sparse::{
        Compressed, Entries, RowFormat, SparseConfig, SparseOptions, SparseTrace, index_scores,
        select_entries, sparse_attention,
    },
};
use kv_models::{
    AttentionTrace, KvTrace, LanguageModel, ModelCacheConfig, TraceKind, ids_to_tensor,
    spans::PHASE,
};
use tracing::trace_span;

pub use crate::run::LayerError;
use crate::{Error, Plan, Result, Run, ids};

/// Quantization error of one tensor, as sums and counts that can be added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SideError {
    /// Sum of squares of `restored - original`.
    pub error: f64,
    /// Sum of squares of the original.
    pub norm: f64,
    /// Elements.
    pub elements: usize,
    /// Elements with `(x - min) / scale` outside `[0, 2^n_bits - 1]`.
    pub clipped: usize,
    /// Groups.
    pub groups: usize,
    /// Groups with scale 0.
    pub constant: usize,
}

impl SideError {
    /// `rms(restored - original) / rms(original)`.
    pub fn relative(&self) -> f64 {
        relative(self.error, self.norm)
    }
}

/// Returns the errors of every layer of `model` with the cache `config`. Keys and values come from
/// the float run over `ids`, so the errors of earlier layers are not included.
///
/// # Errors
/// [`Error::Plan`] for no ids or one the model does not know, and the model's and the cache's
/// errors, such as more ids than the model has positions.
pub fn layer_errors<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    ids: &[u32],
    config: impl Into<ModelCacheConfig>,
) -> Result<Vec<LayerError>> {
    ids::check(ids, model)?;
    if ids.is_empty() {
        return Err(Error::plan("tokens", 0, "must be at least 1"));
    }
    layer_errors_of(model, ids_to_tensor(ids, [1, ids.len()], device), config)
}

/// Computes [`layer_errors`] over ids `[batch, seq]` that are on the model's device.
///
/// # Errors
/// The model's and the cache's errors.
pub fn layer_errors_of(
    model: &LanguageModel,
    ids: Tensor<2, Int>,
    config: impl Into<ModelCacheConfig>,
) -> Result<Vec<LayerError>> {
    let config = config.into();
    config.validate(model)?;
    let name = config.to_string();
    let mut errors = Ok(Vec::with_capacity(model.n_layers()));
    let mut observe = |trace: AttentionTrace| {
        // A forward pass cannot be stopped after the first failure.
        if let Ok(layers) = &mut errors {
            let layer_config = config.layer(model.spec(), trace.layer);
            let errors_of = match &trace.kind {
                TraceKind::Kv(kv) => {
                    let shares_values = model.spec().layers[trace.layer].shares_values();
                    of_layer(kv, shares_values, trace.layer, &layer_config, &name)
                }
                TraceKind::Sparse(sparse) => {
                    let stored = model.spec().layers[trace.layer].sparse_config(&layer_config);
                    of_sparse_layer(sparse, trace.layer, stored.as_ref(), &name)
                }
            };
            match errors_of {
                Ok(layer) => layers.push(layer),
                Err(error) => errors = Err(error),
            }
        }
    };
    let float = ModelCacheConfig::from(KvCacheConfig::float());
    model.hidden_with(ids, &float, Default::default(), Some(&mut observe))?;
    errors
}

/// Sets [`Run::layers`] of the quantized `runs` to the [`layer_errors`] over the first eval window.
///
/// # Errors
/// Fails as [`layer_errors`] does.
pub fn measure_layers<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    plan: &Plan,
    runs: &mut [Run],
) -> Result<()> {
    let Some((ids, _)) = plan.spans().next().map(|span| plan.input(&span)) else { return Ok(()) };
    for (config, run) in plan.caches().iter().zip(runs) {
        if config.is_quantized(model.spec()) {
            let _phase = trace_span!(target: PHASE, "layers", cache = %config).entered();
            run.layers = layer_errors(device, model, &ids, config)?;
        }
    }
    Ok(())
}

/// Quantizes `input`, restores it and compares.
///
/// # Shapes
/// As [`quantize`].
///
/// # Errors
/// Fails as [`quantize`] does, and with [`Error::Device`].
pub fn side_error(
    input: Tensor<4>,
    granularity: Granularity,
    bits: KvFormat,
    group_size: usize,
) -> Result<SideError> {
    let packed = quantize(input.clone(), granularity, bits, group_size)?;
    side(input.clone(), input, &packed, "")
}

fn of_layer(
    trace: &KvTrace,
    shares_values: bool,
    layer: usize,
    config: &KvCacheConfig,
    name: &str,
) -> Result<LayerError> {
    let KvTrace { query, key, value, output, .. } = trace.clone();
    // The quantizer and the comparison use f32 for 16-bit models too.
    let [query, key, value, output] = [query, key, value, output].map(|x| x.cast(DType::F32));
    let counts = Schedule::new(config).counts(key.dims()[2]);
    let error = |side_of: &Tensor<4>, which: Side, count: usize| {
        if count == 0 {
            return Ok(SideError::default());
        }
        let quantized = side_of.clone().narrow(2, config.sink_tokens, count);
        let stored = stored(quantized.clone(), config.float);
        let packed = quantize_side(stored.clone(), which, config)?;
        side(quantized, stored, &packed, name)
    };
    // A Hadamard transform keeps relative errors, so they are measured on transformed values.
    let turned = |rows: &Tensor<4>, side| match config.uses_hadamard(side) {
        true => hadamard(rows.clone()),
        false => Ok(rows.clone()),
    };
    let keys = error(&turned(&key, Side::Keys)?, Side::Keys, counts.keys)?;
    // Values that are channels of keys have the error of keys.
    let values = match shares_values {
        true => keys,
        false => error(&turned(&value, Side::Values)?, Side::Values, counts.values)?,
    };

    let fake_quant = FakeQuantOptions::default();
    let memory = KvMemory::Parallel { config: *config, fake_quant, options: trace.options };
    let sinks = trace.sink_logits.clone();
    let quantized = match shares_values {
        true => memory.attend_latent(query, key, value.dims()[3])?,
        false => memory.attend_with_sinks(query, key, value, sinks)?,
    };
    let output_error = output_error(quantized.output, output, name)?;
    Ok(layer_error(layer, keys, values, output_error))
}

/// Compares a layer that stores its keys and entries as `config` says with `trace`, which is of the
/// float run.
fn of_sparse_layer(
    trace: &SparseTrace,
    layer: usize,
    config: Option<&SparseConfig>,
    name: &str,
) -> Result<LayerError> {
    let config = config.unwrap_or(&trace.config);
    let error = |rows: Option<&Tensor<4>>, format: RowFormat| {
        let coded = rows.map(|rows| format.coded_channels(rows.dims()[3]));
        let (Some(rows), Some(coded @ 1..)) = (rows, coded) else {
            return Ok(SideError::default());
        };
        let rows = rows.clone().cast(DType::F32).narrow(3, 0, coded);
        let config =
            KvCacheConfig::new(format.codes, format.codes).with_group_size(RowFormat::GROUP_SIZE);
        let packed = quantize_side(rows.clone(), Side::Values, &config)?;
        side(rows.clone(), rows, &packed, name)
    };
    let entries = trace.entries.as_ref().and_then(Entries::tensor);
    let index = trace.index.as_ref().zip(config.index);
    let keys = match index {
        Some((trace, index)) => error(Some(&trace.keys), index.keys)?,
        None => SideError::default(),
    };
    let values = error(entries, config.entries)?;

    let selection = match (index, config.compression) {
        (Some((trace, index)), Some(compression)) => {
            let scores = index_scores(&trace.query, &index.keys.rounded(trace.keys.clone()))?;
            Some(select_entries(scores, 0, compression, index.top_k)?)
        }
        _ => None,
    };
    let entries = entries.map(|entries| config.entries.rounded(entries.clone()));
    let compressed = entries.as_ref().zip(config.compression).map(|(entries, compression)| {
        Compressed { entries, compression, selection: selection.as_ref() }
    });
    let options = SparseOptions {
        sliding_window: config.sliding_window,
        scale: None,
        sink_logits: trace.sink_logits.clone(),
    };
    let rows = stored(trace.rows.clone().cast(DType::F32), config.float);
    let quantized = sparse_attention(trace.query.clone(), &rows, compressed, &options)?;
    let output_error = output_error(quantized, trace.output.clone(), name)?;
    Ok(layer_error(layer, keys, values, output_error))
}

/// Returns the relative error of an output.
fn output_error(quantized: Tensor<4>, float: Tensor<4>, name: &str) -> Result<f64> {
    let (error, norm) = squares(&read(quantized, name)?, &read(float, name)?);
    Ok(relative(error, norm))
}

fn layer_error(layer: usize, keys: SideError, values: SideError, output_error: f64) -> LayerError {
    LayerError {
        layer,
        key_error: keys.relative(),
        value_error: values.relative(),
        output_error,
        clipped: share(keys.clipped + values.clipped, keys.elements + values.elements),
        constant: share(keys.constant + values.constant, keys.groups + values.groups),
    }
}

/// Compares `original` with the restored `packed`, which was quantized from `stored`: the original
/// rounded to the cache's float type.
fn side(original: Tensor<4>, stored: Tensor<4>, packed: &Packed, name: &str) -> Result<SideError> {
    let [_, _, tokens, head_dim] = original.dims();
    let QuantSpec { granularity, group_size, .. } = packed.spec();
    let (error, norm) = squares(&read(packed.dequantize(), name)?, &read(original, name)?);
    let (logical, n) = (packed.to_logical(), packed.spec().max_code() as f32);
    let stored = read(stored, name)?;
    let exponents = logical.exponents.iter().map(|&exponent| (f32::from(exponent) - 127.0).exp2());
    let scales: Vec<f32> =
        logical.scale.iter().map(|scale| scale.to_f32()).chain(exponents).collect();
    let clipped = stored.iter().enumerate().filter(|&(i, &x)| {
        let (slice, token, channel) =
            (i / (tokens * head_dim), i / head_dim % tokens, i % head_dim);
        let group = match granularity {
            Granularity::PerChannel => {
                (slice * (tokens / group_size) + token / group_size) * head_dim + channel
            }
            Granularity::PerToken => {
                (slice * tokens + token) * (head_dim / group_size) + channel / group_size
            }
        };
        let scale = scales[group];
        let inside = match packed.spec().largest() {
            Some(largest) => x.abs() / scale <= largest,
            None => (0.0..=n).contains(&((saturated(x) - logical.min[group].to_f32()) / scale)),
        };
        scale != 0.0 && !inside
    });
    Ok(SideError {
        error,
        norm,
        elements: stored.len(),
        clipped: clipped.count(),
        groups: scales.len(),
        constant: scales.iter().filter(|&&scale| scale == 0.0).count(),
    })
}

/// Rounds to the float type in which the cache holds tokens before it quantizes them.
fn stored(tensor: Tensor<4>, float: CacheFloat) -> Tensor<4> {
    let limit = float.round(f32::MAX).min(f32::MAX);
    match float {
        CacheFloat::F32 => tensor,
        _ => tensor.clamp(-limit, limit).cast(float.dtype()).cast(DType::F32),
    }
}

/// Clamps to the range of f16, as the quantizer does.
fn saturated(x: f32) -> f32 {
    x.clamp(-kv_cubecl::reference::F16_MAX, kv_cubecl::reference::F16_MAX)
}

/// Sums of squares of `restored - original` and of `original`.
fn squares(restored: &[f32], original: &[f32]) -> (f64, f64) {
    restored.iter().zip(original).fold((0.0, 0.0), |(error, norm), (&restored, &original)| {
        let original = f64::from(original);
        (error + (f64::from(restored) - original).powi(2), norm + original * original)
    })
}

fn relative(error: f64, norm: f64) -> f64 {
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn read(tensor: Tensor<4>, name: &str) -> Result<Vec<f32>> {
    let fail = |why: String| Error::Device { cache: name.to_string(), why };
    let data = tensor.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    data.try_into_vec().map_err(|error| fail(format!("{error:?}")))
}
