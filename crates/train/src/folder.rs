//! A run's folder: its lock, its configuration and the disk space that it needs.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use kv_models::save::staged;
use serde::{Serialize, de::DeserializeOwned};

use crate::{Checkpoints, Error, History, Result, TrainConfig};

/// The start of a run: new or resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// Starts a new run; a folder that already holds a run is an error.
    #[default]
    No,
    /// Resumes after the last complete checkpoint. A finished run is returned as it ended.
    Last,
    /// Resumes after the checkpoint of an optimizer step; later steps are computed again.
    Step(usize),
}

/// Checks that a new run can start in `folder`, without changing anything.
///
/// # Errors
/// A folder that already holds a run.
pub fn check_new(folder: &Path) -> Result<()> {
    let checkpoints = Checkpoints::of(folder);
    let traces = [settings(folder), History::path(folder), checkpoints.folder().to_path_buf()];
    let Some(trace) = traces.into_iter().find(|path| path.exists()) else { return Ok(()) };
    let made = match checkpoints.last_complete()? {
        Some(step) => format!(", with checkpoints up to step {step}"),
        None => String::new(),
    };
    let name = trace.file_name().unwrap_or_default().to_string_lossy();
    let why = format!("already holds a run ({name}{made}): resume it, or choose another folder");
    Err(Error::Folder { path: folder.into(), why })
}

pub(crate) fn settings(folder: &Path) -> PathBuf {
    folder.join("train.json")
}

/// The number of optimizer steps after which to resume; `None` starts from the beginning.
pub(crate) fn resumed(
    folder: &Path,
    resume: Resume,
    config: &TrainConfig,
) -> Result<Option<usize>> {
    let wanted = match resume {
        Resume::No => return check_new(folder).map(|()| None),
        Resume::Last => None,
        Resume::Step(step) => Some(step),
    };
    let path = settings(folder);
    if TrainConfig::read(&path)? != *config {
        let why = "differs from the configuration to resume with".into();
        return Err(Error::Damaged { path, why });
    }
    let checkpoints = Checkpoints::of(folder);
    let step = checkpoints.resume(wanted)?;
    // A run writes a checkpoint before its first step, unless it is killed before that.
    let begun = || History::read(folder).is_ok_and(|history| !history.train.is_empty());
    if step.is_none() && begun() {
        let why = "holds no checkpoint to resume from".into();
        return Err(Error::Damaged { path: checkpoints.folder().into(), why });
    }
    if let Some(step) = step.filter(|&step| step > config.steps) {
        let rule = format!("the run has {} steps", config.steps);
        return Err(Error::setting("from-step", step, rule));
    }
    Ok(step)
}

/// A lock on a folder, which keeps other processes from training in it until it is dropped.
#[derive(Debug)]
pub(crate) struct FolderLock {
    /// The operating system releases the lock when this is closed.
    _lock: File,
}

impl FolderLock {
    /// Locks the folder of an existing run.
    pub(crate) fn of_run(folder: &Path) -> Result<Self> {
        TrainConfig::read(&settings(folder))?;
        Self::new(folder)
    }

    /// Creates a folder if it is missing, and locks it.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let path = folder.join("lock");
        let lock = File::create(&path).map_err(Error::io(&path))?;
        // A child process shares this process's locks for a moment while it starts.
        for _ in 0..20 {
            match lock.try_lock() {
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(50)),
                // An error means that the file system has no locks.
                Ok(()) | Err(TryLockError::Error(_)) => {
                    // A killed process may have left unfinished files.
                    for part in ["", "checkpoints", "model", "tokens"] {
                        staged::remove_unfinished(&folder.join(part));
                    }
                    return Ok(Self { _lock: lock });
                }
            }
        }
        let why = "another process is training in it".into();
        Err(Error::Folder { path: folder.into(), why })
    }
}

/// Writes files with these names and contents.
pub(crate) fn write_files(folder: &Path, files: &[(&str, Vec<u8>)]) -> Result<()> {
    files.iter().try_for_each(|(name, bytes)| {
        let path = folder.join(name);
        staged::write(&path, bytes).map_err(Error::io(&path))
    })
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Error::Stopped(error.to_string()))? + "\n";
    staged::write(path, text.as_bytes()).map_err(Error::io(path))
}

/// Reads a JSON file; one that is not valid is [`Error::Damaged`].
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read_to_string(path).map_err(Error::io(path))?;
    serde_json::from_str(&text)
        .map_err(|error| Error::Damaged { path: path.into(), why: error.to_string() })
}

/// Checks that files of these sizes in bytes fit into `folder` together, by reserving the space and
/// releasing it. On a file system that cannot reserve space, checks only that files can be written.
pub(crate) fn check_disk_space(folder: &Path, sizes: &[u64]) -> Result<()> {
    let probes: Vec<PathBuf> =
        (0..sizes.len()).map(|i| folder.join(format!("room-{i}.partial"))).collect();
    let reserved = probes.iter().zip(sizes).try_for_each(|(path, &bytes)| {
        let file = File::create(path)?;
        reserve(&file, bytes)
    });
    for path in &probes {
        // Some may not have been created.
        let _ = fs::remove_file(path);
    }
    reserved.map_err(|error| {
        let megabytes = sizes.iter().sum::<u64>().div_ceil(1 << 20);
        let why = format!("needs {megabytes} MiB for the run's checkpoints and model: {error}");
        Error::Folder { path: folder.into(), why }
    })
}

#[cfg(target_os = "linux")]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::{
        fs::{FallocateFlags, fallocate},
        io::Errno,
    };
    match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        result => result.map_err(io::Error::from),
    }
}

#[cfg(not(target_os = "linux"))]
fn reserve(_: &File, _: u64) -> io::Result<()> {
    Ok(())
}

impl TrainConfig {
    /// Reads the configuration of a run, `train.json`.
    ///
    /// # Errors
    /// A file that is missing or not a configuration.
    pub fn read(path: &Path) -> Result<Self> {
        read_json(path)
    }
}
