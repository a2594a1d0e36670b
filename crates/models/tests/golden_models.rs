//! The tiny checkpoints against the logits of the transformers library, from every format.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::Tensor;
use candle_core::quantized::GgmlDType;
use common::{
    TINY, copy, device, expected, fixture, golden, max_difference, read_tensors, tiny, write_gguf,
};
use kv_models::{kv_cubecl::KvCacheConfig, load};
use safetensors::{Dtype, tensor::TensorView};

const TOLERANCE: f32 = 2e-4;

fn check(path: &Path, folder: &Path, tolerance: f32) {
    let device = device();
    let expected = expected(folder, &device);
    let model = load(path, &device).unwrap().model;
    let logits = model.forward(expected.ids, KvCacheConfig::float()).unwrap();
    let worst = max_difference(logits, expected.logits);
    assert!(worst <= tolerance, "{}: {worst} > {tolerance}", path.display());
}

#[test]
fn golden_logits_from_safetensors() {
    for folder in golden() {
        check(&folder, &folder, TOLERANCE);
    }
}

#[test]
fn tiny_checkpoints_survive_gguf() {
    let folder = tempfile::tempdir().unwrap();
    for name in TINY {
        let file = folder.path().join(name).with_extension("gguf");
        write_gguf(&tiny(name), &file, GgmlDType::F32, &[]);
        check(&file, &tiny(name), TOLERANCE);
    }
}

#[test]
fn gguf_block_types_load() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, tolerance) in [
        (GgmlDType::F16, 5e-3),
        (GgmlDType::BF16, 5e-2),
        (GgmlDType::Q8_0, 5e-2),
        (GgmlDType::Q5_1, 1.0),
        (GgmlDType::Q4_0, 2.0),
    ] {
        let file = folder.path().join(format!("{dtype:?}.gguf"));
        write_gguf(&tiny("qwen2-tiny"), &file, dtype, &[]);
        check(&file, &tiny("qwen2-tiny"), tolerance);
    }
}

#[test]
fn golden_step_equals_forward() {
    let device = device();
    for folder in golden() {
        let ids = expected(&folder, &device).ids;
        let [batch, seq] = ids.dims();
        let model = load(&folder, &device).unwrap().model;
        let config = KvCacheConfig::float().with_capacity(seq);
        let forward = model.forward(ids.clone(), config).unwrap();
        let largest = forward.clone().abs().max().into_scalar::<f32>();
        let (a, b) = (seq / 3, seq / 2);
        for chunks in [vec![1; seq], vec![a, 1, b - a - 1, seq - b], vec![seq]] {
            let mut cache = model.new_cache(config, batch, &device).unwrap();
            let mut parts = vec![];
            for m in &chunks {
                let next = ids.clone().narrow(1, cache.len(), *m);
                parts.push(model.step(next, &mut cache).unwrap());
            }
            assert_eq!(cache.len(), seq);
            assert_eq!(cache.remaining(), 0);
            let worst = max_difference(Tensor::cat(parts, 1), forward.clone());
            assert!(
                worst <= 5e-5 * largest.max(1.0),
                "{} in {} chunks: {worst}",
                folder.display(),
                chunks.len()
            );
        }
    }
}

#[test]
fn quantized_step_equals_forward() {
    let device = device();
    // llama-tiny: head_dim 16, so groups of 16 channels.
    let config: KvCacheConfig = "k4v4-g16-r32".parse().unwrap();
    let folder = tiny("llama-tiny");
    let ids = expected(&folder, &device).ids;
    let [batch, seq] = ids.dims();
    let model = load(&folder, &device).unwrap().model;
    let forward = model.forward(ids.clone(), config).unwrap();
    let float = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    assert!(max_difference(forward.clone(), float) > 1e-4, "4 bits change something");

    let mut cache = model.new_cache(config.with_capacity(seq), batch, &device).unwrap();
    let steps = (0..seq).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap());
    let steps = Tensor::cat(steps.collect(), 1);
    // Codes may flip at rounding edges; the mean may not move.
    let mean = (steps - forward).abs().mean().into_scalar::<f32>();
    assert!(mean < 2e-3, "mean difference {mean}");
    assert!(cache.memory_bytes().total() > 0);
    cache.reset();
    assert!(cache.is_empty());
}

#[test]
fn pytorch_checkpoint_with_old_rope_fields_and_biases() {
    check(&fixture("pytorch-tiny"), &fixture("pytorch-tiny"), TOLERANCE);
    let file = fixture("pytorch-tiny").join("pytorch_model.bin");
    check(&file, &fixture("pytorch-tiny"), TOLERANCE);
}

/// Rewrites the weights as two shards of another float type.
fn shard(folder: &Path, dtype: Dtype) {
    let tensors = read_tensors(&folder.join("model.safetensors"));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let mut map = BTreeMap::new();
    let half = tensors.len() / 2;
    for (i, part) in [&tensors[..half], &tensors[half..]].iter().enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", i + 1);
        let data: Vec<(String, Vec<usize>, Vec<u8>)> = part
            .iter()
            .map(|(name, shape, values)| {
                map.insert(name.clone(), file.clone());
                let bytes = values.iter().flat_map(|&x| match dtype {
                    Dtype::F16 => half::f16::from_f32(x).to_le_bytes(),
                    _ => half::bf16::from_f32(x).to_le_bytes(),
                });
                (name.clone(), shape.clone(), bytes.collect())
            })
            .collect();
        let views = data.iter().map(|(name, shape, bytes)| {
            (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &folder.join(file)).unwrap();
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn shards_of_half_precision_load() {
    for (dtype, tolerance) in [(Dtype::F16, 5e-3), (Dtype::BF16, 5e-2)] {
        let folder = copy(&tiny("llama3-rope-tiny"));
        shard(folder.path(), dtype);
        check(folder.path(), &tiny("llama3-rope-tiny"), tolerance);
    }
}
