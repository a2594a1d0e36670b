//! A whole run on burn-train.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use burn::{
    module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup},
    tensor::{Device, Tensor},
};
use burn_optim::{
    AdamWConfig, ModuleOptimizer,
    lr_scheduler::{
        LrSchedulerConfig, cosine::CosineAnnealingLrSchedulerConfig,
        linear::LinearLrSchedulerConfig, module_lr_scheduler::ModuleLrScheduler,
        sequential::SequentialLrSchedulerConfig,
    },
};
use burn_train::{
    EarlyStoppingStrategy, ExecutionStrategy, Interrupter, Learner, MultiDeviceOptim,
    SupervisedTraining, checkpoint::KeepLastNCheckpoints, metric::store::EventStoreClient,
};
use kv_models::{
    LanguageModel,
    kv_cubecl::{KvCacheConfig, On, Target},
};

use crate::{
    Checkpoints, Error, History, Prepared, QatConfig, Result, TrainConfig, Trainable, Trainee,
    checkpoint::PARTS,
    data::{Order, TokenFile, TrainLoader, ValidLoader, Windows},
    history::{Recorder, Tell},
    metrics, prepare,
    renderer::{self, Silent},
    step::Task,
};

/// Checkpoints kept: the last and the one before it.
const KEPT: usize = 2;

/// The ids a model is trained on and validated with.
#[derive(Clone, Debug)]
pub struct Texts {
    /// To train on.
    pub train: Arc<TokenFile>,
    /// To validate with; `None` holds out the tail of `train`.
    pub valid: Option<Arc<TokenFile>>,
}

/// Where a run keeps its files and how it shows what it does.
pub struct Run<'a> {
    /// Its folder: `train.json`, `history.jsonl` and `checkpoints/`.
    pub folder: PathBuf,
    /// Continue after the last checkpoint, or after that of an epoch.
    pub resume: Resume,
    /// burn-train's dashboard on this terminal; needs the feature `tui`.
    pub dashboard: bool,
    /// Called with a line of text for every validation, and for every `tell_every`-th step.
    pub tell: Option<Tell>,
    /// Steps between two that are told.
    pub tell_every: u64,
    /// Devices that share each optimizer step; `None` is the model's alone.
    pub devices: Option<&'a [Device]>,
}

impl<'a> Run<'a> {
    /// A new run in `folder`, silent, on the model's device.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            resume: Resume::No,
            dashboard: false,
            tell: None,
            tell_every: 1,
            devices: None,
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

/// Whether a run starts or continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// Start; a folder with checkpoints in it is an error.
    #[default]
    No,
    /// After the last checkpoint.
    Last,
    /// After the checkpoint of an epoch.
    Epoch(usize),
}

/// A finished run.
#[derive(Debug)]
pub struct Trained {
    /// The model as trained.
    pub model: Prepared,
    /// What was measured.
    pub history: History,
    /// Epochs run; fewer than planned when it stopped early.
    pub epochs: usize,
}

