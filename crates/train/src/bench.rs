//! Single training steps outside of a run, for benchmarks.

use std::sync::{Arc, Mutex};

use burn::tensor::{Int, Tensor, TensorData};
use burn_optim::ModuleOptimizer;
use burn_train::TrainStep;
use kv_models::{
    LanguageModel,
    kv_cubecl::{On, Target},
};

use crate::{
    Error, Result, TrainConfig, Trainee,
    data::Batch,
    history::Recorder,
    optimize::optimizer,
    setup::{Setup, set_up},
    step::Task,
};

/// A model, its optimizer, and one batch that every step trains on.
pub struct Stepper {
    trainee: Trainee,
    optimizer: ModuleOptimizer,
    lr: f64,
    batch: Batch,
}

impl core::fmt::Debug for Stepper {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Stepper").field("config", &self.trainee.task.config).finish_non_exhaustive()
    }
}

impl Stepper {
    /// Prepares `model` as [`train`](crate::train) does. The batch's ids depend only on the size of
    /// the vocabulary.
    ///
    /// # Errors
    /// A setting out of range, or a cache that does not fit the model.
    pub fn new<T: Target>(
        device: &On<T>,
        model: LanguageModel,
        config: &TrainConfig,
    ) -> Result<Self> {
        config.validate()?;
        let vocab = model.vocab_size() as u64;
        let Setup { prepared, teacher, autodiff } = set_up(device, model, config)?;
        let recorder = Mutex::new(Recorder::default());
        let task = Arc::new(Task { config: config.clone(), recorder });
        let ids = |offset: usize| -> Tensor<2, Int> {
            let shape = [config.batch, config.seq_len];
            let id = |i: usize| ((i + offset) as u64 * 2_654_435_761 % vocab) as i32;
            let ids: Vec<i32> = (0..shape[0] * shape[1]).map(id).collect();
            Tensor::from_data(TensorData::new(ids, shape), &autodiff)
        };
        let batch = Batch { inputs: ids(0), targets: ids(1), position: 0, epoch: 0 };
        let trainee = Trainee { prepared, teacher, task };
        let (optimizer, lr) = (optimizer(config, &trainee), config.schedule.lr);
        Ok(Self { trainee, optimizer, lr, batch })
    }

    /// Forward, backward and update; returns the loss.
    ///
    /// # Errors
    /// An error of the model, or [`Error::Stopped`] if the loss is not finite.
    pub fn step(&mut self) -> Result<f64> {
        let (sums, grads) = self.trainee.gradients(self.batch.clone())?;
        let trainee = self.trainee.clone();
        self.trainee = TrainStep::optimize(trainee, &mut self.optimizer, self.lr.into(), grads);
        let objective = self.trainee.task.config.objective;
        let loss = objective.value(sums.nll, sums.kl) / sums.rows.max(1) as f64;
        match loss.is_finite() {
            true => Ok(loss),
            false => Err(Error::Stopped(format!("the loss is {loss}"))),
        }
    }
}
