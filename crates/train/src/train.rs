//! A complete run with burn-train.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use burn::{module::Module, tensor::Device};
use burn_train::{
    EarlyStoppingStrategy, Interrupter, Learner, LearningResult, SupervisedTraining,
    TrainingStrategy, metric::store::EventStoreClient,
};
use kv_models::{
    LanguageModel,
    kv_cubecl::{On, Target},
};

use crate::{
    Checkpoints, Error, History, Prepared, Result, Resume, Strategy, TrainConfig, Trainee,
    checkpoint::{KeepLastAndBest, PARTS},
    data::{Order, TokenFile, TrainLoader, ValidLoader, Windows},
    fit::Fit,
    folder::{FolderLock, check_disk_space, check_new, resumed, settings, write_files, write_json},
    history::{LogLine, Recorder},
    metrics,
    optimize::{optimizer, schedule},
    renderer::{self, Silent},
    setup::{Setup, checkpoint_bytes, set_up},
    step::Task,
    workers,
};

/// The token ids for training and validation.
#[derive(Clone, Debug)]
pub struct Texts {
    /// Texts for training.
    pub train: Arc<TokenFile>,
    /// Texts for validation; `None` holds out the tail of each text of `train`.
    pub valid: Option<Arc<TokenFile>>,
}

impl Texts {
    /// Cuts the texts into windows: those to train on, and those to validate with.
    ///
    /// # Errors
    /// Texts shorter than a window, or a held-out share that leaves nothing to train on.
    pub fn windows(&self, config: &TrainConfig) -> Result<(Windows, Windows)> {
        let train = Windows::new(self.train.clone(), config.seq_len)?;
        Ok(match &self.valid {
            Some(valid) => (train, Windows::new(valid.clone(), config.seq_len)?),
            None => train.hold_out(config.holdout)?,
        })
    }
}

/// The folder of a run and the way it shows its progress.
pub struct Run<'a> {
    /// Its folder: `train.json`, `history.jsonl` and `checkpoints/`.
    pub folder: PathBuf,
    /// Starts a new run, or resumes after the last checkpoint or after the checkpoint of a step.
    pub resume: Resume,
    /// Shows burn-train's dashboard on this terminal; needs the feature `tui`.
    pub dashboard: bool,
    /// Receives a line of text for every validation and for every `log_every`-th step.
    pub log: Option<LogLine>,
    /// Optimizer steps between two lines of text.
    pub log_every: u64,
    /// Devices that share each optimizer step, the model's first; `None` is the model's alone.
    /// Their number does not change the result, except by rounding.
    pub devices: Option<&'a [Device]>,
    /// The way in which the gradients of several devices are added up.
    pub strategy: Strategy,
    /// The time that devices of other machines may take for an optimizer step. A run that waits
    /// longer fails.
    pub worker_deadline: Duration,
    /// Stops the run when it becomes true, with a checkpoint of the last whole optimizer step.
    pub stop: Option<Arc<AtomicBool>>,
    /// Names and contents of files written into the folder of a new run after all checks passed.
    pub files: Vec<(&'a str, Vec<u8>)>,
}

impl<'a> Run<'a> {
    /// A new run in `folder`, silent, on the model's device.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            resume: Resume::No,
            dashboard: false,
            log: None,
            log_every: 1,
            devices: None,
            strategy: Strategy::default(),
            worker_deadline: Duration::from_secs(600),
            stop: None,
            files: Vec::new(),
        }
    }
}

impl core::fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { folder, resume, dashboard, devices, .. } = self;
        f.debug_struct("Run")
            .field("folder", folder)
            .field("resume", resume)
            .field("dashboard", dashboard)
            .field("devices", devices)
            .finish_non_exhaustive()
    }
}

/// A finished run.
#[derive(Debug)]
pub struct Trained {
    /// The trained model: after the last step, or with [`patience`](TrainConfig::patience) after
    /// the step with the best validation.
    pub model: Prepared,
    /// The losses of all steps and validations.
    pub history: History,
    /// Optimizer steps made; fewer than planned if the run stopped early.
    pub steps: usize,
    /// The optimizer step after which the model had these weights.
    pub step: usize,
}

