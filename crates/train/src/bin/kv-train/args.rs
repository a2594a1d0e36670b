//! The arguments of `qat` and `pretrain`, and the run they describe.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kv_cli::{Backend, DeviceList, MemorySize, ModelSource, WorkerArgs, cache_help};
use kv_models::{
    ModelCacheConfig,
    kv_cubecl::{FakeQuantOptions, SteGradient},
};
use kv_train::{
    Adapter, Objective, QatConfig, Schedule, Strategy, TrainConfig, Trainable, check_new,
    data::Source,
};

use crate::{
    evaluation::check_eval_tokens,
    spec::{Architecture, Origin, Spec, Weights, read_config},
};

/// Parses the weights that are trained by name, so that an error can suggest the nearest name.
pub(crate) fn trainable() -> impl TypedValueParser<Value = Trainable> {
    PossibleValuesParser::new(Trainable::ALL.map(Trainable::name))
        .try_map(|name| name.parse::<Trainable>())
}

#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) spec: Spec,
    pub(crate) folder: PathBuf,
    /// Prints lines instead of showing the dashboard.
    pub(crate) plain: bool,
    pub(crate) memory: Option<MemorySize>,
}

/// The defaults of `kv-train pretrain`.
fn pretraining() -> TrainConfig {
    TrainConfig {
        steps: 1000,
        steps_per_epoch: 100,
        schedule: Schedule { lr: 2e-3, min_lr: 1e-4, warmup: 50 },
        weight_decay: 0.1,
        beta_2: 0.95,
        valid_windows: 16,
        ..TrainConfig::default()
    }
}

/// Returns the help of an option with its defaults in both commands.
fn help(text: &str, default: impl Fn(&TrainConfig) -> String) -> String {
    let [qat, pretrain] = [TrainConfig::default(), pretraining()].map(|config| default(&config));
    match qat == pretrain {
        true => format!("{text} [default: {qat}]"),
        false => format!("{text} [default: qat {qat}, pretrain {pretrain}]"),
    }
}

/// The arguments that `qat` and `pretrain` share. Their defaults differ, so none is declared here.
#[derive(Debug, clap::Args)]
struct Training {
    /// Text to train on: UTF-8, or .jsonl with one object per line; repeatable.
    #[arg(long = "text", required = true)]
    texts: Vec<PathBuf>,
    /// Field of a .jsonl object that holds the text.
    #[arg(long, default_value = "text")]
    field: String,
    /// Text for validation instead of the tails of the training texts; repeatable.
    #[arg(long = "valid-text")]
    valid_texts: Vec<PathBuf>,
    /// Folder of the new run; it must not hold another run.
    #[arg(long)]
    out: PathBuf,
    /// Backend to train on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Devices that share each optimizer step, instead of --backend: flex:2 (the CPU as two
    /// devices, which share its threads), wgpu:0,1, cuda:0-7, or devices that kv-train worker
    /// serves on other machines, remote:HOST:PORT/0,HOST:PORT/0-1. Each of them adds --batch x
    /// --accumulation sequences to a step.
    #[arg(long, value_name = "LIST", conflicts_with = "backend")]
    devices: Option<DeviceList>,
    #[command(flatten)]
    workers: WorkerArgs,
    /// Way to add up the gradients of several devices: multi, on the first device; ddp, by an
    /// all-reduce between CUDA devices; auto, ddp between CUDA devices and otherwise multi.
    #[arg(long, default_value = "auto")]
    strategy: Strategy,
    #[arg(long, help = help("Optimizer steps", |it| it.steps.to_string()))]
    steps: Option<usize>,
    #[arg(long, help = help(
        "Optimizer steps between validations and checkpoints; the last step always has both",
        |it| it.steps_per_epoch.to_string(),
    ))]
    steps_per_epoch: Option<usize>,
    #[arg(long, help = help("Tokens per sequence", |it| it.seq_len.to_string()))]
    seq_len: Option<usize>,
    #[arg(long, help = help("Sequences per batch", |it| it.batch.to_string()))]
    batch: Option<usize>,
    #[arg(long, help = help("Batches per optimizer step", |it| it.accumulation.to_string()))]
    accumulation: Option<usize>,
    #[arg(long, help = help("Highest learning rate", |it| it.schedule.lr.to_string()))]
    lr: Option<f64>,
    #[arg(long, help = help(
        "Learning rate at the end of the cosine",
        |it| it.schedule.min_lr.to_string(),
    ))]
    min_lr: Option<f64>,
    #[arg(long, help = help(
        "Steps of linear warm-up, by default at most a tenth of --steps",
        |it| it.schedule.warmup.to_string(),
    ))]
    warmup: Option<usize>,
    #[arg(long, help = help(
        "Decoupled weight decay of matrices except embeddings",
        |it| it.weight_decay.to_string(),
    ))]
    weight_decay: Option<f32>,
    #[arg(long, help = help("Decay rate of AdamW's second moment", |it| it.beta_2.to_string()))]
    beta_2: Option<f32>,
    #[arg(long, help = help(
        "Largest global norm of the gradient; 0 for no limit",
        |it| it.clip_norm.unwrap_or(0.0).to_string(),
    ))]
    clip_norm: Option<f64>,
    #[arg(long, help = help(
        "Seed of the data order and of new weights",
        |it| it.seed.to_string(),
    ))]
    seed: Option<u64>,
    #[arg(long, help = help(
        "Share of each text's tail held out for validation",
        |it| it.holdout.to_string(),
    ))]
    holdout: Option<f64>,
    #[arg(long, help = help(
        "Largest number of held-out windows in a validation",
        |it| it.valid_windows.to_string(),
    ))]
    valid_windows: Option<usize>,
    /// Stop after this many validations in a row without a better loss, and save the best model
    /// [default: never].
    #[arg(long)]
    patience: Option<usize>,
    /// Held-out tokens to evaluate the model on before and after training; 0 for no evaluation.
    #[arg(long, default_value_t = 4096)]
    eval_tokens: usize,
    /// Recompute cheap activations in the backward pass instead of keeping them.
    #[arg(long)]
    gradient_checkpointing: bool,
    /// Print a line for every few steps instead of showing the dashboard.
    #[arg(long)]
    plain: bool,
    /// Memory limit for training, such as 16G [default: the free memory].
    #[arg(long)]
    memory: Option<MemorySize>,
}

