//! Writes GGUF files for tests.

use std::{fs, path::Path};

use candle_core::{
    Device as Cpu, Tensor as CandleTensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};
use serde_json::Value as Json;

use super::{fixture, read_tensors, tiny};

/// Writes a golden checkpoint as llama.cpp's converter does, in `dtype` where shapes allow.
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

/// gpt-oss alternates gate and up rows of its experts in one transposed tensor. GGUF files have two
/// tensors.
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

/// Maps a byte to a printable character as GPT-2 does.
fn byte_token(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count();
    char::from_u32(256 + rank as u32).unwrap()
}

/// Writes a GGUF file whose vocabulary is the bytes, followed by `merges`.
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

/// Returns the vocabulary of `fixtures/bos/tokenizer.json` as metadata of a GGUF file, and `more`.
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

/// Returns the divisors that llama.cpp's converter stores for `rope_type` llama3.
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

/// Returns the factors of `rope_scaling` as tensors, if the configuration has them.
fn longrope_factors(config: &Json) -> Vec<(String, Vec<f32>)> {
    let factors = |kind: &str| {
        let of = |field: &str| config[field][format!("{kind}_factor")].as_array();
        let factors = of("rope_scaling").or_else(|| of("rope_parameters"))?;
        let values = factors.iter().map(|x| x.as_f64().unwrap() as f32).collect();
        Some((format!("rope_factors_{kind}.weight"), values))
    };
    ["short", "long"].into_iter().filter_map(factors).collect()
}