/// Trains `model` on `texts`.
///
/// # Errors
/// - A setting out of range, texts shorter than a window, a folder that holds another run, cannot
///   be written or lacks space, or a damaged checkpoint: nothing is changed.
/// - A failure during training, such as a loss that is not finite or a full disk: earlier
///   checkpoints are complete.
/// - [`Error::Interrupted`] if the run was asked to stop.
pub fn train<T: Target>(
    device: &On<T>,
    model: LanguageModel,
    texts: &Texts,
    config: &TrainConfig,
    mut run: Run<'_>,
) -> Result<Trained> {
    config.validate()?;
    let devices = run.devices.unwrap_or(core::slice::from_ref(&**device));
    run.strategy.all_reduces(devices)?;
    if devices.first() != Some(&**device) {
        let rule = "must start with the device of the model";
        return Err(Error::setting("devices", format!("{devices:?}"), rule));
    }
    if config.seq_len > model.max_positions() {
        let rule = format!("must be at most the model's {} positions", model.max_positions());
        return Err(Error::setting("seq-len", config.seq_len, rule));
    }
    let (train, valid) = texts.windows(config)?;
    // The folder of a resumed run is locked before its checkpoints are read, since another process
    // might be writing them. A new folder is locked after all checks passed.
    let lock = match run.resume {
        Resume::No => None,
        _ => Some(FolderLock::of_run(&run.folder)?),
    };
    let resumed = resumed(&run.folder, run.resume, config)?;
    let Setup { prepared, teacher, autodiff } = set_up(device, model, config)?;
    let _lock = run.claim(lock, resumed, config, &prepared)?;
    Checkpoints::of(&run.folder).delete_after(resumed)?;
    let valid_batches = valid.len().min(config.valid_windows).div_ceil(config.batch);
    let recorder = Mutex::new(run.recorder(resumed, config, valid_batches)?);
    let task = Arc::new(Task { config: config.clone(), recorder });
    let mut trainee = Trainee { prepared, teacher, task: task.clone() };
    if !task.is_finished() {
        trainee = run.make_steps(trainee, train, valid, resumed, autodiff)?;
    }
    run.result(trainee)
}

impl Run<'_> {
    /// Locks the run's folder, checks that it has the disk space, and writes the first files of a
    /// new run. `lock` is the lock of a resumed run.
    fn claim(
        &self,
        lock: Option<FolderLock>,
        resumed: Option<usize>,
        config: &TrainConfig,
        prepared: &Prepared,
    ) -> Result<FolderLock> {
        let lock = lock.map_or_else(|| FolderLock::new(&self.folder), Ok)?;
        let new = self.resume == Resume::No;
        if new {
            // Another process may have started a run here in the meantime.
            check_new(&self.folder)?;
        }
        let [weights, moments] = checkpoint_bytes(prepared);
        let in_f16 = 2 * prepared.model.n_weights() as u64;
        // At worst there are three checkpoints: the best, the last, and the one being written. The
        // final model in f16 also holds the packed weights, which are in no checkpoint.
        let sizes = [weights, moments].repeat(if resumed.is_some() { 1 } else { 3 });
        check_disk_space(&self.folder, &[&sizes[..], &[in_f16]].concat())?;
        if new {
            write_files(&self.folder, &self.files)?;
            // This file is the last one, because it marks the run as started.
            write_json(&settings(&self.folder), config)?;
        }
        Ok(lock)
    }

    /// Opens the history of the run, from which the steps after `resumed` are removed.
    fn recorder(
        &mut self,
        resumed: Option<usize>,
        config: &TrainConfig,
        valid_batches: usize,
    ) -> Result<Recorder> {
        let (from, steps) = (resumed.map(|step| step as u64), config.steps as u64);
        let log = self.log.take().map(|log| (log, self.log_every));
        let mut recorder = Recorder::new(&self.folder, from, steps, valid_batches, log)?;
        let done = resumed.unwrap_or(0);
        recorder.set_steps_made(done);
        if resumed.is_some() {
            recorder.log_line(&format!("resuming after step {done} of {steps}"));
        }
        Ok(recorder)
    }

    /// Makes the optimizer steps that are left.
    fn make_steps(
        &self,
        trainee: Trainee,
        train: Windows,
        valid: Windows,
        resumed: Option<usize>,
        autodiff: Device,
    ) -> Result<Trainee> {
        let (task, done) = (trainee.task.clone(), resumed.unwrap_or(0));
        let config = &task.config;
        let order = Order::new(config.seed, train.len())?;
        // An epoch of the loader is one optimizer step.
        let batches = config.sequences_per_step() / config.batch;
        let (train, device) = (Arc::new(train), autodiff.clone());
        let train = TrainLoader::new(train, order, config.batch, batches, done, device)?;
        let plain = autodiff.clone().without_autodiff();
        let valid = ValidLoader::new(Arc::new(valid), config.batch, config.valid_windows, plain)?;

        let optimizer = optimizer(config, &trainee);
        let schedule = schedule(config.schedule, config.steps)?;
        let mut learner = Learner::new(trainee, optimizer, schedule);
        let checkpoints = Checkpoints::of(&self.folder);
        if let Some(step) = resumed {
            let [weights, moments, rate] = PARTS;
            learner.load_model(checkpoints.restore(weights, step)?);
            learner.load_optim(checkpoints.restore(moments, step)?);
            learner.load_scheduler(checkpoints.restore(rate, step)?);
        }
        let others = self.devices.unwrap_or_default().iter().skip(1).cloned();
        let others = others.map(|device| match config.gradient_checkpointing {
            true => device.autodiff().gradient_checkpointing(),
            false => device.autodiff(),
        });
        let devices: Vec<Device> = core::iter::once(autodiff).chain(others).collect();
        let (task, strategy, stop) = (task.clone(), self.strategy, self.stop.clone());
        let deadline = self.worker_deadline;
        let fit = Fit { devices: devices.clone(), strategy, deadline, task, done, stop };
        let training = SupervisedTraining::new(&self.folder, Arc::new(train), Arc::new(valid));
        launch(training, learner, fit, &checkpoints, self.dashboard)
            .map_err(|error| workers::blame(error, &devices))
    }

    /// Returns the finished run with the weights of its best step if the configuration has a
    /// patience, else with the last ones.
    fn result(self, trainee: Trainee) -> Result<Trained> {
        let (task, checkpoints) = (trainee.task.clone(), Checkpoints::of(&self.folder));
        let config = &task.config;
        let (steps, history) = (task.lock().steps_made(), History::read(&self.folder)?);
        if !task.is_finished() {
            // The last checkpoint was written in the background, so it has not been checked yet.
            checkpoints.check(steps)?;
            let (folder, step) = (self.folder, steps);
            return Err(Error::Interrupted { folder, step, steps: config.steps });
        }
        let best = history.best(config.objective).map_or(steps, |best| best.step as usize);
        let step = if config.patience.is_some() { best } else { steps };
        if step != steps {
            checkpoints.check(steps)?;
        }
        let model = restore(trainee, &checkpoints, step)?;
        Ok(Trained { model, history, steps, step })
    }
}