impl Training {
    fn config(&self, defaults: TrainConfig) -> TrainConfig {
        let Schedule { lr, min_lr, warmup } = defaults.schedule;
        let steps = self.steps.unwrap_or(defaults.steps);
        TrainConfig {
            seq_len: self.seq_len.unwrap_or(defaults.seq_len),
            batch: self.batch.unwrap_or(defaults.batch),
            accumulation: self.accumulation.unwrap_or(defaults.accumulation),
            devices: self.devices.as_ref().map_or(1, DeviceList::count),
            steps,
            steps_per_epoch: self.steps_per_epoch.unwrap_or(defaults.steps_per_epoch.min(steps)),
            schedule: Schedule {
                lr: self.lr.unwrap_or(lr),
                min_lr: self.min_lr.unwrap_or(min_lr),
                warmup: self.warmup.unwrap_or(warmup.min(steps / 10)),
            },
            weight_decay: self.weight_decay.unwrap_or(defaults.weight_decay),
            beta_2: self.beta_2.unwrap_or(defaults.beta_2),
            clip_norm: match self.clip_norm {
                Some(norm) => (norm != 0.0).then_some(norm),
                None => defaults.clip_norm,
            },
            seed: self.seed.unwrap_or(defaults.seed),
            holdout: self.holdout.unwrap_or(defaults.holdout),
            valid_windows: self.valid_windows.unwrap_or(defaults.valid_windows),
            patience: self.patience.or(defaults.patience),
            gradient_checkpointing: self.gradient_checkpointing,
            ..defaults
        }
    }

    /// Checks everything that does not need the model before `origin` finds it, which may download
    /// it. Nothing is written.
    fn start(
        self,
        origin: impl FnOnce() -> Result<Origin>,
        defaults: TrainConfig,
    ) -> Result<Start> {
        let config = self.config(defaults);
        config.validate()?;
        check_eval_tokens(self.eval_tokens)?;
        check_new(&self.out)?;
        Source::new(self.texts.iter().chain(&self.valid_texts)).check_readable()?;
        let origin = origin()?;
        let Self { backend, devices, strategy, texts, field, valid_texts, eval_tokens, .. } = self;
        let backend = devices.as_ref().map_or(backend, DeviceList::backend);
        let weights = Weights::Restored;
        let spec = Spec {
            backend,
            devices,
            strategy,
            origin,
            texts,
            field,
            valid_texts,
            config,
            eval_tokens,
            weights,
            inputs: None,
            workers: self.workers,
        };
        Ok(Start { spec, folder: self.out, plain: self.plain, memory: self.memory })
    }
}