/// Trains `model` on `texts`.
///
/// # Errors
/// A setting out of range, texts shorter than a window, a folder that cannot be written, a damaged
/// checkpoint, and whatever stops training: a loss that is not finite, a full disk. Checkpoints
/// written before are whole.
pub fn train<T: Target>(
    device: &On<T>,
    model: LanguageModel,
    texts: &Texts,
    config: &TrainConfig,
    run: Run<'_>,
) -> Result<Trained> {
    config.validate()?;
    if config.seq_len > model.max_positions() {
        let rule = format!("exceeds the model's {} positions", model.max_positions());
        return Err(Error::setting("seq-len", config.seq_len, rule));
    }
    let (train, valid) = windows(texts, config)?;
    let checkpoints = Checkpoints::of(&run.folder);
    let done = start(&run, &checkpoints, config)?;

    let Setup { prepared, teacher, autodiff } = set_up(device, model, config)?;
    let n_devices = run.devices.map_or(1, <[Device]>::len);
    let valid_batches = valid.len().min(config.valid_windows).div_ceil(config.batch);
    let recorder = Recorder::new(
        &run.folder,
        (done * config.steps_per_epoch) as u64,
        config.steps as u64,
        valid_batches,
        run.tell.map(|tell| (tell, run.tell_every)),
    )?;
    let recorder = Mutex::new(recorder);
    let task = Arc::new(Task { config: config.clone(), teacher, n_devices, recorder });
    let trainee = Trainee { prepared, task: task.clone() };

    let order = Order::new(config.seed, train.len())?;
    let batches = config.steps_per_epoch * config.accumulation * n_devices;
    let train_loader =
        TrainLoader::new(train, order, config.batch, batches, done, autodiff.clone())?;
    let plain = (**device).clone().without_autodiff();
    let valid_loader = ValidLoader::new(valid, config.batch, config.valid_windows, plain)?;

    let interrupter = Interrupter::new();
    task.lock().stop_by(interrupter.clone());
    let resumed = (done > 0).then_some(done);
    let [model_part, optimizer_part, schedule_part] = PARTS;
    let mut training = SupervisedTraining::<Trainee>::new(
        &run.folder,
        Arc::new(train_loader),
        Arc::new(valid_loader),
    )
    .with_interrupter(interrupter.clone())
    .with_application_logger(None)
    .with_metric_logger(Silent)
    .with_custom_checkpointers(
        checkpoints.part(model_part),
        checkpoints.part(optimizer_part),
        checkpoints.part(schedule_part),
    )
    .with_checkpointing_strategy(KeepLastNCheckpoints::new(KEPT))
    .grads_accumulation(config.accumulation)
    .num_epochs(config.epochs());
    training = training.renderer(renderer::new(run.dashboard, &interrupter, resumed)?);
    training = metrics::register(training);
    if let Some(epoch) = resumed {
        training = training.checkpoint(epoch);
    }
    if config.gradient_checkpointing {
        training = training.gradient_checkpointing();
    }
    if let Some(epochs) = config.patience {
        training = training.early_stopping(Patience { epochs, task: task.clone() });
    }
    let devices = run.devices.map_or_else(|| vec![autodiff.clone()], <[Device]>::to_vec);
    let strategy = ExecutionStrategy::multi(devices, MultiDeviceOptim::OptimMainDevice);
    training = training.with_training_strategy(strategy.into());

    let learner = Learner::new(trainee, optimizer(config), schedule(config)?);
    let result = training.launch(learner);

    if let Some(error) = result.error {
        return Err(Error::Stopped(error.to_string()));
    }
    if let Some(why) = task.lock().failure() {
        return Err(Error::Stopped(why.to_string()));
    }
    if let Some(why) = result.interrupted {
        return Err(Error::Stopped(why.reason.unwrap_or_else(|| "interrupted".into())));
    }
    let history = History::read(&run.folder)?;
    let epochs =
        history.valid.last().map_or(0, |valid| valid.step as usize) / config.steps_per_epoch;
    // The last checkpoint was written in the background.
    checkpoints.check(epochs)?;
    Ok(Trained { model: result.model.prepared, history, epochs })
}

fn windows(texts: &Texts, config: &TrainConfig) -> Result<(Arc<Windows>, Arc<Windows>)> {
    let train = Windows::new(texts.train.clone(), config.seq_len)?;
    let (train, valid) = match &texts.valid {
        Some(valid) => (train, Windows::new(valid.clone(), config.seq_len)?),
        None => train.hold_out(config.holdout)?,
    };
    Ok((Arc::new(train), Arc::new(valid)))
}

/// Stops after `epochs` validations that were not better than the best before them, those before a
/// resumed run among them.
#[derive(Clone)]
struct Patience {
    epochs: usize,
    task: Arc<Task>,
}

impl EarlyStoppingStrategy for Patience {
    fn should_stop(&mut self, _: usize, _: &EventStoreClient) -> bool {
        self.task.lock().since_best(self.task.config.objective) >= self.epochs
    }
}

