//! The logits of the tiny checkpoints in every format equal those of the transformers library.

use std::{fs, path::Path};

use burn::tensor::{Device, Int, Tensor, TensorData};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use kv_models::kv_cubecl::{On, Target};
use kv_models::{LanguageModel, kv_cubecl::KvCacheConfig, load};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use safetensors::SafeTensors;
use serde_json::json;

use crate::common::{
    GgmlType, TINY, Value, copy, device, expected, f32s, fixture, golden, max_difference, tiny,
    with_config, write_gguf,
};

const TOLERANCE: f32 = 2e-4;

fn check(path: &Path, folder: &Path, tolerance: f32) {
    check_on(&device(), path, folder, tolerance);
}

/// Compares logits at once, the last tokens one by one, and `KV_PARTITIONS` random partitions into
/// calls.
fn check_on(device: &Device, path: &Path, folder: &Path, tolerance: f32) {
    let expected = expected(folder, device);
    let model = load(path, device).unwrap().model;
    let largest = expected.logits.clone().abs().max().into_scalar::<f32>();
    let tolerance = tolerance * largest;
    let logits = model.forward(expected.ids.clone(), KvCacheConfig::float()).unwrap();
    let worst = max_difference(logits, expected.logits.clone());
    assert!(worst <= tolerance, "{}: {worst} > {tolerance}", path.display());
    // Decodes the last tokens one by one after the tokens before them.
    let [batch, seq] = expected.ids.dims();
    let config = KvCacheConfig::float().with_capacity(seq);
    let in_calls = |sizes: &[usize]| {
        let mut cache = model.new_cache(config, batch, device).unwrap();
        let calls = sizes.iter().map(|&size| {
            let ids = expected.ids.clone().narrow(1, cache.len(), size);
            model.step(ids, &mut cache).unwrap()
        });
        Tensor::cat(calls.collect(), 1)
    };
    if let Some(decoded) = expected.decoded {
        let steps = decoded.dims()[1];
        let logits = in_calls(&[vec![seq - steps], vec![1; steps]].concat());
        let worst = max_difference(logits.narrow(1, seq - steps, steps), decoded);
        assert!(worst <= tolerance, "{} token by token: {worst} > {tolerance}", path.display());
    }
    let partitions = std::env::var("KV_PARTITIONS").map_or(2, |n| n.parse().expect("a number"));
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    for case in 0..partitions {
        let (mut sizes, mut left) = (vec![], seq);
        while left > 0 {
            let size = rng.random_range(1..=[50, 150, 10][case % 3]).min(left);
            sizes.push(size);
            left -= size;
        }
        let worst = max_difference(in_calls(&sizes), expected.logits.clone());
        assert!(worst <= tolerance, "{} in {sizes:?}: {worst} > {tolerance}", path.display());
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
crate::common::stamp_gpus!(golden_logits);

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn golden_logits<T: Target>(gpu: &On<T>) {
    for folder in golden() {
        check_on(gpu, &folder, &folder, TOLERANCE);
    }
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
        write_gguf(&tiny(name), &file, GgmlType::F32, &[]);
        check(&file, &tiny(name), TOLERANCE);
    }
}

/// The two layouts of MXFP4 differ: one byte has neighbors, or the same position of both halves.
#[test]
fn experts_in_mxfp4_are_restored() {
    let folder = fixture("mxfp4");
    check(&folder, &folder, TOLERANCE);
    check(&folder.join("model.gguf"), &folder, TOLERANCE);
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
    // llama-tiny has head_dim 16, so it takes groups of 16 channels.
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
    // Single codes may change in rounding, but the mean difference stays small.
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

/// Returns `phi3-tiny` with a scaled-down version of a published configuration.
fn phi3(config: &str) -> tempfile::TempDir {
    let folder = copy(&tiny("phi3-tiny"));
    fs::copy(fixture("phi3").join(config), folder.path().join("config.json")).unwrap();
    folder
}

/// Returns ids, and the logits of the transformers library for the last of them.
fn phi3_expected(name: &str, device: &Device) -> (Tensor<2, Int>, Tensor<3>) {
    let bytes = fs::read(fixture("phi3").join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("input_ids").unwrap();
    let ids: Vec<i32> =
        ids.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    let n_ids = ids.len();
    let ids = Tensor::from_data(TensorData::new(ids, [1, n_ids]), device);
    let logits = tensors.tensor(name).unwrap();
    let shape: [usize; 3] = logits.shape().try_into().unwrap();
    (ids, Tensor::from_data(TensorData::new(f32s(logits.data()), shape), device))
}

fn token_by_token(model: &LanguageModel, ids: Tensor<2, Int>, capacity: usize) -> Tensor<3> {
    let config = KvCacheConfig::float().with_capacity(capacity);
    let mut cache = model.new_cache(config, 1, &ids.device()).unwrap();
    let n = ids.dims()[1];
    let steps = (0..n).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap());
    Tensor::cat(steps.collect(), 1)
}

#[test]
fn phi3_is_exact_past_its_sliding_window() {
    let device = device();
    let folder = phi3("config-4k.json");
    let (ids, expected) = phi3_expected("4k", &device); // logits of tokens 16 to 28, window 24
    let loaded = load(folder.path(), &device).unwrap();
    let model = loaded.model;
    assert_eq!((model.max_positions(), loaded.notes), (4096, vec![]));
    assert!(model.spec().layers.iter().all(|layer| layer.sliding_window == Some(24)));
    let logits = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let n = expected.dims()[1];
    assert!(max_difference(logits.narrow(1, 16, n), expected.clone()) < TOLERANCE);
    let seq = ids.dims()[1];
    let streamed = token_by_token(&model, ids.clone(), seq);
    assert!(max_difference(streamed.narrow(1, 16, n), expected.clone()) < TOLERANCE);

    // Without the sliding window, the logits of token 24 are wrong.
    let path = folder.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.replace("\"sliding_window\": 24", "\"sliding_window\": null")).unwrap();
    let loaded = load(folder.path(), &device).unwrap();
    assert!(loaded.notes.is_empty(), "{:?}", loaded.notes);
    let logits = loaded.model.forward(ids, KvCacheConfig::float()).unwrap();
    let worst = |token| {
        let part = logits.clone().narrow(1, token, 1);
        max_difference(part, expected.clone().narrow(1, token - 16, 1))
    };
    assert!(worst(23) < TOLERANCE && worst(24) > 10.0 * TOLERANCE, "{} {}", worst(23), worst(24));
}

#[test]
fn sliding_windows_are_read_from_every_format() {
    let device = device();
    let windows = |path: &Path| -> Vec<Option<usize>> {
        let loaded = load(path, &device).unwrap();
        assert!(loaded.notes.is_empty(), "{:?}", loaded.notes);
        loaded.model.spec().layers.iter().map(|layer| layer.sliding_window).collect()
    };
    let mixed = with_config("qwen2-tiny", |c| {
        c["sliding_window"] = json!(128);
        c["use_sliding_window"] = json!(true);
        c["layer_types"] = json!(["full_attention", "sliding_attention"]);
    });
    assert_eq!(windows(mixed.path()), [None, Some(128)]);
    let by_number = with_config("qwen2-tiny", |c| {
        c["sliding_window"] = json!(128);
        c["use_sliding_window"] = json!(true);
        c["max_window_layers"] = json!(1);
        c.as_object_mut().unwrap().remove("layer_types");
    });
    assert_eq!(windows(by_number.path()), [None, Some(128)]);
    let gguf = mixed.path().join("window.gguf");
    let window = [("llama.attention.sliding_window", Value::U32(128))];
    write_gguf(&tiny("llama-tiny"), &gguf, GgmlType::F32, &window);
    assert!(windows(&gguf).iter().all(|window| *window == Some(128)));
}

#[test]
fn phi3_with_long_contexts_takes_the_factors_of_its_cache() {
    let device = device();
    let folder = phi3("config-128k.json"); // factors change past 32 tokens
    let gguf = folder.path().join("longrope.gguf");
    write_gguf(folder.path(), &gguf, GgmlType::F32, &[]);
    for path in [folder.path(), &gguf] {
        let loaded = load(path, &device).unwrap();
        let model = loaded.model;
        assert_eq!(model.max_positions(), 512);
        for part in [path.to_str().unwrap(), "longrope", "32 tokens"] {
            assert!(loaded.notes[0].contains(part), "{:?} lacks {part}", loaded.notes);
        }
        for (name, n, room) in [("128k-32", 32, 32), ("128k-48", 48, 48), ("128k-48", 48, 4096)] {
            let (ids, expected) = phi3_expected(name, &device); // logits of the last 12 of n tokens
            let ids = ids.narrow(1, 0, n);
            let config = KvCacheConfig::float().with_capacity(room);
            let logits = model.forward(ids.clone(), config).unwrap();
            let worst = max_difference(logits.narrow(1, n - 12, 12), expected.clone());
            assert!(worst < TOLERANCE, "{name}: {worst}");
            let streamed = token_by_token(&model, ids, room);
            let worst = max_difference(streamed.narrow(1, n - 12, 12), expected);
            assert!(worst < TOLERANCE, "{name} token by token: {worst}");
        }
    }
}
