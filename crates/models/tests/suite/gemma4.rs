//! Gemma 4: the last layers share the caches of earlier ones. The golden tests compare its logits
//! with the transformers library's.

use std::{fs, path::Path};

use burn::tensor::{Int, Tensor};
use kv_models::{
    ConfigJson, LanguageModel, LayerSpec, LoadOptions, ModelCacheConfig, ModelSpec, SavedCache,
    ids_to_tensor,
    kv_cubecl::{CacheFloat, KvCacheConfig},
    load,
    nn::init::seeded,
    outline, random,
};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use serde_json::{Value as Json, json};

use crate::common::{
    GgmlType, assert_contains, device, expected, failure, max_difference, partitions, read_tensors,
    tiny, with_config, write_gguf, write_tensors,
};

const NAME: &str = "gemma4-tiny";
const LEN: usize = 160;

fn tiny_model(name: &str) -> LanguageModel {
    load(tiny(name), &device()).unwrap().model
}

/// The checkpoint whose keys are the values in layers that see all tokens.
const WIDE: &str = "gemma4-wide-tiny";

/// Returns a model with a sliding window that is longer than the residual of most caches.
fn with_longer_window(name: &str) -> LanguageModel {
    let folder = with_config(name, |c| c["sliding_window"] = json!(48));
    load(folder.path(), &device()).unwrap().model
}

fn logits(folder: &Path) -> Tensor<3> {
    let device = device();
    let model = load(folder, &device).unwrap().model;
    model.forward(expected(&tiny(NAME), &device).ids, KvCacheConfig::float()).unwrap()
}

fn random_ids(rng: &mut Xoshiro256PlusPlus, batch: usize, len: usize) -> Tensor<2, Int> {
    let ids: Vec<u32> = (0..batch * len).map(|_| rng.random_range(0..256)).collect();
    ids_to_tensor(&ids, [batch, len], &device())
}

fn largest(x: &Tensor<3>) -> f32 {
    x.clone().abs().max().into_scalar::<f32>()
}

#[test]
fn partitions_equal_the_closed_form() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(41);
    for (name, cache, tolerance, n) in [
        (NAME, "float", 5e-5, 100),
        (NAME, "k4v4-g32-r32", 2e-3, 100),
        (WIDE, "float", 5e-5, 30),
        (WIDE, "k4v4-g16-r32-gflush", 1e-3, 30),
        (WIDE, "k3v3-g32-r32", 1e-3, 100),
    ] {
        let model = if cache == "float" { tiny_model(name) } else { with_longer_window(name) };
        let case = (cache, tolerance, n);
        partitions::partition_equals_the_closed_form(&model, name, case, &mut rng);
    }
}

/// A field that is read wrongly changes the logits by far more than the golden tests allow.
#[test]
fn every_field_counts() {
    let right = logits(&tiny(NAME));
    let largest = largest(&right);
    let changes: [fn(&mut Json); 6] = [
        |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(0.5),
        |c| c["rope_parameters"]["full_attention"]["factor"] = json!(8.0),
        |c| c["rope_parameters"]["full_attention"]["rope_theta"] = json!(100.0),
        |c| c["rope_parameters"]["sliding_attention"]["rope_theta"] = json!(100.0),
        |c| c["sliding_window"] = json!(8),
        |c| c["final_logit_softcapping"] = json!(0.5),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let folder = with_config(NAME, change);
        let worst = max_difference(logits(folder.path()), right.clone());
        assert!(worst > 0.002 * largest, "change {i}: {worst} of {largest}");
    }
}

/// Older files have the sizes of layers that see all tokens in fields of their own.
#[test]
fn older_fields_of_heads_are_read() {
    for (name, head_dim, kv_heads) in [(NAME, 64, Json::Null), (WIDE, 64, json!(1))] {
        let folder = with_config(name, |c| {
            c.as_object_mut().unwrap().remove("per_layer_config");
            c["global_head_dim"] = json!(head_dim);
            c["num_global_key_value_heads"] = kv_heads;
        });
        let spec = load(folder.path(), &device()).unwrap().model.spec().clone();
        assert_eq!(spec, *load(tiny(name), &device()).unwrap().model.spec());
    }
}

