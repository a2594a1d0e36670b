//! Settings of a run have their documented effect. On Flex, equal computations give equal bits, so
//! losses are compared exactly.

use std::collections::BTreeSet;

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Int, Tensor, TensorData},
};
use kv_models::{
    LanguageModel,
    kv_cubecl::{Autodiff, FakeQuantOptions, Flex, KvFormat, On, Side, SteGradient},
};
use kv_train::{
    Adapter, Objective, QatConfig, Run, Schedule, Texts, TrainConfig, Trainable, train,
};

use crate::common::{Losses, World, config, qat, quantized, weights};

type Cpu = World<Autodiff<Flex>>;

/// Returns the paths of the weights in which two models differ.
fn changed(before: &LanguageModel, after: &LanguageModel) -> BTreeSet<String> {
    let (before, after) = (weights(before), weights(after));
    assert!(before.keys().eq(after.keys()), "other weights");
    before.into_iter().filter(|(path, data)| after[path] != *data).map(|(path, _)| path).collect()
}

#[test]
fn training_lowers_the_loss() {
    let world = Cpu::new();
    let config = TrainConfig { steps: 40, steps_per_epoch: 20, ..quantized() };
    let trained = world.train("run", &config).unwrap();
    let history = &trained.history;
    assert_eq!((history.train.len(), history.valid.len(), trained.steps), (40, 3, 40));
    let steps: Vec<u64> = history.valid.iter().map(|record| record.step).collect();
    assert_eq!((steps, trained.step), (vec![0, 20, 40], 40));
    let (first, last) = (history.train[0].loss, history.train[39].loss);
    // The loss starts at about log(vocabulary) and falls, because the text repeats a few phrases.
    assert!(first > 5.0 && last < 0.5 * first, "from {first} to {last}");
    assert!(history.valid[1].nll < history.valid[0].nll);
    assert!(history.train.iter().all(|record| record.tokens_per_second > 0.0));
    assert!(history.train.iter().all(|record| record.kl.is_none() && record.nll == record.loss));
    assert!(history.valid[2].nll < history.valid[1].nll);
    // Both are losses of the untrained model, on different texts.
    assert!((history.valid[0].nll - first).abs() < 0.5, "{:?}", history.valid[0]);
    let shares = history.valid[1].shares.unwrap();
    assert!((0.0..0.1).contains(&shares.clipped) && shares.constant == 0.0, "{shares:?}");
}

#[test]
fn equal_runs_give_equal_bits() {
    let world = Cpu::new();
    let adapter = Some(Adapter { rank: 2, alpha: 4.0 });
    for (name, config) in
        [("weights", quantized()), ("adapters", TrainConfig { adapter, ..quantized() })]
    {
        let once = world.losses(name, &config);
        assert_eq!(once, world.losses(&format!("{name} again"), &config), "{name}");
    }
}

#[test]
fn a_model_without_autodiff_is_trained_too() {
    let world = Cpu::new();
    let expected = world.losses("autodiff", &quantized());
    let device = On::<Flex>::open().unwrap();
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let model = world.model.clone().valid();
    let run = Run::new(world.path("plain"));
    let trained = train(&device, model, &texts, &quantized(), run).unwrap();
    assert_eq!(Losses::of(&trained.history), expected);
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    let world = Cpu::new();
    let adapter = Some(Adapter { rank: 2, alpha: 4.0 });
    for (name, config) in [
        ("side by side", quantized()),
        ("one by one", TrainConfig { batch: 1, objective: Objective::Distillation, ..quantized() }),
        ("adapted", TrainConfig { adapter, ..quantized() }),
    ] {
        let kept = world.losses(name, &config);
        let config = TrainConfig { gradient_checkpointing: true, ..config };
        assert_eq!(kept, world.losses(&format!("{name} recomputed"), &config), "{name}");
    }
}

#[test]
fn a_delayed_start_is_float_until_then() {
    let world = Cpu::new();
    let float = world.losses("float", &config()).objectives();
    let delayed = QatConfig { start_step: 3, ..qat(crate::common::K2V2) };
    let config = TrainConfig { qat: Some(delayed), ..config() };
    let delayed = world.losses("delayed", &config).objectives();
    assert_eq!(float[..3], delayed[..3]);
    assert_ne!(float[3], delayed[3]);
}

