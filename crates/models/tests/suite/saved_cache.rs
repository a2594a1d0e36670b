//! Saved caches continue bit for bit. Other models, caches and texts are refused.
#![allow(clippy::print_stderr, reason = "a skipped test prints the reason")]

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use std::fs;

use burn::tensor::Device;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use kv_models::kv_cubecl::{On, Target};
use kv_models::{
    LoadOptions, ModelCache, SavedCache, WeightDtype, ids_to_tensor, kv_weights::Activations, load,
    load_with,
};
use serde_json::json;

use crate::common::{
    assert_contains, device,
    saved::{Saved, bits, config, pass, text},
    tiny,
};

/// The models cover sliding windows, learned sinks, learned positions, scaled frequencies and
/// shared caches.
const MODELS: [&str; 10] = [
    "llama-tiny",
    "gemma3-tiny",
    "gpt-oss-tiny",
    "gpt2-tiny",
    "mistral-swa-tiny",
    "qwen3_moe-tiny",
    "qwen3_5-tiny",
    "mixtral-tiny",
    "deepseek_v3-tiny",
    "gemma4-tiny",
];
const CACHES: [&str; 8] = [
    "float",
    "float-f16",
    "k8v8-g8-r16",
    "k4v2-g16-r16-s3-after",
    "k4v4-g8-r16-gflush",
    "k4v16-g8-r8",
    "kint8vint8",
    "k2v2-g16-r16",
];

/// Saves and restores after every number of tokens. Continues beside the original cache, token by
/// token and with a chunk.
fn continues_bit_for_bit(
    on: &Device,
    models: &[&str],
    caches: &[&str],
    lens: impl Fn(usize) -> Vec<usize>,
) {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prefix.safetensors");
    for (seed, name) in models.iter().enumerate() {
        let model = load(tiny(name), on).unwrap().model;
        let text = text(64, seed as u64);
        for cache_name in caches {
            let config = config(cache_name, 64);
            if !on.supports_dtype(config.float.dtype()) {
                eprintln!("SKIPPED: {cache_name}, the device has no such type");
                continue;
            }
            let mut cache = model.new_cache(config, 1, on).unwrap();
            for len in lens(seed) {
                let at = format!("{name} {cache_name} after {len} tokens");
                let held = cache.len();
                pass(&model, &mut cache, &text[held..len], on);
                cache.save(&path, &model, name, &[&text[..len]]).unwrap();
                let saved = SavedCache::open(&path).unwrap();
                assert_eq!((saved.tokens(), saved.model()), (&[text[..len].to_vec()][..], *name));
                let mut restored = saved.restore(&model, config, on).unwrap();
                assert_eq!(restored.memory_bytes().total(), cache.memory_bytes().total(), "{at}");
                let mut twin = cache.clone();
                let rest = &text[len..64.min(len + 12)];
                let (steps, chunk) = rest.split_at(rest.len() / 2);
                for part in steps.chunks(1).chain([chunk].into_iter().filter(|it| !it.is_empty())) {
                    let got = pass(&model, &mut restored, part, on);
                    let want = pass(&model, &mut twin, part, on);
                    assert!(bits(&got) == bits(&want), "{at}: other logits");
                }
            }
        }
    }
}