/// Returns a folder with the tensors and the configuration of a checkpoint with images, and with
/// the keys and values of layers that share a cache, which published checkpoints contain.
fn with_images() -> tempfile::TempDir {
    let folder = with_config(NAME, |config| {
        let mut text = config.clone();
        text.as_object_mut().unwrap().remove("tie_word_embeddings");
        *config = json!({
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": text,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": true,
        });
    });
    let mut tensors = read_tensors(&tiny(NAME).join("model.safetensors"));
    for (name, _, _) in &mut tensors {
        *name = name.replacen("model.", "model.language_model.", 1);
    }
    for name in ["model.vision_tower.encoder.layers.0.mlp.weight", "model.embed_audio.weight"] {
        tensors.push((name.into(), vec![2, 2], vec![0.5; 4]));
    }
    for (part, shape) in [("k_proj", vec![32, 64]), ("v_proj", vec![32, 64]), ("k_norm", vec![32])]
    {
        let name = format!("model.language_model.layers.4.self_attn.{part}.weight");
        let numbers = vec![0.5; shape.iter().product()];
        tensors.push((name, shape, numbers));
    }
    write_tensors(&folder.path().join("model.safetensors"), tensors);
    folder
}

#[test]
fn the_text_part_of_a_checkpoint_with_images_loads() {
    let folder = with_images();
    let loaded = load(folder.path(), &device()).unwrap();
    let notes = loaded.notes.join("\n");
    for part in [
        "not read: 1 tensor vision_tower.* (the image encoder)",
        "1 tensor embed_audio.* (the audio encoder)",
        "not read: 3 tensors of keys and values in layers that share a cache",
    ] {
        assert!(notes.contains(part), "{notes} lacks {part}");
    }
    let worst = max_difference(logits(folder.path()), logits(&tiny(NAME)));
    assert!(worst == 0.0, "{worst}");
}

