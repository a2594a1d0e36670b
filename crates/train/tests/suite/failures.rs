//! Runs that must fail: numbers that are not finite, and invalid settings and folders.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::Tensor,
};
use kv_models::{
    LanguageModel,
    kv_cubecl::{Autodiff, Flex},
    llama::{Config, Llama},
};
use kv_train::{
    Adapter, Checkpoints, Error, QatConfig, Resume, Run, Schedule, Texts, TrainConfig, train,
};

use crate::common::{World, architecture, config, qat, quantized, sentences, tiny, weights};

type Cpu = World<Autodiff<Flex>>;

/// Multiplies the weights whose paths contain `name`.
struct Enlarge {
    path: Vec<String>,
    name: &'static str,
    times: f64,
}

impl ModuleMapper for Enlarge {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.path.iter().any(|part| part == self.name) {
            true => param.map(|tensor| tensor.mul_scalar(self.times)),
            false => param,
        }
    }
}

impl Enlarge {
    fn weights(model: LanguageModel, name: &'static str, times: f64) -> LanguageModel {
        let before = weights(&model);
        let model = model.map(&mut Self { path: vec![], name, times });
        assert!(weights(&model) != before, "no weight of {name}");
        model
    }
}

/// With a head of 1e20, the loss and every gradient are finite, but their norm in f32 is not.
/// Scaled by it, all gradients would be 0, and the run would continue without training anything.
#[test]
fn a_norm_beyond_f32_stops_the_run() {
    let world = Cpu::new();
    let config = TrainConfig { steps: 4, ..config() };
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let model = tiny(Config { tied_head: false, ..architecture() }, &world.device);
    let model = Enlarge::weights(model, "head", 1e20);
    for (name, clip_norm) in [("clipped", Some(1.0)), ("as it is", None)] {
        let config = TrainConfig { clip_norm, ..config.clone() };
        let error = world.train_on(model.clone(), &texts, name, &config, Resume::No).unwrap_err();
        assert!(matches!(&error, Error::Stopped(_)), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("step 0: the norm of the gradient is inf"), "{error}");
        assert_eq!(Checkpoints::of(&world.path(name)).steps().unwrap(), [0]);
    }
}

/// The largest f32 as weight decay makes weights infinite in one step, after a finite loss.
#[test]
fn no_checkpoint_holds_a_weight_that_is_not_finite() {
    let world = Cpu::new();
    let schedule = Schedule { lr: 1.0, min_lr: 0.0, warmup: 0 };
    let config = TrainConfig { weight_decay: f32::MAX, schedule, ..config() };
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let asked = Arc::new(AtomicBool::new(false));
    let stop = asked.clone();
    let log = move |line: &str| {
        asked.fetch_or(line.starts_with("step"), Ordering::Relaxed);
    };
    let run = Run { stop: Some(stop), log: Some(Box::new(log)), ..Run::new(world.path("run")) };
    let model = Enlarge::weights(world.model.clone(), "qkv", 1000.0);
    let error = train(&world.device, model, &texts, &config, run).unwrap_err().to_string();
    assert!(error.contains("qkv") && error.contains("not finite after step 1"), "{error}");
    assert_eq!(Checkpoints::of(&world.path("run")).steps().unwrap(), [0]);
}