#[test]
fn restored_caches_continue_at_every_length() {
    continues_bit_for_bit(&device(), &MODELS, &CACHES, |seed| match seed {
        0 => (1..64).collect(),
        _ => (1..64).step_by(5).collect(),
    });
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
crate::common::stamp_gpus!(restored_caches_continue_on_a_gpu, caches_move_between_devices);

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn restored_caches_continue_on_a_gpu<T: Target>(gpu: &On<T>) {
    // A software driver compiles the kernels of each cache slowly.
    let caches = ["float", "k4v2-g16-r16-s3-after"];
    continues_bit_for_bit(gpu, &["llama-tiny", "gemma3-tiny"], &caches, |seed| vec![3 + seed, 41]);
}

/// A cache saved on one device is saved byte for byte by another, and continues there with the same
/// numbers except for rounding.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn caches_move_between_devices<T: Target>(gpu: &On<T>) {
    let cpu = device();
    let scratch = tempfile::tempdir().unwrap();
    let [there, back] = ["there", "back"].map(|name| scratch.path().join(name));
    let text = text(60, 9);
    for name in ["llama-tiny", "gemma3-tiny"] {
        for cache_name in ["float", "k4v2-g16-r16-s3-after"] {
            for [from, to] in [[&cpu, &**gpu], [&**gpu, &cpu]] {
                let [here, other] = [from, to].map(|on| load(tiny(name), on).unwrap().model);
                let config = config(cache_name, 60);
                let mut cache = here.new_cache(config, 1, from).unwrap();
                pass(&here, &mut cache, &text[..37], from);
                cache.save(&there, &here, name, &[&text[..37]]).unwrap();
                let saved = SavedCache::open(&there).unwrap();
                let mut moved = saved.restore(&other, config, to).unwrap();
                moved.save(&back, &other, name, &[&text[..37]]).unwrap();
                assert!(
                    fs::read(&there).unwrap() == fs::read(&back).unwrap(),
                    "{name} {cache_name}"
                );
                let got = pass(&other, &mut moved, &text[37..], to);
                let want = pass(&here, &mut cache, &text[37..], from);
                let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(far < 2e-3, "{name} {cache_name}: {far}");
            }
        }
    }
}

/// Another capacity changes nothing else.
#[test]
fn any_capacity_restores() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let path = scratch.path().join("prefix");
    let text = text(64, 3);
    for name in ["llama-tiny", "mistral-swa-tiny"] {
        let model = load(tiny(name), &on).unwrap().model;
        for cache_name in CACHES {
            let filled = |capacity| {
                let mut cache = model.new_cache(config(cache_name, capacity), 1, &on).unwrap();
                pass(&model, &mut cache, &text[..30], &on);
                cache
            };
            filled(40).save(&path, &model, name, &[&text[..30]]).unwrap();
            let saved = SavedCache::open(&path).unwrap();
            for capacity in [31, 64, 300] {
                let mut restored =
                    saved.restore(&model, config(cache_name, capacity), &on).unwrap();
                let n = 34.min(capacity - 30);
                assert_eq!(restored.remaining(), capacity.min(model.max_positions()) - 30);
                let got = pass(&model, &mut restored, &text[30..30 + n], &on);
                let want = pass(&model, &mut filled(capacity), &text[30..30 + n], &on);
                assert!(bits(&got) == bits(&want), "{name} {cache_name} {capacity}");
            }
            let error = saved.restore(&model, config(cache_name, 29), &on).unwrap_err();
            assert_eq!(error.to_string(), "capacity = 29: the saved cache holds 30 tokens");
        }
    }
}

/// Sequences of different lengths, and an empty cache.
#[test]
fn batches_and_empty_caches_are_saved() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let path = scratch.path().join("prefix");
    let model = load(tiny("llama-tiny"), &on).unwrap().model;
    let texts = [text(9, 4), text(40, 5)];
    let config = config("k4v2-g16-r16-s3-after", 64);
    let alone = texts.each_ref().map(|text| {
        let mut cache = model.new_cache(config, 1, &on).unwrap();
        pass(&model, &mut cache, text, &on);
        cache
    });
    let mut cache = ModelCache::join(&alone).unwrap();
    cache.save(&path, &model, "two", &texts).unwrap();
    let saved = SavedCache::open(&path).unwrap();
    assert_eq!(saved.tokens(), texts);
    let mut restored = saved.restore(&model, config, &on).unwrap();
    assert_eq!(restored.lens(), [9, 40]);
    let next = ids_to_tensor(&[7, 8], [2, 1], &on);
    let [got, want] = [&mut restored, &mut cache].map(|cache| {
        let logits = model.step(next.clone(), cache).unwrap();
        logits.into_data().convert::<f32>().try_into_vec::<f32>().unwrap()
    });
    assert!(bits(&got) == bits(&want));

    let error = cache.save(&path, &model, "two", &texts).unwrap_err().to_string();
    assert_contains(&error, &["tokens = [9, 40]", "[10, 41]"]);
    let empty = model.new_cache(config, 1, &on).unwrap();
    empty.save(&path, &model, "none", &[Vec::new()]).unwrap();
    let saved = SavedCache::open(&path).unwrap();
    assert!(saved.restore(&model, config, &on).unwrap().is_empty());
    assert_eq!(saved.check_prompt(0, &[1]).unwrap(), 0);
}

