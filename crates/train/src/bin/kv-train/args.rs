//! The command line, and the run it describes.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kv_cli::{Backend, MemorySize, ModelSource};
use kv_models::{
    LayerSpec, LoadOptions, Loaded, ModelCacheConfig,
    kv_cubecl::{FakeQuantOptions, SteGradient},
    kv_weights::Activations,
    llama, load_with,
    nn::RopeScaling,
};
use kv_train::{
    Adapter, Objective, QatConfig, Schedule, TrainConfig, Trainable, check_new, data::Source,
};
use serde::{Deserialize, Serialize};

use crate::{evaluation::check_eval_tokens, inputs::Input, memory::Sizes};

/// A run as its folder keeps it, to be continued without repeating the command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) backend: Backend,
    pub(crate) devices: usize,
    pub(crate) origin: Origin,
    pub(crate) texts: Vec<PathBuf>,
    pub(crate) field: String,
    pub(crate) valid_texts: Vec<PathBuf>,
    pub(crate) config: TrainConfig,
    pub(crate) eval_tokens: usize,
    /// Whether quantized weights of the model stay packed.
    #[serde(default)]
    pub(crate) weights: Weights,
    /// The files it was started with; older runs have not kept them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inputs: Option<Vec<Input>>,
}

/// The weights that are trained, by name, so that a mistyped one is answered with the nearest.
pub(crate) fn trainable() -> impl TypedValueParser<Value = Trainable> {
    PossibleValuesParser::new(["all", "layers", "attention", "qkv"])
        .try_map(|name| name.parse::<Trainable>())
}

/// What becomes of the quantized weights of a model's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Weights {
    /// Restored to f32 when the model is loaded.
    #[default]
    Restored,
    /// Frozen as they are in the file, and multiplied with activations as they are.
    Packed,
}

impl Weights {
    /// How the model is loaded.
    pub(crate) fn options(self) -> LoadOptions {
        let packed = (self == Self::Packed).then_some(Activations::Exact);
        LoadOptions::default().with_packed(packed)
    }
}

/// Loads a model to be trained.
pub(crate) fn load(path: &Path, device: &Device, weights: Weights) -> Result<Loaded> {
    let loaded = load_with(path, device, weights.options())?;
    if weights == Weights::Packed && !loaded.model.is_packed() {
        bail!(
            "weights packed: {} holds none; kv-train quantize makes them, and GGUF files and those in 16 bits have them",
            path.display()
        );
    }
    Ok(loaded)
}

/// Where the weights come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Origin {
    /// A model's folder or file.
    Model(PathBuf),
    /// Random weights.
    Random(Architecture),
}

/// A Llama-style model.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
pub(crate) struct Architecture {
    /// Ids of the tokenizer that is trained on the texts.
    #[arg(long, default_value_t = 2048)]
    pub(crate) vocab: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 256)]
    pub(crate) hidden: usize,
    /// Width of the MLP.
    #[arg(long, default_value_t = 704)]
    pub(crate) intermediate: usize,
    /// Layers.
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: usize,
    /// Query heads.
    #[arg(long, default_value_t = 4)]
    pub(crate) heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    pub(crate) kv_heads: usize,
    /// Channels per head.
    #[arg(long, default_value_t = 64)]
    pub(crate) head_dim: usize,
    /// The longest context.
    #[arg(long, default_value_t = 1024)]
    pub(crate) context: usize,
}

impl Architecture {
    /// What decides the memory of training, computed without overflow.
    pub(crate) fn sizes(&self) -> Sizes {
        let [vocab, hidden, intermediate, layers, heads, kv_heads, head_dim] = [
            self.vocab,
            self.hidden,
            self.intermediate,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
        ]
        .map(|n| n as f64);
        let (query_rows, qkv_rows) = (heads * head_dim, (heads + 2.0 * kv_heads) * head_dim);
        let of_layer = hidden * (qkv_rows + query_rows + 3.0 * intermediate);
        Sizes {
            weights: 4.0 * (vocab * hidden + layers * of_layer),
            vocabulary: vocab * hidden,
            hidden,
            layers,
            qkv_rows: layers * qkv_rows,
            widest: intermediate,
        }
    }

