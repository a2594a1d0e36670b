//! Writes GGUF files for tests (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).

use std::{collections::HashMap, fs, path::Path};

use serde_json::Value as Json;

use super::{
    GgmlType, fixture, gguf_delta,
    gguf_experts::{Stacks, expert_tensors},
    gguf_gemma4, gguf_latent, gguf_rope, read_tensors, tiny,
};

/// A metadata value.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    U8(u8),
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    /// Values of one type.
    Array(Vec<Self>),
}

impl Value {
    /// Returns GGUF's number of the type.
    fn kind(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::U16(_) => 2,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::F64(_) => 12,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(n) => out.push(*n),
            Self::U16(n) => out.extend(n.to_le_bytes()),
            Self::U32(n) => out.extend(n.to_le_bytes()),
            Self::I32(n) => out.extend(n.to_le_bytes()),
            Self::F32(x) => out.extend(x.to_le_bytes()),
            Self::F64(x) => out.extend(x.to_le_bytes()),
            Self::Bool(flag) => out.push(u8::from(*flag)),
            Self::String(text) => write_string(text, out),
            Self::Array(items) => {
                // An empty array has a type too.
                let kind = items.first().map_or(4, Self::kind);
                assert!(items.iter().all(|item| item.kind() == kind));
                out.extend(kind.to_le_bytes());
                out.extend((items.len() as u64).to_le_bytes());
                items.iter().for_each(|item| item.write(out));
            }
        }
    }
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor of a GGUF file.
pub(crate) struct GgufTensor {
    pub(crate) name: String,
    /// The outermost dimension first.
    shape: Vec<usize>,
    kind: GgmlType,
    data: Vec<u8>,
}

impl GgufTensor {
    pub(crate) fn new(name: String, shape: &[usize], values: &[f32], kind: GgmlType) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}");
        Self { name, shape: shape.to_vec(), kind, data: kind.quantize(values) }
    }
}

/// The metadata and tensors of a GGUF file.
type Parts = (Vec<(String, Value)>, Vec<GgufTensor>);

/// Writes a golden checkpoint as llama.cpp's converter does, in `dtype` where shapes allow. Returns
/// where the data of each tensor begins.
pub(crate) fn write_gguf(
    folder: &Path,
    file: &Path,
    dtype: GgmlType,
    extra: &[(&str, Value)],
) -> HashMap<String, usize> {
    let (metadata, tensors) = gguf_parts(folder, dtype, extra);
    write_gguf_file(file, &metadata, &tensors)
}