#[test]
fn other_models_and_caches_are_named() {
    let saved = Saved::new("llama-tiny");
    let on = device();
    assert!(
        SavedCache::open(saved.path()).unwrap().restore(&saved.model, saved.config, &on).is_ok()
    );

    // Other models: another family, other weights, the same weights in another type.
    let other = load(tiny("gpt2-tiny"), &on).unwrap().model;
    saved.refused(&other, config("k4v2-g16-r16-s3", 48), &["model.decoder = Llama", "the-maker"]);
    let tuned = crate::common::with_tensors("llama-tiny", |tensors| {
        let (_, _, values) =
            tensors.iter_mut().find(|(name, ..)| name.ends_with("1.mlp.down_proj.weight")).unwrap();
        values.iter_mut().for_each(|value| *value *= 1.0 + 1e-6);
    });
    let tuned = load(tuned.path(), &on).unwrap().model;
    let own = &["model = the-maker", "weights differ from this model's", "load the model that"];
    saved.refused(&tuned, saved.config, own);
    let half = LoadOptions::default().with_dtype(WeightDtype::Bf16);
    let half = load_with(tiny("llama-tiny"), &on, half).unwrap().model;
    let kind = &["weights = f32", "this model has bf16 weights", "same --weights and --dtype"];
    saved.refused(&half, saved.config, kind);

    // Another rope with the same weights.
    let rope = crate::common::with_config("llama-tiny", |config| {
        config["rope_parameters"]["rope_theta"] = json!(12345.0)
    });
    let rope = load(rope.path(), &on).unwrap().model;
    saved.refused(&rope, saved.config, &["ropes.0 = ", "channels", "another rope"]);
    // Another sliding window.
    let window = crate::common::with_config("llama-tiny", |config| {
        config["model_type"] = json!("mistral");
        config["sliding_window"] = json!(20);
    });
    let window = load(window.path(), &on).unwrap().model;
    saved.refused(&window, saved.config, &["layers.0.sliding_window = none", "this model has 20;"]);

    // Other caches.
    for name in
        ["float", "k4v4-g16-r16-s3", "k4v2-g16-r16", "k4v2-g16-r16-s3-f16", "k4v2-g16-r32-s3"]
    {
        let asked = format!("{name} is requested; use the same --cache");
        let parts = &["layers.0.cache = k4v2-g16-r16-s3: ", &asked];
        saved.refused(&saved.model, config(name, 48), parts);
    }
    let mixed = kv_models::ModelCacheConfig::from(saved.config).with_float_layers([1]);
    let opened = SavedCache::open(saved.path()).unwrap();
    let error = opened.restore(&saved.model, mixed, &on).unwrap_err().to_string();
    assert_contains(&error, &["layers.1.cache = k4v2-g16-r16-s3: float is requested"]);
}

