//! Training of recurrent layers: with all weights, and with adapters on packed ones.

use kv_models::{
    ConfigJson, LanguageModel,
    kv_cubecl::{Autodiff, Flex},
    nn::init::seeded,
    qwen3_5::Qwen35,
};
use kv_train::{Resume, Texts};
use serde_json::json;

use crate::common::{VOCAB, World, quantized};

type Cpu = World<Autodiff<Flex>>;

/// Two layers of linear attention before one of attention.
fn model(world: &Cpu) -> LanguageModel {
    let text = json!({
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "full_attention_interval": 3,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "tie_word_embeddings": true,
    })
    .to_string();
    let config = ConfigJson { text: &text, path: "config.json".as_ref() };
    seeded(&world.device, 11, || kv_models::random(&config, &world.device)).unwrap()
}

fn rates(model: &LanguageModel) -> Vec<f32> {
    let linear = model.downcast_ref::<Qwen35>().unwrap().layers[0].linear_attention.as_ref();
    let linear = linear.unwrap();
    let parts = [linear.log_rate.val(), linear.time_bias.val(), linear.norm.gamma.val()];
    parts.into_iter().flat_map(|part| part.into_data().iter::<f32>().collect::<Vec<_>>()).collect()
}

fn texts(world: &Cpu) -> Texts {
    Texts { train: world.tokens("text.txt"), valid: None }
}

#[test]
fn all_weights_of_a_recurrent_model_learn() {
    let world = Cpu::new();
    let before = model(&world);
    let trained =
        world.train_on(before.clone(), &texts(&world), "run", &quantized(), Resume::No).unwrap();
    let (first, last) = (trained.history.valid[0], trained.history.valid.last().unwrap());
    assert!(last.nll < first.nll - 0.3, "from {} to {}", first.nll, last.nll);
    let (rates_before, rates_after) = (rates(&before), rates(&trained.model.convert().model));
    assert_eq!(rates_before.len(), 2 + 2 + 32);
    assert!(rates_before.iter().zip(&rates_after).all(|(before, after)| before != after));
}

#[test]
fn adapters_on_packed_weights_of_a_recurrent_model_learn() {
    let world = Cpu::new();
    world.adapters_learn("run", model(&world), quantized());
}
