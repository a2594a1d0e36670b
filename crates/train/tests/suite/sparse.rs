//! Training of sparse attention, whose indexers have a loss of their own, and of models that a
//! config.json describes.

use std::fs;

use burn::tensor::Tensor;
use kv_models::{
    ConfigJson, LanguageModel,
    deepseek_v4::{DeepseekV4, Layer},
    kv_cubecl::{Autodiff, Flex},
    nn::init::seeded,
};
use kv_train::{Error, History, Resume, Schedule, Texts, TrainConfig, Trainable};
use serde_json::{Value, json};

use crate::common::{VOCAB, World, config, fails, program, succeeds};

type Cpu = World<Autodiff<Flex>>;

/// A layer with a window, one with an indexer and one with all entries.
fn architecture() -> Value {
    let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    json!({
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4, "heavily_compressed_attention": 16,
        },
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 6,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "routed_scaling_factor": 1.0,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "max_position_embeddings": 128,
        "rope_parameters": {"main": rope(1e4), "compress": rope(1e5)},
    })
}

fn model(world: &Cpu) -> LanguageModel {
    let text = architecture().to_string();
    let config = ConfigJson { text: &text, path: "config.json".as_ref() };
    seeded(&world.device, 11, || kv_models::random(&config, &world.device)).unwrap()
}

/// Parameters of the layer with the indexer: of the indexer and of the rest.
fn weights(model: &LanguageModel) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let model = model.downcast_ref::<DeepseekV4>().unwrap();
    let Layer { attention, experts, .. } = &model.layers[1];
    let host = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
    let indexer = attention.indexer.as_ref().unwrap();
    let own = [
        indexer.query.weight.val(),
        indexer.weights.weight.val(),
        indexer.compressor.parts.content_gate.weight.val(),
    ];
    let others = [
        attention.query.weight.val(),
        attention.compressor.as_ref().unwrap().parts.content_gate.weight.val(),
        experts.shared.down.weight.val(),
        model.head.as_ref().unwrap().weight.val(),
    ];
    (own.map(host).into(), others.map(host).into())
}

