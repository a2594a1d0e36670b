//! Helpers shared by the tests.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{Device, Int, Tensor, TensorData};
use candle_core::{
    Device as Cpu, Tensor as CandleTensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};
use kv_models::{LayerSpec, llama::Config, nn::RopeScaling};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value as Json;

/// The project's tiny checkpoints.
pub(crate) const TINY: [&str; 11] = [
    "gpt2-tiny",
    "llama-tiny",
    "llama3-rope-tiny",
    "qwen2-tiny",
    "phi3-tiny",
    "qwen3-tiny",
    "phi4-tiny",
    "mistral-swa-tiny",
    "smollm3-tiny",
    "gemma3-tiny",
    "gpt-oss-tiny",
];

/// The folder of one of the project's tiny checkpoints.
pub(crate) fn tiny(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/models")).join(name)
}

/// All golden checkpoints: the project's, or those of `KV_GOLDEN`, a folder of the same form.
pub(crate) fn golden() -> Vec<PathBuf> {
    let root = std::env::var_os("KV_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden")),
        PathBuf::from,
    );
    let mut folders: Vec<_> = fs::read_dir(root.join("models"))
        .unwrap_or_else(|error| panic!("{}: {error}", root.join("models").display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.safetensors").is_file())
        .collect();
    folders.sort();
    assert!(!folders.is_empty(), "{} holds no checkpoint", root.display());
    folders
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

/// The real model. Tests that load it are ignored unless asked for by `--ignored smollm2`, as `scripts/check`
/// does.
pub(crate) fn smollm2() -> PathBuf {
    let path = std::env::var_os("KV_SMOLLM2").map_or_else(
        || {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    let hint = "run scripts/get-smollm2 or set KV_SMOLLM2";
    assert!(path.is_file(), "{} is not there; {hint}", path.display());
    path
}

/// Gemma 3. Tests that load it are ignored unless asked for by `--ignored gemma3`.
pub(crate) fn gemma3() -> PathBuf {
    let path = std::env::var_os("KV_GEMMA3").map_or_else(
        || {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../target/models/gemma-3-270m-q4_k_m.gguf")
        },
        PathBuf::from,
    );
    assert!(
        path.is_file(),
        "{} is not there; run scripts/get-gemma3 or set KV_GEMMA3",
        path.display()
    );
    path
}

/// The Flex device the tests run on.
pub(crate) fn device() -> Device {
    Device::flex()
}

/// `input_ids` and `logits` of a checkpoint's `expected.safetensors`.
pub(crate) struct Expected {
    pub(crate) ids: Tensor<2, Int>,
    pub(crate) logits: Tensor<3>,
    /// The logits of the last tokens, computed one by one, if the file has them.
    pub(crate) decoded: Option<Tensor<3>>,
}

pub(crate) fn expected(folder: &Path, device: &Device) -> Expected {
    let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("input_ids").unwrap();
    let shape: [usize; 2] = ids.shape().try_into().unwrap();
    let values: Vec<i32> =
        ids.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    let ids = Tensor::from_data(TensorData::new(values, shape), device);
    let floats = |name: &str| {
        let tensor = tensors.tensor(name).ok()?;
        let shape: [usize; 3] = tensor.shape().try_into().unwrap();
        Some(Tensor::from_data(TensorData::new(f32s(tensor.data()), shape), device))
    };
    Expected { ids, logits: floats("logits").unwrap(), decoded: floats("decode_logits") }
}

pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(crate) fn max_difference<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a - b).abs().max().into_scalar::<f32>()
}

/// A writable copy of a folder.
pub(crate) fn copy(folder: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        fs::write(to.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    to
}

/// `(name, shape, values)` of a safetensors file of f32.
pub(crate) fn read_tensors(file: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(n, t)| (n.to_string(), t.shape().to_vec(), f32s(t.data()))).collect()
}

/// The message of a failing load, checked to be one line that names the file.
pub(crate) fn failure(path: &Path) -> String {
    let message = kv_models::load(path, &device()).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    assert!(message.contains(path.file_name().unwrap().to_str().unwrap()), "{message}");
    message
}

/// `message` has all of `parts`.
#[track_caller]
pub(crate) fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

/// A golden folder with a changed `config.json`.
pub(crate) fn with_config(name: &str, change: impl FnOnce(&mut Json)) -> tempfile::TempDir {
    let folder = copy(&tiny(name));
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
    folder
}

/// A tensor's name, shape and values.
pub(crate) type Named = (String, Vec<usize>, Vec<f32>);

/// A golden folder with changed tensors.
pub(crate) fn with_tensors(name: &str, change: impl FnOnce(&mut Vec<Named>)) -> tempfile::TempDir {
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

/// A golden checkpoint as llama.cpp's converter would write it, in `dtype` where shapes allow.
pub(crate) fn write_gguf(folder: &Path, file: &Path, dtype: GgmlDType, extra: &[(&str, Value)]) {
    let config: Json =
        serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let arch = match config["model_type"].as_str().unwrap() {
        "mistral" => "llama",
        "gemma3_text" => "gemma3",
        "gpt_oss" => "gpt-oss",
        other => other,
    };
    let int = |key: &str| config[key].as_u64().map(|n| n as u32);
    let rope = &config["rope_parameters"];
    let mut metadata: Vec<(String, Value)> =
        vec![("general.architecture".into(), Value::String(arch.into()))];
    let mut put = |key: &str, value: Option<Value>| {
        metadata.extend(value.map(|value| (format!("{arch}.{key}"), value)));
    };
    let u32 = |value: Option<u32>| value.map(Value::U32);
    put("embedding_length", u32(int("hidden_size").or(int("n_embd"))));
    let ff = int("intermediate_size").or(int("n_embd").map(|n| 4 * n));
    put("feed_forward_length", u32(ff));
    put("block_count", u32(int("num_hidden_layers").or(int("n_layer"))));
    put("attention.head_count", u32(int("num_attention_heads").or(int("n_head"))));
    put("attention.head_count_kv", u32(int("num_key_value_heads")));
    put("attention.key_length", u32(int("head_dim")));
    put("context_length", u32(int("max_position_embeddings").or(int("n_positions"))));
    let float = |value: &Json| value.as_f64().map(|x| Value::F32(x as f32));
    put("attention.layer_norm_rms_epsilon", float(&config["rms_norm_eps"]));
    put("attention.layer_norm_epsilon", float(&config["layer_norm_epsilon"]));
    put("rope.freq_base", float(&rope["rope_theta"]));
    if let (Some(hidden), Some(heads)) = (int("hidden_size"), int("num_attention_heads")) {
        let head_dim = int("head_dim").unwrap_or(hidden / heads);
        let partial = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        put("rope.dimension_count", Some(Value::U32((f64::from(head_dim) * partial) as u32)));
    }
    if arch == "gemma3" {
        let theta = |kind: &str| &rope[kind]["rope_theta"];
        put("rope.freq_base", float(theta("full_attention")));
        put("rope.freq_base_swa", float(theta("sliding_attention")));
        put("attention.sliding_window_pattern", Some(Value::U32(4)));
    }
    if arch == "gpt-oss" {
        put("expert_count", u32(int("num_local_experts")));
        put("expert_used_count", u32(int("num_experts_per_tok")));
        put("expert_feed_forward_length", u32(int("intermediate_size")));
        put("rope.scaling.type", Some(Value::String("yarn".into())));
        put("rope.scaling.factor", float(&rope["factor"]));
        let original = rope["original_max_position_embeddings"].as_u64().unwrap();
        put("rope.scaling.original_context_length", Some(Value::U32(original as u32)));
    }
    let window = config["sliding_window"].as_u64().map(|n| Value::U32(n as u32));
    put("attention.sliding_window", window);
    let factors = longrope_factors(&config);
    if !factors.is_empty() {
        let original = config["original_max_position_embeddings"].as_f64().unwrap();
        let scale = config["max_position_embeddings"].as_f64().unwrap() / original;
        let attention = (1.0 + scale.ln() / original.ln()).sqrt();
        put("rope.scaling.original_context_length", Some(Value::U32(original as u32)));
        put("rope.scaling.attn_factor", Some(Value::F32(attention as f32)));
    }
    for (key, value) in extra {
        metadata.push(((*key).into(), value.clone()));
    }

    let mut tensors = vec![];
    for (name, shape, values) in read_tensors(&folder.join("model.safetensors")) {
        if name.contains("mlp.experts") {
            tensors.extend(expert_tensors(&name, &shape, values, dtype));
            continue;
        }
        let gguf = gguf_name(arch, &name);
        let mut values = values;
        if arch == "gemma3" && gguf.ends_with("norm.weight") {
            values.iter_mut().for_each(|gain| *gain += 1.0);
        }
        let mut tensor = CandleTensor::from_vec(values, shape, &Cpu::Cpu).unwrap();
        let conv1d = arch == "gpt2" && (gguf.contains("ffn") || gguf.contains("attn_"));
        if conv1d && tensor.rank() == 2 {
            tensor = tensor.t().unwrap().contiguous().unwrap();
        }
        if matches!(arch, "llama" | "smollm3") {
            let heads = match gguf.split('.').nth(2) {
                Some("attn_q") => int("num_attention_heads"),
                Some("attn_k") => int("num_key_value_heads"),
                _ => None,
            };
            if let Some(heads) = heads {
                let (rows, columns) = tensor.dims2().unwrap();
                let halves = (heads as usize, 2, rows / heads as usize / 2, columns);
                tensor = tensor.reshape(halves).unwrap().transpose(1, 2).unwrap();
                tensor = tensor.contiguous().unwrap().reshape((rows, columns)).unwrap();
            }
        }
        let fits = tensor.rank() == 2 && tensor.dims()[1].is_multiple_of(dtype.block_size());
        let dtype = if fits { dtype } else { GgmlDType::F32 };
        tensors.push((gguf, QTensor::quantize(&tensor, dtype).unwrap()));
    }
    let mut vectors = factors;
    if rope["rope_type"] == "llama3" {
        vectors.push(("rope_freqs.weight".into(), llama3_divisors(&config)));
    }
    for (name, values) in vectors {
        let n = values.len();
        let tensor = CandleTensor::from_vec(values, n, &Cpu::Cpu).unwrap();
        tensors.push((name, QTensor::quantize(&tensor, GgmlDType::F32).unwrap()));
    }
    write_gguf_file(file, &metadata, &tensors);
}

pub(crate) fn write_gguf_file(
    file: &Path,
    metadata: &[(String, Value)],
    tensors: &[(String, QTensor)],
) {
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut fs::File::create(file).unwrap(), &metadata, &tensors).unwrap();
}

/// gpt-oss has gate and up rows of its experts alternating in one transposed tensor; GGUF files have two.
fn expert_tensors(
    name: &str,
    shape: &[usize],
    values: Vec<f32>,
    dtype: GgmlDType,
) -> Vec<(String, QTensor)> {
    let tensor = CandleTensor::from_vec(values, shape, &Cpu::Cpu).unwrap();
    let is_bias = name.ends_with("_bias");
    // [experts, columns, rows] -> [experts, rows, columns]; a bias is one column.
    let tensor = if is_bias { tensor.unsqueeze(2) } else { tensor.transpose(1, 2) }.unwrap();
    let tensor = tensor.contiguous().unwrap();
    let (experts, rows, columns) = tensor.dims3().unwrap();
    let name = gguf_name("gpt-oss", name);
    let parts = if name.contains("gate_up_proj") {
        let pairs = tensor.reshape((experts, rows / 2, 2, columns)).unwrap();
        let part = |i| pairs.narrow(2, i, 1).unwrap().squeeze(2).unwrap().contiguous().unwrap();
        let (layer, _) = name.split_once(".mlp").unwrap();
        let suffix = if is_bias { "bias" } else { "weight" };
        vec![
            (format!("{layer}.ffn_gate_exps.{suffix}"), part(0)),
            (format!("{layer}.ffn_up_exps.{suffix}"), part(1)),
        ]
    } else {
        vec![(name, tensor)]
    };
    let quantize = |(name, tensor): (String, CandleTensor)| {
        let tensor = if is_bias { tensor.squeeze(2).unwrap() } else { tensor };
        let dtype = if is_bias { GgmlDType::F32 } else { dtype };
        (name, QTensor::quantize(&tensor, dtype).unwrap())
    };
    parts.into_iter().map(quantize).collect()
}

/// GPT-2's map of bytes to printable characters.
fn byte_token(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count();
    char::from_u32(256 + rank as u32).unwrap()
}

/// A GGUF file whose vocabulary is the bytes, then `merges` in order.
pub(crate) fn write_vocabulary(file: &Path, model: &str, pre: &str, merges: &[&str]) {
    let mut tokens: Vec<String> = (0..=255).map(|b| byte_token(b).to_string()).collect();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let strings = |items: &[String]| {
        Value::Array(items.iter().map(|item| Value::String(item.clone())).collect())
    };
    let merges: Vec<String> = merges.iter().map(ToString::to_string).collect();
    let extra = [
        ("tokenizer.ggml.model", Value::String(model.into())),
        ("tokenizer.ggml.pre", Value::String(pre.into())),
        ("tokenizer.ggml.tokens", strings(&tokens)),
        ("tokenizer.ggml.merges", strings(&merges)),
    ];
    write_gguf(&tiny("gpt2-tiny"), file, GgmlDType::F32, &extra);
}

/// The vocabulary of `fixtures/bos/tokenizer.json` as metadata of a GGUF file, and `more`.
pub(crate) fn bos_vocabulary(more: &[(&str, Value)]) -> Vec<(String, Value)> {
    let file = fs::read(fixture("bos").join("tokenizer.json")).unwrap();
    let json: Json = serde_json::from_slice(&file).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens: Vec<_> = vocab.iter().map(|(token, id)| (id.as_u64(), token)).collect();
    tokens.sort_unstable();
    let kinds = (0..tokens.len()).map(|id| Value::I32(if id < 3 { 3 } else { 1 })).collect();
    let tokens = tokens.into_iter().map(|(_, token)| Value::String(token.clone())).collect();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    let pair =
        |merge: &Json| format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let merges = merges.map(|merge| Value::String(pair(merge))).collect();
    let mut metadata = vec![
        ("tokenizer.ggml.model".to_string(), Value::String("gpt2".into())),
        ("tokenizer.ggml.tokens".to_string(), Value::Array(tokens)),
        ("tokenizer.ggml.token_type".to_string(), Value::Array(kinds)),
        ("tokenizer.ggml.merges".to_string(), Value::Array(merges)),
        ("tokenizer.ggml.bos_token_id".to_string(), Value::U32(1)),
    ];
    if more.iter().all(|(key, _)| *key != "tokenizer.ggml.pre") {
        metadata.push(("tokenizer.ggml.pre".into(), Value::String("llama-bpe".into())));
    }
    metadata.extend(more.iter().map(|(key, value)| (key.to_string(), value.clone())));
    metadata
}

fn gguf_name(arch: &str, name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.").replace("transformer.h.", "blk.");
    if arch == "gpt-oss" {
        name = name
            .replace("self_attn.sinks", "attn_sinks.weight")
            .replace("post_attention_layernorm", "post_attention_norm")
            .replace("mlp.router", "ffn_gate_inp")
            .replace("mlp.experts.down_proj_bias", "ffn_down_exps.bias")
            .replace("mlp.experts.down_proj", "ffn_down_exps.weight");
    }
    if arch == "gemma3" {
        name = name.replace("post_attention_layernorm", "post_attention_norm");
    }
    for (hf, gguf) in [
        ("model.embed_tokens", "token_embd"),
        ("transformer.wte", "token_embd"),
        ("transformer.wpe", "position_embd"),
        ("transformer.ln_f", "output_norm"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
        ("ln_1", "attn_norm"),
        ("ln_2", "ffn_norm"),
    ] {
        name = name.replace(hf, gguf);
    }
    name
}

/// The divisors that llama.cpp's converter stores for `rope_type` llama3.
fn llama3_divisors(config: &Json) -> Vec<f32> {
    let rope = &config["rope_parameters"];
    let get = |key: &str| rope[key].as_f64().unwrap();
    let dim = config["head_dim"].as_u64().unwrap();
    (0..dim / 2)
        .map(|i| {
            let freq = get("rope_theta").powf(-2.0 * i as f64 / dim as f64);
            let wavelength = std::f64::consts::TAU / freq;
            let original = get("original_max_position_embeddings");
            let (low, high) = (get("low_freq_factor"), get("high_freq_factor"));
            let divisor = if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                get("factor")
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / get("factor") + smooth)
            };
            divisor as f32
        })
        .collect()
}

/// The factors of `rope_scaling` as tensors, for a configuration that has them.
fn longrope_factors(config: &Json) -> Vec<(String, Vec<f32>)> {
    let factors = |kind: &str| {
        let of = |field: &str| config[field][format!("{kind}_factor")].as_array();
        let factors = of("rope_scaling").or_else(|| of("rope_parameters"))?;
        let values = factors.iter().map(|x| x.as_f64().unwrap() as f32).collect();
        Some((format!("rope_factors_{kind}.weight"), values))
    };
    ["short", "long"].into_iter().filter_map(factors).collect()
}

/// A Llama of two layers.
pub(crate) fn small() -> Config {
    Config {
        vocab_size: 256,
        hidden_size: 64,
        intermediate_size: 96,
        n_layers: 2,
        attention: LayerSpec::new(4, 2, 16),
        max_positions: 512,
        norm_epsilon: 1e-5,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        tied_head: true,
        rotary_dim: 16,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        full_layers: Default::default(),
        unrotated_layers: Default::default(),
        qk_norms: false,
    }
}
