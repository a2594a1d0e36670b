//! DeepSeek-V3: all heads attend to one latent row per token. The golden tests compare its logits
//! with the transformers library's.

use std::{fs, path::Path};

use burn::{module::Param, tensor::Tensor};
use kv_models::{
    ConfigJson, LanguageModel, LoadOptions, Loaded, QuantizeOptions, SaveOptions,
    deepseek_v3::{Config, DeepseekV3},
    kv_cubecl::{CacheFloat, KvCacheConfig},
    kv_weights::{Activations, GroupSize, WeightFormat},
    load, load_with, outline, random, save, save_quantized,
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value as Json, json};

use crate::{
    common::{
        GgmlType, GgufTensor, Value, assert_contains, device, expected, failure, gguf_parts,
        max_difference,
        minifloat::{e4m3, nearest},
        partitions, read_tensors, tiny, with_config, with_tensors, write_gguf, write_gguf_file,
    },
    save::words,
};

const NAME: &str = "deepseek_v3-tiny";

/// A change to a configuration.
type Change = fn(&mut Json);

fn logits(path: &Path) -> Tensor<3> {
    let device = device();
    let model = load(path, &device).unwrap().model;
    model.forward(expected(&tiny(NAME), &device).ids, KvCacheConfig::float()).unwrap()
}

/// A field that is read wrongly changes the logits by far more than the golden tests allow.
#[test]
fn every_field_counts() {
    let right = logits(&tiny(NAME));
    let largest = right.clone().abs().max().into_scalar::<f32>();
    let changes: [(&str, Change); 10] = [
        ("topk_group", |c| c["topk_group"] = json!(2)),
        ("n_group", |c| c["n_group"] = json!(4)),
        ("num_experts_per_tok", |c| c["num_experts_per_tok"] = json!(3)),
        ("norm_topk_prob", |c| c["norm_topk_prob"] = json!(false)),
        ("routed_scaling_factor", |c| c["routed_scaling_factor"] = json!(1.0)),
        ("rope_interleave", |c| c["rope_interleave"] = json!(false)),
        ("rope_theta", |c| c["rope_parameters"]["rope_theta"] = json!(100.0)),
        ("mscale", |c| c["rope_parameters"]["mscale"] = json!(2.0)),
        ("mscale_all_dim", |c| {
            c["rope_parameters"]["mscale_all_dim"] = json!(2.0);
            c["rope_parameters"]["mscale"] = json!(2.0);
        }),
        ("factor", |c| c["rope_parameters"]["factor"] = json!(2.0)),
    ];
    for (field, change) in changes {
        let folder = with_config(NAME, change);
        let worst = max_difference(logits(folder.path()), right.clone());
        assert!(worst > 0.002 * largest, "{field}: {worst} of {largest}");
    }
}

#[test]
fn partitions_equal_the_closed_form() {
    let cases = [("float", 5e-5, 100), ("k4v4-g32-r32", 2e-3, 20), ("k3v3-g32-r32", 2e-3, 20)];
    partitions::partitions_equal_the_closed_form(NAME, &cases);
}

/// With the rows of rope in the order of halves, rope rotates halves.
#[test]
fn rope_rotates_neighbors_or_halves() {
    let (plain, rotary, rank) = (32, 16, 32);
    let halves = |values: &mut [f32], width: usize| {
        let rows: Vec<Vec<f32>> = values.chunks(width).map(<[f32]>::to_vec).collect();
        let order = (0..rotary).map(|i| 2 * i % rotary + 2 * i / rotary);
        for (to, from) in values.chunks_mut(width).zip(order) {
            to.copy_from_slice(&rows[from]);
        }
    };
    let folder = with_tensors(NAME, |tensors| {
        for (name, shape, values) in tensors {
            let width = shape.last().copied().unwrap();
            if name.contains("q_b_proj") {
                let heads = values.chunks_mut((plain + rotary) * width);
                heads.for_each(|head| halves(&mut head[plain * width..], width));
            }
            if name.contains("kv_a_proj") {
                halves(&mut values[rank * width..], width);
            }
        }
    });
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["rope_interleave"] = json!(false);
    fs::write(&path, config.to_string()).unwrap();
    let right = logits(&tiny(NAME));
    let largest = right.clone().abs().max().into_scalar::<f32>();
    let worst = max_difference(logits(folder.path()), right);
    assert!(worst < 1e-5 * largest, "{worst} of {largest}");
}

