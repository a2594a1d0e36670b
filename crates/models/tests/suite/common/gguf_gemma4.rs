//! The names and metadata of Gemma 4 in GGUF files, as llama.cpp's converter writes them.

use serde_json::Value as Json;

use super::gguf::Value;

/// Returns the metadata that other architectures do not have, or have in another form.
pub(super) fn metadata(config: &Json) -> Vec<(String, Value)> {
    let sliding: Vec<bool> = config["layer_types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| kind == "sliding_attention")
        .collect();
    let int = |value: &Json| Value::U32(value.as_u64().unwrap() as u32);
    let rope = |kind: &str| {
        Value::F32(config["rope_parameters"][kind]["rope_theta"].as_f64().unwrap() as f32)
    };
    let global = Value::U32(global_head_dim(config));
    let local = int(&config["head_dim"]);
    let mut all = vec![
        ("attention.shared_kv_layers", int(&config["num_kv_shared_layers"])),
        ("embedding_length_per_layer_input", int(&config["hidden_size_per_layer_input"])),
        (
            "attention.sliding_window_pattern",
            Value::Array(sliding.iter().map(|flag| Value::Bool(*flag)).collect()),
        ),
        ("attention.key_length", global.clone()),
        ("attention.value_length", global.clone()),
        ("attention.key_length_swa", local.clone()),
        ("attention.value_length_swa", local.clone()),
        ("rope.dimension_count", global),
        ("rope.dimension_count_swa", local),
        ("rope.freq_base", rope("full_attention")),
        ("rope.freq_base_swa", rope("sliding_attention")),
    ];
    if let Some(cap) = config["final_logit_softcapping"].as_f64() {
        all.push(("final_logit_softcapping", Value::F32(cap as f32)));
    }
    if config["use_double_wide_mlp"] == true {
        let first = sliding.len() - config["num_kv_shared_layers"].as_u64().unwrap() as usize;
        let width = config["intermediate_size"].as_u64().unwrap() as u32;
        let widths =
            (0..sliding.len()).map(|i| Value::U32(if i < first { width } else { 2 * width }));
        all.push(("feed_forward_length", Value::Array(widths.collect())));
    }
    all.into_iter().map(|(key, value)| (format!("gemma4.{key}"), value)).collect()
}

/// Returns the channels of a head that sees all tokens: those of the last layer.
pub(super) fn global_head_dim(config: &Json) -> u32 {
    let last = config["num_hidden_layers"].as_u64().unwrap() - 1;
    config["per_layer_config"][last.to_string()]["head_dim"].as_u64().unwrap() as u32
}

/// Replaces the names that other architectures do not have.
pub(super) fn name(name: &str) -> String {
    let mut name = name.to_string();
    for (hf, gguf) in [
        ("model.embed_tokens_per_layer", "per_layer_token_embd"),
        ("model.per_layer_model_projection", "per_layer_model_proj"),
        ("model.per_layer_projection_norm", "per_layer_proj_norm"),
        ("post_per_layer_input_norm", "post_norm"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("layer_scalar", "layer_output_scale.weight"),
    ] {
        name = name.replace(hf, gguf);
    }
    name
}
