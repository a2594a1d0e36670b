//! Several devices that share each optimizer step.

use std::fs;

use burn::{module::Module, tensor::Device};
use kv_models::{
    LanguageModel, LoadOptions, QuantizeOptions,
    kv_cubecl::{Autodiff, Flex, Target},
    kv_weights::{Activations, GroupSize, WeightFormat},
    load_with, save_quantized,
};
use kv_train::{
    Adapter, Objective, Resume, Run, Schedule, Strategy, Texts, TrainConfig, Trainable, Trained,
    train,
};

use crate::common::{
    Losses, World, fails, losses, program, qat_args, quantized, saved, succeeds, weights,
};

type Cpu = World<Autodiff<Flex>>;

/// Trains `model` on a number of devices of the CPU.
pub(crate) fn run(
    world: &Cpu,
    model: &LanguageModel,
    name: &str,
    config: &TrainConfig,
    devices: usize,
    resume: Resume,
) -> kv_train::Result<Trained> {
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let devices = vec![(*world.device).clone(); devices];
    let run = Run { resume, devices: Some(&devices), ..Run::new(world.path(name)) };
    train(&world.device, model.clone(), &texts, config, run)
}

/// Returns the mean loss of each optimizer step.
pub(crate) fn by_step(trained: &Trained, steps: usize) -> Vec<f64> {
    let mut sums = vec![(0.0, 0); steps];
    for record in &trained.history.train {
        let (sum, n) = &mut sums[record.step as usize];
        // All batches of these runs have the same number of sequences, except in uneven shares.
        *sum += record.loss;
        *n += 1;
    }
    sums.into_iter().map(|(sum, n)| sum / f64::from(n)).collect()
}

