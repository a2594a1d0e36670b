//! Files and requests that are wrong give one clear line and no panic.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::Path,
};

use burn::tensor::{Int, Tensor};
use candle_core::quantized::{GgmlDType, gguf_file::Value};
use common::{copy, device, expected, read_tensors, tiny, write_gguf};
use kv_models::{Error, LanguageModel, kv_cubecl::KvCacheConfig, load};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value as Json, json};

/// The message of a failing load, checked to be one line that names the file.
fn failure(path: &Path) -> String {
    let message = load(path, &device()).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    assert!(message.contains(path.file_name().unwrap().to_str().unwrap()), "{message}");
    message
}

fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

/// A golden folder with a changed `config.json`.
fn with_config(name: &str, change: impl FnOnce(&mut Json)) -> tempfile::TempDir {
    let folder = copy(&tiny(name));
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
    folder
}

/// A change to a configuration.
type Change = fn(&mut Json);

type Named = (String, Vec<usize>, Vec<f32>);

/// A golden folder with changed tensors.
fn with_tensors(name: &str, change: impl FnOnce(&mut Vec<Named>)) -> tempfile::TempDir {
    let folder = copy(&tiny(name));
    let path = folder.path().join("model.safetensors");
    let mut tensors = read_tensors(&path);
    change(&mut tensors);
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(n, shape, values)| (n, shape, values.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views = data.iter().map(|(n, shape, bytes)| {
        (n.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    folder
}

#[test]
fn nothing_there() {
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

#[test]
fn wrong_configurations_name_field_value_and_rule() {
    let cases: [(&str, Change, &[&str]); 12] = [
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
            "qwen2-tiny",
            |c| {
                c["sliding_window"] = json!(128);
                c["use_sliding_window"] = json!(true);
            },
            &["unsupported sliding window attention", "sliding_window 128", "512"],
        ),
        (
            "llama3-rope-tiny",
            |c| c["rope_parameters"]["rope_type"] = json!("yarn"),
            &["unsupported rope type yarn"],
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
        load(with_config(name, change).path(), &device()).unwrap();
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
    let config = |path: &Path| match load(path, &device()).unwrap().model {
        LanguageModel::Llama(model) => model.config().clone(),
        other => panic!("{other:?}"),
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
fn broken_weight_files() {
    let folder = copy(&tiny("llama-tiny"));
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    for len in [0, 4, 9, 500, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&file, &bytes[..len]).unwrap();
        let message = load(folder.path(), &device()).unwrap_err().to_string();
        assert_contains(&message, &["model.safetensors: not a readable safetensors file"]);
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

/// A tiny GGUF file with a vocabulary and every kind of metadata value.
fn tiny_gguf(folder: &Path) -> std::path::PathBuf {
    let file = folder.join("tiny.gguf");
    let strings = |n: usize| Value::Array((0..n).map(|i| Value::String(format!("t{i}"))).collect());
    let extra = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", strings(256)),
        ("tokenizer.ggml.merges", Value::Array(vec![])),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1); 256])),
        ("general.alignment", Value::U32(32)),
        ("x.f64", Value::F64(0.5)),
        ("x.bool", Value::Bool(true)),
        ("x.nested", Value::Array(vec![Value::Array(vec![Value::U8(1)]); 2])),
    ];
    write_gguf(&tiny("llama-tiny"), &file, GgmlDType::Q8_0, &extra);
    file
}

#[test]
fn truncated_gguf_at_any_byte() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(tiny_gguf(folder.path())).unwrap();
    let cut = folder.path().join("cut.gguf");
    let header = (0..400).chain((400..12_000).step_by(61));
    let data = (12_000..bytes.len() - 32).step_by(7919);
    for len in header.chain(data) {
        fs::write(&cut, &bytes[..len]).unwrap();
        assert_contains(&failure(&cut), &["cut.gguf: not a readable GGUF file"]);
    }
}

#[test]
fn mutated_gguf_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny_gguf(folder.path());
    let bytes = fs::read(&path).unwrap();
    let header_len = 14_000.min(bytes.len());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut n_failed = 0;
    for _ in 0..1500 {
        let at = rng.random_range(0..header_len - 8);
        let n = rng.random_range(1..=8);
        let mut patch = vec![0; n];
        match rng.random_range(0..3) {
            0 => patch.fill(0xff),
            1 => {}
            _ => rng.fill(&mut patch[..]),
        }
        let mut write = |bytes: &[u8]| {
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.write_all(bytes).unwrap();
        };
        write(&patch);
        match load(&path, &device()) {
            Ok(_) => {}
            Err(error) => {
                n_failed += 1;
                assert!(!error.to_string().contains('\n'), "{error}");
            }
        }
        write(&bytes[at..at + n]);
    }
    assert!(n_failed > 100, "mutations must matter, {n_failed} failed");
    load(&path, &device()).unwrap();
}

#[test]
fn wrong_gguf_content_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.gguf");
    let cases: [(&str, Value, &[&str]); 6] = [
        (
            "general.architecture",
            Value::String("mamba".into()),
            &["unsupported GGUF architecture mamba"],
        ),
        ("llama.attention.head_count", Value::U32(12), &["blk.0.attn_q.weight", "[192, 96]"]),
        ("llama.attention.head_count", Value::String("6".into()), &["head_count", "integer"]),
        ("general.alignment", Value::U32(0), &["general.alignment", "multiple of 8"]),
        (
            "llama.attention.sliding_window",
            Value::U32(64),
            &["unsupported sliding window", "sliding_window 64"],
        ),
        ("llama.rope.scaling.type", Value::String("yarn".into()), &["unsupported rope type yarn"]),
    ];
    for (key, value, parts) in cases {
        // A later key replaces an earlier one.
        write_gguf(&tiny("llama-tiny"), &file, GgmlDType::F32, &[(key, value)]);
        assert_contains(&failure(&file), parts);
    }
    fs::write(&file, b"not a model at all").unwrap();
    assert_contains(&failure(&file), &["magic GGUF"]);
}

#[test]
fn unknown_ggml_types_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("iq.gguf");
    write_gguf(&tiny("qwen2-tiny"), &file, GgmlDType::F32, &[]);
    let mut bytes = fs::read(&file).unwrap();
    // name, u32 n_dims, two u64 dims, u32 type
    let name = b"token_embd.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 16;
    bytes[at..at + 4].copy_from_slice(&20u32.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    assert_contains(
        &failure(&file),
        &["unsupported GGML type 20 (IQ4_NL)", "token_embd.weight", "iq.gguf"],
    );
}

#[test]
fn a_context_beyond_the_limits_leaves_the_cache_as_it_was() {
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

    // The refused calls left no trace: the next step is what it would have been.
    let next = model.step(ids.clone().narrow(1, 40, 5), &mut cache).unwrap();
    let forward = model.forward(ids.clone().narrow(1, 0, 45), config).unwrap();
    assert!(common::max_difference(next, forward.narrow(1, 40, 5)) < 1e-5);

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