fn index_losses(history: &History) -> Vec<f64> {
    history.train.iter().map(|step| step.index_loss.unwrap()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// With all other weights frozen, the loss of the indexers falls and nothing else changes.
#[test]
fn indexers_learn_from_attention() {
    let world = Cpu::new();
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let config = TrainConfig {
        trainable: Trainable::Indexer,
        steps: 60,
        steps_per_epoch: 60,
        schedule: Schedule { lr: 1e-2, min_lr: 1e-3, warmup: 2 },
        ..config()
    };
    let before = model(&world);
    let trained = world.train_on(before.clone(), &texts, "run", &config, Resume::No).unwrap();
    let losses = index_losses(&trained.history);
    let (first, last) = (mean(&losses[..5]), mean(&losses[55..]));
    assert!(last < 0.6 * first, "{first} to {last}: {losses:?}");
    let after = trained.model.convert().model;
    let ((own, others), (own_after, others_after)) = (weights(&before), weights(&after));
    assert_eq!(others, others_after);
    assert!(own.iter().zip(&own_after).all(|(before, after)| before != after));
}

/// Text and indexers are trained together, and the loss that is reported is the text's.
#[test]
fn text_and_indexers_learn_together() {
    let world = Cpu::new();
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let config = TrainConfig { steps: 40, steps_per_epoch: 40, ..config() };
    let before = model(&world);
    let trained = world.train_on(before.clone(), &texts, "run", &config, Resume::No).unwrap();
    let steps = &trained.history.train;
    assert!(steps.iter().all(|step| step.loss == step.nll && step.index_loss.unwrap() > 0.0));
    assert!(steps[39].nll < 0.8 * steps[0].nll, "{} to {}", steps[0].nll, steps[39].nll);
    let after = trained.model.convert().model;
    let ((own, others), (own_after, others_after)) = (weights(&before), weights(&after));
    for (before, after) in own.iter().zip(&own_after).chain(others.iter().zip(&others_after)) {
        assert!(before != after);
    }
}

#[test]
fn a_model_without_an_indexer_has_none_to_train() {
    let world = Cpu::new();
    let config = TrainConfig { trainable: Trainable::Indexer, ..config() };
    let error = world.train("run", &config).unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("trainable indexer") && error.contains("no weights"), "{error}");
    // Other models have no such loss.
    let trained = world.train("other", &crate::common::config()).unwrap();
    assert!(trained.history.train.iter().all(|step| step.index_loss.is_none()));
}

#[test]
fn models_of_any_family_are_pretrained() {
    let world = Cpu::new();
    let (text, run) = (world.string("text.txt"), world.string("run"));
    world.write("sparse.json", &architecture().to_string());
    let common = [
        ["--text", &text],
        ["--seq-len", "64"],
        ["--steps", "12"],
        ["--steps-per-epoch", "6"],
        ["--holdout", "0.1"],
        ["--valid-windows", "2"],
        ["--eval-tokens", "200"],
    ];
    let common = common.concat();
    let pretrain = |config: &str, out: &str, more: &[&str]| {
        program(&[&["pretrain", "--config", config, "--out", out], &common[..], more].concat())
    };
    let config = world.string("sparse.json");
    let first = succeeds(&mut pretrain(&config, &run, &[]));
    assert!(first.contains("index "), "{first}");
    let weights = || fs::read(format!("{run}/model/model.safetensors")).unwrap();
    let trained = weights();
    // The run keeps the configuration, so it resumes without the file, bit for bit.
    fs::remove_file(&config).unwrap();
    succeeds(&mut program(&["resume", &run, "--from-step", "6"]));
    assert!(trained == weights());
    let saved = fs::read_to_string(format!("{run}/model/config.json")).unwrap();
    assert!(saved.contains("deepseek_v4"), "{saved}");
    // Its model is the start of another run, which begins where this one ended.
    let (model, next) = (format!("{run}/model"), world.string("next"));
    let from = ["pretrain", "--from", &model, "--out", &next];
    let stdout = succeeds(&mut program(&[&from[..], &common].concat()));
    let perplexities = |text: &str| -> Vec<f64> {
        let after = text.split("valid after").skip(1);
        let number = |line: &str| line.split_whitespace().nth(2).unwrap().parse().unwrap();
        after.map(number).collect()
    };
    let (first, second) = (perplexities(&first), perplexities(&stdout));
    assert_eq!(first.len(), 3, "{first:?}");
    // Weights are saved in 16 bits.
    assert!((second[0] / first[2] - 1.0).abs() < 0.01, "{second:?} after {first:?}");
    assert!(second[2] < second[0] && second[0] < first[0], "{second:?} after {first:?}");

    let refused = world.string("refused");
    let fails_with = |config: &str, more: &[&str], parts: &[&str]| {
        fails(&mut pretrain(config, &refused, more), parts);
        assert!(!world.path("refused/run.json").exists());
    };
    fails_with(&config, &[], &["sparse.json", "cannot read"]);
    world.write("list.json", "[]");
    fails_with(&world.string("list.json"), &[], &["list.json", "not a JSON object"]);
    let mut broken = architecture();
    broken["index_topk"] = json!(0);
    world.write("broken.json", &broken.to_string());
    fails_with(&world.string("broken.json"), &[], &["config.json", "index_topk", "0"]);
    fails_with(&world.string("broken.json"), &["--layers", "2"], &["--config", "--layers"]);
    fails_with(&world.string("broken.json"), &["--from", &run], &["--config", "--from"]);
    world.write("unknown.json", r#"{"model_type": "unheard-of"}"#);
    fails_with(&world.string("unknown.json"), &[], &["model_type unheard-of", "supported"]);
}
