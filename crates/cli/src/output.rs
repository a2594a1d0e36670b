//! What a program writes: lines for people, and files for programs.
//!
//! A reader that goes away (`| head`) is no mistake of the program, and does not end it: what else
//! it writes may still be wanted. A file is tried before the work whose result it is to hold, so
//! that a wrong name is found at once; nothing of it is on the disk until the result is.

use core::fmt::Display;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result, bail};
use kv_models::save::staged;

/// The stream that people read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Screen {
    /// Standard output.
    Out,
    /// Standard error, where standard output is what another program reads.
    Error,
}

impl Screen {
    /// Standard output, unless one of `files` is `-`, which is written there.
    pub fn beside<'a>(files: impl IntoIterator<Item = Option<&'a Path>>) -> Self {
        match files.into_iter().flatten().any(is_stdout) {
            true => Self::Error,
            false => Self::Out,
        }
    }

    /// Writes `text` at once. Whether there still is a reader.
    ///
    /// # Errors
    /// Fails with the error of the system, for example if the disk is full.
    pub fn print(self, text: impl Display) -> Result<bool> {
        let written = match self {
            Self::Out => write_all(&mut io::stdout().lock(), &text),
            Self::Error => write_all(&mut io::stderr().lock(), &text),
        };
        match written {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(error).context("standard output: cannot write"),
        }
    }

    /// [`print`](Self::print) of `text` and the end of the line.
    ///
    /// # Errors
    /// Fails as [`print`](Self::print) does.
    pub fn line(self, text: impl Display) -> Result<bool> {
        self.print(format_args!("{text}\n"))
    }
}

/// Prints a note for the user on standard error, and ignores errors.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "note: {text}");
}

/// [`note`] of each of `lines`, on one line each.
pub fn notes(lines: &[String]) {
    for line in lines {
        note(line.split_whitespace().collect::<Vec<_>>().join(" "));
    }
}

fn write_all(to: &mut impl Write, text: &impl Display) -> io::Result<()> {
    write!(to, "{text}")?;
    to.flush()
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// A file that is written at the end, whole or not at all; for `-`, standard output.
#[derive(Debug)]
pub struct OutFile {
    name: &'static str,
    path: PathBuf,
    to: To,
}

#[derive(Debug)]
enum To {
    Stdout,
    /// A temporary file in the same folder, which replaces the named one.
    Replaced,
    /// Not a regular file: a pipe or a terminal, for example.
    Direct(File),
}

impl OutFile {
    /// Finds out whether `path` can be written, and changes nothing there yet; `name` is the
    /// argument that messages name.
    ///
    /// # Errors
    /// Why it cannot be written.
    pub fn open(name: &'static str, path: &Path) -> Result<Self> {
        let to = check(path).with_context(|| format!("{name} {}: cannot write", path.display()))?;
        Ok(Self { name, path: path.into(), to })
    }

    /// Writes `content`.
    ///
    /// # Errors
    /// Fails with the error of the system. The file is then unchanged.
    pub fn write(self, content: &[u8]) -> Result<()> {
        let Self { name, path, to } = self;
        let _whole = writing();
        let written = match to {
            To::Stdout => match io::stdout().lock().write_all(content) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
                written => written,
            },
            To::Direct(mut file) => file.write_all(content),
            To::Replaced => staged::write(&target(&path), content),
        };
        written.with_context(|| format!("{name} {}: cannot write", path.display()))
    }
}

fn check(path: &Path) -> Result<To> {
    if is_stdout(path) {
        return Ok(To::Stdout);
    }
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => bail!("is a folder"),
        Ok(found) => {
            // Opening for appending does not change the file.
            let file = OpenOptions::new().append(true).open(path)?;
            if !found.is_file() {
                return Ok(To::Direct(file));
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => (),
        Err(error) => return Err(error.into()),
    }
    // Whether a new file can be made there is known once one was.
    staged::stage(&target(path))?;
    Ok(To::Replaced)
}

/// Returns the file to replace: the target of a link, or the path itself.
fn target(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.into())
}

/// Does what leaves files behind when it is cut off: [`exit_interrupted`](crate::exit_interrupted)
/// waits until it is done.
pub fn uninterrupted<T>(work: impl FnOnce() -> T) -> T {
    let _whole = writing();
    work()
}

/// Held while a file is written, so a program that a signal ends leaves no unfinished file.
pub(crate) fn writing() -> MutexGuard<'static, ()> {
    static WRITING: Mutex<()> = Mutex::new(());
    WRITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Finds out whether files can be written into `folder`, or into a new folder of this name, and
/// changes nothing there.
///
/// # Errors
/// Why not; `name` is the argument that messages name.
pub fn check_folder(name: &'static str, folder: &Path) -> Result<()> {
    let _whole = writing();
    let is_missing = |at: &&Path| *at != Path::new("") && !at.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    let tried = fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder).map(drop));
    for new in missing {
        // A folder that another program wrote into meanwhile is not empty and stays.
        let _ = fs::remove_dir(new);
    }
    let tried = tried.map_err(staged::system_error);
    tried.with_context(|| format!("{name} {}: cannot write", folder.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use super::*;

    /// A check leaves nothing behind, whether it succeeds or not, and errors name the user's file.
    #[test]
    fn checks_of_outputs_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("text"), "before").unwrap();
        fs::create_dir(at("old")).unwrap();
        let list = || {
            let entries = fs::read_dir(folder.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        for name in ["old", "new", "old/new/newer"] {
            check_folder("report", &at(name)).unwrap();
            assert_eq!(list(), ["old", "text"], "{name}");
            assert_eq!(fs::read_dir(at("old")).unwrap().count(), 0, "{name}");
        }
        let error = |checked: Result<()>| format!("{:#}", checked.unwrap_err());
        for name in ["text", "text/new"] {
            let message = error(check_folder("report", &at(name)));
            assert!(message.starts_with("report /") && message.contains(name), "{message}");
        }
        for name in ["no/file", "text/file"] {
            let message = error(OutFile::open("json", &at(name)).map(drop));
            assert!(message.starts_with("json /") && message.contains(name), "{message}");
            assert!(!message.contains("unfinished"), "{message}");
        }
        assert_eq!(list(), ["old", "text"]);
    }
}
