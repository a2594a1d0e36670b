//! Files that appear whole or not at all.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{Error, Result};

/// Files written beside their places and moved there together: an error or a full disk before
/// [`commit`](Self::commit) leaves what was there.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    files: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    temporary: PathBuf,
    path: PathBuf,
}

impl Staged {
    /// The place to write what will become `path`.
    pub(crate) fn add(&mut self, path: &Path) -> PathBuf {
        static N: AtomicUsize = AtomicUsize::new(0);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let n = N.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_file_name(format!(".{name}.{}-{n}.tmp", std::process::id()));
        self.files.push(Entry { temporary: temporary.clone(), path: path.into() });
        temporary
    }

    /// Writes what will become `path`.
    pub(crate) fn write(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        fs::write(self.add(path), bytes).map_err(failed(path))
    }

    /// Moves the files to their places, in the order they were added.
    pub(crate) fn commit(mut self) -> Result<()> {
        for Entry { temporary, path } in &self.files {
            File::open(temporary).and_then(|file| file.sync_all()).map_err(failed(path))?;
        }
        for Entry { temporary, path } in &self.files {
            fs::rename(temporary, path).map_err(failed(path))?;
        }
        self.files.clear();
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        for Entry { temporary, .. } in &self.files {
            // Nothing to do about a file that cannot be removed, or was moved already.
            let _ = fs::remove_file(temporary);
        }
    }
}

/// What the system says when `path` cannot be written.
pub(crate) fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Write { path: path.into(), source }
}

/// Writes one file, whole or not at all.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut staged = Staged::default();
    staged.write(path, bytes)?;
    staged.commit()
}