/// Layers 4 and 5 share the caches of layers 3 and 2: no bytes are allocated, planned or saved for
/// them.
#[test]
fn shared_caches_are_allocated_planned_and_saved_once() {
    let (model, device) = (tiny_model(NAME), device());
    let (spec, tokens, batch) = (model.spec(), 96, 3);
    let owners: Vec<Option<usize>> = spec.layers.iter().map(|layer| layer.shared).collect();
    assert_eq!(owners, [None, None, None, None, Some(3), Some(2)]);
    let config: KvCacheConfig = "k4v4-g16-r16".parse().unwrap();
    let config = config.with_capacity(tokens);
    let cache = model.new_cache(config, batch, &device).unwrap();
    let bytes = cache.memory_bytes();
    assert_eq!((bytes.layers.len(), cache.layers().len()), (6, 4));
    assert_eq!([4, 5].map(|i: usize| bytes.layers[i].total()), [0, 0]);
    let policy = ModelCacheConfig::from(config);
    for (i, layer) in spec.layers.iter().enumerate() {
        let planned = layer.cache_bytes(&policy.layer(spec, i), batch).unwrap();
        assert_eq!(planned, bytes.layers[i], "layer {i}");
    }
    // One key head of 64 channels in f32, and of 32 channels in a sliding window of 24 tokens.
    let float = model.new_cache(KvCacheConfig::float().with_capacity(tokens), 1, &device).unwrap();
    let floats: Vec<usize> = float.memory_bytes().layers.iter().map(|it| it.floats).collect();
    let (full, sliding) = (tokens * 2 * 64 * 4, 24 * 2 * 32 * 4);
    assert_eq!(floats, [sliding, sliding, full, sliding, 0, 0]);
    // A decode step reads a cache once for each layer that attends to it.
    let read: usize = float.layers().iter().map(|layer| layer.bytes_read(tokens)).sum();
    let again = [3, 2].map(|i: usize| float.layers()[i].bytes_read(tokens));
    assert_eq!(float.bytes_read(tokens), read + again.iter().sum::<usize>());

    let ids: Vec<u32> = (0..40).collect();
    let mut cache = model.new_cache(config, 1, &device).unwrap();
    model.step(ids_to_tensor(&ids, [1, 40], &device), &mut cache).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("saved.safetensors");
    cache.save(&file, &model, NAME, &[&ids]).unwrap();
    let bytes = fs::read(&file).unwrap();
    let saved = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let layers = saved.names().into_iter().filter_map(|name| name.strip_prefix("layers."));
    let numbers: std::collections::BTreeSet<_> =
        layers.filter_map(|name| name.split('.').next()?.parse::<usize>().ok()).collect();
    assert_eq!(numbers.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    let mut restored = SavedCache::open(&file).unwrap().restore(&model, config, &device).unwrap();
    let next = || ids_to_tensor(&[7], [1, 1], &device);
    let expected = model.step(next(), &mut cache).unwrap().into_data();
    assert_eq!(model.step(next(), &mut restored).unwrap().into_data(), expected);
}

/// A rule names layers that own a cache; layers that share it have the owner's.
#[test]
fn policies_are_for_layers_with_a_cache_of_their_own() {
    let model = tiny_model(NAME);
    let policy = |text: &str| ModelCacheConfig::from_toml(text).unwrap();
    let of = |layers: &str| {
        let all = "[[rules]]\ncache = \"k4v4-g16-r16\"\n";
        policy(&format!("{all}[[rules]]\nlayers = \"{layers}\"\ncache = \"k2v2-g16-r16\""))
    };
    let error = of("4..6").validate(&model).unwrap_err();
    assert_contains(&error.to_string(), &["rules[1]", "4..6", "share the cache"]);
    let mixed = of("3..6");
    mixed.validate(&model).unwrap();
    let name = |i| mixed.layer(model.spec(), i).with_sliding_window(None).to_string();
    assert_eq!(
        [2, 3, 4, 5].map(name),
        ["k4v4-g16-r16", "k2v2-g16-r16", "k2v2-g16-r16", "k4v4-g16-r16"]
    );
    let shown = mixed.in_full(model.spec()).unwrap();
    assert_contains(
        &shown,
        &[
            "layers 0..3 k4v4-g16-r16",
            "layer 3 k2v2-g16-r16",
            "layer 4 shared with layer 3",
            "layer 5 shared",
        ],
    );
    assert_eq!(mixed.caches(model.spec()).count(), 4);
    // A rule for kinds of attention reaches the owners and so the others.
    let global = policy("[[rules]]\nattention = \"global\"\ncache = \"k4v4-g16-r16\"");
    let quantized = |i| global.layer(model.spec(), i).is_quantized();
    assert_eq!([1, 2, 3, 4, 5].map(quantized), [false, true, false, false, true]);
}

/// Sequences that are forked, cut back and continued with different numbers of tokens equal
/// sequences of their own.
#[test]
fn forks_and_ragged_calls_equal_single_sequences() {
    let (model, device) = (with_longer_window(WIDE), device());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(43);
    for name in ["float", "k4v4-g32-r32", "k3v3-g32-r32"] {
        let config: KvCacheConfig = name.parse().unwrap();
        let config = config.with_capacity(LEN);
        let ids = random_ids(&mut rng, 1, LEN);
        let mut cache = model.new_cache(config, 3, &device).unwrap();
        let mut alone = model.new_cache(config, 1, &device).unwrap();
        model.step(ids.clone().narrow(1, 0, 60), &mut alone).unwrap();
        cache.admit(0, &alone).unwrap();
        cache.fork(0, 2).unwrap();
        let mut singles = [(); 3].map(|()| alone.clone());
        singles[1].reset();
        for tokens in [[1, 0, 1], [20, 33, 1], [3, 2, 0], [1, 1, 1], [9, 0, 40]] {
            let most = tokens.iter().max().copied().unwrap();
            let part = |i: usize| ids.clone().narrow(1, singles[i].len(), most);
            let all = Tensor::cat((0..3).map(part).collect(), 0);
            let logits = model.step_ragged(all.clone(), &tokens, &mut cache).unwrap();
            for (i, &n) in tokens.iter().enumerate().filter(|(_, n)| **n > 0) {
                let own = all.clone().narrow(0, i, 1).narrow(1, 0, n);
                let expected = model.step(own, &mut singles[i]).unwrap();
                let found = logits.clone().narrow(0, i, 1).narrow(1, 0, n);
                let off = (found - expected.clone()).abs();
                let off = if name == "float" { off.max() } else { off.mean() };
                let off = off.into_scalar::<f32>();
                assert!(off < 2e-3 * largest(&expected), "{name}, {tokens:?}, {i}: {off}");
            }
            assert_eq!(cache.lens(), singles.each_ref().map(|it| it.len()));
        }
    }
}

/// Files keep what `config.json` has, and GGUF files of both checkpoints have it, too.
#[test]
fn gguf_files_have_the_same_layers() {
    let folder = tempfile::tempdir().unwrap();
    for name in [NAME, WIDE] {
        let file = folder.path().join("tiny.gguf");
        write_gguf(&tiny(name), &file, GgmlType::F32, &[]);
        let (file, own) = (load(&file, &device()).unwrap(), load(tiny(name), &device()).unwrap());
        assert_eq!(file.model.spec(), own.model.spec(), "{name}");
        assert_eq!(file.notes, Vec::<String>::new());
    }
}

/// A layer shares the cache of an earlier one that owns a cache of the same form.
#[test]
fn a_spec_names_owners_that_have_a_cache() {
    let layer = LayerSpec::new(4, 1, 32);
    let wider = LayerSpec::new(4, 2, 32).sharing_cache_of(0);
    for (layers, owner) in [
        (vec![layer.sharing_cache_of(0), layer], "0 of layer 0"),
        (vec![layer, layer.sharing_cache_of(2), layer], "2 of layer 1"),
        (vec![layer, layer.sharing_cache_of(0), layer.sharing_cache_of(1)], "1 of layer 2"),
        (vec![layer, layer.sharing_cache_of(9)], "9 of layer 1"),
        (vec![layer, wider], "0 of layer 1"),
    ] {
        let spec = ModelSpec::new(256, 64, 512, layers);
        let error = ModelCacheConfig::from(KvCacheConfig::float()).validate(&spec).unwrap_err();
        let error = error.to_string();
        assert_contains(&error, &["shared", owner, "an earlier layer with a cache of its own"]);
        assert!(!error.contains('\n'), "{error}");
    }
}

/// The sizes of Gemma 4 E2B: 15 of 35 layers own a cache, and 3 of them see all tokens.
#[test]
fn the_plan_of_gemma_4_e2b_is_the_arithmetic_of_its_sizes() {
    let kinds: Vec<&str> =
        (0..35).map(|i| if i % 5 == 4 { "full_attention" } else { "sliding_attention" }).collect();
    let config = json!({
        "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 1536,
        "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "max_position_embeddings": 131_072, "num_kv_shared_layers": 20, "sliding_window": 512,
        "layer_types": kinds, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144, "use_double_wide_mlp": true,
        "final_logit_softcapping": 30.0, "dtype": "float32",
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let plan = outline(folder.path(), &device(), LoadOptions::default()).unwrap();
    let spec = &plan.spec;
    assert_eq!(spec.owners().count(), 15);
    // The table of inputs is looked up, as the embedding.
    let (rows, inputs) = (262_144, 35 * 256);
    let row = 4 * (inputs + 1536);
    assert_eq!(plan.weights.looked_up, (4 * rows * inputs, row));
    let read = plan.weights.total() - 4 * rows * inputs + row;
    assert_eq!(plan.weights.bytes_per_token(), read);
    assert_eq!(plan.weights.widest, 2 * 6144);
    let tokens = 32_768;
    let f16 = KvCacheConfig::float().with_float(CacheFloat::F16).with_capacity(tokens);
    let policy = ModelCacheConfig::from(f16);
    let bytes = |i: usize| spec.layers[i].cache_bytes(&policy.layer(spec, i), 1).unwrap().floats;
    // Keys and values in 2 bytes.
    let total: usize = (0..35).map(bytes).sum();
    assert_eq!(total, 3 * tokens * 2 * 512 * 2 + 12 * 512 * 2 * 256 * 2);
}

#[test]
fn wrong_configurations_name_field_value_and_rule() {
    type Change = fn(&mut Json);
    let cases: [(Change, &[&str]); 14] = [
        (
            |c| c["num_kv_shared_layers"] = json!(6),
            &["num_kv_shared_layers = 6", "below num_hidden_layers 6", "own the caches"],
        ),
        (
            |c| c["num_kv_shared_layers"] = json!(7),
            &["num_kv_shared_layers = 7", "below num_hidden_layers 6"],
        ),
        (
            |c| c["num_kv_shared_layers"] = json!(4),
            &["num_kv_shared_layers = 4", "layer 2 has full_attention", "lower the number"],
        ),
        (
            |c| c["layer_types"][3] = json!("chunked_attention"),
            &["unsupported attention chunked_attention", "full_attention and sliding_attention"],
        ),
        (
            |c| c["layer_types"][5] = json!("sliding_attention"),
            &["last of layer_types = sliding_attention", "must be full_attention"],
        ),
        (|c| c["enable_moe_block"] = json!(true), &["enable_moe_block = true", "must be false"]),
        (
            |c| c["per_layer_config"]["5"]["head_dim"] = json!(32),
            &["unsupported per_layer_config", "layer 5 head_dim 32", "must be alike"],
        ),
        (
            |c| c["per_layer_config"]["1"] = json!({"hidden_activation": "relu"}),
            &["per_layer_config.1.hidden_activation = \"relu\"", "must be head_dim or"],
        ),
        (
            |c| c["per_layer_config"]["6"] = json!({"head_dim": 64}),
            &["key of per_layer_config = 6", "from 0 to 5"],
        ),
        (
            |c| c["per_layer_config"]["x"] = json!({"head_dim": 64}),
            &["key of per_layer_config = x", "the number of a layer"],
        ),
        (
            |c| c["global_head_dim"] = json!(128),
            &["global_head_dim = 128", "per_layer_config has head_dim 64"],
        ),
        (
            |c| c["vocab_size_per_layer_input"] = json!(128),
            &["vocab_size_per_layer_input = 128", "must be 256"],
        ),
        (
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(1.5),
            &["partial_rotary_factor = 1.5", "from 0 to 1"],
        ),
        (
            |c| c["final_logit_softcapping"] = json!(0.0),
            &["final_logit_softcapping = 0", "above 0"],
        ),
    ];
    for (change, parts) in cases {
        let folder = with_config(NAME, change);
        let message = failure(folder.path());
        assert_contains(&message, parts);
        assert!(!message.contains('\n'), "{message}");
    }
}

/// Larger published models have no inputs of layers and share no caches.
#[test]
fn models_without_inputs_of_layers_stream() {
    let text = json!({
        "model_type": "gemma4_text", "vocab_size": 256, "hidden_size": 64, "head_dim": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "global_head_dim": 64, "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": true, "sliding_window": 16, "max_position_embeddings": 128,
        "hidden_size_per_layer_input": null,
    })
    .to_string();
    let config = ConfigJson { text: &text, path: "config.json".as_ref() };
    let device = device();
    let model = seeded(&device, 5, || random(&config, &device)).unwrap();
    assert_eq!((model.spec().per_layer_inputs, model.spec().owners().count()), (0, 3));
    let ids: Vec<u32> = (0..60).map(|i| i * 5 % 256).collect();
    let float = KvCacheConfig::float().with_capacity(60);
    let worst = model.streaming_difference(&ids, float, &device).unwrap();
    assert!(worst < 1e-3, "{worst}");
}
