//! Reads and writes whole files.

mod parts;
pub mod staged;

use std::{fs, io, path::Path};

use serde::Serialize;

pub(crate) use parts::Part;

use crate::error::{Error, Result};

/// Reads a text file.
///
/// # Errors
/// [`Error::NotFound`] or [`Error::Io`].
pub fn read_to_string(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: path.into(), hint: String::new() },
        _ => Error::Io { path: path.into(), source },
    })
}

/// Returns indented JSON.
pub fn pretty(value: &impl Serialize) -> Vec<u8> {
    // Only maps whose keys are not strings can fail, and none is written here.
    let mut bytes = serde_json::to_vec_pretty(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// Returns the error of a file that cannot be written.
pub fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Write { path: path.into(), source: staged::system_error(source) }
}

/// Writes one file, completely or not at all.
///
/// # Errors
/// [`Error::Write`].
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    staged::write(path, bytes).map_err(failed(path))
}
