//! One training step, as burn-train calls it.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Device, Int, Tensor},
};
use burn_optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn_train::{InferenceStep, TrainOutput, TrainStep};
use kv_eval::layers::{LayerError, layer_errors_of};
use kv_models::{LanguageModel, kv_cubecl::KvCacheConfig};
use rayon::prelude::*;

use crate::{
    Error, Prepared, QatConfig, Result, StepRecord, TrainConfig,
    data::Batch,
    history::{GroupShares, Recorder},
    index_losses::IndexLosses,
    loss::{self, Head, Sums},
    metrics::Measured,
};

/// A prepared model and its training task.
#[derive(Module, Debug)]
pub struct Trainee {
    /// The model.
    pub prepared: Prepared,
    /// The untrained model, if the objective needs it, on the same device without autodiff.
    #[module(skip)]
    pub(crate) teacher: Option<LanguageModel>,
    #[module(skip)]
    pub(crate) task: Arc<Task>,
}

/// The part of a run that stays the same in all steps.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) config: TrainConfig,
    pub(crate) recorder: Mutex<Recorder>,
}

/// A batch after its backward pass.
pub(crate) struct TrainedBatch {
    /// Gradients of the mean loss over all tokens of the optimizer step.
    pub(crate) gradients: GradientsParams,
    pub(crate) loss: BatchLoss,
}

/// The loss of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLoss {
    pub(crate) record: StepRecord,
    pub(crate) sequences: usize,
    tokens: usize,
}

impl BatchLoss {
    pub(crate) fn measured(&self) -> Measured {
        Measured::train(&self.record, self.tokens)
    }
}

/// The position of a sequence in its run.
#[derive(Clone, Copy)]
struct RunPosition {
    /// Number of sequences before it.
    position: u64,
    /// Number of optimizer steps before it.
    step: u64,
}