#[test]
fn settings_decide_what_is_quantized() {
    let world = Cpu::new();
    let with = |qat: QatConfig| TrainConfig { qat: Some(qat), ..config() };
    let float = world.losses("float", &config());
    let exact = world.losses("exact", &quantized());
    assert_ne!(float.train[0], exact.train[0]);

    // Some layers in float, then some sequences in float.
    let mut layers = qat(crate::common::K2V2);
    layers.cache = layers.cache.with_float_layers([1]);
    let one = world.losses("one layer", &with(layers.clone()));
    assert!(one.train[0] != float.train[0] && one.train[0] != exact.train[0]);
    layers.cache = layers.cache.with_float_layers([0]);
    assert_eq!(world.losses("no layer", &with(layers)), float);
    let all_float = TrainConfig { float_share: 1.0, ..quantized() };
    assert_eq!(world.losses("float share", &all_float).train, float.train);
    let half_float = TrainConfig { float_share: 0.5, ..quantized() };
    let half = world.losses("half", &half_float);
    assert!(half.train[0] != float.train[0] && half.train[0] != exact.train[0]);

    // Quantization of every token, then another gradient of the quantizer.
    let everything = FakeQuantOptions { quantize_everything: true, ..Default::default() };
    let everything = QatConfig { fake_quant: everything, ..qat(crate::common::K2V2) };
    let everything = world.losses("everything", &with(everything));
    assert_ne!(everything.train[0], exact.train[0]);
    let scale = FakeQuantOptions { gradient: SteGradient::ScaleMin, ..Default::default() };
    let scale = QatConfig { fake_quant: scale, ..qat(crate::common::K2V2) };
    let scale = world.losses("scale", &with(scale));
    assert_eq!(scale.train[0], exact.train[0]);
    assert_ne!(scale.train[1], exact.train[1]);
}

#[test]
fn only_the_chosen_weights_change() {
    let world = Cpu::new();
    let layer = |names: &[&str]| -> BTreeSet<String> {
        let paths = names
            .iter()
            .flat_map(|name| (0..2).map(move |layer| format!("Llama.layers.{layer}.{name}")));
        paths.collect()
    };
    let attention = ["attention_norm.gamma", "qkv.weight", "output.weight"];
    let mlp = ["mlp_norm.gamma", "mlp.gate_up.weight", "mlp.down.weight"];
    let layers = &layer(&attention) | &layer(&mlp);
    let all = weights(&world.model).into_keys().collect::<BTreeSet<_>>();
    let matrices = layer(&["qkv.weight", "output.weight", "mlp.gate_up.weight", "mlp.down.weight"]);
    let adapter = Some(Adapter { rank: 2, alpha: 4.0 });
    for (trainable, adapter, expected) in [
        (Trainable::All, None, all),
        (Trainable::Layers, None, layers),
        (Trainable::Attention, None, layer(&attention)),
        (Trainable::Qkv, None, layer(&["qkv.weight"])),
        (Trainable::All, adapter, matrices),
        (Trainable::Attention, adapter, layer(&["qkv.weight", "output.weight"])),
        (Trainable::Qkv, adapter, layer(&["qkv.weight"])),
    ] {
        let what = format!("{trainable} {}", if adapter.is_some() { "adapted" } else { "" });
        let config = TrainConfig { trainable, adapter, steps: 4, ..quantized() };
        let trained = world.train(&what, &config).unwrap();
        assert_eq!(changed(&world.model, &trained.model.convert().model), expected, "{what}");
    }
}

#[test]
fn only_matrices_decay() {
    let world = Cpu::new();
    let with = |name: &str, weight_decay| {
        let schedule = Schedule { lr: 1e-2, min_lr: 1e-2, warmup: 0 };
        let config = TrainConfig { weight_decay, steps: 1, schedule, ..quantized() };
        world.train(name, &config).unwrap().model.convert().model
    };
    let decayed = changed(&with("still", 0.0), &with("decaying", 0.5));
    let matrices = ["qkv.weight", "output.weight", "mlp.gate_up.weight", "mlp.down.weight"];
    let expected = (0..2)
        .flat_map(|layer| matrices.map(|name| format!("Llama.layers.{layer}.{name}")))
        .collect::<BTreeSet<_>>();
    assert_eq!(decayed, expected);
}

#[test]
fn the_last_epoch_may_be_short() {
    let world = Cpu::new();
    let config = TrainConfig { steps: 10, steps_per_epoch: 4, ..quantized() };
    let trained = world.train("run", &config).unwrap();
    let steps: Vec<u64> = trained.history.valid.iter().map(|record| record.step).collect();
    assert_eq!(steps, [0, 4, 8, 10]);
    // The number of validations changes nothing else.
    let config = TrainConfig { steps_per_epoch: 10, ..config };
    let whole = world.train("whole", &config).unwrap();
    assert_eq!(Losses::of(&trained.history).train, Losses::of(&whole.history).train);
    assert_eq!(weights(&trained.model.convert().model), weights(&whole.model.convert().model));
}

#[test]
fn accumulated_batches_are_one_batch() {
    let world = Cpu::new();
    let whole = world.losses("whole", &quantized()).objectives();
    let config = TrainConfig { batch: 1, accumulation: 2, ..quantized() };
    let halves = world.losses("halves", &config);
    assert_eq!(halves.train[3].1, 1, "two records per optimizer step");
    for (whole, halves) in whole.iter().zip(halves.objectives().chunks(2)) {
        let mean = (halves[0] + halves[1]) / 2.0;
        // Only the order of f32 sums differs.
        assert!((whole - mean).abs() < 1e-6 * whole, "{whole} against {mean}");
    }
}

