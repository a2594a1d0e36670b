//! What a run measured, one line of JSON per event, appended as it happens.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use kv_models::save::staged;
use serde::{Deserialize, Serialize};

use super::WorldConfig;
use crate::{Error, History, Result, Tell, history::read_lines};

/// An optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldStep {
    /// Optimizer steps made before it.
    pub step: u64,
    /// The mean square over all latents of what is wrong: of a frame with noise, the prediction's difference from
    /// `noise - picture`; of one that the model [finishes](crate::WorldConfig::two_step), the difference of what it becomes
    /// from its picture.
    pub loss: f64,
    /// Its time.
    pub seconds: f64,
}

/// Frames that the model played on by itself, against the true ones: means in decibels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldValid {
    /// Optimizer steps made before it.
    pub step: u64,
    /// PSNR of what the model shows.
    pub psnr: f64,
    /// PSNR of the last frame it was shown, over and over.
    pub psnr_of_last: f64,
    /// PSNR of what the codec restores of the true frames.
    pub psnr_of_codec: f64,
}

/// One line.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Train(WorldStep),
    Valid(WorldValid),
}

/// Everything a run measured, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorldHistory {
    /// Steps.
    pub train: Vec<WorldStep>,
    /// Validations.
    pub valid: Vec<WorldValid>,
}

impl WorldHistory {
    /// Reads what a run in `folder` measured. A last line cut short by a kill is dropped.
    ///
    /// # Errors
    /// A file that cannot be read, or a line before the last that is not one of ours.
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
pub(super) struct Log {
    path: PathBuf,
    file: File,
    tell: Option<Tell>,
    tell_every: usize,
    steps: usize,
    validated: Vec<u64>,
    /// Of the steps since the last that was told.
    losses: Vec<f64>,
}

impl Log {
    /// A new history in `folder`, or, to resume after so many steps, the part of the old one up to there.
    pub(super) fn new(
        folder: &Path,
        done: Option<usize>,
        config: &WorldConfig,
        tell: Option<Tell>,
        tell_every: usize,
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
        if let Some(tell) = &tell {
            let run = match done {
                Some(done) => format!("going on after step {done} of {steps}"),
                None => format!("{steps} steps"),
            };
            let second = match two_step {
                0 => "none with two steps a frame".to_string(),
                // As steps are counted where they are told: from 1.
                n => format!("from step {} on with two steps a frame", steps - n + 1),
            };
            tell(&format!("{run}, {second}"));
        }
        Ok(Self {
            path,
            file,
            tell,
            tell_every: tell_every.max(1),
            steps,
            validated,
            losses: vec![],
        })
    }

    pub(super) fn has_validation(&self, step: usize) -> bool {
        self.validated.contains(&(step as u64))
    }

    pub(super) fn step(&mut self, record: WorldStep) -> Result<()> {
        self.losses.push(record.loss);
        let made = record.step as usize + 1;
        if let Some(tell) = &self.tell
            && made.is_multiple_of(self.tell_every)
        {
            let loss = self.losses.iter().sum::<f64>() / self.losses.len() as f64;
            let (steps, seconds) = (self.steps, record.seconds);
            tell(&format!("step {made:>5}/{steps}  loss {loss:.4}  {seconds:.2} s a step"));
            self.losses.clear();
        }
        self.write(&Line::Train(record))
    }

    pub(super) fn valid(&mut self, record: WorldValid) -> Result<()> {
        if let Some(tell) = &self.tell {
            let WorldValid { step, psnr, psnr_of_last, psnr_of_codec } = record;
            tell(&format!(
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

/// Numbers and names always are JSON.
fn json(line: &Line) -> String {
    serde_json::to_string(line).unwrap_or_default()
}
