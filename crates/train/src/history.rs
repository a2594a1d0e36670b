//! The history of a run: its losses, one line of JSON per event, appended as it happens.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
};

use burn_train::Interrupter;
use kv_models::save::staged;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Error, Objective, Result, loss::Sums};

/// One training batch. Losses are means over its tokens, in nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Sequences trained on before it.
    pub position: u64,
    /// Optimizer steps made before it.
    pub step: u64,
    /// Value of the objective.
    pub loss: f64,
    /// Negative log-likelihood.
    pub nll: f64,
    /// Divergence from the teacher, if there is one.
    pub kl: Option<f64>,
    /// Divergence of the attention to entries from the indexers, summed over layers, if the model
    /// has indexers that are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index_loss: Option<f64>,
    /// Tokens per second of forward and backward pass.
    pub tokens_per_second: f64,
}

/// A validation. Losses are means over tokens, in nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidRecord {
    /// Optimizer steps made before it.
    pub step: u64,
    /// Negative log-likelihood with the cache that is trained for.
    pub nll: f64,
    /// Negative log-likelihood with a float cache.
    pub nll_float: f64,
    /// Divergence from the teacher, or without a teacher from the same model with a float cache;
    /// with the cache that is trained for.
    pub kl: f64,
    /// Divergence with a float cache, from the same reference.
    pub kl_float: f64,
    /// Shares of clipped elements and constant groups.
    pub shares: Option<GroupShares>,
}

/// Shares of clipped elements and constant groups in the quantizer, over all layers of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupShares {
    /// Elements outside the range of the codes, because scale and minimum are rounded to f16.
    pub clipped: f64,
    /// Groups whose scale is 0.
    pub constant: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Train(StepRecord),
    Valid(ValidRecord),
}

/// Reads the lines of a history. A last line cut short by a kill is dropped.
///
/// # Errors
/// A file that cannot be read, or a line before the last that cannot be parsed.
pub(crate) fn read_lines<L: DeserializeOwned>(path: &Path) -> Result<Vec<L>> {
    let file = File::open(path).map_err(Error::io(path))?;
    let lines = BufReader::new(file).lines().collect::<std::io::Result<Vec<_>>>();
    let lines = lines.map_err(Error::io(path))?;
    let mut read = Vec::with_capacity(lines.len());
    for (number, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(line) => read.push(line),
            Err(_) if number + 1 == lines.len() => {}
            Err(error) => {
                let why = format!("line {}: {error}", number + 1);
                return Err(Error::Damaged { path: path.into(), why });
            }
        }
    }
    Ok(read)
}

/// All records of a run, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Batches.
    pub train: Vec<StepRecord>,
    /// Validations.
    pub valid: Vec<ValidRecord>,
}

impl History {
    /// The path of the history in a run's folder.
    pub fn path(folder: &Path) -> PathBuf {
        folder.join("history.jsonl")
    }

    /// Reads the history of the run in `folder`. A last line cut short by a kill is dropped.
    ///
    /// # Errors
    /// A file that cannot be read, or a line before the last that cannot be parsed.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut history = Self::default();
        for line in read_lines(&Self::path(folder))? {
            match line {
                Line::Train(record) => history.train.push(record),
                Line::Valid(record) => history.valid.push(record),
            }
        }
        Ok(history)
    }

    /// The validation after `step` optimizer steps.
    pub fn validation(&self, step: usize) -> Option<&ValidRecord> {
        self.valid.iter().find(|record| record.step == step as u64)
    }

    /// The validation with the lowest `objective`, the first of several.
    pub fn best(&self, objective: Objective) -> Option<&ValidRecord> {
        let value = |record: &&ValidRecord| objective.value(record.nll, record.kl);
        self.valid.iter().min_by(|a, b| value(a).total_cmp(&value(b)))
    }

    /// Number of validations since the best.
    pub(crate) fn since_best(&self, objective: Objective) -> usize {
        let best = self.best(objective).map_or(0, |best| best.step);
        self.valid.iter().filter(|record| record.step > best).count()
    }

    /// Drops all records after optimizer step `step`.
    fn truncate(&mut self, step: u64) {
        self.train.retain(|record| record.step < step);
        self.valid.retain(|record| record.step <= step);
    }

    fn lines(&self) -> Vec<Line> {
        let train = self.train.iter().map(|&record| (record.step, 1, Line::Train(record)));
        let valid = self.valid.iter().map(|&record| (record.step, 0, Line::Valid(record)));
        let mut lines: Vec<_> = train.chain(valid).collect();
        lines.sort_by_key(|&(step, kind, _)| (step, kind));
        lines.into_iter().map(|(.., line)| line).collect()
    }
}

/// A function that shows one line of progress.
pub type LogLine = Box<dyn Fn(&str) + Send>;

/// Writes the history of a run, and stops the run at the first failure.
#[derive(Default)]
pub(crate) struct Recorder {
    path: PathBuf,
    /// `None` writes no file.
    file: Option<File>,
    log: Option<(LogLine, u64)>,
    interrupter: Option<Interrupter>,
    failure: Option<Error>,
    steps: u64,
    made: u64,
    /// Only the validations.
    history: History,
    valid_batches: usize,
    pending: PendingValidation,
}