/// Layers that predict further tokens are not read.
#[test]
fn further_layers_are_noted() {
    let device = device();
    let folder = with_tensors(NAME, |tensors| {
        for name in ["model.layers.3.enorm.weight", "model.layers.3.input_layernorm.weight"] {
            tensors.push((name.into(), vec![64], vec![1.0; 64]));
        }
    });
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("tiny.gguf");
    let (mut metadata, mut tensors) = gguf_parts(&tiny(NAME), GgmlType::F32, &[]);
    metadata.retain(|(key, _)| key != "deepseek2.block_count");
    metadata.push(("deepseek2.block_count".into(), Value::U32(4)));
    metadata.push(("deepseek2.nextn_predict_layers".into(), Value::U32(1)));
    for name in ["blk.3.attn_norm.weight", "blk.3.nextn.enorm.weight"] {
        tensors.push(GgufTensor::new(name.into(), &[64], &[1.0; 64], GgmlType::F32));
    }
    write_gguf_file(&file, &metadata, &tensors);
    for path in [folder.path(), &file] {
        let loaded = load(path, &device).unwrap();
        let parts = ["not read: 2 tensors", "layers.3.*", "several tokens"];
        assert_contains(&loaded.notes.join("\n"), &parts);
        let worst = max_difference(logits(path), logits(&tiny(NAME)));
        assert!(worst < 1e-4, "{worst}");
    }
}

/// Files of 2024 have one tensor of keys and values, and the channels of heads in the keys that now
/// have those of the cache.
#[test]
fn older_gguf_files_are_read() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("tiny.gguf");
    let (mut metadata, mut tensors) = gguf_parts(&tiny(NAME), GgmlType::F32, &[]);
    let renewed = ["key_length", "value_length", "head_count_kv"];
    metadata.retain(|(key, _)| renewed.iter().all(|part| !key.contains(part)));
    for (key, value) in [("key_length", 48), ("value_length", 32), ("head_count_kv", 4)] {
        metadata.push((format!("deepseek2.attention.{key}"), Value::U32(value)));
    }
    let is_split = |name: &str| name.contains("attn_k_b") || name.contains("attn_v_b");
    tensors.retain(|tensor| !is_split(&tensor.name));
    for (name, shape, values) in read_tensors(&tiny(NAME).join("model.safetensors")) {
        if let Some(layer) = name.strip_suffix(".self_attn.kv_b_proj.weight") {
            let name = format!("{}.attn_kv_b.weight", layer.replace("model.layers", "blk"));
            tensors.push(GgufTensor::new(name, &shape, &values, GgmlType::F32));
        }
    }
    write_gguf_file(&file, &metadata, &tensors);
    let worst = max_difference(logits(&file), logits(&tiny(NAME)));
    assert!(worst < 1e-4, "{worst}");
}

/// A GGUF file becomes a folder with the tensors of the folder that it was made of.
#[test]
fn gguf_files_become_folders() {
    let scratch = tempfile::tempdir().unwrap();
    let (file, saved) = (scratch.path().join("tiny.gguf"), scratch.path().join("saved"));
    write_gguf(&tiny(NAME), &file, GgmlType::F32, &[]);
    let model = load(&file, &device()).unwrap().model;
    save(&saved, &model, &words(), SaveOptions::default()).unwrap();
    let tensors = |folder: &Path| {
        let mut tensors = read_tensors(&folder.join("model.safetensors"));
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    };
    assert!(tensors(&saved) == tensors(&tiny(NAME)));
    let config = |path: &Path| {
        let model = load(path, &device()).unwrap().model;
        let config = model.downcast_ref::<DeepseekV3>().unwrap().config().clone();
        // Only folders have the number of further layers, and GGUF files have f32.
        Config {
            num_nextn_predict_layers: 0,
            rms_norm_eps: config.rms_norm_eps as f32 as f64,
            ..config
        }
    };
    assert_eq!(config(&saved), config(&tiny(NAME)));
}

