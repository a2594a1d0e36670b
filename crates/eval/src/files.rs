//! The files of a report.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use kv_models::save::staged::{stage, system_error};
use kv_report::create_folder;

use crate::Result;

/// A path and the bytes to write there.
pub(crate) type NewFile = (PathBuf, Vec<u8>);

/// Writes `files` into `folder`, which is created if missing. Returns their paths. If one cannot be
/// written, none appears, and a folder that was missing is removed.
pub(crate) fn write_together(folder: &Path, files: Vec<NewFile>) -> Result<Vec<PathBuf>> {
    let is_new = !folder.exists();
    create_folder(folder)?;
    let written = write_all(&files);
    if written.is_err() && is_new {
        // A folder that another program wrote into meanwhile is not empty and stays.
        let _ = fs::remove_dir(folder);
    }
    written.map(|()| files.into_iter().map(|(path, _)| path).collect())
}

fn write_all(files: &[NewFile]) -> Result<()> {
    let mut staged = Vec::with_capacity(files.len());
    for (path, bytes) in files {
        let mut file = stage(path).map_err(failed(path))?;
        file.write_all(bytes).map_err(failed(path))?;
        staged.push(file);
    }
    for ((path, _), file) in files.iter().zip(staged) {
        file.persist(path).map_err(|error| failed(path)(error.error))?;
    }
    Ok(())
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> kv_report::Error {
    move |source| kv_report::Error::Write { path: path.into(), source: system_error(source) }
}