    pub(crate) fn config(&self) -> llama::Config {
        llama::Config {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            n_layers: self.layers,
            attention: LayerSpec::new(self.heads, self.kv_heads, self.head_dim),
            max_positions: self.context,
            norm_epsilon: 1e-5,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            tied_head: true,
            rotary_dim: self.head_dim,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            full_layers: Default::default(),
            layers_without_rope: Default::default(),
            qk_norms: false,
        }
    }
}

/// A new run.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) spec: Spec,
    pub(crate) folder: PathBuf,
    /// Lines instead of the dashboard.
    pub(crate) plain: bool,
    pub(crate) memory: Option<MemorySize>,
}

/// The settings of `kv-train pretrain` unless they are given.
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

/// The help of an option, with its default in both commands.
fn help(text: &str, default: impl Fn(&TrainConfig) -> String) -> String {
    let [qat, pretrain] = [TrainConfig::default(), pretraining()].map(|config| default(&config));
    match qat == pretrain {
        true => format!("{text} [default: {qat}]"),
        false => format!("{text} [default: qat {qat}, pretrain {pretrain}]"),
    }
}

/// What both kinds of training take. Defaults differ, so they are in the commands.
#[derive(Debug, clap::Args)]
struct Training {
    /// A text to train on: UTF-8, or .jsonl with one object per line; repeatable.
    #[arg(long = "text", required = true)]
    texts: Vec<PathBuf>,
    /// The field of a .jsonl object that holds the text.
    #[arg(long, default_value = "text")]
    field: String,
    /// A text to validate with, instead of the tail of the others; repeatable.
    #[arg(long = "valid-text")]
    valid_texts: Vec<PathBuf>,
    /// The run's folder, which must not hold another run.
    #[arg(long)]
    out: PathBuf,
    /// Where to train.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Devices of the backend that share each optimizer step.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    devices: usize,
    #[arg(long, help = help("Optimizer steps", |it| it.steps.to_string()))]
    steps: Option<usize>,
    #[arg(long, help = help(
        "Optimizer steps between validations and checkpoints; both come after the last step too",
        |it| it.steps_per_epoch.to_string(),
    ))]
    steps_per_epoch: Option<usize>,
    #[arg(long, help = help("Tokens per sequence", |it| it.seq_len.to_string()))]
    seq_len: Option<usize>,
    #[arg(long, help = help("Sequences per batch", |it| it.batch.to_string()))]
    batch: Option<usize>,
    #[arg(long, help = help("Batches per optimizer step", |it| it.accumulation.to_string()))]
    accumulation: Option<usize>,
    #[arg(long, help = help("The highest learning rate", |it| it.schedule.lr.to_string()))]
    lr: Option<f64>,
    #[arg(long, help = help(
        "The last learning rate of the cosine",
        |it| it.schedule.min_lr.to_string(),
    ))]
    min_lr: Option<f64>,
    #[arg(long, help = help(
        "Steps of linear warm-up, by default at most a tenth of all",
        |it| it.schedule.warmup.to_string(),
    ))]
    warmup: Option<usize>,
    #[arg(long, help = help(
        "Decoupled weight decay, of matrices but embeddings",
        |it| it.weight_decay.to_string(),
    ))]
    weight_decay: Option<f32>,
    #[arg(long, help = help("Decay rate of the second moment", |it| it.beta_2.to_string()))]
    beta_2: Option<f32>,
    #[arg(long, help = help(
        "Largest global norm of the gradient; 0 for no limit",
        |it| it.clip_norm.unwrap_or(0.0).to_string(),
    ))]
    clip_norm: Option<f64>,
    #[arg(long, help = help(
        "Seed of the data's order and of new weights",
        |it| it.seed.to_string(),
    ))]
    seed: Option<u64>,
    #[arg(long, help = help(
        "Share of each text's tail held out for validation",
        |it| it.holdout.to_string(),
    ))]
    holdout: Option<f64>,
    #[arg(long, help = help(
        "Held-out windows used in a validation, at most",
        |it| it.valid_windows.to_string(),
    ))]
    valid_windows: Option<usize>,
    /// Stop after as many validations without a better loss, and save the best model
    /// [default: never].
    #[arg(long)]
    patience: Option<usize>,
    /// Held-out tokens on which the model is evaluated before and after; 0 for none.
    #[arg(long, default_value_t = 4096)]
    eval_tokens: usize,
    /// Recompute cheap activations in the backward pass instead of keeping them.
    #[arg(long)]
    gradient_checkpointing: bool,
    /// Print a line for every few steps, on a terminal too, instead of the dashboard.
    #[arg(long)]
    plain: bool,
    /// The memory that training may take, such as 16G [default: what is free].
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

    /// Refuses what can be known to be wrong before it finds out where the weights come from, which
    /// may download them. Nothing has been written by then.
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
        let Self { backend, devices, texts, field, valid_texts, eval_tokens, .. } = self;
        let weights = Weights::Restored;
        let spec = Spec {
            backend,
            devices,
            origin,
            texts,
            field,
            valid_texts,
            config,
            eval_tokens,
            weights,
            inputs: None,
        };
        Ok(Start { spec, folder: self.out, plain: self.plain, memory: self.memory })
    }
}