#[test]
fn distillation_lowers_the_divergence() {
    let mut world = Cpu::new();
    let pretrained = TrainConfig { steps: 80, steps_per_epoch: 80, ..config() };
    let pretrained = world.train("pretrained", &pretrained).unwrap().model.convert();
    pretrained.save(world.path("model"), &world.tokenizer).unwrap();
    world.model = kv_models::load(world.path("model"), &world.device).unwrap().model;

    let objective = Objective::Distillation;
    let base = TrainConfig { objective, steps: 3, steps_per_epoch: 3, ..config() };
    let float = world.train("float", &base).unwrap();
    let kl = float.history.train[0].kl.unwrap();
    // Teacher and student have the same logits, so only the rounding of f32 sums remains.
    assert!(kl.abs() < 1e-6, "{kl}");

    let base = TrainConfig { qat: Some(qat(crate::common::K2V2)), ..base };
    let schedule = |lr| Schedule { lr, min_lr: 0.0, warmup: 2 };
    let still = TrainConfig { schedule: schedule(1e-12), ..base.clone() };
    let history = world.train("before", &still).unwrap().history;
    let before = history.valid[0];
    assert_eq!((before.step, history.valid[1].step), (0, 3));
    assert!((before.kl - history.valid[1].kl).abs() < 1e-6, "{history:?}");
    assert!(before.kl > 1e-3 && before.kl_float.abs() < 1e-6, "{before:?}");
    assert!(before.nll > before.nll_float, "{before:?}");

    let config = TrainConfig { schedule: schedule(3e-4), steps: 30, ..base };
    let trained = world.train("trained", &config).unwrap();
    let record = trained.history.train[0];
    assert!(record.kl.unwrap() > 1e-3 && record.loss == record.kl.unwrap(), "{record:?}");
    let after = trained.history.valid.last().unwrap();
    assert!(after.kl < 0.8 * before.kl, "from {before:?} to {after:?}");

    let objective = Objective::Mixed { kl_weight: 0.25 };
    let config = TrainConfig { objective, steps: 3, ..config };
    let mixed = world.train("mixed", &config).unwrap().history.train[0];
    let expected = 0.75 * mixed.nll + 0.25 * mixed.kl.unwrap();
    assert!((mixed.loss - expected).abs() < 1e-12, "{mixed:?}");
    assert_eq!(mixed.kl, record.kl);
}

/// A small limit on the gradient norm changes the result.
#[test]
fn clipping_bounds_the_update() {
    let world = Cpu::new();
    let with = |clip_norm| TrainConfig { clip_norm, ..quantized() };
    let free = world.losses("free", &with(None));
    assert_eq!(free, world.losses("never reached", &with(Some(1e9))));
    // Gradients far below Adam's epsilon change nothing.
    let held = world.train("held", &with(Some(1e-13))).unwrap();
    let before = weights(&world.model);
    for (path, after) in weights(&held.model.convert().model) {
        let moved = before[&path].iter().zip(&after).map(|(a, b)| (a - b).abs());
        assert!(moved.fold(0.0, f32::max) < 1e-5, "{path}");
    }
}

#[test]
fn a_saved_model_is_what_was_trained() {
    /// Rounds weights as a file in f16 does.
    struct Half;
    impl ModuleMapper for Half {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(DType::F16).cast(DType::F32))
        }
    }
    let world = Cpu::new();
    let mut qat = qat("k4v2-g16-r32-s2-after");
    // The layers and the sides have different formats.
    qat.cache = qat.cache.with_float_layers([1]).with_format(0, Side::Keys, KvFormat::Affine8);
    let adapter = Some(Adapter { rank: 2, alpha: 4.0 });
    for adapter in [None, adapter] {
        let name = if adapter.is_some() { "adapted" } else { "trained" };
        let config = TrainConfig { qat: Some(qat.clone()), adapter, steps: 4, ..config() };
        let trained = world.train(name, &config).unwrap();
        let ids: Vec<i32> = world.tokens("text.txt").ids(0..96).map(|id| id as i32).collect();
        let ids =
            |device| Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), [1, 96]), device);
        let host = |tensor: Tensor<3>| tensor.into_data().try_to_vec::<f32>().unwrap();

        let plain = (*world.device).clone().without_autodiff();
        let devices = trained.model.devices();
        let prepared = host(trained.model.forward(ids(&devices[0])).unwrap());
        let converted = trained.model.convert();
        let logits = host(converted.model.forward(ids(&plain), &converted.cache).unwrap());
        let largest = logits.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let far = prepared.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Merging adapters changes the order of f32 sums and sometimes the rounding of a code.
        assert!(far <= if adapter.is_some() { 2e-2 * largest } else { 0.0 }, "{far} of {largest}");

        let folder = world.path(&format!("{name}/model"));
        converted.save(&folder, &world.tokenizer).unwrap();
        assert!(folder.join("kv_cache.json").is_file());
        let loaded = kv_models::load(&folder, &plain).unwrap();
        assert_eq!(loaded.cache.as_ref(), Some(&qat.cache));
        assert_eq!(loaded.tokenizer.unwrap().n_ids(), crate::common::VOCAB);
        let saved = host(loaded.model.forward(ids(&plain), &qat.cache).unwrap());
        let rounded = converted.model.map(&mut Half);
        assert_eq!(saved, host(rounded.forward(ids(&plain), &qat.cache).unwrap()));
    }
}
