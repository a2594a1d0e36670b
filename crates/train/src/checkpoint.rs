//! Checkpoints that are either complete or recognized as damaged.
//!
//! A checkpoint consists of three files. Each is written under a temporary name and renamed when
//! complete; its seal, a file with its length and checksum, is written last. The previous
//! checkpoint is kept until the next one is complete, and the one with the best validation is never
//! deleted.

use std::{
    fs::{self, File},
    io::{self, Read},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::store::ModuleRecord;
use burn_optim::{OptimizerRecord, lr_scheduler::LrSchedulerRecord};
use burn_train::{
    checkpoint::{
        Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
    },
    metric::store::EventStoreClient,
};
use kv_models::save::staged;
use serde::{Deserialize, Serialize};

use crate::{Error, Result, ValidRecord, step::Task};

pub(crate) const PARTS: [&str; 3] = ["model", "optimizer", "schedule"];

/// The checkpoints of a run's folder, named by the optimizer steps made before them.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// The length and checksum of a file, written after the file itself.
#[derive(Serialize, Deserialize)]
struct Seal {
    bytes: u64,
    crc32: u32,
}

impl Seal {
    fn of(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let (mut hasher, mut bytes) = (crc32fast::Hasher::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(Self { bytes, crc32: hasher.finalize() }),
                n => {
                    hasher.update(&buffer[..n]);
                    bytes += n as u64;
                }
            }
        }
    }
}

impl Checkpoints {
    /// The checkpoints of the run in folder `run`.
    pub fn of(run: &Path) -> Self {
        Self { folder: run.join("checkpoints") }
    }

    pub(crate) fn run(&self) -> &Path {
        self.folder.parent().unwrap_or(&self.folder)
    }

    /// The folder that holds them.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn file(&self, part: &str, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step}.{part}.bpk"))
    }

    fn seal(&self, part: &str, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step}.{part}.json"))
    }

    /// The optimizer steps after which any part was saved, in ascending order.
    ///
    /// # Errors
    /// A folder that exists but cannot be read.
    pub fn steps(&self) -> Result<Vec<usize>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(&self.folder)(error)),
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::io(&self.folder))?.file_name();
            let step = name.to_str().and_then(|name| {
                let (step, rest) = name.strip_prefix("step-")?.split_once('.')?;
                let (part, _) = rest.split_once('.')?;
                PARTS.contains(&part).then(|| step.parse::<usize>().ok())?
            });
            steps.extend(step);
        }
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// Returns whether all parts after `step` are completely written.
    pub fn is_complete(&self, step: usize) -> bool {
        PARTS.iter().all(|part| self.seal(part, step).is_file())
    }

    /// The last step whose checkpoint is completely written.
    ///
    /// # Errors
    /// As for [`steps`](Self::steps).
    pub fn last_complete(&self) -> Result<Option<usize>> {
        Ok(self.steps()?.into_iter().rev().find(|&step| self.is_complete(step)))
    }

    /// Checks the lengths and checksums of the checkpoint after `step`.
    ///
    /// # Errors
    /// [`Error::Damaged`] naming the file that is missing, shorter or different.
    pub fn check(&self, step: usize) -> Result<()> {
        for part in PARTS {
            let (path, seal) = (self.file(part, step), self.seal(part, step));
            let damaged = |why: String| Error::Damaged { path: path.clone(), why };
            let text = fs::read_to_string(&seal).map_err(|_| {
                damaged(format!("was not completed: {} is missing", seal.display()))
            })?;
            let sealed: Seal = serde_json::from_str(&text)
                .map_err(|error| damaged(format!("{}: {error}", seal.display())))?;
            let found = Seal::of(&path).map_err(|error| damaged(error.to_string()))?;
            if found.bytes != sealed.bytes {
                let (bytes, of) = (found.bytes, sealed.bytes);
                return Err(damaged(format!("is truncated: {bytes} of {of} bytes")));
            }
            if found.crc32 != sealed.crc32 {
                return Err(damaged(
                    "is damaged: its checksum differs from the one written".into(),
                ));
            }
        }
        Ok(())
    }

    /// The step to resume after: `wanted`, or the step of the last complete checkpoint. `None` if
    /// no checkpoint is complete.
    ///
    /// # Errors
    /// A step without a checkpoint: the message lists the steps that have one. A damaged
    /// checkpoint: the message names the last one that is intact.
    pub fn resume(&self, wanted: Option<usize>) -> Result<Option<usize>> {
        let Some(step) = wanted.map_or_else(|| self.last_complete(), |step| Ok(Some(step)))? else {
            return Ok(None);
        };
        let steps = self.steps()?;
        if !steps.contains(&step) {
            let why = match &steps[..] {
                [] => format!("holds no checkpoint of step {step} or any other step"),
                [one] => format!("holds no checkpoint of step {step}, only of step {one}"),
                [rest @ .., last] => {
                    let rest: Vec<String> = rest.iter().map(usize::to_string).collect();
                    let rest = rest.join(", ");
                    format!("holds no checkpoint of step {step}, only of steps {rest} and {last}")
                }
            };
            return Err(Error::Damaged { path: self.folder.clone(), why });
        }
        self.check(step).map(|()| Some(step)).map_err(|error| match error {
            Error::Damaged { path, why } => {
                let whole = steps.iter().rev().find(|&&other| self.check(other).is_ok());
                let hint = match whole {
                    Some(whole) => format!(
                        "; the checkpoint of step {whole} is intact: resume with --from-step \
                         {whole}"
                    ),
                    None => "; no other checkpoint is intact".into(),
                };
                Error::Damaged { path, why: why + &hint }
            }
            other => other,
        })
    }

    /// Deletes the checkpoints of steps after `step`, or all: the run computes them again.
    pub(crate) fn delete_after(&self, step: Option<usize>) -> Result<()> {
        self.keep(|later| Some(later) <= step)
    }

    /// Reads one part of the checkpoint after `step`.
    pub(crate) fn restore<R: Checkpoint>(&self, part: &str, step: usize) -> Result<R> {
        let path = self.file(part, step);
        R::load(path.clone()).map_err(|error| Error::Damaged { path, why: error.to_string() })
    }

    pub(crate) fn save(
        &self,
        step: usize,
        model: ModuleRecord,
        optimizer: OptimizerRecord,
        schedule: LrSchedulerRecord,
    ) -> Result<()> {
        let [model_part, optimizer_part, schedule_part] = PARTS.map(|part| self.part(part));
        let saved = model_part.write(step, model);
        let saved = saved.and_then(|()| optimizer_part.write(step, optimizer));
        saved
            .and_then(|()| schedule_part.write(step, schedule))
            .map_err(|why| Error::Stopped(format!("{why}; the previous checkpoint is unchanged")))
    }

    /// Deletes the checkpoints of all steps for which `keeps` returns false.
    pub(crate) fn keep(&self, keeps: impl Fn(usize) -> bool) -> Result<()> {
        for step in self.steps()?.into_iter().filter(|&step| !keeps(step)) {
            self.delete(step)?;
        }
        Ok(())
    }

    fn delete(&self, step: usize) -> Result<()> {
        for path in PARTS.iter().flat_map(|part| [self.seal(part, step), self.file(part, step)]) {
            remove(&path).map_err(Error::io(&path))?;
        }
        Ok(())
    }

    /// The writer of one part, for burn-train.
    pub(crate) fn part(&self, part: &'static str) -> Part {
        Part { checkpoints: self.clone(), part }
    }
}

