//! DeepSeek-V4: logits of tiny checkpoints against the transformers library, refusals, saved
//! folders and residual streams.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn::{
    module::Param,
    tensor::{Device, Int, Tensor, TensorData},
};
use common::{assert_contains, copy, device, expected, failure, golden_in, max_difference};
use kv_models::{
    Error, LanguageModel, SaveOptions, Tokenizer,
    deepseek_v4::{Config, DeepseekV4, HyperConnection, LayerKind, sinkhorn},
    kv_cubecl::KvCacheConfig,
    load,
    nn::RopeScaling,
    save,
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value as Json, json};

/// The largest error, as a part of the largest logit.
const TOLERANCE: f32 = 2e-4;

/// Returns the checkpoints of the project, or of the folder `KV_GOLDEN` if it has some.
fn golden() -> Vec<PathBuf> {
    let given = std::env::var_os("KV_GOLDEN").map(PathBuf::from);
    match given.filter(|root| !root.join("deepseek").is_dir()) {
        Some(_) => vec![tiny()],
        None => golden_in("deepseek"),
    }
}

fn tiny() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/deepseek/deepseek-v4-tiny")).into()
}

fn worst(model: &LanguageModel, folder: &Path, device: &Device) -> f32 {
    let expected = expected(folder, device);
    let largest = expected.logits.clone().abs().max().into_scalar::<f32>();
    let logits = model.forward(expected.ids, KvCacheConfig::float()).unwrap();
    max_difference(logits, expected.logits) / largest
}

#[test]
fn golden_logits_of_whole_sequences() {
    let device = device();
    for folder in golden() {
        let loaded = load(&folder, &device).unwrap();
        assert!(loaded.notes.is_empty(), "{:?}", loaded.notes);
        let worst = worst(&loaded.model, &folder, &device);
        println!("{}: {worst:e} of the largest logit", folder.display());
        assert!(worst <= TOLERANCE, "{}: {worst} > {TOLERANCE}", folder.display());
    }
}
