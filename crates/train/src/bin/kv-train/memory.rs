//! The check before a run that training fits into memory.

use std::path::Path;

use anyhow::{Result, bail};
use burn::tensor::Device;
use kv_cli::{Backend, DeviceList, MemorySize, memory_limit};
use kv_models::{
    LayerSpec, LoadOptions, MemoryLimit, ModelOutline, decimal_size, outline, outline_config,
};
use kv_train::{Objective, TrainConfig, Trainable};

use crate::spec::{Architecture, Origin, Spec, Weights, config_json, config_text};

/// The sizes of a model that decide how much memory training takes.
pub(crate) struct Sizes {
    /// Bytes of the weights in memory.
    pub(crate) weights: f64,
    /// Largest number of elements in embedding and head.
    pub(crate) vocabulary: f64,
    pub(crate) hidden: f64,
    pub(crate) layers: f64,
    /// Rows of the queries, keys and values of all layers.
    pub(crate) qkv_rows: f64,
    /// Rows of the widest matrix of a layer.
    pub(crate) widest: f64,
}

/// Checks that the minimum that training takes fits into memory: weights, gradients, AdamW's
/// moments, the teacher, and the activations that the backward pass needs.
///
/// # Errors
/// Too little memory; the message lists the size of each part.
pub(crate) fn check(
    sizes: &Sizes,
    config: &TrainConfig,
    (backend, device): (Backend, &Device),
    memory: Option<MemorySize>,
) -> Result<()> {
    let MemoryLimit { total: Some(available), source, .. } = memory_limit(memory, device) else {
        return Ok(());
    };
    let parts = parts(sizes, config, backend == Backend::Flex);
    let needed: f64 = parts.iter().map(|(_, bytes)| bytes).sum();
    if needed <= available as f64 {
        return Ok(());
    }
    let size = |bytes: f64| decimal_size(bytes as u64);
    let listed = parts.iter().filter(|(_, bytes)| *bytes > 0.0);
    let listed: Vec<_> = listed.map(|(name, bytes)| format!("{name} {}", size(*bytes))).collect();
    bail!(
        "memory: training needs at least {}, but {source} allows {}: {}; try a smaller model, \
         smaller batches or shorter sequences",
        size(needed),
        decimal_size(available),
        listed.join(", "),
    )
}

/// Returns the bytes of each part. All are lower bounds, so a run that fits is never refused.
fn parts(sizes: &Sizes, config: &TrainConfig, on_cpu: bool) -> [(&'static str, f64); 5] {
    const F32: f64 = 4.0;
    let Sizes { weights, vocabulary, hidden, layers, qkv_rows, widest } = *sizes;
    let (batch, seq) = (config.batch as f64, config.seq_len as f64);
    let trained = match (config.adapter, config.trainable) {
        (Some(adapter), _) => adapter.rank as f64 * (hidden * layers + qkv_rows),
        (None, Trainable::All) => weights / F32,
        (None, Trainable::Layers) => (weights / F32 - vocabulary).max(0.0),
        (None, Trainable::Attention | Trainable::Qkv) => hidden * qkv_rows,
        (None, Trainable::Indexer) => 0.0,
    };
    // On the CPU, every sequence of a batch has its own gradients, which are then added up.
    let gradients = if on_cpu { batch } else { 1.0 };
    // The teacher shares the frozen weights.
    let teacher = match (config.objective, config.adapter) {
        (Objective::CrossEntropy, _) | (_, Some(_)) => 0.0,
        _ => F32 * trained,
    };
    // The residual stream before each layer is kept, and the results of the layer unless they are
    // recomputed.
    let per_token = match config.gradient_checkpointing {
        true => hidden * layers,
        false => (hidden + widest) * layers + qkv_rows,
    };
    let at_once = match on_cpu {
        true => batch.min(rayon::current_num_threads() as f64),
        false => batch,
    };
    [
        ("weights", weights),
        ("teacher", teacher),
        ("gradients", F32 * trained * gradients),
        ("moments", 2.0 * F32 * trained),
        ("activations", F32 * at_once * seq * per_token),
    ]
}

/// Checks that training the model of a run fits into memory.
///
/// # Errors
/// As for [`check`], or a header of the model's files that cannot be read.
pub(crate) fn check_run(spec: &Spec, device: &Device, memory: Option<MemorySize>) -> Result<()> {
    let sizes = match &spec.origin {
        Origin::Model(path) => Sizes::of_model(path, spec.weights, device)?,
        Origin::Random(architecture) => Sizes::of_random(architecture),
        Origin::Config(fields) => {
            let text = config_text(fields);
            Sizes::of(&outline_config(&config_json(&text), None, device, LoadOptions::default())?)
        }
    };
    // Devices of the CPU share its memory.
    let shared = spec.devices.as_ref().map_or(1, DeviceList::sharing_memory);
    let batch = spec.config.batch.saturating_mul(shared).min(spec.config.sequences_per_step());
    let config = TrainConfig { batch, ..spec.config.clone() };
    check(&sizes, &config, (spec.backend, device), memory)
}

impl Sizes {
    pub(crate) fn of_model(path: &Path, weights: Weights, device: &Device) -> Result<Self> {
        Ok(Self::of(&outline(path, device, weights.options())?))
    }

    fn of(outline: &ModelOutline) -> Self {
        let (model, weights) = (&outline.spec, &outline.weights);
        let rows = |layer: &LayerSpec| layer.qkv_rows() as f64;
        Self {
            weights: weights.total() as f64,
            vocabulary: 2.0 * model.vocab_size as f64 * model.hidden_size as f64,
            hidden: model.hidden_size as f64,
            layers: model.layers.len() as f64,
            qkv_rows: model.layers.iter().map(rows).sum(),
            widest: weights.widest as f64,
        }
    }

    /// Computes the sizes of a model with random weights, as f64 to avoid overflow.
    fn of_random(model: &Architecture) -> Self {
        let [vocab, hidden, layers] = [model.vocab, model.hidden, model.layers].map(|n| n as f64);
        let [heads, kv_heads] = [model.heads, model.kv_heads].map(|n| n as f64);
        let (head_dim, widest) = (model.head_dim as f64, model.intermediate as f64);
        let (query_rows, qkv_rows) = (heads * head_dim, (heads + 2.0 * kv_heads) * head_dim);
        let of_layer = hidden * (qkv_rows + query_rows + 3.0 * widest);
        Self {
            weights: 4.0 * (vocab * hidden + layers * of_layer),
            vocabulary: vocab * hidden,
            hidden,
            layers,
            qkv_rows: layers * qkv_rows,
            widest,
        }
    }
}