/// Arguments of `kv-train qat`.
#[derive(Debug, clap::Args)]
pub(crate) struct Qat {
    #[command(flatten)]
    model: ModelSource,
    #[arg(long, value_parser = ModelCacheConfig::find, help = cache_help("Cache to train for"))]
    cache: ModelCacheConfig,
    /// Indices of layers whose caches stay in float.
    #[arg(long = "float-layers", value_delimiter = ',')]
    float_layers: Vec<usize>,
    /// Loss: ce, kl (distillation from the untrained model with a float cache), or mixed:W with the
    /// weight W of kl.
    #[arg(long, default_value = "kl")]
    objective: Objective,
    /// Share of sequences that are trained with a float cache.
    #[arg(long, default_value_t = 0.0)]
    float_share: f64,
    /// Weights to train.
    #[arg(long, value_parser = trainable(), default_value = "all")]
    trainable: Trainable,
    /// Train low-rank adapters of this rank instead of the weights.
    #[arg(long)]
    lora: Option<usize>,
    /// Load weights of a GGUF file, of kv-train quantize, or in f16 or bf16 restored or packed.
    /// Packed weights take as many bytes in memory as in the file, and only adapters (--lora) can
    /// train them.
    #[arg(long, value_enum, default_value = "restored")]
    weights: Weights,
    /// Scale of the adapters, which is divided by their rank [default: twice the rank].
    #[arg(long, requires = "lora")]
    lora_alpha: Option<f64>,
    /// Also pass gradients through the quantizer's scale and minimum.
    #[arg(long)]
    scale_gradient: bool,
    /// Optimizer steps before the quantizer is switched on.
    #[arg(long, default_value_t = 0)]
    start_step: u64,
    /// Quantize every token during training, which no cache does; for comparison only.
    #[arg(long)]
    quantize_everything: bool,
    #[command(flatten)]
    training: Training,
}

impl Qat {
    pub(crate) fn start(self) -> Result<Start> {
        let gradient = match self.scale_gradient {
            true => SteGradient::ScaleMin,
            false => SteGradient::Identity,
        };
        let quantize_everything = self.quantize_everything;
        let cache = self.cache.with_float_layers(self.float_layers);
        let qat = QatConfig {
            cache,
            fake_quant: FakeQuantOptions { gradient, quantize_everything },
            start_step: self.start_step,
        };
        let adapter = self
            .lora
            .map(|rank| Adapter { rank, alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64) });
        let defaults = TrainConfig {
            qat: Some(qat),
            objective: self.objective,
            float_share: self.float_share,
            trainable: self.trainable,
            adapter,
            ..TrainConfig::default()
        };
        if self.weights == Weights::Packed && self.lora.is_none() {
            bail!("weights packed: packed weights are frozen; add --lora N to train adapters");
        }
        let origin = || Ok(Origin::Model(self.model.find()?));
        let mut start = self.training.start(origin, defaults)?;
        start.spec.weights = self.weights;
        Ok(start)
    }
}

/// Arguments of `kv-train pretrain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Pretrain {
    /// config.json of a model of any family, instead of the sizes of a Llama-style model.
    #[arg(long, conflicts_with = "Architecture")]
    config: Option<PathBuf>,
    /// Folder or GGUF file of a model, to start from instead of random weights: with longer
    /// sequences or other texts, for example. Its tokenizer is used as well.
    #[arg(long, conflicts_with_all = ["Architecture", "config"])]
    from: Option<PathBuf>,
    #[command(flatten)]
    architecture: Architecture,
    #[command(flatten)]
    training: Training,
}

impl Pretrain {
    pub(crate) fn start(self) -> Result<Start> {
        let origin = || match (self.from, &self.config) {
            (Some(model), _) => Ok(Origin::Model(model)),
            (None, Some(path)) => Ok(Origin::Config(read_config(path)?)),
            (None, None) => Ok(Origin::Random(self.architecture)),
        };
        self.training.start(origin, pretraining())
    }
}