/// Prepares the folder and returns the epochs that are done.
fn start(run: &Run<'_>, checkpoints: &Checkpoints, config: &TrainConfig) -> Result<usize> {
    fs::create_dir_all(&run.folder).map_err(Error::io(&run.folder))?;
    let path = run.folder.join("train.json");
    let done = match run.resume {
        Resume::No => {
            if let Some(last) = checkpoints.epochs()?.last() {
                let why = format!(
                    "holds a run with checkpoints up to epoch {last}: resume it, or choose another \
                     folder"
                );
                return Err(Error::Damaged { path: run.folder.clone(), why });
            }
            let text = serde_json::to_string_pretty(config)
                .map_err(|error| Error::Stopped(error.to_string()))?;
            fs::write(&path, text + "\n").map_err(Error::io(&path))?;
            0
        }
        Resume::Last => checkpoints.resume(None)?,
        Resume::Epoch(epoch) => checkpoints.resume(Some(epoch))?,
    };
    if done > 0 {
        let saved = TrainConfig::read(&path)?;
        if saved != *config {
            let why = "is another configuration than the one to resume with".into();
            return Err(Error::Damaged { path, why });
        }
    }
    if done >= config.epochs() {
        let rule = format!("the run has done its {} epochs", config.epochs());
        return Err(Error::setting("resume", done, rule));
    }
    Ok(done)
}

impl TrainConfig {
    /// Reads the configuration of a run, `train.json`.
    ///
    /// # Errors
    /// A file that is missing or not a configuration.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(Error::io(path))?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Damaged { path: path.into(), why: error.to_string() })
    }
}

/// Makes every weight anew on a device: moved there, it would keep its own kind of autodiff.
struct Recreate<'a>(&'a Device);

impl ModuleMapper for Recreate<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| Tensor::from_data(tensor.into_data(), self.0))
    }
}

/// A model ready for its first step.
pub(crate) struct Setup {
    pub(crate) prepared: Prepared,
    /// The model as it was, where the objective needs it.
    pub(crate) teacher: Option<LanguageModel>,
    /// The device of the prepared model.
    pub(crate) autodiff: Device,
}

/// Prepares for the cache of `config`, or for a float one, with what is trained chosen.
pub(crate) fn set_up(
    device: &Device,
    mut model: LanguageModel,
    config: &TrainConfig,
) -> Result<Setup> {
    // New adapters are random.
    device.seed(config.seed);
    let teacher = config.objective.needs_teacher().then(|| model.clone().valid());
    let mut autodiff = device.clone().autodiff();
    if config.gradient_checkpointing {
        autodiff = autodiff.gradient_checkpointing();
    }
    if config.gradient_checkpointing || !model.devices().iter().all(Device::is_autodiff) {
        model = model.map(&mut Recreate(&autodiff));
    }
    let float = || QatConfig::new(KvCacheConfig::float());
    let prepared = prepare(choose(model, config)?, config.qat.clone().unwrap_or_else(float))?;
    Ok(Setup { prepared, teacher, autodiff })
}

/// Freezes what is not trained, or attaches adapters to what is.
fn choose(model: LanguageModel, config: &TrainConfig) -> Result<LanguageModel> {
    struct Paths {
        trainable: Trainable,
        /// Of the parameters that are trained, and of the matrices among them.
        chosen: Vec<String>,
        path: Vec<String>,
    }
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            let path = self.path.join(".");
            if self.trainable.includes(&path) {
                self.chosen.push(path);
            }
        }
    }
    let mut paths = Paths { trainable: config.trainable, chosen: Vec::new(), path: Vec::new() };
    model.visit(&mut paths);
    if let Some(adapter) = config.adapter {
        // Adapters are for the matrices of the layers: an adapted embedding would be composed anew
        // for every lookup.
        let matrices: Vec<String> =
            paths.chosen.into_iter().filter(|path| Trainable::Layers.includes(path)).collect();
        let group = ParamGroup::from_paths(matrices);
        return Ok(model.apply_lora(Lora::new(adapter.rank, adapter.alpha).set_param_group(group)));
    }
    let group = ParamGroup::from_paths(paths.chosen);
    Ok(model.freeze().unfreeze_group(group))
}

pub(crate) fn optimizer(config: &TrainConfig) -> ModuleOptimizer {
    AdamWConfig::new()
        .with_beta_2(config.beta_2)
        .with_weight_decay(config.weight_decay)
        .with_epsilon(1e-8)
        .init()
}

fn schedule(config: &TrainConfig) -> Result<ModuleLrScheduler> {
    let crate::Schedule { lr, min_lr, warmup } = config.schedule;
    let rest = config.steps - warmup;
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
