//! Training of a model whose last layers share the caches of earlier ones: with all weights, and
//! with adapters on packed ones.

use burn::module::Module;
use kv_models::{
    ConfigJson, LanguageModel,
    gemma4::Gemma4,
    kv_cubecl::{Autodiff, Flex, KvCacheConfig},
    nn::init::seeded,
};
use kv_train::{Resume, Texts};
use serde_json::json;

use crate::common::{K2V2, VOCAB, World, quantized};

type Cpu = World<Autodiff<Flex>>;

/// Layers 2 and 3 share the caches of layers 0 and 1.
fn model(world: &Cpu) -> LanguageModel {
    let text = json!({
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 48,
        "layer_types":
            ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": true,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 20.0,
        "max_position_embeddings": 128,
    })
    .to_string();
    let config = ConfigJson { text: &text, path: "config.json".as_ref() };
    seeded(&world.device, 12, || kv_models::random(&config, &world.device)).unwrap()
}

/// The key and value rows of the layers that own a cache, and the inputs of layers.
fn shared_weights(model: &LanguageModel) -> Vec<f32> {
    let gemma = model.downcast_ref::<Gemma4>().unwrap();
    let mut all = vec![];
    for (layer, rows) in [(0, 64..128), (1, 128..256)] {
        let qkv = gemma.layers[layer].attention.qkv.weight.rows(rows.start, rows.len());
        all.extend(qkv.into_data().iter::<f32>());
    }
    let inputs = gemma.per_layer.as_ref().unwrap();
    all.extend(inputs.projection.weight.val().into_data().iter::<f32>());
    all.extend(inputs.norm.gamma.val().into_data().iter::<f32>());
    all
}

fn texts(world: &Cpu) -> Texts {
    Texts { train: world.tokens("text.txt"), valid: None }
}

#[test]
fn all_weights_of_a_model_with_shared_caches_learn() {
    let world = Cpu::new();
    let before = model(&world);
    let trained =
        world.train_on(before.clone(), &texts(&world), "run", &quantized(), Resume::No).unwrap();
    let (first, last) = (trained.history.valid[0], trained.history.valid.last().unwrap());
    assert!(last.nll < first.nll - 0.3, "from {} to {}", first.nll, last.nll);
    let converted = trained.model.convert();
    let after = shared_weights(&converted.model);
    let changed = shared_weights(&before).iter().zip(&after).filter(|(a, b)| a != b).count();
    assert!(changed > after.len() * 9 / 10, "{changed} of {}", after.len());
    // The trained model streams as it was trained.
    let ids: Vec<u32> = (0..96).map(|i| (i * 7 + 3) % VOCAB as u32).collect();
    let config: KvCacheConfig = K2V2.parse().unwrap();
    let model = converted.model.valid();
    let device = (*world.device).clone().without_autodiff();
    let float = model.streaming_difference(&ids, KvCacheConfig::float().with_capacity(96), &device);
    assert!(float.unwrap() < 1e-3);
    assert!(model.streaming_difference(&ids, config.with_capacity(96), &device).is_ok());
}

#[test]
fn adapters_on_packed_weights_of_a_model_with_shared_caches_learn() {
    let world = Cpu::new();
    world.adapters_learn("run", model(&world), quantized());
}
