//! The settings that decide the result of a run, and no others: resuming a run with other settings
//! is an error.

use core::{fmt, str::FromStr};

use kv_models::{ModelSpec, Role};
use serde::{Deserialize, Serialize};

use crate::{Error, QatConfig, Result};

/// The loss that training minimizes, per token and in nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// `-log p(target)`: adapts to the text.
    CrossEntropy,
    /// `KL(teacher || student)`: recovers the quality that quantization lost. The teacher is the
    /// untrained model, frozen, with a float cache (Hinton et al., 2015,
    /// <https://arxiv.org/abs/1503.02531>).
    Distillation,
    /// `(1 - kl_weight) * cross-entropy + kl_weight * distillation`.
    Mixed {
        /// Between 0 and 1.
        kl_weight: f64,
    },
}

impl Objective {
    pub(crate) fn weights(self) -> (f64, f64) {
        match self {
            Self::CrossEntropy => (1.0, 0.0),
            Self::Distillation => (0.0, 1.0),
            Self::Mixed { kl_weight } => (1.0 - kl_weight, kl_weight),
        }
    }

    /// The value of the objective, given the cross-entropy `nll` and the divergence `kl`.
    pub fn value(self, nll: f64, kl: f64) -> f64 {
        let (ce_weight, kl_weight) = self.weights();
        ce_weight * nll + kl_weight * kl
    }

    pub(crate) fn needs_teacher(self) -> bool {
        self.weights().1 != 0.0
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CrossEntropy => f.write_str("ce"),
            Self::Distillation => f.write_str("kl"),
            Self::Mixed { kl_weight } => write!(f, "mixed:{kl_weight}"),
        }
    }
}

impl FromStr for Objective {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail =
            || Error::setting("objective", text, "must be ce, kl, or mixed:W with W in 0..1");
        match text.split_once(':') {
            None if text == "ce" => Ok(Self::CrossEntropy),
            None if text == "kl" => Ok(Self::Distillation),
            Some(("mixed", weight)) => {
                let kl_weight: f64 = weight.parse().map_err(|_| fail())?;
                (0.0..=1.0).contains(&kl_weight).then_some(Self::Mixed { kl_weight }).ok_or(fail())
            }
            _ => Err(fail()),
        }
    }
}

/// The weights that are trained; all others are frozen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trainable {
    /// All.
    #[default]
    All,
    /// The layers: neither embedding, final norm nor head.
    Layers,
    /// Attention: its norm, projections and output.
    Attention,
    /// The query, key and value projections.
    Qkv,
    /// The indexers of sparse attention.
    Indexer,
}

impl Trainable {
    /// All of them, from the most weights on.
    pub const ALL: [Self; 5] = [Self::All, Self::Layers, Self::Attention, Self::Qkv, Self::Indexer];

    /// Returns the name, as in arguments.
    pub const fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Layers => "layers",
            Self::Attention => "attention",
            Self::Qkv => "qkv",
            Self::Indexer => "indexer",
        }
    }

    /// Returns whether a weight of this role is trained; `None` is a weight without a role.
    pub(crate) fn includes(self, role: Option<Role>) -> bool {
        match self {
            Self::All => true,
            Self::Layers => role.is_some_and(Role::is_layer),
            Self::Attention => role.is_some_and(Role::is_attention),
            Self::Qkv => role == Some(Role::Qkv),
            Self::Indexer => role == Some(Role::Indexer),
        }
    }
}

impl fmt::Display for Trainable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Trainable {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|which| which.name() == text).ok_or_else(|| {
            Error::setting("trainable", text, "must be all, layers, attention, qkv or indexer")
        })
    }
}

/// Low-rank adapters in place of the weights themselves: `W + alpha / rank * A B` (Hu et al., 2021,
/// <https://arxiv.org/abs/2106.09685>), on the matrices of the layers that
/// [`Trainable`] names. They are merged into the weights by [`convert`](crate::Prepared::convert).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapter {
    /// Rank of the two factors.
    pub rank: usize,
    /// Scale of the product of the factors, which is multiplied by `alpha / rank`.
    pub alpha: f64,
}

