//! The training loop: optimizer steps, validations, checkpoints, and the points where a run may
//! stop.
//!
//! Burn's own training strategies stop between batches without a checkpoint and can only start at
//! the beginning of an epoch, so they are not used.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use burn::{data::dataloader::Progress, module::Module, tensor::Device};
use burn_optim::GradientsParams;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingItem, ValidLoader,
    metric::store::EventStoreClient,
};
use kv_models::decimal_size;

use crate::{
    Measured, Strategy, TrainConfig, Trainee,
    data::Batch,
    setup::check_finite,
    step::{BatchLoss, Task},
    workers::Workers,
};

/// Trains from optimizer step `done` to the last, or until it is asked to stop. One epoch of its
/// data loaders is one optimizer step, so that a run can resume after any step.
pub(crate) struct Fit {
    pub(crate) devices: Vec<Device>,
    pub(crate) strategy: Strategy,
    /// The time that devices of other machines may take for a step.
    pub(crate) deadline: Duration,
    pub(crate) task: Arc<Task>,
    /// Optimizer steps made before this starts; 0 in a new run.
    pub(crate) done: usize,
    /// Asks the run to stop when it becomes true.
    pub(crate) stop: Option<Arc<AtomicBool>>,
}

/// The state of a run in progress.
struct TrainState {
    learner: Learner<Trainee>,
    processor: SupervisedTrainingEventProcessor<Trainee>,
    checkpointer: Option<LearningCheckpointer<Trainee>>,
    interrupter: Interrupter,
    event_store: Arc<EventStoreClient>,
    valid_loader: ValidLoader<Trainee>,
    workers: Workers,
    /// Optimizer steps before the last checkpoint.
    saved: Option<usize>,
}

impl SupervisedLearningStrategy<Trainee> for Fit {
    fn train(
        &self,
        learner: Learner<Trainee>,
        train: TrainLoader<Trainee>,
        valid: ValidLoader<Trainee>,
        mut components: TrainingComponents<Trainee>,
    ) -> LearningResult<Trainee> {
        let interrupter = components.interrupter.clone();
        let start = LearnerEvent::Start {
            total_epochs: self.config().epochs(),
            starting_epoch: self.epoch_after(self.done),
            label: None,
        };
        interrupter.fail_on_error(components.event_processor.process_train(start));
        let (model, mut processor) = self.fit(components, learner, train, valid, 1);
        // The dashboard resets the interrupter when it ends.
        let (interrupted, error) = (interrupter.interruption(), interrupter.error());
        interrupter.fail_on_error(processor.process_train(LearnerEvent::End(None)));
        interrupter.fail_on_error(processor.flush());
        let model = model.valid();
        LearningResult { model, renderer: processor.renderer(), interrupted, error }
    }

    fn fit(
        &self,
        components: TrainingComponents<Trainee>,
        mut learner: Learner<Trainee>,
        train: TrainLoader<Trainee>,
        valid: ValidLoader<Trainee>,
        _: usize,
    ) -> (Trainee, SupervisedTrainingEventProcessor<Trainee>) {
        let TrainingComponents {
            event_processor,
            checkpointer,
            mut early_stopping,
            interrupter,
            event_store,
            ..
        } = components;
        let main = &self.devices[0];
        learner.fork(main);
        let workers = match Workers::new(&self.devices, self.strategy, &train, self.deadline) {
            Ok(workers) => workers,
            Err(error) => {
                self.task.fail_by(error);
                return (learner.model(), event_processor);
            }
        };
        let mut state = TrainState {
            learner,
            processor: event_processor,
            checkpointer,
            interrupter,
            event_store,
            valid_loader: valid.to_device(&main.clone().inner()),
            workers,
            saved: None,
        };

        let mut step = self.done;
        loop {
            if self.config().validates_after(step) {
                if !self.validate_and_save(&mut state, step) {
                    break;
                }
                let stopping = early_stopping.as_mut();
                if stopping.is_some_and(|stopping| stopping.should_stop(step, &state.event_store)) {
                    break;
                }
            }
            let ended = step == self.config().steps || self.stops(&state);
            if ended || !self.step(&mut state, step) {
                break;
            }
            step += 1;
            self.task.lock().set_steps_made(step);
        }
        // A run that was asked to stop and did not fail has the weights after `step` steps.
        let asked = self.stops(&state) && !self.failed(&state);
        if asked && state.saved != Some(step) {
            self.save(&mut state, step);
        }
        // Waits until all checkpoints are written.
        drop(state.checkpointer.take());
        (state.learner.model(), state.processor)
    }
}

impl Fit {
    fn config(&self) -> &TrainConfig {
        &self.task.config
    }

    /// Returns whether the run was asked to stop or failed.
    fn stops(&self, state: &TrainState) -> bool {
        self.asked() || state.interrupter.should_stop()
    }