/// A field that changes what a model computes, but neither its weights nor its caches.
#[test]
fn other_configurations_of_the_same_weights_are_named() {
    let on = device();
    let cases = [
        ("deepseek_v3-tiny", "rope_interleave", json!(false)),
        ("deepseek_v3-tiny", "rms_norm_eps", json!(1e-3)),
        ("deepseek_v3-tiny", "num_experts_per_tok", json!(1)),
        ("deepseek_v3-tiny", "n_group", json!(4)),
        ("deepseek_v3-tiny", "topk_group", json!(2)),
        ("deepseek_v3-tiny", "routed_scaling_factor", json!(1.0)),
        ("deepseek_v3-tiny", "norm_topk_prob", json!(false)),
        ("qwen3_5-tiny", "rms_norm_eps", json!(0.01)),
        ("gemma4-tiny", "final_logit_softcapping", json!(5.0)),
        ("gpt-oss-tiny", "swiglu_limit", json!(3.0)),
    ];
    for (name, field, value) in cases {
        let saved = Saved::new(name);
        let change = |value| crate::common::with_config(name, |config| config[field] = value);
        let other = load(change(value.clone()).path(), &on).unwrap().model;
        let (field, rule) = (format!("model.{field} = "), format!("this model has {value}"));
        saved.refused(&other, saved.config, &[&field, &rule, "belongs to the-maker"]);
    }
    // The longest context changes nothing else, and GGUF files have numbers in f32.
    let saved = Saved::new("llama-tiny");
    let same = crate::common::with_config("llama-tiny", |config| {
        config["max_position_embeddings"] = json!(400);
        let epsilon = config["rms_norm_eps"].as_f64().unwrap();
        config["rms_norm_eps"] = json!(f64::from(epsilon as f32));
    });
    let same = load(same.path(), &on).unwrap().model;
    let opened = SavedCache::open(saved.path()).unwrap();
    assert!(opened.restore(&same, saved.config, &on).is_ok());
}

/// Longrope has two sets of frequencies; the capacity selects one.
#[test]
fn a_capacity_that_changes_rope_is_refused() {
    let on = device();
    let model = load(tiny("phi4-tiny"), &on).unwrap().model;
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prefix.safetensors");
    let text = text(10, 8);
    let mut cache = model.new_cache(config("float", 16), 1, &on).unwrap();
    pass(&model, &mut cache, &text, &on);
    cache.save(&path, &model, "phi", &[&text]).unwrap();
    let saved = SavedCache::open(&path).unwrap();
    assert!(saved.restore(&model, config("float", 20), &on).is_ok());
    let longest = model.max_positions();
    let error = saved.restore(&model, config("float", longest), &on).unwrap_err().to_string();
    assert_contains(&error, &["ropes.0", &format!("at capacity {longest};")]);
}

#[test]
fn packed_and_restored_weights_are_distinguished() {
    let on = device();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    let kind = crate::common::GgmlType::Q4_0;
    crate::common::write_gguf(&tiny("llama-tiny"), &file, kind, &[]);
    let packed = |activations| {
        let options = LoadOptions::default().with_packed(Some(activations));
        load_with(&file, &on, options).unwrap().model
    };
    let model = packed(Activations::Int8);
    let (text, config) = (text(12, 7), config("float", 32));
    let mut cache = model.new_cache(config, 1, &on).unwrap();
    pass(&model, &mut cache, &text, &on);
    let path = scratch.path().join("prefix");
    cache.save(&path, &model, "packed", &[&text]).unwrap();
    let saved = SavedCache::open(&path).unwrap();
    assert!(saved.restore(&packed(Activations::Int8), config, &on).is_ok());
    let restored = load(&file, &on).unwrap().model;
    let error = saved.restore(&restored, config, &on).unwrap_err().to_string();
    assert_contains(&error, &["weights = packed", "this model has f32 weights", "--weights"]);
}

#[test]
fn a_prompt_that_does_not_begin_with_the_tokens_is_refused_where_it_differs() {
    let saved = Saved::new("llama-tiny");
    let opened = SavedCache::open(saved.path()).unwrap();
    let mut prompt = [&saved.text[..], &[1, 2]].concat();
    assert_eq!(opened.check_prompt(0, &prompt).unwrap(), 30);
    for n in [0, 10, 30] {
        let error = opened.check_prompt(0, &prompt[..n]).unwrap_err().to_string();
        assert_contains(&error, &["tokens = 30", &format!("the prompt has {n} ")]);
    }
    let held = saved.text[17];
    for asked in [held + 1, held.wrapping_sub(1)] {
        prompt[17] = asked;
        for prompt in [&prompt[..], &prompt[..18]] {
            let error = opened.check_prompt(0, prompt).unwrap_err().to_string();
            let difference = format!("at position 17: it has token {asked}, the cache {held}");
            assert_contains(&error, &[&difference]);
        }
    }
    assert!(opened.check_prompt(1, &prompt).unwrap_err().to_string().contains("below batch 1"));
}