/// Learning rate: linear warm-up, then a cosine to `min_lr` at the last step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The highest rate, which ends the warm-up.
    pub lr: f64,
    /// The rate of the last step.
    pub min_lr: f64,
    /// Optimizer steps of warm-up.
    pub warmup: usize,
}

impl Schedule {
    /// Checks every field against its range, for a run of `steps` optimizer steps.
    pub(crate) fn check(&self, steps: usize) -> Result<()> {
        let Self { lr, min_lr, warmup } = *self;
        unit("lr", lr)?;
        unit("min-lr", min_lr)?;
        if lr == 0.0 || min_lr > lr {
            return Err(Error::setting("lr", lr, "must be above 0 and not below min-lr"));
        }
        if warmup >= steps {
            let rule = format!("must be less than steps {steps}");
            return Err(Error::setting("warmup", warmup, rule));
        }
        Ok(())
    }
}

fn unit(field: &'static str, value: f64) -> Result<()> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::setting(field, value, "must be between 0 and 1")),
    }
}

/// A training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The cache to train for; `None` trains with a float cache.
    pub qat: Option<QatConfig>,
    /// The loss that is minimized.
    pub objective: Objective,
    /// Share of the sequences, between 0 and 1, that are trained with a float cache. They keep the
    /// model good when it is served without quantization.
    pub float_share: f64,
    /// The weights that are trained.
    pub trainable: Trainable,
    /// Low-rank adapters to train in place of the weights.
    pub adapter: Option<Adapter>,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Sequences per batch.
    pub batch: usize,
    /// Batches per optimizer step and device, whose gradients are averaged.
    pub accumulation: usize,
    /// Number of devices for which the run was planned: an optimizer step has `batch * accumulation
    /// * devices` sequences, on whatever devices it is computed.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub devices: usize,
    /// Optimizer steps in all.
    pub steps: usize,
    /// Optimizer steps between validations and checkpoints, called an epoch in the dashboard. The
    /// last epoch may be shorter.
    pub steps_per_epoch: usize,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// Decoupled weight decay of AdamW, applied to all matrices except embeddings.
    pub weight_decay: f32,
    /// Decay rate of AdamW's second moment; the first moment's is 0.9.
    pub beta_2: f32,
    /// Largest global norm of the gradient; a longer gradient is scaled down to it.
    pub clip_norm: Option<f64>,
    /// Seed of the data's order, and of new weights.
    pub seed: u64,
    /// Share of each text, at its end, that is held out for validation.
    pub holdout: f64,
    /// Largest number of held-out windows in a validation.
    pub valid_windows: usize,
    /// Number of validations in a row without a better loss after which the run stops and keeps the
    /// best model.
    pub patience: Option<usize>,
    /// If true, the backward pass recomputes cheap activations instead of keeping them.
    pub gradient_checkpointing: bool,
}

fn one() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(n: &usize) -> bool {
    *n == 1
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            qat: None,
            objective: Objective::CrossEntropy,
            float_share: 0.0,
            trainable: Trainable::All,
            adapter: None,
            seq_len: 1024,
            batch: 2,
            accumulation: 1,
            devices: 1,
            steps: 100,
            steps_per_epoch: 25,
            schedule: Schedule { lr: 2e-5, min_lr: 0.0, warmup: 5 },
            weight_decay: 0.0,
            beta_2: 0.99,
            clip_norm: Some(1.0),
            seed: 0,
            holdout: 0.02,
            valid_windows: 4,
            patience: None,
            gradient_checkpointing: false,
        }
    }
}