/// Arguments of `kv-train qat`.
#[derive(Debug, clap::Args)]
pub(crate) struct Qat {
    #[command(flatten)]
    model: ModelSource,
    /// The cache to train for: kKvV with bits 2, 4, 8 or 16 or the name of a format, then -gN, -rN, -sN, -after,
    /// -gflush, -hadv, -hadk, -f16 or -bf16; or a policy: safe, balanced, small, or a file of .json or .toml.
    #[arg(long, value_parser = ModelCacheConfig::find)]
    cache: ModelCacheConfig,
    /// Layers whose caches stay in float, by index.
    #[arg(long = "float-layers", value_delimiter = ',')]
    float_layers: Vec<usize>,
    /// ce, kl (distillation from the model as it is, with a float cache), or mixed:W.
    #[arg(long, default_value = "kl")]
    objective: Objective,
    /// Share of the sequences that are trained with a float cache.
    #[arg(long, default_value_t = 0.0)]
    float_share: f64,
    /// Which weights are trained.
    #[arg(long, value_parser = trainable(), default_value = "all")]
    trainable: Trainable,
    /// Train low-rank adapters of this rank instead of the weights.
    #[arg(long)]
    lora: Option<usize>,
    /// What becomes of quantized weights, those of a GGUF file or of kv-train quantize, and of those in f16 and bf16. Packed ones take the file's
    /// bytes in memory; only adapters are trained on them, by --lora.
    #[arg(long, value_enum, default_value = "restored")]
    weights: Weights,
    /// Scale of the adapters, over their rank; by default twice the rank.
    #[arg(long, requires = "lora")]
    lora_alpha: Option<f64>,
    /// Let gradients pass through scale and minimum as well.
    #[arg(long)]
    scale_gradient: bool,
    /// Steps before the quantizer is switched on.
    #[arg(long, default_value_t = 0)]
    start_step: u64,
    /// Quantize every token while training, which no cache does: for comparison only.
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
            bail!("weights packed: are frozen; train adapters on them with --lora N");
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
    #[command(flatten)]
    architecture: Architecture,
    #[command(flatten)]
    training: Training,
}

impl Pretrain {
    pub(crate) fn start(self) -> Result<Start> {
        let origin = || Ok(Origin::Random(self.architecture));
        self.training.start(origin, pretraining())
    }
}

/// A number that is not 0.
fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("must be a whole number, at least 1".into()),
        Ok(n) => Ok(n),
    }
}