/// Saves after every validation, and keeps the previous checkpoint and the best validated one.
pub(crate) struct KeepLastAndBest {
    pub(crate) checkpoints: Checkpoints,
    pub(crate) task: Arc<Task>,
}

impl CheckpointingStrategy for KeepLastAndBest {
    fn checkpointing(&mut self, step: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        // The best earlier one, because the new one is not complete yet.
        let objective = self.task.config.objective;
        let value = |record: &&ValidRecord| objective.value(record.nll, record.kl);
        let best = {
            let recorder = self.task.lock();
            let earlier =
                recorder.validations().valid.iter().filter(|record| record.step < step as u64);
            earlier.min_by(|a, b| value(a).total_cmp(&value(b))).map(|record| record.step)
        };
        // If the folder cannot be listed, nothing is deleted.
        let steps = self.checkpoints.steps().unwrap_or_default();
        let complete = |other: &usize| *other < step && self.checkpoints.is_complete(*other);
        let before = steps.iter().copied().filter(complete).max().unwrap_or(0);
        let old = steps.iter().filter(|&&other| other < before && Some(other as u64) != best);
        // Deletions come first: they are immediate, the checkpoint is written in the background.
        old.map(|&other| CheckpointingAction::Delete(other))
            .chain([CheckpointingAction::Save])
            .collect()
    }
}

pub(crate) struct Part {
    checkpoints: Checkpoints,
    part: &'static str,
}

impl Part {
    /// Writes a file under a temporary name, renames it when complete, then writes its seal.
    fn write<R: Checkpoint>(&self, step: usize, record: R) -> core::result::Result<(), String> {
        let Self { checkpoints, part } = self;
        let (path, seal) = (checkpoints.file(part, step), checkpoints.seal(part, step));
        let io = |path: &Path| {
            let path = path.display().to_string();
            move |error: io::Error| format!("{path}: {error}")
        };
        fs::create_dir_all(&checkpoints.folder).map_err(io(&checkpoints.folder))?;
        let file = staged::stage(&path).map_err(io(&path))?.into_temp_path();
        record.save(file.to_path_buf()).map_err(|error| format!("{}: {error}", path.display()))?;
        File::open(&file).and_then(|file| file.sync_all()).map_err(io(&path))?;
        let sealed = Seal::of(&file).map_err(io(&path))?;
        let text = serde_json::to_string(&sealed).map_err(|error| error.to_string())?;
        // A seal left by an earlier checkpoint does not match this file.
        remove(&seal).map_err(io(&seal))?;
        file.persist(&path).map_err(|error| io(&path)(error.error))?;
        staged::write(&seal, text.as_bytes()).map_err(io(&seal))
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl<R: Checkpoint> Checkpointer<R> for Part {
    fn save(&self, step: usize, record: R) -> core::result::Result<(), CheckpointerError> {
        // A read from a lost device panics. Burn's thread for checkpoints must not end by that,
        // because dropping its handle would then panic as well.
        let written = catch_unwind(AssertUnwindSafe(|| self.write(step, record)));
        let written = written.unwrap_or_else(|_| Err("the device failed".to_string()));
        written.map_err(|why| {
            CheckpointerError::Unknown(format!("{why}; the previous checkpoint is unchanged"))
        })
    }

    fn restore(&self, step: usize) -> core::result::Result<R, CheckpointerError> {
        R::load(self.checkpoints.file(self.part, step))
    }

    /// Deletes an old checkpoint, but never the last complete one.
    fn delete(&self, step: usize) -> core::result::Result<(), CheckpointerError> {
        let Self { checkpoints, part } = self;
        let last = checkpoints
            .last_complete()
            .map_err(|error| CheckpointerError::Unknown(error.to_string()))?;
        if last.is_none_or(|last| last <= step) {
            return Ok(());
        }
        [checkpoints.seal(part, step), checkpoints.file(part, step)]
            .iter()
            .try_for_each(|path| remove(path))
            .map_err(CheckpointerError::IOError)
    }
}
