//! Checkpoints that are either whole or recognized as damaged.
//!
//! A checkpoint is three files, written beside and renamed when complete, each with a note of its
//! length and checksum, which comes last. The one before is kept until the next is whole, and the
//! best validated one for good.

use std::{
    fs::{self, File},
    io::{self, Read},
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

/// What a checkpoint consists of.
pub(crate) const PARTS: [&str; 3] = ["model", "optimizer", "schedule"];

/// The checkpoints of a run's folder, named by the optimizer steps made before them.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// Length and checksum of a file, written after it.
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
    /// Those of the run in `run`.
    pub fn of(run: &Path) -> Self {
        Self { folder: run.join("checkpoints") }
    }

    /// The run's folder.
    pub(crate) fn run(&self) -> &Path {
        self.folder.parent().unwrap_or(&self.folder)
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn file(&self, part: &str, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step}.{part}.bpk"))
    }

    fn seal(&self, part: &str, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step}.{part}.json"))
    }

    /// Steps after which something was saved, ascending.
    ///
    /// # Errors
    /// A folder that is there and cannot be read.
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

    /// Whether everything after `step` was written to its end.
    pub fn is_complete(&self, step: usize) -> bool {
        PARTS.iter().all(|part| self.seal(part, step).is_file())
    }

    /// The last that was written to its end.
    ///
    /// # Errors
    /// Those of [`steps`](Self::steps).
    pub fn last_complete(&self) -> Result<Option<usize>> {
        Ok(self.steps()?.into_iter().rev().find(|&step| self.is_complete(step)))
    }

    /// Checks that the checkpoint after `step` is what was written.
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
                return Err(damaged("is damaged: its checksum is not what was written".into()));
            }
        }
        Ok(())
    }

    /// The step to resume after: `wanted`, or that of the last checkpoint written to its end; `None`
    /// where there is none.
    ///
    /// # Errors
    /// A step without a checkpoint; then the message lists those there are. A damaged checkpoint;
    /// then it names the last that is whole.
    pub fn resume(&self, wanted: Option<usize>) -> Result<Option<usize>> {
        let Some(step) = wanted.map_or_else(|| self.last_complete(), |step| Ok(Some(step)))? else {
            return Ok(None);
        };
        let steps = self.steps()?;
        if !steps.contains(&step) {
            let why = match &steps[..] {
                [] => format!("holds no checkpoint of step {step}, nor of any other"),
                [one] => format!("holds no checkpoint of step {step}, but that of step {one}"),
                [rest @ .., last] => {
                    let rest: Vec<String> = rest.iter().map(usize::to_string).collect();
                    let rest = rest.join(", ");
                    format!(
                        "holds no checkpoint of step {step}, but those of steps {rest} and {last}"
                    )
                }
            };
            return Err(Error::Damaged { path: self.folder.clone(), why });
        }
        self.check(step).map(|()| Some(step)).map_err(|error| match error {
            Error::Damaged { path, why } => {
                let whole = steps.iter().rev().find(|&&other| self.check(other).is_ok());
                let hint = match whole {
                    Some(whole) => format!(
                        "; the checkpoint of step {whole} is whole: resume with --from-step {whole}"
                    ),
                    None => "; no other checkpoint is whole".into(),
                };
                Error::Damaged { path, why: why + &hint }
            }
            other => other,
        })
    }

    /// Deletes what was saved after later steps than `step`, or all: the run makes them again.
    pub(crate) fn delete_after(&self, step: Option<usize>) -> Result<()> {
        self.keep(|later| Some(later) <= step)
    }

    /// Reads one part of the checkpoint after `step`.
    pub(crate) fn restore<R: Checkpoint>(&self, part: &str, step: usize) -> Result<R> {
        let path = self.file(part, step);
        R::load(path.clone()).map_err(|error| Error::Damaged { path, why: error.to_string() })
    }

    /// Writes a whole checkpoint.
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
            .map_err(|why| Error::Stopped(format!("{why}; the checkpoint before it is untouched")))
    }

    /// Deletes what was saved after other steps than those to keep.
    pub(crate) fn keep(&self, keeps: impl Fn(usize) -> bool) -> Result<()> {
        for step in self.steps()?.into_iter().filter(|&step| !keeps(step)) {
            self.delete(step)?;
        }
        Ok(())
    }

    /// Deletes what was saved after a step, its seals first.
    fn delete(&self, step: usize) -> Result<()> {
        for path in PARTS.iter().flat_map(|part| [self.seal(part, step), self.file(part, step)]) {
            remove(&path).map_err(Error::io(&path))?;
        }
        Ok(())
    }

    /// What saves one part.
    pub(crate) fn part(&self, part: &'static str) -> Part {
        Part { checkpoints: self.clone(), part }
    }
}

/// Saves after every validation, and keeps the checkpoint before that one and the best validated.
pub(crate) struct Keep {
    pub(crate) checkpoints: Checkpoints,
    pub(crate) task: Arc<Task>,
}

impl CheckpointingStrategy for Keep {
    fn checkpointing(&mut self, step: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        // The best before this one: until this one is whole, it may be the best there is.
        let objective = self.task.config.objective;
        let value = |record: &&ValidRecord| objective.value(record.nll, record.kl);
        let best = {
            let recorder = self.task.lock();
            let earlier =
                recorder.validations().valid.iter().filter(|record| record.step < step as u64);
            earlier.min_by(|a, b| value(a).total_cmp(&value(b))).map(|record| record.step)
        };
        // What cannot be listed is not deleted.
        let steps = self.checkpoints.steps().unwrap_or_default();
        let complete = |other: &usize| *other < step && self.checkpoints.is_complete(*other);
        let before = steps.iter().copied().filter(complete).max().unwrap_or(0);
        let old = steps.iter().filter(|&&other| other < before && Some(other as u64) != best);
        // First the deletions, which wait for nothing; then the checkpoint, in the background.
        old.map(|&other| CheckpointingAction::Delete(other))
            .chain([CheckpointingAction::Save])
            .collect()
    }
}

/// One part of all checkpoints.
pub(crate) struct Part {
    checkpoints: Checkpoints,
    part: &'static str,
}

impl Part {
    /// A file is complete before it gets its name, and named before it is sealed.
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
        // An older seal is not of this file.
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
        self.write(step, record).map_err(|why| {
            CheckpointerError::Unknown(format!("{why}; the checkpoint before it is untouched"))
        })
    }

    fn restore(&self, step: usize) -> core::result::Result<R, CheckpointerError> {
        R::load(self.checkpoints.file(self.part, step))
    }

    /// Deletes an old checkpoint, but never the last that is whole.
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
