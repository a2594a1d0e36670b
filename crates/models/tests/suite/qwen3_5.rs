//! Qwen3.5: layers of the gated delta rule have a state instead of a cache. The golden tests
//! compare its logits with the transformers library's.

use std::{fs, path::Path};

use burn::tensor::Tensor;
use kv_models::{
    LoadOptions, ModelCache, ModelCacheConfig, ModelSpec, SaveOptions, SavedCache, ids_to_tensor,
    kv_cubecl::{CacheFloat, KvCacheConfig},
    load, outline, save,
};
use serde_json::{Value as Json, json};

use crate::{
    common::{
        GgmlType, GgufTensor, Value, assert_contains, device, expected, gguf_parts, max_difference,
        partitions, read_tensors, tiny, with_config, write_gguf_file, write_tensors,
    },
    save::words,
};

const NAME: &str = "qwen3_5-tiny";

fn logits(folder: &Path) -> Tensor<3> {
    let device = device();
    let model = load(folder, &device).unwrap().model;
    model.forward(expected(&tiny(NAME), &device).ids, KvCacheConfig::float()).unwrap()
}

/// A field that is read wrongly changes the logits by far more than the golden tests allow.
#[test]
fn every_field_counts() {
    let right = logits(&tiny(NAME));
    let largest = right.clone().abs().max().into_scalar::<f32>();
    let changes: [fn(&mut Json); 3] = [
        |c| {
            c["rope_parameters"]["partial_rotary_factor"] = json!(0.5);
            c["rope_parameters"]["mrope_section"] = json!([4, 2, 2]);
        },
        |c| c["rope_parameters"]["rope_theta"] = json!(100.0),
        |c| c["rms_norm_eps"] = json!(0.1),
    ];
    for change in changes {
        let folder = with_config(NAME, change);
        let worst = max_difference(logits(folder.path()), right.clone());
        assert!(worst > 0.002 * largest, "{worst} of {largest}");
    }
}

/// Like transformers, whose attention of this family has no sliding window.
#[test]
fn a_sliding_window_is_ignored_and_noted() {
    let folder = with_config(NAME, |c| c["sliding_window"] = json!(16));
    let notes = load(folder.path(), &device()).unwrap().notes.join("\n");
    assert_contains(&notes, &["config.json: sliding_window 16 is ignored"]);
    assert!(max_difference(logits(folder.path()), logits(&tiny(NAME))) == 0.0);
}

#[test]
fn sections_that_do_not_fill_the_rope_are_refused() {
    for sections in [json!([2, 1, 2]), json!([2, 2]), json!([u64::MAX, 4, 1])] {
        let folder = with_config(NAME, |c| c["rope_parameters"]["mrope_section"] = sections);
        let message = load(folder.path(), &device()).unwrap_err().to_string();
        assert_contains(&message, &["mrope_section = [", "3 numbers with the sum 4"]);
    }
}

/// Returns a folder with the tensors and the configuration of a checkpoint with images.
fn with_images() -> tempfile::TempDir {
    let folder = with_config(NAME, |config| {
        let mut text = config.clone();
        text["tie_word_embeddings"] = Json::Null;
        text.as_object_mut().unwrap().remove("tie_word_embeddings");
        *config = json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": true,
        });
    });
    let mut tensors = read_tensors(&tiny(NAME).join("model.safetensors"));
    for (name, _, _) in &mut tensors {
        *name = name.replacen("model.", "model.language_model.", 1);
    }
    for name in ["model.visual.blocks.0.attn.proj.weight", "mtp.fc.weight"] {
        tensors.push((name.into(), vec![2, 2], vec![0.5; 4]));
    }
    write_tensors(&folder.path().join("model.safetensors"), tensors);
    folder
}

#[test]
fn the_text_part_of_a_checkpoint_with_images_loads() {
    let folder = with_images();
    let loaded = load(folder.path(), &device()).unwrap();
    let notes = loaded.notes.join("\n");
    for part in ["not read: 1 tensor visual.* (the image encoder)", "1 tensor mtp.*"] {
        assert!(notes.contains(part), "{notes} lacks {part}");
    }
    let worst = max_difference(logits(folder.path()), logits(&tiny(NAME)));
    assert!(worst == 0.0, "{worst}");
}

