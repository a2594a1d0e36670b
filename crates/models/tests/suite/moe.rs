//! Mixtures of experts: every field of the configuration counts, and experts in GGUF files of Llama
//! select the family. The golden tests compare logits with the transformers library's.

use std::path::Path;

use burn::tensor::Tensor;
use kv_models::{DecoderConfig, kv_cubecl::KvCacheConfig, llama::Llama, load, mixtral::Mixtral};
use serde_json::{Value as Json, json};

use crate::common::{
    GgmlType, GgufTensor, Value, assert_contains, device, expected, failure, gguf_parts,
    max_difference, tiny, with_config, write_gguf, write_gguf_file,
};

/// A change to a configuration.
type Change = fn(&mut Json);

const QWEN3: &str = "qwen3_moe-tiny";
const MIXTRAL: &str = "mixtral-tiny";

fn logits(name: &str, folder: &Path) -> Tensor<3> {
    let device = device();
    let model = load(folder, &device).unwrap().model;
    model.forward(expected(&tiny(name), &device).ids, KvCacheConfig::float()).unwrap()
}

/// Another value of one field changes the logits by far more than the golden tests allow.
#[test]
fn every_field_counts() {
    let changes: [(&str, Change); 5] = [
        (QWEN3, |c| c["num_experts_per_tok"] = json!(2)),
        (QWEN3, |c| c["norm_topk_prob"] = json!(false)),
        (MIXTRAL, |c| c["num_experts_per_tok"] = json!(3)),
        (MIXTRAL, |c| c["sliding_window"] = json!(null)),
        (MIXTRAL, |c| c["rope_parameters"]["rope_theta"] = json!(10_000.0)),
    ];
    for (name, change) in changes {
        let right = logits(name, &tiny(name));
        let largest = right.clone().abs().max().into_scalar::<f32>();
        let folder = with_config(name, change);
        let worst = max_difference(logits(name, folder.path()), right);
        assert!(worst > 0.01 * largest, "{name}: {worst} of {largest}");
    }
}

/// The window of Qwen3-MoE is in all layers, whatever `max_window_layers` is.
#[test]
fn all_layers_of_qwen3_moe_have_the_sliding_window() {
    let changes: [Change; 3] =
        [|_| (), |c| c["max_window_layers"] = json!(28), |c| c["layer_types"] = json!(["x"])];
    for change in changes {
        let folder = with_config(QWEN3, |c| {
            c["use_sliding_window"] = json!(true);
            c["sliding_window"] = json!(16);
            change(c);
        });
        let model = load(folder.path(), &device()).unwrap().model;
        assert!(model.spec().layers.iter().all(|layer| layer.sliding_window == Some(16)));
    }
    let folder = with_config(QWEN3, |c| c["use_sliding_window"] = json!(true));
    assert_contains(&failure(folder.path()), &["sliding_window = missing", "use_sliding_window"]);
}

#[test]
fn absent_fields_have_mixtrals_defaults() {
    let config = |folder: &Path| {
        let model = load(folder, &device()).unwrap().model;
        model.downcast_ref::<Mixtral>().unwrap().config().clone()
    };
    let folder = with_config(MIXTRAL, |c| {
        for field in ["rope_parameters", "rms_norm_eps", "hidden_act", "tie_word_embeddings"] {
            c.as_object_mut().unwrap().remove(field).unwrap();
        }
    });
    assert_eq!(config(folder.path()), config(&tiny(MIXTRAL)));
}

/// Mixtral has no architecture of its own in GGUF files.
#[test]
fn experts_tell_mixtral_from_llama_in_gguf_files() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    let read = |name: &str, extra: &[(&str, Value)]| {
        write_gguf(&tiny(name), &file, GgmlType::F32, extra);
        load(&file, &device()).unwrap().model
    };
    assert!(read(MIXTRAL, &[]).downcast_ref::<Mixtral>().is_some());
    for extra in [&[][..], &[("llama.expert_count", Value::U32(0))]] {
        assert!(read("llama-tiny", extra).downcast_ref::<Llama>().is_some());
    }
}

#[test]
fn wrong_experts_in_gguf_files_are_named() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    let cases: [(&str, Value, &[&str]); 4] = [
        (
            "llama.expert_used_count",
            Value::U32(6),
            &["num_experts_per_tok = 6", "must be at most num_local_experts 5"],
        ),
        ("llama.expert_used_count", Value::U32(0), &["num_experts_per_tok = 0", "between 1 and"]),
        ("llama.expert_count", Value::U32(4), &["blk.0.ffn_gate_inp.weight", "[5, 64]", "[4, 64]"]),
        ("llama.expert_count", Value::F32(5.0), &["llama.expert_count = 5", "unsigned integer"]),
    ];
    for (key, value, parts) in cases {
        write_gguf(&tiny(MIXTRAL), &file, GgmlType::F32, &[(key, value)]);
        assert_contains(&failure(&file), parts);
    }
    // Files of 2023 have a tensor for each expert.
    let (metadata, mut tensors) = gguf_parts(&tiny(MIXTRAL), GgmlType::F32, &[]);
    let name = "blk.0.ffn_gate.0.weight".to_string();
    tensors.push(GgufTensor::new(name, &[96, 64], &[0.0; 96 * 64], GgmlType::F32));
    write_gguf_file(&file, &metadata, &tensors);
    let parts = ["unsupported tensors of single experts", "blk.0.ffn_gate.0.weight", "llama.cpp"];
    assert_contains(&failure(&file), &parts);
}

/// Mixtral's `config.json` has no field for biases, so readers would ignore them.
#[test]
fn a_mixtral_with_biases_is_not_saved() {
    let model = load(tiny(MIXTRAL), &device()).unwrap().model;
    let mut config = model.downcast_ref::<Mixtral>().unwrap().config().clone();
    let path = Path::new("config.json");
    assert_eq!(config.to_json(path).unwrap()["sliding_window"], json!(48));
    config.base.qkv_bias = true;
    let error = config.to_json(path).unwrap_err().to_string();
    assert_contains(&error, &["qkv_bias true", "in a saved model", "config.json"]);
    assert!(!error.contains('\n'), "{error}");
}
