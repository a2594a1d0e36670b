use std::path::PathBuf;

use crate::data::DataError;

/// An error of training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of its range.
    #[error("{field} {value}: {rule}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of a run differs from what was written.
    #[error("{path}: {why}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage, and what still works.
        why: String,
    },
    /// No run can start in a folder.
    #[error("{path}: {why}", path = path.display())]
    Folder {
        /// The folder, or the file in it that is in the way.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// A worker of another machine went away or took too long.
    #[error(
        "worker {device}: {why}; continue with kv-train resume --devices on those that are left"
    )]
    Worker {
        /// The device, as in a list of devices.
        device: String,
        /// The reason.
        why: String,
    },
    /// Devices of this machine cannot be served.
    #[error("worker: {0}; try another address for --listen")]
    Serve(String),
    /// Training failed.
    #[error("training stopped: {0}")]
    Stopped(String),
    /// Training was asked to stop, and can be resumed.
    #[error(
        "stopped after step {step} of {steps}; the checkpoint is in {folder}",
        folder = folder.display()
    )]
    Interrupted {
        /// The run's folder.
        folder: PathBuf,
        /// Optimizer steps made; the last checkpoint follows this step.
        step: usize,
        /// Optimizer steps planned.
        steps: usize,
    },
    /// An error of the texts.
    #[error(transparent)]
    Data(#[from] DataError),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] kv_models::Error),
    /// An error of the cache's configuration or of the device.
    #[error(transparent)]
    Cache(#[from] kv_models::kv_cubecl::Error),
    /// A report cannot be drawn or written.
    #[error(transparent)]
    Report(#[from] kv_report::Error),
    /// An evaluation fails.
    #[error(transparent)]
    Eval(#[from] kv_eval::Error),
}

impl Error {
    pub(crate) fn setting(
        field: &'static str,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Self {
        Self::Setting { field, value: value.to_string(), rule: rule.into() }
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        |source| Self::Io { path, source }
    }
}

/// Results of this crate.
pub type Result<T> = core::result::Result<T, Error>;