/// An embedding with one row of infinities, untied from the head.
fn broken(token: usize, world: &Cpu) -> LanguageModel {
    let config = Config { tied_head: false, ..architecture() };
    let mut llama = tiny(config, &world.device).downcast::<Llama>().unwrap();
    let embedding = &mut llama.embedding.weight;
    *embedding = embedding.clone().map_tensor(|tensor| {
        let row = Tensor::full([1, 64], f32::INFINITY, &tensor.device());
        tensor.slice_assign([token..token + 1, 0..64], row)
    });
    LanguageModel::new(llama)
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run() {
    let world = Cpu::new();
    let id = |text: &str| world.tokenizer.encode(text).unwrap()[0] as usize;
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let model = broken(id(". "), &world);
    let error = world.train_on(model, &texts, "train", &quantized(), Resume::No).unwrap_err();
    assert_eq!(
        error.to_string(),
        "training stopped: the held-out loss after step 0 is NaN, with a float cache NaN"
    );

    // The infinity occurs only in validation: no checkpoint is written.
    world.write("other.txt", &sentences(60).replace("the moon", "Q"));
    let texts = Texts { valid: Some(world.tokens("other.txt")), ..texts };
    let config = TrainConfig { seq_len: 48, valid_windows: 100, ..quantized() };
    let model = broken(id("Q"), &world);
    let error = world.train_on(model, &texts, "valid", &config, Resume::No).unwrap_err();
    assert!(matches!(&error, Error::Stopped(why) if why.contains("after step 0")), "{error}");
    assert_eq!(Checkpoints::of(&world.path("valid")).steps().unwrap(), [0; 0]);

    // The infinity occurs only in training: the first checkpoint would hold it.
    let texts = Texts { train: world.tokens("other.txt"), valid: Some(world.tokens("text.txt")) };
    let model = broken(id("Q"), &world);
    let error = world.train_on(model, &texts, "later", &config, Resume::No).unwrap_err();
    let said = "not finite after step 0";
    assert!(matches!(&error, Error::Stopped(why) if why.contains(said)), "{error}");
    assert_eq!(Checkpoints::of(&world.path("later")).steps().unwrap(), [0; 0]);
}

#[test]
fn mistakes_are_reported() {
    let world = Cpu::new();
    let says = |name: &str, config: &TrainConfig, resume, parts: &[&str]| {
        let error = world.resume(name, config, resume).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    };
    let new = |config: TrainConfig, parts: &[&str]| says("new", &config, Resume::No, parts);
    new(TrainConfig { seq_len: 129, ..config() }, &["seq-len 129", "128 positions"]);
    new(TrainConfig { batch: 0, ..config() }, &["batch 0", "at least 1"]);
    new(TrainConfig { float_share: 1.5, ..config() }, &["float-share 1.5"]);
    new(TrainConfig { clip_norm: Some(f64::NAN), ..config() }, &["clip-norm NaN"]);
    new(TrainConfig { patience: Some(0), ..config() }, &["patience 0"]);
    new(TrainConfig { holdout: 0.0, ..config() }, &["holdout", "above 0"]);
    let adapter = Some(Adapter { rank: 0, alpha: 1.0 });
    new(TrainConfig { adapter, ..config() }, &["lora 0"]);
    let schedule = |lr, warmup| Schedule { lr, min_lr: 0.0, warmup };
    new(TrainConfig { schedule: schedule(0.0, 0), ..config() }, &["lr 0", "above 0"]);
    new(TrainConfig { schedule: schedule(f64::NAN, 0), ..config() }, &["lr NaN"]);
    new(TrainConfig { schedule: schedule(1e-3, 12), ..config() }, &["warmup 12", "steps 12"]);
    new(TrainConfig { qat: Some(qat("k2v2-g64-r64")), ..config() }, &["group_size", "head_dim 32"]);
    let mut layers = qat(crate::common::K2V2);
    layers.cache = layers.cache.with_float_layers([2]);
    new(TrainConfig { qat: Some(layers), ..config() }, &["rules[1].layers = 2", "layers 0 to 1"]);
    let with = |cache, seq_len| TrainConfig { qat: Some(qat(cache)), seq_len, ..config() };
    new(with("k2v2", 64), &["seq-len 64", "at least 129 for k2v2", "residual of 128 tokens"]);
    new(with("k2v2", 128), &["seq-len 128", "values stay in float"]);
    new(with("k2v16", 127), &["seq-len 127", "at least 128 for k2v16", "keys stay in float"]);
    new(with("k2v2-r32-s4-after", 37), &["seq-len 37", "at least 38"]);
    let late = QatConfig { start_step: 12, ..qat(crate::common::K2V2) };
    new(TrainConfig { qat: Some(late), ..config() }, &["start-step 12", "below steps 12"]);
    assert!(!world.path("new").exists(), "a refused start leaves nothing");

    let config = TrainConfig { steps: 8, ..quantized() };
    says("nowhere", &config, Resume::Last, &["nowhere/train.json"]);
    world.train("run", &config).unwrap();
    let folder = world.string("run");
    says("run", &config, Resume::No, &[&folder, "checkpoints up to step 8", "resume it"]);
    let other = TrainConfig { seed: 6, ..config.clone() };
    says("run", &other, Resume::Step(4), &["train.json", "differs from the configuration"]);
    says("run", &config, Resume::Step(7), &["no checkpoint of step 7", "4 and 8"]);
    for entry in fs::read_dir(world.path("run/checkpoints")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    says("run", &config, Resume::Last, &["checkpoints", "no checkpoint"]);
    world.write("run/train.json", "{");
    says("run", &config, Resume::Step(4), &["train.json", "EOF"]);
}
