//! Hashes of the files that decide the result of a run, so that it is resumed only with the same
//! ones.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// A file that a run was started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Input {
    /// Its role in the run, such as `text`.
    pub(crate) what: String,
    path: PathBuf,
    /// XXH3 of its bytes, in hexadecimal.
    xxh3: String,
}

impl Input {
    /// Hashes a file; `None` for a pipe, which can be read only once.
    pub(crate) fn of(what: &str, path: &Path) -> Result<Option<Self>> {
        let read = || -> std::io::Result<Option<String>> {
            if !fs::metadata(path)?.is_file() {
                return Ok(None);
            }
            let (mut file, mut hash) = (File::open(path)?, Xxh3::new());
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok(Some(format!("{:016x}", hash.digest()))),
                    n => hash.update(&buffer[..n]),
                }
            }
        };
        let xxh3 = read().with_context(|| format!("{what} {}: cannot read", path.display()))?;
        Ok(xxh3.map(|xxh3| Self { what: what.into(), path: path.into(), xxh3 }))
    }

    /// Returns the same file with another path, for example its path in the run's folder.
    pub(crate) fn at(self, path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), ..self }
    }

    pub(crate) fn all(what: &str, paths: &[PathBuf]) -> Result<Vec<Self>> {
        let inputs = paths.iter().map(|path| Self::of(what, path));
        Ok(inputs.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Hashes the files that the model at `path` is read from.
    pub(crate) fn of_model(what: &str, path: &Path) -> Result<Vec<Self>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let is_folder = path.is_dir() || name.ends_with(".safetensors") || name.ends_with(".bin");
        let whole = stem_of_parts(&name);
        let of_model = |other: &str| match is_folder {
            true => is_of_folder(other),
            false => other == name || whole.is_some() && stem_of_parts(other) == whole,
        };
        let listed = if folder == Path::new("") { Path::new(".") } else { folder };
        let context = || format!("{what} {}: cannot read", path.display());
        let mut paths = vec![];
        for entry in fs::read_dir(listed).with_context(context)? {
            let name = entry.with_context(context)?.file_name();
            if name.to_str().is_some_and(of_model) {
                paths.push(folder.join(name));
            }
        }
        // If both kinds of weights exist, safetensors are read.
        let is = |path: &Path, extension| path.extension().is_some_and(|found| found == extension);
        if paths.iter().any(|path| is(path, "safetensors")) {
            paths.retain(|path| !is(path, "bin"));
        }
        paths.sort();
        Self::all(what, &paths)
    }
}

/// Returns whether a file of a model's folder decides its weights or its tokens.
fn is_of_folder(name: &str) -> bool {
    let named = ["config.json", "tokenizer.json", "tokenizer_config.json"].contains(&name);
    let ends = [".safetensors", ".bin"].iter().any(|end| name.ends_with(end));
    !name.starts_with('.') && (named || ends)
}

/// Returns the common parts of the names of a split GGUF model, `NAME-00001-of-00003.gguf`.
fn stem_of_parts(name: &str) -> Option<(String, String)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, _) = rest.rsplit_once('-')?;
    Some((stem.into(), count.into()))
}

/// Checks that a run is resumed with the same files it was `started` with.
///
/// # Errors
/// The first file that differs, is missing or is new.
pub(crate) fn check_same(started: &[Input], now: &[Input]) -> Result<()> {
    let of = |list: &[Input], input: &Input| {
        list.iter().find(|other| (&other.what, &other.path) == (&input.what, &input.path)).cloned()
    };
    for input in started.iter().chain(now) {
        let why = match (of(started, input), of(now, input)) {
            (Some(before), Some(found)) if before.xxh3 == found.xxh3 => continue,
            (Some(_), Some(_)) => "differs from the file that the run was started with",
            (Some(_), None) => "is missing, but the run was started with it",
            (None, _) => "did not exist when the run was started",
        };
        bail!(
            "{} {}: {why}; restore the original files, or start a new run",
            input.what,
            input.path.display()
        );
    }
    Ok(())
}
