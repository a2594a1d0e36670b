//! Training of mixtures of experts: runs with all weights and with adapters on packed ones.

use kv_models::{
    ConfigJson, LanguageModel,
    kv_cubecl::{Autodiff, Flex},
    nn::init::seeded,
};
use kv_train::{Resume, Texts, TrainConfig};
use serde_json::{Value, json};

use crate::common::{VOCAB, World, config, qat};

type Cpu = World<Autodiff<Flex>>;

const K4V4: &str = "k4v4-g32-r32";

/// The fields of each family with 8 experts of 32 channels, two for each token.
fn families() -> [Value; 2] {
    [
        json!({"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8,
            "intermediate_size": 96, "norm_topk_prob": true}),
        json!({"model_type": "mixtral", "intermediate_size": 32, "num_local_experts": 8}),
    ]
}

fn model(world: &Cpu, family: &Value) -> LanguageModel {
    let mut fields = json!({
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": true,
    });
    fields.as_object_mut().unwrap().extend(family.as_object().unwrap().clone());
    let text = fields.to_string();
    let config = ConfigJson { text: &text, path: "config.json".as_ref() };
    seeded(&world.device, 11, || kv_models::random(&config, &world.device)).unwrap()
}

fn texts(world: &Cpu) -> Texts {
    Texts { train: world.tokens("text.txt"), valid: None }
}

#[test]
fn all_weights_of_experts_learn() {
    let world = Cpu::new();
    for (i, family) in families().iter().enumerate() {
        let config = TrainConfig { qat: Some(qat(K4V4)), ..config() };
        let (before, name) = (model(&world, family), format!("run{i}"));
        let trained = world.train_on(before, &texts(&world), &name, &config, Resume::No).unwrap();
        let (first, last) = (trained.history.valid[0], trained.history.valid.last().unwrap());
        assert!(last.nll < first.nll - 0.3, "{family}: from {} to {}", first.nll, last.nll);
    }
}

#[test]
fn adapters_on_packed_weights_of_experts_learn() {
    let world = Cpu::new();
    for (i, family) in families().iter().enumerate() {
        let config = TrainConfig { qat: Some(qat(K4V4)), ..config() };
        world.adapters_learn(&format!("run{i}"), model(&world, family), config);
    }
}
