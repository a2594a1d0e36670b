//! Files that appear whole or not at all: written under another name beside their place, and moved
//! there when they are complete.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use tempfile::{Builder, NamedTempFile};

/// How the names of files that are not complete begin.
const UNFINISHED: &str = ".unfinished-";

/// A new file that is to become `path` by [`NamedTempFile::persist`]; until then it is removed again
/// when it is dropped. Its name ends as that of `path` does.
///
/// # Errors
/// What the system says where no file can be made beside `path`.
pub fn stage(path: &Path) -> io::Result<NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut name = std::ffi::OsString::from("-");
    name.push(path.file_name().unwrap_or_default());
    let mut file = Builder::new();
    // Those of any new file, for its owner alone otherwise.
    #[cfg(unix)]
    file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    file.prefix(UNFINISHED).suffix(&name).tempfile_in(folder)
}

/// Writes the file at `path`, and waits until it is on the disk.
///
/// # Errors
/// What the system says. What was at `path` is then still there.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = stage(path)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// Removes what writers that were killed left in `folder`, where no others are at work.
pub fn remove_unfinished(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            // What cannot be removed takes room and does no other harm.
            let _ = fs::remove_file(entry.path());
        }
    }
}
