//! New folders, which get their name when they are complete.

use std::{
    fs, io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    error::{Error, Result},
    files::failed,
};

/// Checks that no file or folder has this name.
///
/// # Errors
/// Fails for one that exists.
pub fn check_absent(folder: &Path) -> Result<()> {
    match fs::symlink_metadata(folder).is_ok() {
        true => Err(failed(folder)(io::Error::new(io::ErrorKind::AlreadyExists, "exists already"))),
        false => Ok(()),
    }
}

/// Writes a new folder. `write` gets an empty one, which is renamed when it is complete.
///
/// # Errors
/// Fails for a folder that exists or cannot be written, as `write` does, and with
/// [`Error::Interrupted`] if `stop` is true then. Nothing is left on the disk then.
pub fn new_folder<E: From<Error>>(
    folder: &Path,
    stop: Option<&AtomicBool>,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    check_absent(folder)?;
    let parent = match folder.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(parent).map_err(failed(parent))?;
    let mut unfinished = tempfile::Builder::new();
    unfinished.prefix(".unfinished-");
    #[cfg(unix)]
    unfinished.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let unfinished = unfinished.tempdir_in(parent).map_err(failed(folder))?;
    write(unfinished.path())?;
    if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
        return Err(Error::Interrupted.into());
    }
    fs::rename(unfinished.path(), folder).map_err(failed(folder))?;
    // The renamed folder must not be removed.
    let _ = unfinished.keep();
    Ok(())
}