#[test]
fn wrong_configurations_name_field_value_and_rule() {
    let cases: [(Change, &[&str]); 19] = [
        (|c| c["topk_group"] = json!(3), &["topk_group = 3", "must be at most n_group 2"]),
        (|c| c["n_group"] = json!(3), &["n_group = 3", "must divide n_routed_experts 8"]),
        (|c| c["n_group"] = json!(0), &["n_group = 0", "must be between 1 and"]),
        (|c| c["n_group"] = json!(8), &["num_experts_per_tok = 2", "at most 1, the experts in"]),
        (
            |c| {
                c["n_group"] = json!(8);
                c["topk_group"] = json!(4);
            },
            &["n_group = 8", "must leave at least 2 of 8 experts per group"],
        ),
        (
            |c| c["num_experts_per_tok"] = json!(5),
            &["num_experts_per_tok = 5", "at most 4, the experts in", "raise topk_group"],
        ),
        (
            |c| c["num_experts_per_tok"] = json!(9),
            &["num_experts_per_tok = 9", "must be at most n_routed_experts 8"],
        ),
        (|c| c["kv_lora_rank"] = json!(0), &["kv_lora_rank = 0", "must be between 1 and"]),
        (|c| c["kv_lora_rank"] = json!(null), &["kv_lora_rank = missing", "the model needs it"]),
        (|c| c["kv_lora_rank"] = json!(16), &["kv_b_proj.weight", "[256, 32]", "[256, 16]"]),
        (
            |c| drop(c.as_object_mut().unwrap().remove("q_lora_rank")),
            &["q_lora_rank = missing", "set it to null for queries that are not compressed"],
        ),
        (|c| c["q_lora_rank"] = json!(0), &["q_lora_rank = 0", "must be between 1 and"]),
        (|c| c["q_lora_rank"] = json!(null), &["self_attn.q_proj.weight", "missing"]),
        (
            |c| {
                c["qk_rope_head_dim"] = json!(15);
                c["qk_head_dim"] = json!(null);
            },
            &["qk_rope_head_dim = 15", "must be even"],
        ),
        (
            |c| {
                c["qk_rope_head_dim"] = json!(1u32 << 31);
                c["qk_head_dim"] = json!(null);
            },
            &["channels with rope = 2147483648", "must be at most 65536"],
        ),
        (|c| c["qk_head_dim"] = json!(47), &["qk_head_dim = 47", "must be 48"]),
        (
            |c| c["scoring_func"] = json!("tanh"),
            &["scoring_func = \"tanh\"", "must be softmax or sigmoid"],
        ),
        (|c| c["attention_bias"] = json!(true), &["attention_bias = true", "must be false"]),
        (|c| c["num_key_value_heads"] = json!(2), &["num_key_value_heads = 2", "must be 4"]),
    ];
    for (change, parts) in cases {
        let folder = with_config(NAME, change);
        assert_contains(&failure(folder.path()), parts);
    }
}

#[test]
fn wrong_metadata_names_field_value_and_rule() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    let cases: [(&str, Value, &[&str]); 5] = [
        ("expert_gating_func", Value::U32(3), &["expert_gating_func = 3", "2 (sigmoid)"]),
        ("expert_weights_norm", Value::U32(1), &["expert_weights_norm = 1", "must be a bool"]),
        ("rope.dimension_count", Value::U32(64), &["rope.dimension_count = 64", "48 channels"]),
        ("expert_group_used_count", Value::U32(3), &["topk_group = 3", "at most n_group 2"]),
        ("attention.kv_lora_rank", Value::U32(0), &["kv_lora_rank = 0", "between 1 and"]),
    ];
    for (key, value, parts) in cases {
        let key = format!("deepseek2.{key}");
        write_gguf(&tiny(NAME), &file, GgmlType::F32, &[(&key, value)]);
        assert_contains(&failure(&file), parts);
    }
}

