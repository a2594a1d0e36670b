//! Training on another backend gives the same losses, up to rounding.
#![cfg(all(feature = "flex", any(feature = "wgpu", feature = "cuda")))]
#![allow(clippy::print_stdout, reason = "how close is seen with --nocapture")]

use kv_models::kv_cubecl::{Autodiff, Flex, Target};
use kv_train::{Objective, Schedule, TrainConfig};

use crate::common::{World, config, qat};

/// Returns the objectives of ten steps, and the last validation.
fn losses<T: Target>() -> (Vec<f64>, [f64; 3]) {
    let world = World::<Autodiff<T>>::new();
    let config = TrainConfig {
        qat: Some(qat(crate::common::K2V2)),
        objective: Objective::Distillation,
        // The rate is low because Adam's first steps are as long for noise as for real gradients.
        schedule: Schedule { lr: 5e-4, min_lr: 0.0, warmup: 2 },
        batch: 1,
        steps: 10,
        steps_per_epoch: 10,
        valid_windows: 1,
        ..config()
    };
    let history = world.train("run", &config).unwrap().history;
    let last = history.valid[1];
    (history.train.iter().map(|record| record.loss).collect(), [last.nll, last.nll_float, last.kl])
}

#[cfg(feature = "wgpu")]
#[test]
fn ten_steps_on_wgpu_are_those_on_flex() {
    ten_steps_are_those_on_flex::<kv_models::kv_cubecl::Wgpu>();
}

#[cfg(feature = "cuda")]
#[test]
fn ten_steps_on_cuda_are_those_on_flex() {
    use kv_models::kv_cubecl::{Cuda, On};
    match On::<Cuda>::open() {
        Ok(_) => ten_steps_are_those_on_flex::<Cuda>(),
        Err(error) if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") => {
            println!("SKIPPED: {error}");
        }
        Err(error) => panic!("{error} (KV_ALLOW_NO_DEVICE=1 skips the tests of a missing device)"),
    }
}

fn ten_steps_are_those_on_flex<T: Target>() {
    let (flex, flex_valid) = losses::<Flex>();
    let (gpu, gpu_valid) = losses::<T>();
    let mut worst: f64 = 0.0;
    for (step, (flex, gpu)) in flex.iter().zip(&gpu).enumerate() {
        println!("step {step}: {flex:.6} {gpu:.6}");
        worst = worst.max((flex - gpu).abs());
    }
    for (flex, gpu) in flex_valid.iter().zip(&gpu_valid) {
        worst = worst.max((flex - gpu).abs());
    }
    println!("largest difference {worst:.1e}");
    assert_eq!(flex.len(), 10);
    assert!(flex[0] > 1e-3, "the quantizer is on: {flex:?}");
    // The backends sum in different orders; most of the difference comes from codes that round the
    // other way.
    assert!(worst < 1e-3, "{flex:?} against {gpu:?}, {flex_valid:?} against {gpu_valid:?}");
}
