//! Layers of latent attention in GGUF files, as llama.cpp's converter writes them.

use serde_json::Value as Json;

use super::{Value, gguf::transposed};

/// A tensor: name, shape and numbers.
type Tensor = (String, Vec<usize>, Vec<f32>);

/// Returns the metadata of the layers.
pub(super) fn metadata(config: &Json) -> Vec<(&'static str, Value)> {
    let int = |key: &str| config[key].as_u64().unwrap() as u32;
    let rope = &config["rope_parameters"];
    let number = |value: &Json| value.as_f64().unwrap() as f32;
    let (rank, rotary) = (int("kv_lora_rank"), int("qk_rope_head_dim"));
    let sizes = [
        // The cache has one head, of latent rows.
        ("attention.head_count_kv", 1),
        ("attention.kv_lora_rank", rank),
        ("attention.key_length", rank + rotary),
        ("attention.value_length", rank),
        ("attention.key_length_mla", int("qk_nope_head_dim") + rotary),
        ("attention.value_length_mla", int("v_head_dim")),
        ("rope.dimension_count", rotary),
        ("leading_dense_block_count", int("first_k_dense_replace")),
        ("expert_count", int("n_routed_experts")),
        ("expert_shared_count", int("n_shared_experts")),
        ("expert_group_count", int("n_group")),
        ("expert_group_used_count", int("topk_group")),
        // Sigmoid.
        ("expert_gating_func", 2),
        ("rope.scaling.original_context_length", int_of(&rope["original_max_position_embeddings"])),
    ];
    let query = config["q_lora_rank"].as_u64().map(|rank| ("attention.q_lora_rank", rank as u32));
    let sizes = sizes.into_iter().chain(query).map(|(key, n)| (key, Value::U32(n)));
    let floats = [
        ("expert_weights_scale", number(&config["routed_scaling_factor"])),
        ("rope.scaling.factor", number(&rope["factor"])),
        ("rope.scaling.yarn_log_multiplier", 0.1 * number(&rope["mscale_all_dim"])),
    ];
    let normalized = config["norm_topk_prob"].as_bool().unwrap();
    let others = [
        ("expert_weights_norm", Value::Bool(normalized)),
        ("rope.scaling.type", Value::String("yarn".into())),
    ];
    let floats = floats.map(|(key, x)| (key, Value::F32(x)));
    sizes.chain(floats).chain(others).collect()
}

fn int_of(value: &Json) -> u32 {
    value.as_u64().unwrap() as u32
}

/// Returns the name with the parts replaced that only this architecture has.
pub(super) fn renamed(name: &str) -> String {
    let pairs = [
        ("self_attn.q_a_proj", "attn_q_a"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm"),
        ("self_attn.q_b_proj", "attn_q_b"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        ("self_attn.kv_b_proj", "attn_kv_b"),
        ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ];
    pairs.iter().fold(name.to_string(), |name, (hf, gguf)| name.replace(hf, gguf))
}

/// Divides the rows of keys and values of all heads into two tensors, the first of them transposed.
/// Other tensors stay.
pub(super) fn split(
    gguf: String,
    shape: Vec<usize>,
    values: Vec<f32>,
    config: &Json,
) -> Vec<Tensor> {
    let Some(layer) = gguf.strip_suffix("attn_kv_b.weight") else {
        return vec![(gguf, shape, values)];
    };
    let int = |key: &str| config[key].as_u64().unwrap() as usize;
    let (n_heads, rank) = (int("num_attention_heads"), int("kv_lora_rank"));
    let (keys, rows) = (int("qk_nope_head_dim"), int("v_head_dim"));
    let heads = || values.chunks((keys + rows) * rank);
    let of_keys = heads().flat_map(|head| transposed(&head[..keys * rank], rank)).collect();
    let of_values = heads().flat_map(|head| head[keys * rank..].to_vec()).collect();
    vec![
        (format!("{layer}attn_k_b.weight"), vec![n_heads, rank, keys], of_keys),
        (format!("{layer}attn_v_b.weight"), vec![n_heads, rows, rank], of_values),
    ]
}
