//! Files that appear completely or not at all. They are written under another name in the same
//! folder and renamed when they are complete.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use tempfile::{Builder, NamedTempFile};

const UNFINISHED: &str = ".unfinished-";

/// Creates a file that becomes `path` by [`NamedTempFile::persist`] and is removed if it is dropped
/// before. Its name ends as `path` does.
///
/// # Errors
/// Fails if no file can be created beside `path`.
pub fn stage(path: &Path) -> io::Result<NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut name = std::ffi::OsString::from("-");
    name.push(path.file_name().unwrap_or_default());
    let mut file = Builder::new();
    // The permissions of any new file. By default, only the owner could read it.
    #[cfg(unix)]
    file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    file.prefix(UNFINISHED).suffix(&name).tempfile_in(folder).map_err(system_error)
}

/// Returns the system's error without the path of a temporary file, which the tempfile crate adds
/// and users never named.
pub fn system_error(error: io::Error) -> io::Error {
    match error.to_string().split_once(" at path \"") {
        Some((why, _)) => io::Error::new(error.kind(), why),
        None => error,
    }
}

/// Writes the file at `path`, and waits until it is on the disk.
///
/// # Errors
/// Fails if the system cannot write. An existing file at `path` is then unchanged.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = stage(path)?;
    file.write_all(bytes).map_err(system_error)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// Removes files that killed writers left in `folder`. No other writer may be active there.
pub fn remove_unfinished(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            // A file that cannot be removed only takes disk space.
            let _ = fs::remove_file(entry.path());
        }
    }
}
