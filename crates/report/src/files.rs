//! Writes reports.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use crate::{Error, Result};

/// Creates the folder of a report if it is missing.
///
/// # Errors
/// [`Error::Write`] naming the path.
pub fn create_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.into(), source })
}

/// Writes a file. If the system cannot write all of it, removes it.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |source: io::Error| Error::Write { path: path.into(), source };
    let mut file = File::create(path).map_err(failed)?;
    file.write_all(bytes).map_err(|source| {
        if file.metadata().is_ok_and(|file| file.is_file()) {
            let _ = fs::remove_file(path);
        }
        failed(source)
    })
}
