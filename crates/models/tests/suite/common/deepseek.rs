//! The tiny checkpoints of DeepSeek-V4, with the logits of the transformers library.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::Tensor;
use kv_models::{
    LanguageModel, ModelCache, Tokenizer,
    deepseek_v4::{Config, LayerKind, Mode},
    load,
    nn::RopeScaling,
};
use serde_json::json;

use super::{
    device, expected, golden_in,
    saved::{config, pass},
};

/// The largest error, as a part of the largest logit.
pub(crate) const TOLERANCE: f32 = 2e-4;

/// Returns the checkpoints of the project, or of the folder `KV_GOLDEN` if it has some.
pub(crate) fn golden() -> Vec<PathBuf> {
    let given = std::env::var_os("KV_GOLDEN").map(PathBuf::from);
    match given.filter(|root| !root.join("deepseek").is_dir()) {
        Some(_) => vec![tiny()],
        None => golden_in("deepseek"),
    }
}

pub(crate) fn tiny() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/deepseek/deepseek-v4-tiny")).into()
}

/// A model with texts and the logits that they must have.
pub(crate) struct Golden {
    pub(crate) model: LanguageModel,
    pub(crate) texts: Vec<Vec<u32>>,
    /// The logits of each text, `[seq * vocab]`.
    pub(crate) logits: Vec<Vec<f32>>,
    pub(crate) decoded: Option<Tensor<3>>,
    pub(crate) largest: f32,
}

impl Golden {
    pub(crate) fn new(folder: &Path) -> Self {
        let device = device();
        let expected = expected(folder, &device);
        let [batch, seq] = expected.ids.dims();
        let largest = expected.logits.clone().abs().max().into_scalar::<f32>();
        let ids: Vec<u32> = expected.ids.into_data().iter::<u32>().collect();
        let logits = host(expected.logits);
        let vocab = logits.len() / ids.len();
        Self {
            model: load(folder, &device).unwrap().model,
            texts: ids.chunks(seq).map(Vec::from).collect(),
            logits: logits.chunks(seq * vocab).take(batch).map(Vec::from).collect(),
            decoded: expected.decoded,
            largest,
        }
    }

    pub(crate) fn tiny() -> Self {
        Self::new(&tiny())
    }

    pub(crate) fn cache(&self, name: &str, capacity: usize, batch: usize) -> ModelCache {
        self.model.new_cache(config(name, capacity), batch, &device()).unwrap()
    }

    /// Appends tokens of a text to the only sequence of `cache`, and returns their logits.
    pub(crate) fn pass(&self, cache: &mut ModelCache, text: usize, count: usize) -> Vec<f32> {
        let start = cache.len();
        pass(&self.model, cache, &self.texts[text][start..start + count], &device())
    }

    /// Checks logits of tokens from `start` on.
    #[track_caller]
    pub(crate) fn check(
        &self,
        text: usize,
        start: usize,
        logits: &[f32],
        what: impl core::fmt::Display,
    ) {
        let vocab = self.logits[text].len() / self.texts[text].len();
        let wanted = &self.logits[text][start * vocab..start * vocab + logits.len()];
        let worst = furthest(logits, wanted);
        assert!(worst <= TOLERANCE * self.largest, "{what}: {worst} of {}", self.largest);
    }

    /// Returns the logits of each of the first `n` tokens of a text, appended one at a time.
    pub(crate) fn one_by_one(&self, name: &str, text: usize, n: usize) -> Vec<Vec<f32>> {
        let mut cache = self.cache(name, n, 1);
        (0..n).map(|_| self.pass(&mut cache, text, 1)).collect()
    }
}

pub(crate) fn host<const D: usize>(logits: Tensor<D>) -> Vec<f32> {
    logits.into_data().convert::<f32>().try_into_vec().unwrap()
}

pub(crate) fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Returns a tokenizer with one word.
pub(crate) fn words() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    });
    fs::write(&path, tokenizer.to_string()).unwrap();
    Tokenizer::from_file(path, &[]).unwrap()
}

/// Returns the configuration of a model with a layer of each kind.
pub(crate) fn small() -> Config {
    Config {
        vocab_size: 40,
        hidden_size: 32,
        intermediate_size: 16,
        layers: vec![LayerKind::Selected, LayerKind::All, LayerKind::Window],
        hash_layers: [0, 2].into(),
        n_heads: 4,
        head_dim: 16,
        rotary_dim: 8,
        query_rank: 16,
        output_groups: 2,
        output_rank: 8,
        sliding_window: 8,
        selected_ratio: 2,
        all_ratio: 8,
        index_heads: 2,
        index_head_dim: 8,
        top_k: 3,
        n_experts: 3,
        experts_per_token: 2,
        routed_scale: 1.5,
        swiglu_limit: 10.0,
        streams: 3,
        sinkhorn_iterations: 5,
        stream_epsilon: 1e-6,
        max_positions: 64,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        compressed_rope_theta: 100_000.0,
        compressed_rope_scaling: RopeScaling::Default,
        mode: Mode::Transformers,
    }
}
