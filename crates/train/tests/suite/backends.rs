//! Training on another backend gives the same losses, up to rounding.
#![cfg(all(feature = "flex", feature = "wgpu"))]
#![allow(clippy::print_stdout, reason = "how close is seen with --nocapture")]

use kv_models::kv_cubecl::{Autodiff, Flex, Target, Wgpu};
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

#[test]
fn ten_steps_on_wgpu_are_those_on_flex() {
    let (flex, flex_valid) = losses::<Flex>();
    let (wgpu, wgpu_valid) = losses::<Wgpu>();
    let mut worst: f64 = 0.0;
    for (step, (flex, wgpu)) in flex.iter().zip(&wgpu).enumerate() {
        println!("step {step}: {flex:.6} {wgpu:.6}");
        worst = worst.max((flex - wgpu).abs());
    }
    for (flex, wgpu) in flex_valid.iter().zip(&wgpu_valid) {
        worst = worst.max((flex - wgpu).abs());
    }
    println!("largest difference {worst:.1e}");
    assert_eq!(flex.len(), 10);
    assert!(flex[0] > 1e-3, "the quantizer is on: {flex:?}");
    // The backends sum in different orders; most of the difference comes from codes that round the
    // other way.
    assert!(worst < 1e-3, "{flex:?} against {wgpu:?}, {flex_valid:?} against {wgpu_valid:?}");
}