/// DeepSeek-V2-Lite in small: queries that are not compressed, and experts by probability.
#[test]
fn queries_may_be_uncompressed() {
    let device = device();
    let folder = with_config(NAME, |c| {
        c["model_type"] = json!("deepseek_v2");
        c["q_lora_rank"] = json!(null);
        c["topk_method"] = json!("greedy");
        c["norm_topk_prob"] = json!(false);
        c["routed_scaling_factor"] = json!(1.0);
    });
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let model = random(&ConfigJson { text: &text, path: &path }, &device).unwrap();
    let ids = expected(&tiny(NAME), &device).ids.narrow(1, 0, 60);
    let whole = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let mut cache = model.new_cache(KvCacheConfig::float().with_capacity(60), 2, &device).unwrap();
    let steps = (0..60).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap());
    let largest = whole.clone().abs().max().into_scalar::<f32>();
    let worst = max_difference(Tensor::cat(steps.collect(), 1), whole.clone());
    assert!(worst < 1e-5 * largest, "{worst} of {largest}");
    let saved = tempfile::tempdir().unwrap();
    save(saved.path(), &model, &words(), SaveOptions::default()).unwrap();
    let again = load(saved.path(), &device).unwrap().model;
    let again = again.forward(ids, KvCacheConfig::float()).unwrap();
    assert_eq!(again.to_data(), whole.to_data());
}

/// Folders in FP8, as published, compute the same as their numbers in f32.
#[test]
fn published_weights_in_8_bits_are_restored() {
    const BLOCK: [usize; 2] = [16, 32];
    let table = e4m3();
    let mut published: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![];
    let le = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let rounded = with_tensors(NAME, |tensors| {
        for (name, shape, values) in tensors {
            let Some(module) = name.strip_suffix("_proj.weight") else {
                published.push((name.clone(), Dtype::F32, shape.clone(), le(values)));
                continue;
            };
            let (rows, columns) = (shape[0], shape[1]);
            let blocks = [rows.div_ceil(BLOCK[0]), columns.div_ceil(BLOCK[1])];
            let block = |at: usize| at / columns / BLOCK[0] * blocks[1] + at % columns / BLOCK[1];
            let mut factors = vec![0f32; blocks[0] * blocks[1]];
            for (at, x) in values.iter().enumerate() {
                factors[block(at)] = factors[block(at)].max(x.abs() / 448.0);
            }
            let mut codes = vec![];
            for (at, x) in values.iter_mut().enumerate() {
                let factor = factors[block(at)];
                let (code, number) = nearest(&table, f64::from(*x / factor));
                codes.push(code);
                *x = number as f32 * factor;
            }
            published.push((name.clone(), Dtype::F8_E4M3, shape.clone(), codes));
            let scales = format!("{module}_proj.weight_scale_inv");
            published.push((scales, Dtype::F32, blocks.to_vec(), le(&factors)));
        }
    });
    let folder = with_config(NAME, |c| {
        c["quantization_config"] = json!({"activation_scheme": "dynamic", "fmt": "e4m3",
            "quant_method": "fp8", "weight_block_size": BLOCK});
    });
    let views = published.iter().map(|(name, dtype, shape, bytes)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).unwrap();
    assert_eq!(logits(folder.path()).to_data(), logits(rounded.path()).to_data());
}

/// Quantized rows of keys and values are restored, and a note says how many.
#[test]
fn quantized_folders_are_read() {
    let device = device();
    let folder = with_config(NAME, |c| c["q_lora_rank"] = json!(32));
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let model = random(&ConfigJson { text: &text, path: &path }, &device).unwrap();
    let ids = expected(&tiny(NAME), &device).ids.narrow(1, 0, 60);
    let logits =
        |model: &LanguageModel| model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let before = logits(&model);
    let largest = before.clone().abs().max().into_scalar::<f32>();
    let scratch = tempfile::tempdir().unwrap();
    let saved = scratch.path().join("saved");
    let options = QuantizeOptions::new([Some(WeightFormat::Int8(GroupSize::G32)); 3]);
    save_quantized(&saved, &model, &words(), options).unwrap();
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let packed = load_with(&saved, &device, options).unwrap();
    assert_contains(&packed.notes.join("\n"), &["3 tensors of", "are restored to f32"]);
    assert_eq!(packed.model.n_weights(), model.n_weights());
    let restored = load(&saved, &device).unwrap().model;
    let worst = max_difference(logits(&packed.model), logits(&restored));
    assert!(worst < 1e-4 * largest, "{worst} of {largest}");
    let mean = (logits(&restored) - before).abs().mean().into_scalar::<f32>();
    assert!(mean > 0.0 && mean < 0.02 * largest, "{mean} of {largest}");
}

