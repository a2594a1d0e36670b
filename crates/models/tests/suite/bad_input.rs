//! Invalid files and requests give one clear line and no panic.

use std::{fs, path::Path};

use burn::tensor::{Int, Tensor};
use kv_models::{Error, Tokenizer, kv_cubecl::KvCacheConfig, llama::Llama, load};
use serde_json::{Value as Json, json};

use crate::common::{
    GgmlType, Named, assert_contains, copy, device, expected, failure, fixture, tiny, with_config,
    with_tensors, write_gguf,
};

/// A change to a configuration.
type Change = fn(&mut Json);

#[test]
fn missing_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("no-such-model.gguf");
    assert_contains(&failure(&missing), &["no-such-model.gguf: not found"]);
    assert_contains(&failure(folder.path()), &["config.json: not found"]);
    fs::copy(tiny("llama-tiny").join("config.json"), folder.path().join("config.json")).unwrap();
    assert_contains(
        &failure(folder.path()),
        &["model.safetensors: not found", "pytorch_model.bin"],
    );
}

/// The error of a field with several forms lists them, without names of Rust types.
#[test]
fn fields_with_several_forms_list_them() {
    for value in [json!("</s>"), json!(-1), json!(2.5), json!([1, "</s>"]), json!({"id": 2})] {
        let folder = with_config("llama-tiny", |c| c["eos_token_id"] = value);
        let message = failure(folder.path());
        assert_contains(&message, &["config.json: eos_token_id", "must be a token id or a list"]);
        assert!(!message.contains("enum"), "{message}");
    }
    let cases = [
        (r#"{"bos_token": 1}"#, "a token must be a text"),
        (r#"{"eos_token": ["</s>"]}"#, "a token must be a text"),
        (r#"{"chat_template": 1}"#, "chat_template must be a text"),
    ];
    for (config, rule) in cases {
        let folder = copy(&tiny("llama-tiny"));
        fs::copy(fixture("bos/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        let error = Tokenizer::from_folder(folder.path(), &[]).unwrap_err().to_string();
        assert_contains(&error, &["tokenizer_config.json", rule]);
        assert!(!error.contains("enum"), "{error}");
    }
}

#[test]
fn wrong_configurations_name_field_value_and_rule() {
    let cases: [(&str, Change, &[&str]); 39] = [
        ("llama-tiny", |c| c["model_type"] = json!(5), &["model_type = 5", "must be a text"]),
        (
            "llama-tiny",
            |c| c["hidden_size"] = json!(-1),
            &["hidden_size = -1", "must be an integer of at least 0"],
        ),
        ("llama-tiny", |c| *c = json!([]), &["config.json", "it must hold an object"]),
        (
            "llama-tiny",
            |c| c["num_hidden_layers"] = json!(4_000_000_000u64),
            &["num_hidden_layers = 4000000000", "between 1 and 1024"],
        ),
        (
            "gemma3-tiny",
            |c| c["num_hidden_layers"] = json!(0),
            &["num_hidden_layers = 0", "between 1 and 1024"],
        ),
        (
            "gpt-oss-tiny",
            |c| c["rope_parameters"] = json!({"rope_theta": 150_000.0}),
            &["rope_parameters = missing", "must have a rope_type"],
        ),
        (
            "llama-tiny",
            |c| c["rms_norm_eps"] = json!("small"),
            &["config.json", "rms_norm_eps = \"small\"", "must be a number"],
        ),
        (
            "smollm3-tiny",
            |c| {
                c["no_rope_layers"] = json!(null);
                c["no_rope_layer_interval"] = json!(0);
            },
            &["no_rope_layer_interval = 0", "must be at least 1"],
        ),
        (
            "qwen3_moe-tiny",
            |c| c["num_experts_per_tok"] = json!(9),
            &["num_experts_per_tok = 9", "must be at most num_experts 8"],
        ),
        (
            "qwen3_moe-tiny",
            |c| c["decoder_sparse_step"] = json!(0),
            &["decoder_sparse_step = 0", "must be at least 1"],
        ),
        (
            "qwen3_moe-tiny",
            |c| c["mlp_only_layers"] = json!([0, 99]),
            &["mlp_only_layers = 99", "must be below num_hidden_layers"],
        ),
        (
            "qwen3_moe-tiny",
            |c| c["moe_intermediate_size"] = json!(48),
            &["experts.0.", "[48, 64]", "[32, 64]"],
        ),
        ("qwen3_moe-tiny", |c| c["num_local_experts"] = json!(7), &["mlp.gate", "[8, 64]", "[7, "]),
        (
            "mixtral-tiny",
            |c| c["num_experts_per_tok"] = json!(6),
            &["num_experts_per_tok = 6", "must be at most num_local_experts 5"],
        ),
        (
            "mixtral-tiny",
            |c| c["num_local_experts"] = json!(0),
            &["num_local_experts = 0", "must be between 1 and"],
        ),
        (
            "mixtral-tiny",
            |c| c["num_local_experts"] = json!(null),
            &["num_local_experts = missing"],
        ),
        (
            "mixtral-tiny",
            |c| c["num_local_experts"] = json!(4),
            &["block_sparse_moe.gate.weight", "[5, 64]", "[4, 64]"],
        ),
        (
            "qwen3_5-tiny",
            |c| {
                c["layer_types"] = json!(null);
                c["full_attention_interval"] = json!(0);
            },
            &["full_attention_interval = 0", "must be at least 1"],
        ),
        (
            "qwen3_5-tiny",
            |c| c["layer_types"] = json!(["linear_attention"]),
            &["length of layer_types = 1", "must be num_hidden_layers 4"],
        ),
        (
            "qwen3_5-tiny",
            |c| c["layer_types"][1] = json!("sliding_attention"),
            &["unsupported attention sliding_attention", "linear_attention"],
        ),
        (
            "qwen3_5-tiny",
            |c| c["linear_num_value_heads"] = json!(3),
            &["linear_num_value_heads = 3", "a multiple of linear_num_key_heads 2"],
        ),
        (
            "qwen3_5-tiny",
            |c| c["linear_conv_kernel_dim"] = json!(1),
            &["linear_conv_kernel_dim = 1", "must be at least 2"],
        ),
        (
            "qwen3_5-tiny",
            |c| c["attention_bias"] = json!(true),
            &["unsupported gated attention with biases", "attention_bias true"],
        ),
        ("llama-tiny", |c| c["model_type"] = json!("mamba"), &["unsupported model_type mamba"]),
        ("llama-tiny", |c| c["head_dim"] = json!(24), &["q_proj.weight", "[96, 96]", "[144, 96]"]),
        (
            "qwen2-tiny",
            |c| c["num_attention_heads"] = json!(5),
            &["hidden_size = 64", "not divisible by num_attention_heads 5"],
        ),
        ("llama-tiny", |c| c["num_key_value_heads"] = json!(4), &["num_key_value_heads = 4", "6"]),
        ("llama-tiny", |c| c["num_key_value_heads"] = json!(0), &["num_key_value_heads = 0"]),
        ("llama-tiny", |c| c["hidden_size"] = json!(null), &["hidden_size = missing"]),
        ("llama-tiny", |c| c["hidden_act"] = json!("gelu"), &["unsupported activation", "gelu"]),
        ("llama-tiny", |c| c["vocab_size"] = json!(257), &["embed_tokens", "[256, 96]"]),
        (
            "phi3-tiny",
            |c| c["quantization_config"] = json!({"quant_method": "gptq", "bits": 4}),
            &["unsupported quantization_config", "quant_method gptq", "config.json"],
        ),
        (
            "gpt2-tiny",
            |c| c["compression_config"] = json!({"format": "int-quantized"}),
            &["unsupported compression_config", "config.json"],
        ),
        (
            "llama-tiny",
            |c| c["layer_types"] = json!(["full_attention", "chunked_attention"]),
            &["unsupported attention", "chunked_attention", "sliding_attention"],
        ),
        (
            "llama-tiny",
            |c| c["layer_types"] = json!(["full_attention", "sliding_attention"]),
            &["sliding_window = missing", "layer_types"],
        ),
        ("phi3-tiny", |c| c["sliding_window"] = json!(0), &["sliding_window = 0", "at least 1"]),
        (
            "llama3-rope-tiny",
            |c| c["rope_parameters"]["rope_type"] = json!("dynamic"),
            &["unsupported rope type dynamic"],
        ),
        (
            "llama3-rope-tiny",
            |c| c["rope_parameters"]["factor"] = json!(-1.0),
            &["rope_scaling.factor = -1", "above 0"],
        ),
        ("gpt2-tiny", |c| c["n_head"] = json!(3), &["n_embd = 64", "n_head 3"]),
    ];
    for (name, change, parts) in cases {
        let folder = with_config(name, change);
        let message = load(folder.path(), &device()).unwrap_err().to_string();
        assert_contains(&message, parts);
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn sliding_windows_that_never_bind_are_fine() {
    let cases: [(&str, Change); 2] = [
        ("phi3-tiny", |c| c["sliding_window"] = json!(512)),
        ("qwen2-tiny", |c| c["sliding_window"] = json!(32)),
    ];
    for (name, change) in cases {
        let loaded = load(with_config(name, change).path(), &device()).unwrap();
        assert_eq!((loaded.model.max_positions(), loaded.notes), (512, vec![]));
    }
}

#[test]
fn old_rope_fields_resolve_like_new_ones() {
    let folder = with_config("llama3-rope-tiny", |c| {
        let mut rope = c["rope_parameters"].take();
        c.as_object_mut().unwrap().remove("rope_parameters");
        c["rope_theta"] = rope["rope_theta"].take();
        rope.as_object_mut().unwrap().remove("rope_theta");
        c["rope_scaling"] = rope;
    });
    let config = |path: &Path| {
        let model = load(path, &device()).unwrap().model;
        model.downcast_ref::<Llama>().unwrap().config().clone()
    };
    assert_eq!(config(folder.path()), config(&tiny("llama3-rope-tiny")));
}

#[test]
fn wrong_tensors_are_named() {
    let missing = with_tensors("llama-tiny", |t| t.retain(|(n, ..)| !n.contains("1.mlp.up_proj")));
    assert_contains(
        &load(missing.path(), &device()).unwrap_err().to_string(),
        &["model.safetensors: tensor model.layers.1.mlp.up_proj.weight is missing"],
    );
    for value in [f32::NAN, f32::INFINITY] {
        let folder = with_tensors("phi3-tiny", |t| {
            let tensor = t.iter_mut().find(|(n, ..)| n.contains("0.self_attn.o_proj")).unwrap();
            tensor.2[17] = value;
        });
        let message = load(folder.path(), &device()).unwrap_err().to_string();
        let value = value.to_string();
        assert_contains(
            &message,
            &["model.layers.0.self_attn.o_proj.weight", &value, "element 17", "finite"],
        );
    }
    let foreign =
        with_tensors("gpt2-tiny", |t| *t = vec![("conv1.weight".into(), vec![1], vec![0.0])]);
    let message = load(foreign.path(), &device()).unwrap_err().to_string();
    assert_contains(&message, &["foreign file", "GPT-2", "conv1.weight"]);
}

#[test]
fn leftover_tensors_are_named() {
    let vector = |name: &str, len: usize| (name.to_string(), vec![len], vec![0.25; len]);
    let extra = |t: &mut Vec<Named>| {
        t.push(vector("model.layers.0.self_attn.q_proj.bias", 96));
        t.push(vector("model.layers.1.self_attn.q_norm.weight", 16));
    };
    let folder = with_tensors("llama-tiny", extra);
    let message = load(folder.path(), &device()).unwrap_err().to_string();
    assert_contains(
        &message,
        &[
            "model.safetensors: 2 tensors",
            "model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_norm.weight",
        ],
    );
    // One layer fewer than in the file, and a head although the configuration has none.
    let fewer = with_config("llama-tiny", |c| c["num_hidden_layers"] = json!(1));
    let message = load(fewer.path(), &device()).unwrap_err().to_string();
    assert_contains(
        &message,
        &["9 tensors", "model.layers.1.input_layernorm.weight", "and 4 more"],
    );
    for (name, head) in [("llama-tiny", "lm_head.weight"), ("gpt2-tiny", "lm_head.weight")] {
        let other = with_tensors(name, |t| {
            let embedding = t.iter().find(|(n, ..)| n.contains("wte") || n.contains("embed"));
            let (_, shape, mut values) = embedding.unwrap().clone();
            values[5] += 1.0;
            t.push((head.into(), shape, values));
        });
        let message = load(other.path(), &device()).unwrap_err().to_string();
        assert_contains(&message, &["1 tensor ", head]);
    }
    // An expert beyond the last.
    let expert = "model.layers.0.mlp.experts.8.down_proj.weight";
    let more = with_tensors("qwen3_moe-tiny", |t| t.push((expert.into(), vec![1], vec![1.0])));
    let message = load(more.path(), &device()).unwrap_err().to_string();
    assert_contains(&message, &["1 tensor ", expert]);
    // The same tensor with and without the prefix.
    let twice = with_tensors("llama-tiny", |t| t.push(vector("norm.weight", 96)));
    let message = load(twice.path(), &device()).unwrap_err().to_string();
    assert_contains(&message, &["norm.weight", "twice"]);

    let file = folder.path().join("leftover.gguf");
    let norm = with_tensors("llama-tiny", |t| {
        t.push(vector("model.layers.1.self_attn.q_norm.weight", 16));
    });
    write_gguf(norm.path(), &file, GgmlType::F32, &[]);
    assert_contains(&failure(&file), &["1 tensor ", "blk.1.attn_q_norm.weight"]);
    let rotary = with_tensors("gpt2-tiny", |t| t.push(vector("rope_freqs.weight", 8)));
    write_gguf(rotary.path(), &file, GgmlType::F32, &[]);
    assert_contains(&failure(&file), &["1 tensor ", "rope_freqs.weight"]);
}

#[test]
fn redundant_tensors_are_ignored() {
    let constant = |name: &str, shape: &[usize]| {
        (name.to_string(), shape.to_vec(), vec![1.0; shape.iter().product()])
    };
    let folders = [
        with_tensors("llama-tiny", |t| {
            t.push(constant("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]));
            t.push(constant("model.rotary_emb.inv_freq", &[8]));
            let embedding = t.iter().find(|(n, ..)| n.contains("embed_tokens")).unwrap().clone();
            t.push(("lm_head.weight".into(), embedding.1, embedding.2));
        }),
        with_tensors("gpt2-tiny", |t| {
            t.push(constant("transformer.h.0.attn.bias", &[1, 1, 256, 256]));
            t.push(constant("transformer.h.1.attn.masked_bias", &[1]));
            let embedding = t.iter().find(|(n, ..)| n.contains("wte")).unwrap().clone();
            t.push(("lm_head.weight".into(), embedding.1, embedding.2));
        }),
    ];
    for folder in folders {
        load(folder.path(), &device()).unwrap();
    }
}

#[test]
fn broken_weight_files() {
    let folder = copy(&tiny("llama-tiny"));
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    for len in [0, 4, 9, 500, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&file, &bytes[..len]).unwrap();
        let message = load(folder.path(), &device()).unwrap_err().to_string();
        assert_contains(&message, &["model.safetensors: not a readable safetensors file"]);
        assert!(len == 0 || message.contains("truncated"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    fs::remove_file(&file).unwrap();
    for bytes in [&b""[..], b"PK\x03\x04 not really", b"\x80\x02}q\x00."] {
        fs::write(folder.path().join("pytorch_model.bin"), bytes).unwrap();
        let message = load(folder.path(), &device()).unwrap_err().to_string();
        assert_contains(&message, &["pytorch_model.bin"]);
    }
    let index = json!({"weight_map": {"a": "../model.safetensors"}});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let message = load(folder.path(), &device()).unwrap_err().to_string();
    assert_contains(&message, &["weight_map = ../model.safetensors", "bare file name"]);
}

#[test]
fn missing_shards_are_named() {
    let folder = copy(&fixture("pytorch-shards"));
    let [first, second] = [1, 2].map(|i| format!("pytorch_model-0000{i}-of-00002.bin"));
    fs::remove_file(folder.path().join(&first)).unwrap();
    let index = folder.path().join("pytorch_model.bin.index.json");
    for without_index in [false, true] {
        if without_index {
            fs::remove_file(&index).unwrap();
        }
        let named = folder.path().join(&second);
        for path in [folder.path(), named.as_path()] {
            let message = load(path, &device()).unwrap_err().to_string();
            assert_contains(&message, &[&first, "not found"]);
        }
    }
}

#[test]
fn a_context_beyond_the_limits_leaves_the_cache_unchanged() {
    let device = device();
    let folder = tiny("llama-tiny");
    let ids = expected(&folder, &device).ids;
    let model = load(&folder, &device).unwrap().model;
    let config = KvCacheConfig::float().with_capacity(50);
    let mut cache = model.new_cache(config, 2, &device).unwrap();
    model.step(ids.clone().narrow(1, 0, 40), &mut cache).unwrap();

    let error = model.step(ids.clone().narrow(1, 40, 11), &mut cache).unwrap_err();
    assert_eq!(error.to_string(), "context of 51 tokens (40 cached + 11 new) exceeds capacity 50");
    let batch = model.step(ids.clone().narrow(0, 0, 1), &mut cache).unwrap_err();
    assert!(batch.to_string().contains("batch = 1"), "{batch}");
    assert_eq!(cache.len(), 40);

    // The rejected calls changed nothing: the next step is the same as without them.
    let next = model.step(ids.clone().narrow(1, 40, 5), &mut cache).unwrap();
    let forward = model.forward(ids.clone().narrow(1, 0, 45), config).unwrap();
    assert!(crate::common::max_difference(next, forward.narrow(1, 40, 5)) < 1e-5);

    let long = Tensor::<2, Int>::zeros([1, model.max_positions() + 1], &device);
    let error = model.forward(long.clone(), KvCacheConfig::float()).unwrap_err();
    assert!(matches!(error, Error::ContextLength { limit_name: "max_positions", .. }), "{error}");
    let roomy = KvCacheConfig::float().with_capacity(4096);
    let mut cache = model.new_cache(roomy, 1, &device).unwrap();
    let error = model.step(long, &mut cache).unwrap_err();
    assert!(matches!(error, Error::ContextLength { limit_name: "max_positions", .. }), "{error}");
    assert!(cache.is_empty());
}

#[test]
fn a_group_size_that_does_not_divide_the_head_is_an_error() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let config: KvCacheConfig = "k4v4-g32-r32".parse().unwrap(); // head_dim is 16
    let ids = Tensor::<2, Int>::zeros([1, 4], &device);
    let error = model.forward(ids, config).unwrap_err().to_string();
    assert_contains(&error, &["group_size 32", "head_dim 16"]);
    assert!(model.new_cache(config, 1, &device).is_err());
}
