//! The history of a run: its losses and PSNRs, one line of JSON per event, appended as it happens.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use kv_models::save::staged;
use serde::{Deserialize, Serialize};

use super::WorldConfig;
use crate::{Error, History, LogLine, Result, history::read_lines};

/// An optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldStep {
    /// Optimizer steps made before it.
    pub step: u64,
    /// Mean squared error over all latents. For a noisy frame, the error is the difference of the
    /// prediction from `noise - picture`. For a frame that the model
    /// [finishes](crate::WorldConfig::two_step), it is the difference of the result from the
    /// picture.
    pub loss: f64,
    /// Time of the step in seconds.
    pub seconds: f64,
}

/// Mean PSNRs, in decibels, of frames that the model generated against the true ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldValid {
    /// Optimizer steps made before it.
    pub step: u64,
    /// PSNR of the generated frames.
    pub psnr: f64,
    /// PSNR of the last given frame, repeated.
    pub psnr_of_last: f64,
    /// PSNR of the true frames after encoding and decoding.
    pub psnr_of_codec: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Train(WorldStep),
    Valid(WorldValid),
}

/// All records of a run, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorldHistory {
    /// Steps.
    pub train: Vec<WorldStep>,
    /// Validations.
    pub valid: Vec<WorldValid>,
}

impl WorldHistory {
    /// Reads the history of the run in `folder`. A last line cut short by a kill is dropped.
    ///
    /// # Errors
    /// A file that cannot be read, or a line before the last that cannot be parsed.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut history = Self::default();
        for line in read_lines(&History::path(folder))? {
            match line {
                Line::Train(record) => history.train.push(record),
                Line::Valid(record) => history.valid.push(record),
            }
        }
        Ok(history)
    }
}

/// Writes the history of a run.
pub(super) struct WorldRecorder {
    path: PathBuf,
    file: File,
    log: Option<LogLine>,
    log_every: usize,
    steps: usize,
    validated: Vec<u64>,
    /// Losses of the steps since the last line of progress.
    losses: Vec<f64>,
}

impl WorldRecorder {
    /// Starts a new history in `folder`, or keeps the part of the old one up to `done` steps.
    pub(super) fn new(
        folder: &Path,
        done: Option<usize>,
        config: &WorldConfig,
        log: Option<LogLine>,
        log_every: usize,
    ) -> Result<Self> {
        let WorldConfig { steps, two_step, .. } = *config;
        let path = History::path(folder);
        let mut lines = Vec::new();
        if let Some(done) = done {
            let WorldHistory { train, valid } = WorldHistory::read(folder)?;
            let train = train.into_iter().filter(|record| record.step < done as u64);
            let valid = valid.into_iter().filter(|record| record.step <= done as u64);
            let train = train.map(|record| (record.step, 1, Line::Train(record)));
            lines.extend(train.chain(valid.map(|record| (record.step, 0, Line::Valid(record)))));
            lines.sort_by_key(|&(step, kind, _)| (step, kind));
        }
        let text: String = lines.iter().map(|(.., line)| json(line) + "\n").collect();
        staged::write(&path, text.as_bytes()).map_err(Error::io(&path))?;
        let file = OpenOptions::new().append(true).open(&path).map_err(Error::io(&path))?;
        let validations = lines.iter().filter(|(_, kind, _)| *kind == 0);
        let validated = validations.map(|&(step, ..)| step).collect();
        if let Some(log) = &log {
            let run = match done {
                Some(done) => format!("resuming after step {done} of {steps}"),
                None => format!("{steps} steps"),
            };
            let second = match two_step {
                0 => "none with two denoising steps per frame".to_string(),
                // Lines of progress count steps from 1.
                n => format!("two denoising steps per frame from step {}", steps - n + 1),
            };
            log(&format!("{run}, {second}"));
        }
        Ok(Self { path, file, log, log_every: log_every.max(1), steps, validated, losses: vec![] })
    }

    pub(super) fn has_validation(&self, step: usize) -> bool {
        self.validated.contains(&(step as u64))
    }

    pub(super) fn step(&mut self, record: WorldStep) -> Result<()> {
        self.losses.push(record.loss);
        let made = record.step as usize + 1;
        if let Some(log) = &self.log
            && made.is_multiple_of(self.log_every)
        {
            let loss = self.losses.iter().sum::<f64>() / self.losses.len() as f64;
            let (steps, seconds) = (self.steps, record.seconds);
            log(&format!("step {made:>5}/{steps}  loss {loss:.4}  {seconds:.2} s per step"));
            self.losses.clear();
        }
        self.write(&Line::Train(record))
    }

    pub(super) fn valid(&mut self, record: WorldValid) -> Result<()> {
        if let Some(log) = &self.log {
            let WorldValid { step, psnr, psnr_of_last, psnr_of_codec } = record;
            log(&format!(
                "valid after {step:>5}  PSNR {psnr:.2} dB  of the last frame {psnr_of_last:.2}  \
                 of the codec {psnr_of_codec:.2}"
            ));
        }
        self.validated.push(record.step);
        self.write(&Line::Valid(record))
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        let line = json(line) + "\n";
        self.file.write_all(line.as_bytes()).map_err(Error::io(&self.path))
    }
}

/// Returns a line as JSON. Numbers and names cannot fail to serialize.
fn json(line: &Line) -> String {
    serde_json::to_string(line).unwrap_or_default()
}