#[test]
fn partitions_equal_the_closed_form() {
    let cases = [("float", 5e-5, 60), ("k4v4-g32-r32", 2e-3, 20), ("k3v3-g32-r32", 2e-3, 20)];
    partitions::partitions_equal_the_closed_form(NAME, &cases);
}

/// Recurrent layers take no part in a policy.
#[test]
fn policies_are_for_layers_with_a_cache() {
    let device = device();
    let model = load(tiny(NAME), &device).unwrap().model;
    let policy = |text: &str| ModelCacheConfig::from_toml(text).unwrap();
    let only_recurrent =
        policy("[[rules]]\ncache = \"k4v4\"\n[[rules]]\nlayers = \"0..3\"\ncache = \"k2v2\"");
    let error = only_recurrent.validate(&model).unwrap_err();
    assert_contains(&error.to_string(), &["rules[1]", "0..3", "recurrent", "state"]);
    policy("[[rules]]\nlayers = \"2..4\"\ncache = \"k4v4-g16\"").validate(&model).unwrap();
    // Only the type bf16 applies to a recurrent layer, too.
    for (name, float) in [
        ("k4v4-g16-r32", CacheFloat::F32),
        ("k4v4-g16-r32-f16", CacheFloat::F32),
        ("k4v4-g16-r32-bf16", CacheFloat::Bf16),
    ] {
        let config = name.parse::<KvCacheConfig>().unwrap().with_capacity(64);
        let cache = model.new_cache(config, 2, &device).unwrap();
        let state = cache.layers()[0].delta().unwrap();
        assert_eq!(state.config().float, float);
        // 4 heads of 16 x 16, and the inputs of 3 tokens in 128 channels, which are f32.
        assert_eq!(state.memory_bytes(), 2 * (4 * 16 * 16 * float.size() + 3 * 128 * 4));
        let planned = model.spec().layers[0].cache_bytes(&config, 2).unwrap();
        assert_eq!(planned.floats, state.memory_bytes());
        assert!(cache.layers()[3].kv().is_some());
    }
    // A cache for all layers fits a model without any layer that has one.
    let recurrent = ModelSpec::new(256, 64, 512, vec![model.spec().layers[0]; 2]);
    let four_bits = ModelCacheConfig::from("k4v4".parse::<KvCacheConfig>().unwrap());
    four_bits.validate(&recurrent).unwrap();
    assert!(!four_bits.is_quantized(&recurrent));
}

/// Value heads of GGUF files are in another order, which a saved folder cannot express. Files can
/// contain further layers that predict several tokens at once.
#[test]
fn gguf_files_have_value_heads_in_another_order() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    let (mut metadata, mut tensors) = gguf_parts(&tiny(NAME), GgmlType::F32, &[]);
    metadata.retain(|(key, _)| key != "qwen35.block_count");
    metadata.push(("qwen35.block_count".into(), Value::U32(5)));
    metadata.push(("qwen35.nextn_predict_layers".into(), Value::U32(1)));
    for name in ["blk.4.attn_norm.weight", "blk.4.nextn.enorm.weight"] {
        tensors.push(GgufTensor::new(name.into(), &[64], &[1.0; 64], GgmlType::F32));
    }
    write_gguf_file(&file, &metadata, &tensors);
    let loaded = load(&file, &device).unwrap();
    assert_contains(
        &loaded.notes.join("\n"),
        &["not read: 2 tensors layers.4.*", "several tokens"],
    );
    let worst = max_difference(logits(&file), logits(&tiny(NAME)));
    assert!(worst < 1e-4, "{worst}");
    let saved = folder.path().join("saved");
    let error = save(&saved, &loaded.model, &words(), SaveOptions::default()).unwrap_err();
    assert_contains(&error.to_string(), &["value heads", "GGUF", "Hugging Face folder"]);
    assert!(!saved.exists());
}