/// Returns the largest difference of any trained weight.
pub(crate) fn difference(a: Trained, b: Trained) -> f32 {
    let [a, b] = [a, b].map(|trained| weights(&trained.model.convert().model));
    let of_weight = |(name, a): (&String, &Vec<f32>)| {
        a.iter().zip(&b[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    a.iter().map(of_weight).fold(0.0, f32::max)
}

/// A run of 20 steps for each kind of training.
pub(crate) fn kinds<T: Target>(
    world: &World<T>,
) -> Vec<(&'static str, LanguageModel, TrainConfig)> {
    let schedule = Schedule { lr: 1e-3, min_lr: 0.0, warmup: 2 };
    let config = TrainConfig { steps: 20, steps_per_epoch: 10, schedule, ..quantized() };
    let adapter = Some(Adapter { rank: 2, alpha: 4.0 });
    let folder = world.path("int8");
    let options = QuantizeOptions::new([Some(WeightFormat::Int8(GroupSize::G32)); 3]);
    save_quantized(&folder, &world.model.clone().valid(), &world.tokenizer, options).unwrap();
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let packed = load_with(&folder, &world.device, options).unwrap().model;
    let plain = || world.model.clone();
    let adapters = TrainConfig { adapter, ..config.clone() };
    vec![
        ("weights", plain(), config.clone()),
        (
            "distilled",
            plain(),
            TrainConfig {
                objective: Objective::Distillation,
                float_share: 0.25,
                trainable: Trainable::Attention,
                ..config.clone()
            },
        ),
        ("recomputed", plain(), TrainConfig { gradient_checkpointing: true, ..config.clone() }),
        ("adapters", plain(), adapters.clone()),
        ("packed", packed, TrainConfig { trainable: Trainable::Attention, ..adapters }),
    ]
}

#[test]
fn two_devices_are_one_with_twice_the_batch() {
    let world = Cpu::new();
    for (kind, model, config) in kinds(&world) {
        let name = |what: &str| format!("{kind} {what}");
        let one = TrainConfig { batch: 2, ..config.clone() };
        let two = TrainConfig { batch: 1, devices: 2, ..config.clone() };
        let one = run(&world, &model, &name("one"), &one, 1, Resume::No).unwrap();
        let two = run(&world, &model, &name("two"), &two, 2, Resume::No).unwrap();
        assert_eq!(two.history.train.len(), 2 * one.history.train.len());
        for (step, (one, two)) in by_step(&one, 20).into_iter().zip(by_step(&two, 20)).enumerate() {
            assert!((one - two).abs() < 1e-6, "{kind}, step {step}: {one} and {two}");
        }
        // The same sums in the same order: the first sequence, then the second.
        assert_eq!(difference(one, two), 0.0, "{kind}");
    }
}

/// Four sequences of a step on other numbers of devices than planned, where each device has one to
/// four of them.
#[test]
fn the_number_of_devices_does_not_change_a_run() {
    let world = Cpu::new();
    let (_, model, config) = kinds(&world).swap_remove(0);
    // With a float cache, because the rounding of a sum may change a code of 2 bits.
    let config = TrainConfig { batch: 1, accumulation: 2, devices: 2, qat: None, ..config };
    let planned = run(&world, &model, "planned", &config, 2, Resume::No).unwrap();
    let expected = (Losses::of(&planned.history), by_step(&planned, 20));
    for devices in [1, 3, 4, 5] {
        let name = format!("on {devices}");
        let other = run(&world, &model, &name, &config, devices, Resume::No).unwrap();
        let positions = |losses: &Losses| -> Vec<(u64, u64)> {
            losses.train.iter().map(|&(position, step, _)| (position, step)).collect()
        };
        assert_eq!(positions(&Losses::of(&other.history)), positions(&expected.0));
        for (a, b) in expected.1.iter().zip(by_step(&other, 20)) {
            // Gradients are added up in another order.
            assert!((a - b).abs() < 1e-5, "{devices} devices: {a} and {b}");
        }
        // Half of it again, on the planned number of devices.
        let again = run(&world, &model, &name, &config, 2, Resume::Step(10)).unwrap();
        let planned = run(&world, &model, "planned", &config, 2, Resume::Last).unwrap();
        let difference = difference(planned, again);
        assert!(difference < 1e-5, "{devices} devices: {difference}");
    }
    // Batches of two sequences; some devices get one sequence.
    let pairs = TrainConfig { batch: 2, accumulation: 1, ..config.clone() };
    let pairs = run(&world, &model, "pairs", &pairs, 3, Resume::No).unwrap();
    let planned = run(&world, &model, "planned", &config, 2, Resume::Last).unwrap();
    assert!(difference(planned, pairs) < 1e-5);
    // On as many devices, everything is the same bit for bit.
    let again = run(&world, &model, "planned", &config, 2, Resume::Step(10)).unwrap();
    assert_eq!(Losses::of(&again.history), expected.0);
    let other = run(&world, &model, "again", &config, 2, Resume::No).unwrap();
    assert_eq!(Losses::of(&other.history), expected.0);
    assert_eq!(difference(again, other), 0.0);
}

#[test]
fn devices_and_strategies_are_checked() {
    let world = Cpu::new();
    let (_, model, config) = kinds(&world).swap_remove(0);
    let texts = || Texts { train: world.tokens("text.txt"), valid: None };
    let refuses = |devices: &[Device], strategy, parts: &[&str]| {
        let run = Run { devices: Some(devices), strategy, ..Run::new(world.path("refused")) };
        let error = train(&world.device, model.clone(), &texts(), &config, run).unwrap_err();
        parts.iter().for_each(|part| assert!(error.to_string().contains(part), "{error}"));
    };
    let device = (*world.device).clone();
    refuses(&[device.clone(), device.clone()], Strategy::Ddp, &["strategy ddp: only several CUDA"]);
    refuses(&[], Strategy::Auto, &["devices []: must start with the device of the model"]);
    assert!(!world.path("refused").exists());
}

#[test]
fn the_program_names_devices() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let [one, two, resumed] = ["one", "two", "resumed"].map(|name| world.string(name));
    let start = |out, more: &[&'static str]| {
        program(&[&qat_args(&model, &text, out, "8")[..], more].concat())
    };
    // The arguments have `--accumulation 2`; a step on two devices has one batch on each.
    let start_on_two = |out| {
        let mut args = qat_args(&model, &text, out, "8");
        let at = args.iter().position(|&arg| arg == "--accumulation").unwrap();
        args[at + 1] = "1";
        args.extend(["--devices", "flex:2"]);
        program(&args)
    };
    succeeds(&mut start(&one, &[]));
    succeeds(&mut start_on_two(&two));
    assert_eq!(losses(&one), losses(&two));
    assert_eq!(saved(&one), saved(&two));
    let spec = fs::read_to_string(world.path("two/run.json")).unwrap();
    assert!(spec.contains(r#""devices": "flex:2""#), "{spec}");
    // It goes on with another number of devices.
    succeeds(&mut start_on_two(&resumed));
    let args = ["resume", &resumed, "--from-step", "4", "--devices", "flex"];
    succeeds(&mut program(&args));
    assert_eq!(losses(&resumed), losses(&one));
    assert_eq!(saved(&resumed), saved(&one));
    // Runs of versions that counted devices.
    let count = |n: &str| {
        let old = spec.replace(r#""devices": "flex:2""#, &format!(r#""devices": {n}"#));
        fs::write(world.path("two/run.json"), old).unwrap();
    };
    count("2");
    fails(&mut program(&["resume", &two]), &["devices 2", "older versions"]);
    count("\"flex:x\"");
    fails(&mut program(&["resume", &two]), &["devices flex:x", "whole number"]);

    let out = world.string("refused");
    let refuses = |more: &[&'static str], parts: &[&str]| {
        fails(&mut start(&out, more), parts);
        assert!(!world.path("refused").exists(), "a refused run has left files");
    };
    refuses(&["--devices", "2"], &["--devices", "must start with a backend"]);
    refuses(&["--devices", "flex:0"], &["--devices", "at least one"]);
    refuses(&["--devices", "flex:2", "--backend", "flex"], &["--devices", "--backend"]);
    refuses(
        &["--devices", "flex:2", "--strategy", "ddp"],
        &["strategy ddp: only several CUDA devices"],
    );
    refuses(&["--strategy", "ddp"], &["strategy ddp: only several CUDA devices"]);
    refuses(&["--devices", "flex:900", "--memory", "100M"], &["memory: training needs at least"]);
    #[cfg(feature = "wgpu")]
    refuses(&["--devices", "wgpu:0,9"], &["devices wgpu:0,9: wgpu has devices 0 to"]);
    #[cfg(not(feature = "cuda"))]
    refuses(&["--devices", "cuda:0-7"], &["cuda is not built into"]);
}

/// A GPU gets the new weights in each step, and the frozen ones once.
#[cfg(feature = "wgpu")]
#[test]
fn devices_of_two_backends_share_a_step() {
    use kv_models::kv_cubecl::Wgpu;
    let world = Cpu::new();
    // The rate is low because Adam's first steps are as long for noise as for real gradients.
    let schedule = Schedule { lr: 5e-4, min_lr: 0.0, warmup: 2 };
    let devices = [(*world.device).clone(), Wgpu::open().unwrap().autodiff()];
    for (kind, model, config) in kinds(&world) {
        if !["distilled", "adapters"].contains(&kind) {
            continue;
        }
        let config = TrainConfig { steps: 10, batch: 1, devices: 2, schedule, ..config };
        let texts = Texts { train: world.tokens("text.txt"), valid: None };
        let folder = world.path(&format!("{kind} on both"));
        let on_both = Run { devices: Some(&devices), ..Run::new(folder) };
        let both = train(&world.device, model.clone(), &texts, &config, on_both).unwrap();
        let alone = run(&world, &model, kind, &config, 1, Resume::No).unwrap();
        for (step, (a, b)) in by_step(&alone, 10).into_iter().zip(by_step(&both, 10)).enumerate() {
            // The backends sum in different orders; most of the difference comes from codes that
            // round the other way.
            assert!((a - b).abs() < 1e-3, "{kind}, step {step}: {a} and {b}");
        }
        let [a, b] = [alone, both].map(|trained| trained.history.valid[1].nll);
        assert!((a - b).abs() < 1e-3, "{kind}: {a} and {b}");
    }
}