    fn asked(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    fn failed(&self, state: &TrainState) -> bool {
        state.interrupter.error().is_some() || self.task.lock().failed()
    }

    /// The epoch, counted from 1, of the optimizer step that follows `step` steps.
    fn epoch_after(&self, step: usize) -> usize {
        step / self.config().steps_per_epoch + 1
    }

    /// Makes one optimizer step. Returns `false` and leaves the model unchanged if the run failed
    /// or was asked to stop.
    fn step(&self, state: &mut TrainState, step: usize) -> bool {
        let config = self.config();
        let per_step = config.sequences_per_step();
        let first = (self.epoch_after(step) - 1) * config.steps_per_epoch;
        let steps = config.steps_per_epoch.min(config.steps - first);
        let epoch = self.epoch_after(step);
        if step == first || step == self.done {
            let total_items = steps * per_step;
            state.train_event(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        }

        let Some((gradients, items)) = self.gradients(state) else { return false };
        if step == self.done {
            self.tell_moved(state);
        }
        state.learner.lr_step();
        state.learner.optimizer_step(gradients);
        if self.failed(state) {
            return false;
        }

        let n_items = items.len();
        for (i, item) in items.into_iter().enumerate() {
            let done = (step - first) * per_step + (i + 1) * per_step / n_items;
            let progress = Progress::new(done, steps * per_step, Some("items".into()));
            let iteration = (step - first) * n_items + i + 1;
            let lr = state.learner.lr_current();
            let item = TrainingItem::new(item, progress, Some(iteration), Some(lr));
            state.train_event(LearnerEvent::ProcessedItem(item));
        }
        if config.validates_after(step + 1) {
            state.train_event(LearnerEvent::EndSplit(epoch));
        }
        true
    }

    /// Prints the bytes that each step moves between devices, if it moves any.
    fn tell_moved(&self, state: &TrainState) {
        let moved = state.workers.moved();
        let Some(most) = moved.iter().max_by_key(|moved| moved.weights + moved.gradients) else {
            return;
        };
        if most.weights + most.gradients > 0 {
            let size = |bytes: usize| decimal_size(bytes as u64);
            let (weights, gradients) = (size(most.weights), size(most.gradients));
            self.task.lock().log_line(&format!(
                "a step sends {weights} of weights to each further device and {gradients} of \
                 gradients back"
            ));
        }
    }

    /// Adds up the gradients of one optimizer step; `None` if the run failed or was asked to stop.
    fn gradients(&self, state: &mut TrainState) -> Option<(GradientsParams, Vec<Measured>)> {
        let TrainState { learner, workers, interrupter, .. } = state;
        let stop = || self.asked() || interrupter.should_stop();
        let mut measured = Vec::new();
        let mut record = |loss: &BatchLoss| {
            self.task.lock().step(&loss.record);
            measured.push(loss.measured());
        };
        let gradients = match workers.step(&learner.model(), &stop, &mut record) {
            Ok(gradients) => gradients?,
            Err(error) => {
                self.task.fail_by(error);
                return None;
            }
        };
        (!self.failed(state)).then_some((gradients, measured))
    }

    /// Validates, unless the history has the validation already, and saves a checkpoint. Returns
    /// `false` and saves nothing if the run failed or was asked to stop during the validation.
    fn validate_and_save(&self, state: &mut TrainState, step: usize) -> bool {
        if self.task.lock().validations().validation(step).is_none() {
            self.validate(state, step);
            if self.stops(state) {
                return false;
            }
        }
        self.save(state, step);
        true
    }

    /// Saves a checkpoint, or fails the run if a weight is not finite.
    fn save(&self, state: &mut TrainState, step: usize) {
        match check_finite(&state.learner.model(), step) {
            Ok(()) => state.save(step),
            Err(why) => self.task.fail(&why),
        }
    }

    /// Measures the held-out loss after `step` steps. The task's recorder adds up the batches and
    /// records the loss after the last one.
    fn validate(&self, state: &mut TrainState, step: usize) {
        let epoch = step.div_ceil(self.config().steps_per_epoch).max(1);
        let total_items = state.valid_loader.num_items();
        state.valid_event(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let model = state.learner.model().valid();
        let loader = state.valid_loader.clone();
        let mut batches = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let batch: Batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    state.interrupter.fail(error);
                    break;
                }
            };
            iteration += 1;
            let item = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(item, batches.progress(), Some(iteration), None);
            state.valid_event(LearnerEvent::ProcessedItem(item));
            if self.stops(state) {
                break;
            }
        }
        self.task.lock().abandon_validation();
        state.valid_event(LearnerEvent::EndSplit(epoch));
        if step > 0 {
            state.train_event(LearnerEvent::EndEpoch(epoch));
        }
        let flushed = state.processor.flush();
        state.interrupter.fail_on_error(flushed);
    }
}

impl TrainState {
    fn train_event(&mut self, event: LearnerEvent<Measured>) {
        let result = self.processor.process_train(event);
        self.interrupter.fail_on_error(result);
    }

    fn valid_event(&mut self, event: LearnerEvent<Measured>) {
        let result = self.processor.process_valid(event);
        self.interrupter.fail_on_error(result);
    }

    /// Writes a checkpoint in the background.
    fn save(&mut self, step: usize) {
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.checkpoint(&self.learner, step, &self.event_store);
        }
        self.saved = Some(step);
    }
}