/// The sums of a validation in progress.
#[derive(Default)]
struct PendingValidation {
    batches: usize,
    quantized: Sums,
    float: Sums,
    shares: Option<GroupShares>,
}

impl core::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Recorder").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Starts a new history in `folder`, or keeps the part of the old one up to `resumed` optimizer
    /// steps.
    pub(crate) fn new(
        folder: &Path,
        resumed: Option<u64>,
        steps: u64,
        valid_batches: usize,
        log: Option<(LogLine, u64)>,
    ) -> Result<Self> {
        let path = History::path(folder);
        let trained = resumed.unwrap_or(0);
        let mut history = match resumed {
            None => History::default(),
            Some(_) => History::read(folder)?,
        };
        history.truncate(trained);
        let mut lines = Vec::new();
        for line in history.lines() {
            serde_json::to_writer(&mut lines, &line)
                .map_err(|error| Error::io(&path)(error.into()))?;
            lines.push(b'\n');
        }
        staged::write(&path, &lines).map_err(Error::io(&path))?;
        let file = OpenOptions::new().append(true).open(&path).map_err(Error::io(&path))?;
        Ok(Self {
            path,
            file: Some(file),
            log,
            interrupter: None,
            failure: None,
            steps,
            made: trained,
            history: History { train: Vec::new(), valid: history.valid },
            valid_batches,
            pending: PendingValidation::default(),
        })
    }

    pub(crate) fn stop_by(&mut self, interrupter: Interrupter) {
        self.interrupter = Some(interrupter);
    }

    /// Remembers the first reason and asks the run to stop.
    pub(crate) fn fail(&mut self, why: &str) {
        self.fail_by(Error::Stopped(why.to_string()));
    }

    /// Remembers the first error and asks the run to stop.
    pub(crate) fn fail_by(&mut self, error: Error) {
        if let Some(interrupter) = &self.interrupter {
            let why = match &error {
                Error::Stopped(why) => why.clone(),
                error => error.to_string(),
            };
            interrupter.stop(Some(&why));
        }
        self.failure.get_or_insert(error);
    }

    /// Returns whether the run failed.
    pub(crate) fn failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Returns the first error, once.
    pub(crate) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// Returns whether the next validation batch is the first of its validation.
    pub(crate) fn validation_starts(&self) -> bool {
        self.pending.batches == 0
    }

    pub(crate) fn set_steps_made(&mut self, steps: usize) {
        self.made = steps as u64;
    }

    pub(crate) fn steps_made(&self) -> usize {
        self.made as usize
    }

    pub(crate) fn validations(&self) -> &History {
        &self.history
    }

    /// Discards the sums of a validation that was interrupted.
    pub(crate) fn abandon_validation(&mut self) {
        self.pending = PendingValidation::default();
    }

    pub(crate) fn log_line(&self, line: &str) {
        if let Some((log, _)) = &self.log {
            log(line);
        }
    }

    pub(crate) fn step(&mut self, record: &StepRecord) {
        self.write(&Line::Train(*record));
        if let Some((log, every)) = &self.log
            && (record.step + 1).is_multiple_of(*every)
        {
            let named = |name: &str, value: Option<f64>| {
                value.map_or(String::new(), |value| format!("  {name} {value:.4}"))
            };
            let (kl, index) = (named("kl", record.kl), named("index", record.index_loss));
            log(&format!(
                "step {:>5}/{}  loss {:.4}  perplexity {:.3}{kl}{index}  {:.0} tokens/s",
                record.step + 1,
                self.steps,
                record.loss,
                record.nll.exp(),
                record.tokens_per_second,
            ));
        }
    }

    pub(crate) fn valid(&mut self, quantized: Sums, float: Sums, shares: Option<GroupShares>) {
        let pending = &mut self.pending;
        pending.quantized.add(quantized);
        pending.float.add(float);
        pending.shares = pending.shares.or(shares);
        pending.batches += 1;
        if pending.batches < self.valid_batches {
            return;
        }
        let PendingValidation { quantized, float, shares, .. } = core::mem::take(&mut self.pending);
        let mean = |sum: f64| sum / quantized.rows.max(1) as f64;
        let record = ValidRecord {
            step: self.made,
            nll: mean(quantized.nll),
            nll_float: mean(float.nll),
            kl: mean(quantized.kl),
            kl_float: mean(float.kl),
            shares,
        };
        if ![record.nll, record.nll_float, record.kl, record.kl_float].iter().all(|x| x.is_finite())
        {
            let ValidRecord { step, nll, nll_float, .. } = record;
            return self.fail(&format!(
                "the held-out loss after step {step} is {nll}, with a float cache {nll_float}"
            ));
        }
        self.history.valid.push(record);
        self.write(&Line::Valid(record));
        self.log_line(&format!(
            "valid after {:>5}  perplexity {:.3}  with a float cache {:.3}  kl {:.4}",
            record.step,
            record.nll.exp(),
            record.nll_float.exp(),
            record.kl,
        ));
    }

    fn write(&mut self, line: &Line) {
        let written = serde_json::to_string(line).map_err(std::io::Error::from).and_then(|text| {
            match &mut self.file {
                Some(file) => file.write_all(format!("{text}\n").as_bytes()),
                None => Ok(()),
            }
        });
        if let Err(error) = written {
            let why = format!("{}: {error}", self.path.display());
            self.fail(&why);
        }
    }
}