/// A state in bf16 is close to one in f32, and a saved cache contains all of it.
#[test]
fn states_in_bf16_are_used_and_saved() {
    let device = device();
    let model = load(tiny(NAME), &device).unwrap().model;
    let tokens: Vec<u32> = (3..23).collect();
    let cache = |float: CacheFloat| KvCacheConfig::float().with_float(float).with_capacity(64);
    let step = |cache: &mut ModelCache, token| {
        model.step(ids_to_tensor(&[token], [1, 1], &device), cache).unwrap()
    };
    let filled = |float| {
        let mut filled = model.new_cache(cache(float), 1, &device).unwrap();
        for &token in &tokens {
            step(&mut filled, token);
        }
        filled
    };
    let exact = step(&mut filled(CacheFloat::F32), 23);
    let mut in_bf16 = filled(CacheFloat::Bf16);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    in_bf16.save(&path, &model, NAME, &[&tokens]).unwrap();
    let rounded = step(&mut in_bf16, 23);
    // Each step rounds the state by up to 2^-9, and decay lets older errors fade.
    let largest = exact.clone().abs().max().into_scalar::<f32>();
    let worst = max_difference(exact, rounded.clone());
    assert!(worst > 0.0 && worst < 2e-2 * largest, "{worst} of {largest}");
    let saved = SavedCache::open(&path).unwrap();
    let mut restored = saved.restore(&model, cache(CacheFloat::Bf16), &device).unwrap();
    assert_eq!(step(&mut restored, 23).into_data(), rounded.into_data());
    let error = saved.restore(&model, cache(CacheFloat::F32), &device).unwrap_err();
    assert_contains(&error.to_string(), &["layers.0.state", "bf16", "f32"]);
}

/// A state contains no earlier one, so a sequence is cut back only to the whole or to nothing.
#[test]
fn sequences_are_not_cut_back() {
    let device = device();
    let model = load(tiny(NAME), &device).unwrap().model;
    let config = KvCacheConfig::float().with_capacity(64);
    let ids = |first: u32| {
        let ids: Vec<u32> = (first..first + 20).collect();
        ids_to_tensor(&ids, [1, 20], &device)
    };
    let mut cache = model.new_cache(config, 1, &device).unwrap();
    model.step(ids(3), &mut cache).unwrap();
    let error = cache.truncate(0, 7).unwrap_err().to_string();
    assert_contains(&error, &["len", "7", "0 or 20", "checkpoint"]);
    assert_eq!((cache.len(), cache.shortest(0).unwrap()), (20, 20));
    assert_eq!(cache.exact(0, 19).unwrap(), 0);
    cache.truncate(0, 20).unwrap();
    cache.truncate(0, 0).unwrap();
    let again = model.step(ids(9), &mut cache).unwrap();
    let mut fresh = model.new_cache(config, 1, &device).unwrap();
    let new = model.step(ids(9), &mut fresh).unwrap();
    assert_eq!(again.to_data(), new.to_data());
}

/// The published sizes of Qwen3.5-27B: 16 layers of attention with 4 key heads of 256 channels, and
/// 48 layers with states of 48 heads.
#[test]
fn the_plan_of_qwen3_5_27b_is_the_published_arithmetic() {
    let config = json!({
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 5120,
        "intermediate_size": 17_408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
            "partial_rotary_factor": 0.25, "mrope_interleaved": true,
            "mrope_section": [11, 11, 10]},
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let plan = outline(folder.path(), &device(), LoadOptions::default()).unwrap();
    let spec = &plan.spec;
    let attention: Vec<usize> = (0..64).filter(|&i| spec.layers[i].has_cache()).collect();
    assert_eq!(attention, (0..16).map(|i| 4 * i + 3).collect::<Vec<_>>());
    let tokens = 32_768;
    let f16 = KvCacheConfig::float().with_float(CacheFloat::F16).with_capacity(tokens);
    // Keys and values that are not quantized still have a few bytes of words.
    let bytes = |i: usize| spec.layers[i].cache_bytes(&f16, 1).unwrap().floats;
    // Keys and values of 4 heads of 256 channels in 2 bytes.
    assert_eq!(bytes(3), tokens * 2 * 4 * 256 * 2);
    // 48 matrices of 128 x 128, and 3 inputs of 2 * 16 * 128 + 48 * 128 channels, in 4 bytes.
    let state = 48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 4;
    assert_eq!(bytes(0), state);
    let total: usize = (0..64).map(bytes).sum();
    assert_eq!(total, 16 * tokens * 4096 + 48 * state);
}
