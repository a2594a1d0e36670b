//! Checkpoints that are either whole or recognized as damaged.
//!
//! A checkpoint is three files, written beside and renamed when complete, each with a note of its
//! length and checksum. The one before is kept until the next is whole.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use burn_train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What a checkpoint consists of.
pub(crate) const PARTS: [&str; 3] = ["model", "optimizer", "schedule"];

/// The checkpoints of a run's folder.
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
    fn of(path: &Path) -> std::io::Result<Self> {
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

    fn file(&self, part: &str, epoch: usize) -> PathBuf {
        self.folder.join(format!("{part}-{epoch}.bpk"))
    }

    fn seal(&self, part: &str, epoch: usize) -> PathBuf {
        self.folder.join(format!("{part}-{epoch}.json"))
    }

    /// Epochs after which something was saved, ascending.
    ///
    /// # Errors
    /// A folder that is there and cannot be read.
    pub fn epochs(&self) -> Result<Vec<usize>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(&self.folder)(error)),
        };
        let mut epochs = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::io(&self.folder))?.file_name();
            let epoch = name.to_str().and_then(|name| {
                let (part, rest) = name.split_once('-')?;
                let (epoch, _) = rest.split_once('.')?;
                PARTS.contains(&part).then(|| epoch.parse::<usize>().ok())?
            });
            epochs.extend(epoch);
        }
        epochs.sort_unstable();
        epochs.dedup();
        Ok(epochs)
    }

    /// Checks that the checkpoint after `epoch` is what was written.
    ///
    /// # Errors
    /// [`Error::Damaged`] naming the file that is missing, shorter or different.
    pub fn check(&self, epoch: usize) -> Result<()> {
        for part in PARTS {
            let (path, seal) = (self.file(part, epoch), self.seal(part, epoch));
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

    /// The epoch to resume after: the last, or `wanted`.
    ///
    /// # Errors
    /// No checkpoint, or a damaged one; then the message names the last that is whole.
    pub fn resume(&self, wanted: Option<usize>) -> Result<usize> {
        let epochs = self.epochs()?;
        let Some(epoch) = wanted.or(epochs.last().copied()) else {
            let why = "holds no checkpoint to resume from".into();
            return Err(Error::Damaged { path: self.folder.clone(), why });
        };
        self.check(epoch).map(|()| epoch).map_err(|error| match error {
            Error::Damaged { path, why } => {
                let whole = epochs.iter().rev().find(|&&other| self.check(other).is_ok());
                let hint = match whole {
                    Some(whole) => format!(
                        "; the checkpoint of epoch {whole} is whole: resume \
                                            with --from-epoch {whole}"
                    ),
                    None => "; no other checkpoint is whole".into(),
                };
                Error::Damaged { path, why: why + &hint }
            }
            other => other,
        })
    }

    /// What saves and restores one part.
    pub(crate) fn part(&self, part: &'static str) -> Part {
        Part { checkpoints: self.clone(), part }
    }
}

/// One part of all checkpoints.
pub(crate) struct Part {
    checkpoints: Checkpoints,
    part: &'static str,
}

impl Part {
    /// A file is complete before it gets its name, and named before it is sealed.
    fn write<R: Checkpoint>(&self, epoch: usize, record: R) -> core::result::Result<(), String> {
        let Self { checkpoints, part } = self;
        let (path, seal) = (checkpoints.file(part, epoch), checkpoints.seal(part, epoch));
        let partial = checkpoints.folder.join(format!("partial-{part}.bpk"));
        let io = |path: &Path| {
            let path = path.display().to_string();
            move |error: std::io::Error| format!("{path}: {error}")
        };
        fs::create_dir_all(&checkpoints.folder).map_err(io(&checkpoints.folder))?;
        let written = (|| {
            record
                .save(partial.clone())
                .map_err(|error| format!("{}: {error}", partial.display()))?;
            File::open(&partial).and_then(|file| file.sync_all()).map_err(io(&partial))?;
            let sealed = Seal::of(&partial).map_err(io(&partial))?;
            let text = serde_json::to_string(&sealed).map_err(|error| error.to_string())?;
            fs::rename(&partial, &path).map_err(io(&path))?;
            let mut file = File::create(&seal).map_err(io(&seal))?;
            file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(io(&seal))
        })();
        if written.is_err() {
            // Best effort: the space may be what was missing.
            let _ = fs::remove_file(&partial);
        }
        written
    }
}

impl<R: Checkpoint> Checkpointer<R> for Part {
    fn save(&self, epoch: usize, record: R) -> core::result::Result<(), CheckpointerError> {
        self.write(epoch, record).map_err(|why| {
            CheckpointerError::Unknown(format!("{why}; the checkpoint before it is untouched"))
        })
    }

    fn restore(&self, epoch: usize) -> core::result::Result<R, CheckpointerError> {
        R::load(self.checkpoints.file(self.part, epoch))
    }

    /// Deletes an old checkpoint, but never the last that is whole.
    fn delete(&self, epoch: usize) -> core::result::Result<(), CheckpointerError> {
        let unknown = |error: Error| CheckpointerError::Unknown(error.to_string());
        let newer = self.checkpoints.epochs().map_err(unknown)?;
        let sealed =
            |other: usize| PARTS.iter().all(|part| self.checkpoints.seal(part, other).is_file());
        if !newer.iter().any(|&other| other > epoch && sealed(other)) {
            return Ok(());
        }
        for path in
            [self.checkpoints.seal(self.part, epoch), self.checkpoints.file(self.part, epoch)]
        {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(CheckpointerError::IOError(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