/// Runs the remaining steps of `fit`.
fn launch(
    mut training: SupervisedTraining<Trainee>,
    learner: Learner<Trainee>,
    fit: Fit,
    checkpoints: &Checkpoints,
    dashboard: bool,
) -> Result<Trainee> {
    let (task, config) = (fit.task.clone(), fit.task.config.clone());
    let lost = workers::lost(&fit.devices);
    let interrupter = Interrupter::new();
    task.lock().stop_by(interrupter.clone());
    let [model_part, optimizer_part, schedule_part] = PARTS;
    training = training
        .with_interrupter(interrupter.clone())
        .with_application_logger(None)
        .with_metric_logger(Silent)
        .with_custom_checkpointers(
            checkpoints.part(model_part),
            checkpoints.part(optimizer_part),
            checkpoints.part(schedule_part),
        )
        .with_checkpointing_strategy(KeepLastAndBest {
            checkpoints: checkpoints.clone(),
            task: task.clone(),
        })
        .num_epochs(config.epochs());
    let resumed = (fit.done > 0).then_some(fit.done / config.steps_per_epoch);
    training = training.renderer(renderer::new(dashboard, &interrupter, resumed)?);
    training = metrics::register(training);
    if config.patience.is_some() {
        training = training.early_stopping(Patience { task: task.clone() });
    }
    training = training.with_training_strategy(TrainingStrategy::Custom(Arc::new(fit)));

    // The dashboard stops immediately by a panic.
    let launched = catch_unwind(AssertUnwindSafe(|| training.launch(learner)));
    let LearningResult { model, renderer, error, .. } = match launched {
        Ok(result) => result,
        #[cfg(feature = "tui")]
        Err(panic) if dashboard && crate::dashboard::is_kill(&*panic) => {
            let step = checkpoints.last_complete()?.unwrap_or(0);
            let folder = checkpoints.run().to_path_buf();
            return Err(Error::Interrupted { folder, step, steps: config.steps });
        }
        Err(panic) => return Err(lost(&*panic).unwrap_or_else(|| resume_unwind(panic))),
    };
    // Dropping the renderer restores the terminal.
    drop(renderer);
    if let Some(error) = error {
        return Err(Error::Stopped(error.to_string()));
    }
    let failure = task.lock().take_failure();
    match failure {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

/// Stops after a configured number of validations in a row without improvement. Validations from
/// before the run was resumed count as well.
#[derive(Clone)]
struct Patience {
    task: Arc<Task>,
}

impl EarlyStoppingStrategy for Patience {
    fn should_stop(&mut self, _: usize, _: &EventStoreClient) -> bool {
        self.task.is_finished()
    }
}

/// Returns `model` with the weights of the run in `folder` after `step` optimizer steps.
///
/// # Errors
/// A missing or damaged checkpoint, or a model or configuration that does not belong to the run.
pub fn checkpointed<T: Target>(
    device: &On<T>,
    model: LanguageModel,
    folder: &std::path::Path,
    step: usize,
) -> Result<Prepared> {
    let config = TrainConfig::read(&folder.join("train.json"))?;
    let checkpoints = Checkpoints::of(folder);
    checkpoints.resume(Some(step))?;
    let Setup { prepared, teacher, .. } = set_up(device, model, &config)?;
    let recorder = Mutex::new(Recorder::default());
    let task = Arc::new(Task { config, recorder });
    restore(Trainee { prepared, teacher, task }, &checkpoints, step)
}

fn restore(trainee: Trainee, checkpoints: &Checkpoints, step: usize) -> Result<Prepared> {
    checkpoints.check(step)?;
    let [model, ..] = PARTS;
    Ok(trainee.load_record(checkpoints.restore(model, step)?).prepared)
}