/// Products with the packed rows of heads equal those with the restored rows, for the few tokens of
/// a decode step and for many.
#[test]
fn packed_rows_of_heads_give_the_products_of_floats() {
    const TOKENS: usize = 24;
    let device = device();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("tiny.gguf");
    write_gguf(&tiny(NAME), &file, GgmlType::Q4_0, &[]);
    let read =
        |packed| load_with(&file, &device, LoadOptions::default().with_packed(packed)).unwrap();
    let ids = expected(&tiny(NAME), &device).ids.narrow(1, 0, TOKENS);
    let config = KvCacheConfig::float().with_capacity(TOKENS);
    // The logits of passes of `n` tokens.
    let logits = |model: &LanguageModel, n: usize| {
        let mut cache = model.new_cache(config, ids.dims()[0], &device).unwrap();
        let step = |t| model.step(ids.clone().narrow(1, t, n), &mut cache).unwrap();
        Tensor::cat((0..TOKENS).step_by(n).map(step).collect(), 1)
    };
    let restored = read(None).model;
    for (activations, most) in [(Activations::Exact, 5e-5), (Activations::Int16, 1e-3)] {
        let Loaded { model: packed, notes, .. } = read(Some(activations));
        assert!(!notes.iter().any(|note| note.contains("are restored")), "{notes:?}");
        let mut floats = packed.downcast_ref::<DeepseekV3>().unwrap().clone();
        let of_file = &restored.downcast_ref::<DeepseekV3>().unwrap().layers;
        for (layer, of_file) in floats.layers.iter_mut().zip(of_file) {
            let weight = &mut layer.attention.keys_values.weight;
            assert!(weight.param().is_none());
            let rows = weight.val();
            let expected = of_file.attention.keys_values.weight.val();
            assert_eq!(rows.to_data(), expected.to_data());
            assert_eq!(weight.rows(5, 40).to_data(), expected.narrow(0, 5, 40).to_data());
            *weight = Param::from_tensor(rows).into();
        }
        let floats = LanguageModel::from(floats);
        let [few, many] = [1, TOKENS].map(|n| [&packed, &floats].map(|model| logits(model, n)));
        let largest = many[1].clone().abs().max().into_scalar::<f32>();
        for ([a, b], what) in [
            ([&few[0], &few[1]], "few tokens"),
            ([&many[0], &many[1]], "many tokens"),
            ([&few[0], &many[0]], "few and many tokens"),
        ] {
            let worst = max_difference(a.clone(), b.clone());
            assert!(worst < most * largest, "{activations:?}, {what}: {worst} of {largest}");
        }
    }
}

/// The published sizes of DeepSeek-V3: 61 layers with a latent row of 512 channels and a rope key
/// of 64.
#[test]
fn the_plan_of_deepseek_v3_is_the_published_arithmetic() {
    let config = json!({
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168,
        "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
        "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": true,
        "scoring_func": "sigmoid", "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "rope_theta": 10_000, "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let plan = outline(folder.path(), &device(), LoadOptions::default()).unwrap();
    let spec = &plan.spec;
    // (0.1 ln 40 + 1)^2 / sqrt(192)
    let scale = spec.layers[0].options.scale.unwrap();
    assert!((scale - 0.135_234).abs() < 1e-5, "{scale}");
    let tokens = 32_768;
    let f16 = KvCacheConfig::float().with_float(CacheFloat::F16).with_capacity(tokens);
    let bytes: usize =
        spec.layers.iter().map(|layer| layer.cache_bytes(&f16, 1).unwrap().floats).sum();
    // Rows of 512 + 64 channels in 2 bytes, whose first channels are the values.
    assert_eq!(bytes, 61 * tokens * 576 * 2);
}