/// Returns what [`write_gguf`] writes.
pub(crate) fn gguf_parts(folder: &Path, dtype: GgmlType, extra: &[(&str, Value)]) -> Parts {
    let config: Json =
        serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let arch = match config["model_type"].as_str().unwrap() {
        "mistral" | "mixtral" => "llama",
        "gemma3_text" => "gemma3",
        "gemma4_text" => "gemma4",
        "gpt_oss" => "gpt-oss",
        "qwen3_moe" => "qwen3moe",
        "qwen3_5_text" => "qwen35",
        "deepseek_v3" => "deepseek2",
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
    if arch == "gemma4" {
        let own = gguf_gemma4::metadata(&config);
        metadata.retain(|(key, _)| own.iter().all(|(other, _)| key != other));
        metadata.extend(own);
    }
    let mut put = |key: &str, value: Option<Value>| {
        metadata.extend(value.map(|value| (format!("{arch}.{key}"), value)));
    };
    if int("num_experts_per_tok").is_some() {
        put("expert_count", u32(int("num_local_experts")));
        put("expert_used_count", u32(int("num_experts_per_tok")));
        if arch != "llama" {
            let width = int("moe_intermediate_size").or(int("intermediate_size"));
            put("expert_feed_forward_length", u32(width));
        }
    }
    if arch == "qwen35" {
        for (key, value) in gguf_delta::sizes(&config) {
            put(key, Some(Value::U32(value)));
        }
    }
    if arch == "deepseek2" {
        gguf_latent::metadata(&config).into_iter().for_each(|(key, value)| put(key, Some(value)));
    }
    if arch == "gpt-oss" {
        put("rope.scaling.type", Some(Value::String("yarn".into())));
        put("rope.scaling.factor", float(&rope["factor"]));
        let original = rope["original_max_position_embeddings"].as_u64().unwrap();
        put("rope.scaling.original_context_length", Some(Value::U32(original as u32)));
    }
    let window = config["sliding_window"].as_u64().map(|n| Value::U32(n as u32));
    put("attention.sliding_window", window);
    let factors = gguf_rope::longrope_factors(&config);
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
    let mut stacks = Stacks::default();
    for (name, shape, values) in read_tensors(&folder.join("model.safetensors")) {
        if arch != "gpt-oss" && name.contains(".experts.") {
            stacks.add(&name, shape, &values);
            continue;
        }
        if name.contains("mlp.experts") {
            tensors.extend(expert_tensors(&name, &shape, &values, dtype));
            continue;
        }
        let gguf = gguf_name(arch, &name);
        let mut values = values;
        if arch == "gemma3" && gguf.ends_with("norm.weight") {
            values.iter_mut().for_each(|gain| *gain += 1.0);
        }
        let mut shape = shape;
        if arch == "qwen35" {
            (shape, values) = gguf_delta::converted(&gguf, shape, values, &config);
        }
        let conv1d = arch == "gpt2" && (gguf.contains("ffn") || gguf.contains("attn_"));
        if conv1d && let [rows, columns] = shape[..] {
            values = transposed(&values, columns);
            shape = vec![columns, rows];
        }
        if matches!(arch, "llama" | "smollm3") {
            let heads = match gguf.split('.').nth(2) {
                Some("attn_q") => int("num_attention_heads"),
                Some("attn_k") => int("num_key_value_heads"),
                _ => None,
            };
            if let Some(heads) = heads {
                let [rows, columns] = shape[..] else { panic!("{gguf}: {shape:?}") };
                // Of a head's channels, the two halves alternate.
                let head = rows / heads as usize;
                values = values
                    .chunks(head * columns)
                    .flat_map(|head| transposed_rows(head, columns, head.len() / columns / 2))
                    .collect();
            }
        }
        for (gguf, shape, values) in gguf_latent::split(gguf, shape, values, &config) {
            let columns = *shape.last().unwrap();
            let fits = shape.len() > 1 && columns.is_multiple_of(dtype.block_size());
            let dtype = if fits { dtype } else { GgmlType::F32 };
            tensors.push(GgufTensor::new(gguf, &shape, &values, dtype));
        }
    }
    tensors.extend(stacks.tensors(dtype));
    let mut vectors = factors;
    if let Some(divisors) = gguf_rope::divisors(&config) {
        vectors.push(("rope_freqs.weight".into(), divisors));
    }
    for (name, values) in vectors {
        tensors.push(GgufTensor::new(name, &[values.len()], &values, GgmlType::F32));
    }
    (metadata, tensors)
}

/// Transposes a matrix with rows of `columns`.
pub(super) fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

/// Takes the rows of a matrix as `[n, half]` and returns them as `[half, n]`.
fn transposed_rows(values: &[f32], columns: usize, half: usize) -> Vec<f32> {
    let rows: Vec<_> = values.chunks(columns).collect();
    let in_order = (0..half).flat_map(|i| rows.iter().skip(i).step_by(half));
    in_order.flat_map(|row| row.iter().copied()).collect()
}

const ALIGNMENT: usize = 32;

/// Writes a GGUF file of version 3 and returns where the data of each tensor begins.
pub(crate) fn write_gguf_file(
    file: &Path,
    metadata: &[(String, Value)],
    tensors: &[GgufTensor],
) -> HashMap<String, usize> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        write_string(key, &mut out);
        out.extend(value.kind().to_le_bytes());
        value.write(&mut out);
    }
    let mut offset = 0;
    for tensor in tensors {
        write_string(&tensor.name, &mut out);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for dim in tensor.shape.iter().rev() {
            out.extend((*dim as u64).to_le_bytes());
        }
        out.extend(tensor.kind.number().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.data.len().next_multiple_of(ALIGNMENT);
    }
    let mut starts = HashMap::new();
    for tensor in tensors {
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        starts.insert(tensor.name.clone(), out.len());
        out.extend(&tensor.data);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    fs::write(file, out).unwrap();
    starts
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
    let vocabulary = byte_vocabulary(model, pre, merges);
    write_gguf(&tiny("gpt2-tiny"), file, GgmlType::F32, &vocabulary);
}

/// Returns a vocabulary of the bytes, followed by `merges`.
pub(crate) fn byte_vocabulary(
    model: &str,
    pre: &str,
    merges: &[&str],
) -> [(&'static str, Value); 4] {
    let mut tokens: Vec<String> = (0..=255).map(|b| byte_token(b).to_string()).collect();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let strings = |items: &[String]| {
        Value::Array(items.iter().map(|item| Value::String(item.clone())).collect())
    };
    let merges: Vec<String> = merges.iter().map(ToString::to_string).collect();
    [
        ("tokenizer.ggml.model", Value::String(model.into())),
        ("tokenizer.ggml.pre", Value::String(pre.into())),
        ("tokenizer.ggml.tokens", strings(&tokens)),
        ("tokenizer.ggml.merges", strings(&merges)),
    ]
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

pub(super) fn gguf_name(arch: &str, name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.").replace("transformer.h.", "blk.");
    if arch == "gpt-oss" {
        name = name
            .replace("self_attn.sinks", "attn_sinks.weight")
            .replace("post_attention_layernorm", "post_attention_norm")
            .replace("mlp.router", "ffn_gate_inp")
            .replace("mlp.experts.down_proj_bias", "ffn_down_exps.bias")
            .replace("mlp.experts.down_proj", "ffn_down_exps.weight");
    }
    if arch == "deepseek2" {
        name = gguf_latent::renamed(&name);
    }
    if matches!(arch, "gemma3" | "gemma4" | "qwen35") {
        name = name.replace("post_attention_layernorm", "post_attention_norm");
    }
    if arch == "gemma4" {
        name = gguf_gemma4::name(&name);
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
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.conv1d", "ssm_conv1d"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt_bias", "ssm_dt.bias"),
        ("linear_attn.norm", "ssm_norm"),
        ("linear_attn.out_proj", "ssm_out"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("block_sparse_moe.gate.", "ffn_gate_inp."),
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
