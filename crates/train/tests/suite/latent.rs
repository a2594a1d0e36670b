//! Training of latent attention: gradients against finite differences, and runs with all weights
//! and with adapters on packed ones.

use burn::{
    module::Param,
    tensor::{Distribution, Int, Tensor},
};
use kv_models::{
    ConfigJson, LanguageModel,
    deepseek_v3::{DeepseekV3, LatentAttention},
    ids_to_tensor,
    kv_cubecl::{Autodiff, Flex, KvCacheConfig},
    nn::{Matrix, init::seeded},
};
use kv_train::{Resume, Texts, TrainConfig};
use serde_json::json;

use crate::common::{VOCAB, World, config, qat};

type Cpu = World<Autodiff<Flex>>;

const K4V4: &str = "k4v4-g32-r32";

/// A layer with an MLP before one with experts.
fn model(world: &Cpu) -> LanguageModel {
    model_with(world, 1)
}

/// Two layers, the first `dense_layers` with an MLP.
fn model_with(world: &Cpu, dense_layers: usize) -> LanguageModel {
    let text = json!({
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32},
    })
    .to_string();
    let config = ConfigJson { text: &text, path: "config.json".as_ref() };
    seeded(&world.device, 11, || kv_models::random(&config, &world.device)).unwrap()
}

fn texts(world: &Cpu) -> Texts {
    Texts { train: world.tokens("text.txt"), valid: None }
}

fn latent_rows(model: &LanguageModel) -> Vec<f32> {
    let attention = &model.downcast_ref::<DeepseekV3>().unwrap().layers[1].attention;
    attention.keys_values.weight.val().into_data().iter::<f32>().collect()
}

#[test]
fn all_weights_of_latent_attention_learn() {
    let world = Cpu::new();
    let before = model(&world);
    for (name, config) in
        [("float", config()), ("k4v4", TrainConfig { qat: Some(qat(K4V4)), ..config() })]
    {
        let trained = world.train_on(before.clone(), &texts(&world), name, &config, Resume::No);
        let trained = trained.unwrap();
        let (first, last) = (trained.history.valid[0], trained.history.valid.last().unwrap());
        assert!(last.nll < first.nll - 0.3, "{name}: from {} to {}", first.nll, last.nll);
        let (rows, trained) = (latent_rows(&before), latent_rows(&trained.model.convert().model));
        let moved = rows.iter().zip(&trained).filter(|(before, after)| before != after).count();
        assert!(moved > rows.len() * 9 / 10, "{name}: {moved} of {} moved", rows.len());
    }
}

#[test]
fn adapters_on_packed_weights_of_latent_attention_learn() {
    let world = Cpu::new();
    world.adapters_learn("run", model(&world), TrainConfig { qat: Some(qat(K4V4)), ..config() });
}

/// Selects a matrix of attention.
type Select = fn(&mut LatentAttention) -> &mut Matrix;

/// The derivative of the loss along a direction of each matrix is its gradient's product with the
/// direction. The loss is f32, so differences are off by about a thousandth. The layers have no
/// experts, because the loss jumps where another one is selected.
#[test]
fn gradients_of_latent_attention_are_finite_differences() {
    let world = Cpu::new();
    let device = &world.device;
    let model = model_with(&world, 2);
    let model = model.downcast_ref::<DeepseekV3>().unwrap();
    let ids: Vec<u32> = (0..48).map(|i| (i * i * 7 + 3 * i) % VOCAB as u32).collect();
    let ids = ids_to_tensor(&ids, [2, 24], device);
    let loss = |model: &DeepseekV3, ids: Tensor<2, Int>| {
        let model = LanguageModel::from(model.clone());
        let logits = model.forward(ids, KvCacheConfig::float()).unwrap();
        // Logits of the same position, weighted by a fixed pattern.
        let [batch, seq, vocab] = logits.dims();
        let pattern = Tensor::<1, Int>::arange(0..(batch * seq * vocab) as i64, &logits.device());
        let pattern = (pattern.remainder_scalar(7).float() - 3.0).reshape([batch, seq, vocab]);
        (logits.tanh() * pattern).mean()
    };
    let matrices: [(&str, Select); 4] = [
        ("qkv", |attention| &mut attention.qkv.weight),
        ("query", |attention| &mut attention.query.as_mut().unwrap().weight),
        ("keys_values", |attention| &mut attention.keys_values.weight),
        ("output", |attention| &mut attention.output.weight),
    ];
    for layer in 0..2 {
        for (name, select) in matrices {
            let mut own = model.clone();
            let param = select(&mut own.layers[layer].attention).param().unwrap().clone();
            let gradients = loss(&own, ids.clone()).backward();
            let gradient = param.val().grad(&gradients).unwrap();
            let direction = seeded(device, 17, || {
                let direction = Distribution::Normal(0.0, 1.0);
                Tensor::<2>::random(gradient.dims(), direction, &gradient.device())
            });
            let expected = (gradient * direction.clone()).sum().into_scalar::<f32>();
            let along = |step: f32| {
                let mut moved = model.clone();
                let matrix = select(&mut moved.layers[layer].attention);
                let numbers = direction.clone().into_data();
                let to = matrix.val() + Tensor::from_data(numbers, &matrix.device()) * step;
                *matrix = Param::from_tensor(to.detach()).into();
                loss(&moved, ids.clone()).into_scalar::<f32>()
            };
            let step = 5e-4;
            let difference = (along(step) - along(-step)) / (2.0 * step);
            let off = (difference - expected).abs();
            assert!(
                off <= 0.02 * expected.abs() + 1e-5,
                "{name} {layer}: {difference}, {expected}"
            );
        }
    }
}
