//! The metrics that the dashboard shows.

use std::sync::Arc;

use burn::tensor::{ExecutionError, TensorReadError};
use burn_train::{
    ItemLazy, LearnerModel, SupervisedTraining,
    metric::{
        Adaptor, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes,
        NumericEntry, SerializedEntry,
    },
};

use crate::{Objective, StepRecord, history::GroupShares, loss::Sums};

/// The measurements of one batch; `None` marks a field that was not measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    rows: usize,
    loss: Option<f64>,
    nll: Option<f64>,
    nll_float: Option<f64>,
    kl: Option<f64>,
    index_loss: Option<f64>,
    tokens_per_second: Option<f64>,
    shares: Option<GroupShares>,
}

impl Measured {
    pub(crate) fn train(record: &StepRecord, rows: usize) -> Self {
        Self {
            rows,
            loss: Some(record.loss),
            nll: Some(record.nll),
            kl: record.kl,
            index_loss: record.index_loss,
            tokens_per_second: Some(record.tokens_per_second),
            ..Self::default()
        }
    }

    pub(crate) fn valid(
        quantized: Sums,
        float: Sums,
        objective: Objective,
        shares: Option<GroupShares>,
    ) -> Self {
        let rows = quantized.rows.max(1) as f64;
        Self {
            rows: quantized.rows,
            loss: Some(objective.value(quantized.nll, quantized.kl) / rows),
            nll: Some(quantized.nll / rows),
            nll_float: Some(float.nll / rows),
            kl: Some(quantized.kl / rows),
            index_loss: None,
            tokens_per_second: None,
            shares,
        }
    }
}

impl ItemLazy for Measured {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<Measured> for Measured {
    fn adapt(&self) -> Measured {
        *self
    }
}

/// The mean of one field over tokens. A perplexity is the exponential of a mean.
#[derive(Clone)]
struct Mean {
    name: MetricName,
    field: fn(&Measured) -> Option<f64>,
    show: fn(f64) -> f64,
    higher_is_better: bool,
    sum: f64,
    rows: usize,
    current: Option<f64>,
}

impl Mean {
    fn new(name: &str, field: fn(&Measured) -> Option<f64>) -> Self {
        Self {
            name: Arc::new(name.into()),
            field,
            show: |x| x,
            higher_is_better: false,
            sum: 0.0,
            rows: 0,
            current: None,
        }
    }

    fn running(&self) -> Option<f64> {
        (self.rows > 0).then(|| (self.show)(self.sum / self.rows as f64))
    }
}

impl Metric for Mean {
    type Input = Measured;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: None, higher_is_better: self.higher_is_better }.into()
    }

    fn update(
        &mut self,
        item: &Measured,
        _: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        self.current = (self.field)(item);
        if let Some(value) = self.current {
            self.sum += value * item.rows as f64;
            self.rows += item.rows;
        }
        Ok(match (self.current.map(self.show), self.running()) {
            (Some(current), Some(running)) => SerializedEntry::new(
                format!("epoch {running:.4} - batch {current:.4}"),
                NumericEntry::Aggregated { aggregated_value: current, count: item.rows }
                    .serialize(),
            ),
            _ => SerializedEntry::not_available(None),
        })
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(match self.running() {
            Some(value) => SerializedEntry::new(
                format!("epoch {value:.4}"),
                NumericEntry::Final(value).serialize(),
            ),
            None => SerializedEntry::not_available(None),
        })
    }

    fn clear(&mut self) {
        (self.sum, self.rows, self.current) = (0.0, 0, None);
    }
}

impl Numeric for Mean {
    fn value(&self) -> Option<NumericEntry> {
        self.current.map(|value| NumericEntry::Value((self.show)(value)))
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.running().map(NumericEntry::Value)
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Value(self.running().unwrap_or(f64::NAN))
    }
}

pub(crate) fn register<M>(training: SupervisedTraining<M>) -> SupervisedTraining<M>
where
    M: LearnerModel,
    <M as burn_train::TrainStep>::Output: Adaptor<Measured>,
    <M as burn_train::InferenceStep>::Output: Adaptor<Measured>,
{
    let perplexity = |name, field| Mean { show: f64::exp, ..Mean::new(name, field) };
    let rate = Mean {
        higher_is_better: true,
        ..Mean::new("Tokens per second", |item| item.tokens_per_second)
    };
    training
        .metric_train_numeric(Mean::new("Loss", |item| item.loss))
        .metric_train_numeric(perplexity("Perplexity", |item| item.nll))
        .metric_train_numeric(Mean::new("KL", |item| item.kl))
        .metric_train_numeric(Mean::new("Index loss", |item| item.index_loss))
        .metric_train_numeric(rate)
        .metric_valid_numeric(Mean::new("Loss", |item| item.loss))
        .metric_valid_numeric(perplexity("Perplexity", |item| item.nll))
        .metric_valid_numeric(perplexity("Perplexity, float cache", |item| item.nll_float))
        .metric_valid_numeric(Mean::new("KL", |item| item.kl))
        .metric_valid_numeric(Mean::new("Clipped elements", |item| {
            item.shares.map(|shares| shares.clipped)
        }))
        .metric_valid_numeric(Mean::new("Constant groups", |item| {
            item.shares.map(|shares| shares.constant)
        }))
}
