//! Checkpoints that are refused.

use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value as Json, json};

use super::{Tensors, tensors, with_config_error};
use crate::common::{assert_contains, copy, deepseek::tiny, failure};

/// Returns the message of a load after `change`.
fn with_tensors(change: impl FnOnce(&mut Tensors)) -> String {
    let folder = copy(&tiny());
    let mut all = tensors(folder.path());
    change(&mut all);
    let views = all.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    failure(folder.path())
}

#[test]
fn a_missing_or_misnamed_tensor_is_named() {
    for name in [
        "model.layers.1.attn.indexer.wq_b.weight",
        "model.layers.3.attn.indexer.weights_proj.weight",
        "model.layers.1.attn.indexer.compressor.ape",
        "model.layers.1.attn.indexer.compressor.wgate.weight",
        "model.layers.2.attn.compressor.norm.weight",
        "model.layers.0.attn.attn_sink",
        "model.layers.0.hc_ffn_scale",
        "model.layers.0.ffn.gate.tid2eid",
        "model.layers.2.ffn.gate.bias",
        "model.hc_head.hc_fn",
        "head.weight",
    ] {
        let message = with_tensors(|tensors| {
            tensors.remove(name).unwrap();
        });
        assert_contains(&message, &[name, "is missing"]);
        let message = with_tensors(|tensors| {
            let tensor = tensors.remove(name).unwrap();
            tensors.insert(format!("{name}_"), tensor);
        });
        assert_contains(&message, &[name, "is missing"]);
    }
    // A layer with all entries has no indexer.
    let message = with_tensors(|tensors| {
        let tensor = tensors["model.layers.1.attn.indexer.wq_b.weight"].clone();
        tensors.insert("model.layers.2.attn.indexer.wq_b.weight".into(), tensor);
    });
    assert_contains(&message, &["model.layers.2.attn.indexer.wq_b.weight", "DeepSeek-V4"]);
}

#[test]
fn a_tensor_of_another_width_is_refused() {
    for (name, expected) in [
        ("model.layers.1.attn.compressor.wkv.weight", "[128, 64]"),
        ("model.layers.1.attn.indexer.compressor.wkv.weight", "[64, 64]"),
        ("model.layers.1.attn.indexer.compressor.ape", "[4, 64]"),
        ("model.layers.1.attn.indexer.wq_b.weight", "[1024, 32]"),
        ("model.layers.2.attn.compressor.ape", "[32, 64]"),
        ("model.layers.0.hc_attn_fn", "[24, 256]"),
        ("model.layers.0.ffn.gate.tid2eid", "[256, 2]"),
    ] {
        let message = with_tensors(|tensors| {
            let (dtype, shape, bytes) = tensors.get_mut(name).unwrap();
            shape[1] /= 2;
            bytes.truncate(shape.iter().product::<usize>() * dtype.bitsize() / 8);
        });
        assert_contains(&message, &[name, expected]);
    }
    let message = with_config_error(|config| config["index_head_dim"] = json!(16));
    assert_contains(&message, &["attn.indexer.wq_b.weight", "[1024, 32]", "[512, 32]"]);
}

#[test]
fn a_table_of_experts_is_checked() {
    let name = "model.layers.1.ffn.gate.tid2eid";
    for number in [4i64, -1] {
        let message = with_tensors(|tensors| {
            let (_, _, bytes) = tensors.get_mut(name).unwrap();
            bytes[8 * 5..8 * 6].copy_from_slice(&number.to_le_bytes());
        });
        assert_contains(&message, &[name, &format!("{number} at element 5"), "0..4"]);
    }
    let message = with_tensors(|tensors| {
        let (dtype, shape, bytes) = tensors.get_mut(name).unwrap();
        *dtype = Dtype::F32;
        bytes.truncate(4 * shape.iter().product::<usize>());
    });
    assert_contains(&message, &[name, "F32", "must be I64"]);
}

#[test]
fn configurations_that_break_a_rule_are_refused() {
    let at_least_1 = "must be between 1 and";
    let cases: [(&str, Json, &[&str]); 24] = [
        ("/index_topk", json!(0), &["index_topk = 0", at_least_1]),
        ("/sliding_window", json!(0), &["sliding_window = 0", at_least_1]),
        ("/index_n_heads", json!(0), &["index_n_heads = 0", at_least_1]),
        ("/hc_mult", json!(0), &["hc_mult = 0", at_least_1]),
        ("/hc_sinkhorn_iters", json!(0), &["hc_sinkhorn_iters = 0", at_least_1]),
        (
            "/compress_rates/compressed_sparse_attention",
            json!(0),
            &["compress_rates.compressed_sparse_attention = 0", at_least_1],
        ),
        (
            "/compress_rates/heavily_compressed_attention",
            json!(0),
            &["compress_rates.heavily_compressed_attention = 0", at_least_1],
        ),
        (
            "/layer_types/1",
            json!("full_attention"),
            &["layer_types = full_attention", "must be one of sliding_attention, compressed_"],
        ),
        ("/layer_types", json!(["sliding_attention"]), &["length of layer_types = 1", "5"]),
        ("/mlp_layer_types/0", json!("dense"), &["mlp_layer_types = dense", "hash_moe or moe"]),
        ("/mlp_layer_types", json!([]), &["length of mlp_layer_types = 0", "5"]),
        ("/o_groups", json!(3), &["o_groups = 3", "must divide num_attention_heads 4"]),
        ("/num_experts_per_tok", json!(5), &["num_experts_per_tok = 5", "n_routed_experts 4"]),
        ("/qk_rope_head_dim", json!(8), &["partial_rotary_factor = 0.25", "gives 16 of 64", "8"]),
        ("/index_head_dim", json!(8), &["index_head_dim = 8", "qk_rope_head_dim 16"]),
        ("/num_key_value_heads", json!(4), &["num_key_value_heads = 4", "must be 1"]),
        ("/scoring_func", json!("softmax"), &["scoring_func = softmax", "sqrtsoftplus"]),
        ("/swiglu_limit", json!(0.0), &["swiglu_limit = 0", "above 0"]),
        ("/rope_parameters", Json::Null, &["rope_parameters = missing"]),
        ("/rope_parameters/main", Json::Null, &["rope_parameters.main = missing"]),
        ("/rope_parameters/compress", Json::Null, &["rope_parameters.compress = missing"]),
        (
            "/rope_parameters/compress/rope_theta",
            Json::Null,
            &["rope_parameters.compress.rope_theta = missing"],
        ),
        (
            "/rope_parameters/compress/original_max_position_embeddings",
            Json::Null,
            &["original_max_position_embeddings = missing"],
        ),
        ("/routed_scaling_factor", Json::Null, &["routed_scaling_factor = missing"]),
    ];
    for (field, value, parts) in cases {
        let message = with_config_error(|config| *config.pointer_mut(field).unwrap() = value);
        assert_contains(&message, parts);
    }
}
