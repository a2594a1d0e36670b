//! What a run measured, one line of JSON per event, appended as it happens.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
};

use burn_train::Interrupter;
use kv_models::save::staged;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Error, Objective, Result, loss::Sums};

/// One batch of training. Losses are means over its tokens, in nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Sequences trained on before it.
    pub position: u64,
    /// Optimizer steps made before it.
    pub step: u64,
    /// The objective.
    pub loss: f64,
    /// Negative log-likelihood.
    pub nll: f64,
    /// Divergence from the teacher, where there is one.
    pub kl: Option<f64>,
    /// Tokens per second, forward and backward.
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
    /// Divergence of the cache that is trained for from the teacher; without a teacher, from the
    /// model's own float cache.
    pub kl: f64,
    /// Divergence of the float cache from the same.
    pub kl_float: f64,
    /// What the quantizer met.
    pub shares: Option<GroupShares>,
}

/// How many of the quantizer's groups and elements are special, over all layers of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupShares {
    /// Elements beyond the codes because scale and minimum are rounded to f16.
    pub clipped: f64,
    /// Groups whose scale is 0.
    pub constant: f64,
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Train(StepRecord),
    Valid(ValidRecord),
}

/// The lines of a history. A last one cut short by a kill is dropped.
///
/// # Errors
/// A file that cannot be read, or a line before the last that is not one of ours.
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

/// Everything a run measured, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Batches.
    pub train: Vec<StepRecord>,
    /// Validations.
    pub valid: Vec<ValidRecord>,
}

impl History {
    /// The file of a run's folder.
    pub fn path(folder: &Path) -> PathBuf {
        folder.join("history.jsonl")
    }

    /// Reads what a run in `folder` measured. A last line cut short by a kill is dropped.
    ///
    /// # Errors
    /// A file that cannot be read, or a line before the last that is not one of ours.
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

    /// The first validation of the lowest `objective`.
    pub fn best(&self, objective: Objective) -> Option<&ValidRecord> {
        let value = |record: &&ValidRecord| objective.value(record.nll, record.kl);
        self.valid.iter().min_by(|a, b| value(a).total_cmp(&value(b)))
    }

    /// Validations since the best.
    pub(crate) fn since_best(&self, objective: Objective) -> usize {
        let best = self.best(objective).map_or(0, |best| best.step);
        self.valid.iter().filter(|record| record.step > best).count()
    }

    /// Drops what came after optimizer step `step`.
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

/// Called with a line of text.
pub type Tell = Box<dyn Fn(&str) + Send>;

/// Writes the history of a run, and stops it at the first failure.
#[derive(Default)]
pub(crate) struct Recorder {
    path: PathBuf,
    /// `None` keeps nothing.
    file: Option<File>,
    tell: Option<(Tell, u64)>,
    interrupter: Option<Interrupter>,
    failure: Option<String>,
    steps: u64,
    made: u64,
    /// The validations.
    history: History,
    valid_batches: usize,
    pending: Pending,
}

/// A validation under way.
#[derive(Default)]
struct Pending {
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
    /// A new history in `folder`, or, to resume after so many optimizer steps, the part of the old
    /// one up to there.
    pub(crate) fn new(
        folder: &Path,
        resumed: Option<u64>,
        steps: u64,
        valid_batches: usize,
        tell: Option<(Tell, u64)>,
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
            tell,
            interrupter: None,
            failure: None,
            steps,
            made: trained,
            history: History { train: Vec::new(), valid: history.valid },
            valid_batches,
            pending: Pending::default(),
        })
    }

    pub(crate) fn stop_by(&mut self, interrupter: Interrupter) {
        self.interrupter = Some(interrupter);
    }

    /// Keeps the first reason and asks the run to stop.
    pub(crate) fn fail(&mut self, why: &str) {
        self.failure.get_or_insert_with(|| why.to_string());
        if let Some(interrupter) = &self.interrupter {
            interrupter.stop(Some(why));
        }
    }

    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Whether the next validation batch is the first of its validation.
    pub(crate) fn validation_starts(&self) -> bool {
        self.pending.batches == 0
    }

    /// Notes that so many optimizer steps are made.
    pub(crate) fn made(&mut self, steps: usize) {
        self.made = steps as u64;
    }

    pub(crate) fn steps_made(&self) -> usize {
        self.made as usize
    }

    /// The validations so far.
    pub(crate) fn validations(&self) -> &History {
        &self.history
    }

    /// Forgets the part of a validation that was interrupted.
    pub(crate) fn abandon_validation(&mut self) {
        self.pending = Pending::default();
    }

    /// Tells `line`.
    pub(crate) fn say(&self, line: &str) {
        if let Some((tell, _)) = &self.tell {
            tell(line);
        }
    }

    pub(crate) fn step(&mut self, record: &StepRecord) {
        self.write(&Line::Train(*record));
        if let Some((tell, every)) = &self.tell
            && (record.step + 1).is_multiple_of(*every)
        {
            let kl = record.kl.map_or(String::new(), |kl| format!("  kl {kl:.4}"));
            tell(&format!(
                "step {:>5}/{}  loss {:.4}  perplexity {:.3}{kl}  {:.0} tokens/s",
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
        let Pending { quantized, float, shares, .. } = core::mem::take(&mut self.pending);
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
        self.say(&format!(
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