impl TrainConfig {
    /// Checks every field against its range.
    ///
    /// # Errors
    /// [`Error::Setting`] naming the first field that is out of its range.
    pub fn validate(&self) -> Result<()> {
        for (field, value) in [
            ("seq-len", self.seq_len),
            ("batch", self.batch),
            ("accumulation", self.accumulation),
            ("devices", self.devices),
            ("steps", self.steps),
            ("steps-per-epoch", self.steps_per_epoch),
            ("valid-windows", self.valid_windows),
        ] {
            if value == 0 {
                return Err(Error::setting(field, value, "must be at least 1"));
            }
        }
        self.check_sizes()?;
        self.schedule.check(self.steps)?;
        unit("float-share", self.float_share)?;
        if !(0.0..1.0).contains(&self.beta_2) {
            return Err(Error::setting("beta-2", self.beta_2, "must be at least 0 and below 1"));
        }
        if !(0.0..1.0).contains(&self.holdout) {
            return Err(Error::setting("holdout", self.holdout, "must be at least 0 and below 1"));
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            let rule = "must be finite and at least 0";
            return Err(Error::setting("weight-decay", self.weight_decay, rule));
        }
        if let Some(norm) = self.clip_norm
            && !(norm > 0.0 && norm.is_finite())
        {
            return Err(Error::setting("clip-norm", norm, "must be finite and above 0"));
        }
        if let Some(Adapter { rank, alpha }) = self.adapter
            && (rank == 0 || !(alpha > 0.0 && alpha.is_finite()))
        {
            let rule = format!("must be at least 1, and its alpha {alpha} must be above 0");
            return Err(Error::setting("lora", rank, rule));
        }
        if self.patience == Some(0) {
            return Err(Error::setting("patience", 0, "must be at least 1"));
        }
        self.qat.as_ref().map_or(Ok(()), |qat| qat.check(self.seq_len, self.steps))
    }

    /// Refuses products that overflow: the tokens of a batch must fit into one buffer, and the
    /// sequences of a run into an f64, which counts the share that is trained in float.
    fn check_sizes(&self) -> Result<()> {
        let below = |limit: u64, numbers: &[usize]| {
            let product = |sum: u64, &n: &usize| sum.checked_mul(n as u64);
            numbers.iter().try_fold(1, product).is_some_and(|product| product < limit)
        };
        if !below(1 << 32, &[self.seq_len]) {
            return Err(Error::setting("seq-len", self.seq_len, "must be below 2^32"));
        }
        if !below(1 << 32, &[self.batch, self.seq_len]) {
            let rule = format!("times seq-len {} must be below 2^32 tokens", self.seq_len);
            return Err(Error::setting("batch", self.batch, rule));
        }
        if !below(1 << 53, &[self.batch, self.accumulation, self.devices]) {
            let rule = format!("times batch {} must be below 2^53 sequences", self.batch);
            return Err(Error::setting("accumulation", self.accumulation, rule));
        }
        if !below(1 << 53, &[self.batch, self.accumulation, self.devices, self.steps]) {
            let rule = format!(
                "times batch {} and accumulation {} must be below 2^53 sequences",
                self.batch, self.accumulation
            );
            return Err(Error::setting("steps", self.steps, rule));
        }
        Ok(())
    }

    /// Checks that the cache fits the model and quantizes at least one of its layers.
    ///
    /// # Errors
    /// A cache that does not fit the model, or [`Error::Setting`] if it is float in all layers.
    pub fn check_model(&self, model: &ModelSpec) -> Result<()> {
        let Some(qat) = &self.qat else { return Ok(()) };
        qat.cache.validate(model)?;
        match qat.cache.is_float(model) {
            true => {
                let rule = "is float in all layers, so nothing would be quantized; to train in \
                            float, pretrain from the model";
                Err(Error::setting("cache", &qat.cache, rule))
            }
            false => Ok(()),
        }
    }

    /// Returns the number of sequences whose gradients are averaged in an optimizer step.
    pub fn sequences_per_step(&self) -> usize {
        self.batch * self.accumulation * self.devices
    }

    pub(crate) fn epochs(&self) -> usize {
        self.steps.div_ceil(self.steps_per_epoch)
    }

    /// Returns whether a validation and a checkpoint follow optimizer step `step`.
    pub(crate) fn validates_after(&self, step: usize) -> bool {
        step.is_multiple_of(self.steps_per_epoch) || step == self.steps
    }
}
