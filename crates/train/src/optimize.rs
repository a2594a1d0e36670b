//! Optimizer and learning rate.

use burn_optim::{
    AdamWConfig, ModuleOptimizer,
    lr_scheduler::{
        LrSchedulerConfig, cosine::CosineAnnealingLrSchedulerConfig,
        linear::LinearLrSchedulerConfig, module_lr_scheduler::ModuleLrScheduler,
        sequential::SequentialLrSchedulerConfig,
    },
};
use kv_models::Role;

use crate::{
    Error, Result, Schedule, TrainConfig, Trainee,
    setup::{group, weights},
};

/// AdamW for the parameters of `trainee`.
///
/// Weight decay applies to matrices except embeddings. No other weight can compensate for a smaller
/// gain or bias, and rows of an embedding would shrink even in steps whose batch does not contain
/// their tokens.
pub(crate) fn optimizer(config: &TrainConfig, trainee: &Trainee) -> ModuleOptimizer {
    let adamw = AdamWConfig::new().with_beta_2(config.beta_2).with_epsilon(1e-8);
    let decaying = adamw.clone().with_weight_decay(config.weight_decay).init();
    let weights = weights(trainee, &trainee.prepared.model.roles());
    let kept = group(weights, |weight| weight.rank < 2 || weight.role == Some(Role::Embedding));
    decaying.with_group(kept, adamw.with_weight_decay(0.0).build(), None)
}

/// Linear warm-up, then a cosine that ends at the last step of the run.
pub(crate) fn schedule(schedule: Schedule, steps: usize) -> Result<ModuleLrScheduler> {
    let Schedule { lr, min_lr, warmup } = schedule;
    // Number of intervals between the first step of the cosine, at `lr`, and the last.
    let rest = (steps - warmup - 1).max(1);
    let cosine = CosineAnnealingLrSchedulerConfig::new(lr, rest).with_min_lr(min_lr);
    let fail = |why: String| Error::setting("lr", lr, why);
    if warmup == 0 {
        return cosine.init().map_err(fail);
    }
    let linear = LinearLrSchedulerConfig::new(lr / warmup as f64, lr, warmup);
    SequentialLrSchedulerConfig::new(
        vec![LrSchedulerConfig::Linear(linear), LrSchedulerConfig::Cosine(cosine)],
        vec![warmup],
    )
    .init()
    .map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_step_has_the_lowest_rate() {
        for (steps, warmup) in [(10, 0), (10, 3), (2, 0), (2, 1), (30, 29)] {
            let schedule = Schedule { lr: 0.5, min_lr: 0.125, warmup };
            let mut scheduler = super::schedule(schedule, steps).unwrap();
            let rates: Vec<f64> = (0..steps).map(|_| scheduler.step().base()).collect();
            let (up, down) = rates.split_at(warmup);
            assert!(up.iter().all(|&rate| rate <= 0.5), "{rates:?}");
            assert_eq!(down[0], 0.5, "{rates:?}");
            assert!(down.is_sorted_by(|a, b| a > b), "{rates:?}");
            // With a single step after the warm-up, the run ends at the highest rate.
            if down.len() > 1 {
                assert!((rates[steps - 1] - 0.125).abs() < 1e-12, "{rates:?}");
            }
        }
    }
}