/// Returns whether this crate should split work on `device` over threads, because Flex runs
/// element-wise operations on the calling thread.
pub(crate) fn on_threads(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    {
        use kv_models::kv_cubecl::{Flex, Target};
        Flex::hosts(&device.clone().without_autodiff())
    }
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

/// Detaches final hidden states, as `[batch * seq, hidden]`, and the head from the autodiff graph.
fn head(model: &LanguageModel, hidden: Tensor<3>) -> Head {
    let [batch, seq, width] = hidden.dims();
    Head {
        hidden: hidden.without_autodiff().reshape([batch * seq, width]),
        weight: model.decoder().head_weight().valid(),
        softcap: model.decoder().logit_softcap(),
    }
}

impl Trainee {
    /// Copies everything to another device.
    pub(crate) fn replica(self, device: &Device) -> Self {
        let plain = device.clone().without_autodiff();
        let teacher = self.teacher.clone().map(|teacher| teacher.to_device(&plain));
        Self { teacher, ..self.fork(device) }
    }

    /// Runs forward and backward of a batch.
    pub(crate) fn train_batch(&self, batch: Batch) -> Result<TrainedBatch> {
        let start = Instant::now();
        let (position, step) = (batch.position, batch.epoch);
        let [sequences, _] = batch.inputs.dims();
        let (sums, gradients) = self.gradients(batch)?;
        let objective = self.task.config.objective;
        let rows = sums.rows.max(1) as f64;
        let record = StepRecord {
            position,
            step,
            loss: objective.value(sums.nll, sums.kl) / rows,
            nll: sums.nll / rows,
            kl: objective.needs_teacher().then_some(sums.kl / rows),
            index_loss: (sums.index != 0.0).then_some(sums.index / rows),
            tokens_per_second: rows / start.elapsed().as_secs_f64(),
        };
        if !(record.loss.is_finite() && record.nll.is_finite()) {
            let loss = record.loss;
            let why = format!("the loss of step {step} is {loss}; try a lower learning rate");
            return Err(Error::Stopped(why));
        }
        let loss = BatchLoss { record, sequences, tokens: sums.rows };
        Ok(TrainedBatch { gradients, loss })
    }

    /// Returns loss sums of a batch, and the gradient of the mean loss over all tokens of the
    /// optimizer step.
    pub(crate) fn gradients(&self, batch: Batch) -> Result<(Sums, GradientsParams)> {
        let config = &self.task.config;
        let [sequences, seq] = batch.inputs.dims();
        let factor = 1.0 / (seq * config.sequences_per_step()) as f64;
        let device = batch.inputs.device();
        let step = batch.epoch;
        let one = |trainee: &Self, index: usize| {
            let ids = |ids: &Tensor<2, Int>| ids.clone().narrow(0, index, 1);
            let at = RunPosition { position: batch.position + index as u64, step };
            trainee.train_rows(ids(&batch.inputs), ids(&batch.targets), at, factor)
        };
        let parts: Vec<Result<(Sums, GradientsParams)>> = if on_threads(&device) && sequences > 1 {
            // A fork has its own autodiff graph, so backward passes can run in parallel.
            (0..sequences)
                .into_par_iter()
                .map_with(self.clone(), |trainee, index| one(&trainee.clone().fork(&device), index))
                .collect()
        } else if config.float_share > 0.0 {
            (0..sequences).map(|index| one(self, index)).collect()
        } else {
            let at = RunPosition { position: batch.position, step };
            vec![self.train_rows(batch.inputs, batch.targets, at, factor)]
        };
        let (mut sums, mut grads) = (Sums::default(), GradientsAccumulator::new());
        for part in parts {
            let (part_sums, part_grads) = part?;
            sums.add(part_sums);
            grads.accumulate(self, part_grads);
        }
        Ok((sums, grads.grads()))
    }

    /// Runs forward and backward of sequences `[n, seq]` that all use the same cache.
    fn train_rows(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        at: RunPosition,
        factor: f64,
    ) -> Result<(Sums, GradientsParams)> {
        let config = &self.task.config;
        let model = &self.prepared.model;
        let plain = inputs.clone().without_autodiff();
        let mut indexers = IndexLosses::of(&self.prepared, config.trainable);
        let hidden = indexers.observe(|observer| match self.task.is_float(at.position) {
            true => {
                let (float, options) = (KvCacheConfig::float().into(), Default::default());
                Ok(model.hidden_with(inputs, &float, options, observer)?)
            }
            false => self.prepared.hidden_with(inputs, at.step, observer),
        })?;
        let taught = |teacher: &LanguageModel| -> Result<Head> {
            Ok(head(teacher, teacher.hidden(plain, KvCacheConfig::float())?))
        };
        let teacher = self.teacher.as_ref().map(taught).transpose()?;
        let targets = targets.without_autodiff().flatten::<1>(0, 1);
        let parameter = model.decoder().head_weight().param();
        let student = head(model, hidden.clone());
        let train_head = parameter.is_some_and(|parameter| parameter.val().is_require_grad());
        let (mut sums, head_grads) = loss::gradients(
            &student,
            teacher.as_ref(),
            &targets,
            config.objective,
            factor,
            train_head,
        );
        // A scalar with the same gradient with respect to the hidden states as the loss.
        let seed = head_grads.hidden.reshape(hidden.dims());
        let mut scalar = (hidden * seed).sum();
        if let Some(loss) = indexers.sum()? {
            scalar = scalar + loss.clone() * factor;
            sums.index = loss.into_scalar::<f64>();
        }
        let mut grads = scalar.backward();
        let mut grads = GradientsParams::from_module(&mut grads, self);
        if let (Some(weight), Some(parameter)) = (head_grads.weight, parameter) {
            let sum = match grads.remove::<2>(parameter.id) {
                Some(lookup) => lookup + weight,
                None => weight,
            };
            grads.register(parameter.id, sum);
        }
        Ok((sums, grads))
    }

    /// Returns the loss sums with the cache that is trained for and with a float cache. For the
    /// first batch of a validation, also returns the shares of clipped elements and constant
    /// groups.
    fn valid_batch(&self, batch: Batch) -> Result<(Sums, Sums, Option<GroupShares>)> {
        let targets = batch.targets.clone().flatten::<1>(0, 1);
        let model = &self.prepared.model;
        let float = head(model, model.hidden(batch.inputs.clone(), KvCacheConfig::float())?);
        let (reference, float) = match &self.teacher {
            Some(teacher) => {
                let hidden = teacher.hidden(batch.inputs.clone(), KvCacheConfig::float())?;
                let reference = head(teacher, hidden);
                let sums = loss::losses(&float, Some(&reference), &targets);
                (reference, sums)
            }
            // Without a teacher, the float cache is the reference, so its own divergence is 0.
            None => {
                let sums = loss::losses(&float, None, &targets);
                (float, sums)
            }
        };
        let mut shares = None;
        let quantized = match &self.task.config.qat {
            Some(qat) => {
                if self.task.lock().validation_starts() {
                    shares = Some(group_shares(model, batch.inputs.clone(), qat)?);
                }
                let hidden = model.hidden_with(batch.inputs, &qat.cache, qat.fake_quant, None)?;
                loss::losses(&head(model, hidden), Some(&reference), &targets)
            }
            None => float,
        };
        Ok((quantized, float, shares))
    }
}

/// Returns the shares of clipped elements and constant groups in the first sequence of `inputs`, as
/// means over all layers. A layer in float counts as 0.
fn group_shares(
    model: &LanguageModel,
    inputs: Tensor<2, Int>,
    qat: &QatConfig,
) -> Result<GroupShares> {
    let layers = layer_errors_of(model, inputs.narrow(0, 0, 1), &qat.cache)?;
    let mean = |share: fn(&LayerError) -> f64| {
        layers.iter().map(share).sum::<f64>() / layers.len().max(1) as f64
    };
    Ok(GroupShares { clipped: mean(|l| l.clipped), constant: mean(|l| l.constant) })
}

impl Task {
    /// Returns whether the run is complete: after the last validation, or after one that used up
    /// the patience.
    pub(crate) fn is_finished(&self) -> bool {
        let (config, recorder) = (&self.config, self.lock());
        let (made, validations) = (recorder.steps_made(), recorder.validations());
        let impatient = |patience| validations.since_best(config.objective) >= patience;
        validations.validation(made).is_some()
            && (made == config.steps || config.patience.is_some_and(impatient))
    }

    /// Returns whether the sequence at `position` is trained with a float cache. Such sequences are
    /// spread evenly over the run.
    fn is_float(&self, position: u64) -> bool {
        let before = |n: u64| (n as f64 * self.config.float_share).floor();
        before(position + 1) > before(position)
    }
}

impl TrainStep for Trainee {
    type Input = Batch;
    type Output = Measured;

    fn step(&self, _: Batch) -> TrainOutput<Measured> {
        unreachable!("`Workers` computes the batches of a step")
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: burn_optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        match clip(&self, grads, self.task.config.clip_norm) {
            Ok(grads) => optim.step(lr, self, grads),
            Err(why) => {
                let step = self.task.lock().steps_made();
                self.task.fail(&format!("step {step}: {why}"));
                self
            }
        }
    }
}

impl InferenceStep for Trainee {
    type Input = Batch;
    type Output = Measured;

    fn step(&self, batch: Batch) -> Measured {
        match self.valid_batch(batch) {
            Ok((quantized, float, shares)) => {
                self.task.lock().valid(quantized, float, shares);
                Measured::valid(quantized, float, self.task.config.objective, shares)
            }
            Err(error) => {
                self.task.fail(&error.to_string());
                Measured::default()
            }
        }
    }
}

/// Scales all gradients so that their global norm is at most `limit` (Pascanu et al., 2013,
/// <https://arxiv.org/abs/1211.5063>).
///
/// # Errors
/// A global norm that is not finite in f32, with the first weight that causes it. Such gradients
/// would make weights NaN, or have no effect when scaled by `limit / inf`. A finite norm also keeps
/// AdamW's squares of gradients finite.
pub(crate) fn clip<M: Module>(
    module: &M,
    mut grads: GradientsParams,
    limit: Option<f64>,
) -> core::result::Result<GradientsParams, String> {
    struct Norm<'a> {
        grads: &'a GradientsParams,
        path: Vec<String>,
        names: Vec<String>,
        squares: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for Norm<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.get::<D>(param.id) {
                self.names.push(self.path.join("."));
                self.squares.push(grad.powi_scalar(2).sum());
            }
        }
    }
    struct Scale<'a> {
        grads: &'a mut GradientsParams,
        factor: f64,
    }
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.remove::<D>(param.id) {
                self.grads.register(param.id, grad.mul_scalar(self.factor));
            }
        }
    }
    let mut norm = Norm { grads: &grads, path: vec![], names: vec![], squares: vec![] };
    module.visit(&mut norm);
    let Norm { names, squares, .. } = norm;
    if squares.is_empty() {
        return Ok(grads);
    }
    let all = Tensor::cat(squares, 0);
    let norm = all.clone().sum().into_scalar::<f64>().sqrt();
    if !norm.is_finite() {
        let squares = all.into_data();
        let first = squares.iter::<f64>().zip(names).find(|(square, _)| !square.is_finite());
        let of = first.map_or(String::new(), |(_, name)| format!(" (first in {name})"));
        return Err(format!(
            "the norm of the gradient is {norm} in f32{of}; try a lower learning rate"
        ));
    }
    if let Some(limit) = limit.filter(|&limit| norm > limit) {
        module.visit(&mut Scale { grads: &mut grads, factor: limit / norm });
    }
    Ok(grads)
}

impl Task {
    pub(crate) fn fail(&self, why: &str) {
        self.lock().fail(why);
    }

    pub(crate) fn fail_by(&self, error: Error) {
        match error {
            Error::Stopped(_) | Error::Worker { .. } => self.lock().fail_by(error),
            error => self.fail(&error.to_string()),
        }
    }

    /// Locks the recorder, even if a thread panicked while it held the lock: at worst a line of the
    /// history is missing.
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
