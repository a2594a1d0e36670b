//! The files of a GGUF model: a single file, or the parts that llama.cpp's `gguf-split` writes.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use memmap2::Mmap;

use super::header::Header;
use crate::{
    error::{Error, Result},
    files::Part,
};

#[derive(Debug)]
pub(crate) struct GgufFile {
    pub(crate) path: PathBuf,
    pub(crate) map: Arc<Mmap>,
    pub(crate) header: Header,
}

/// Opens all files of the model that `path` belongs to. The first file has the metadata.
///
/// # Errors
/// Fails if a file is not a GGUF file, or if a part is missing or contradicts its name.
pub(crate) fn open(path: &Path) -> Result<Vec<GgufFile>> {
    let named = GgufFile::open(path)?;
    let count = match named.integer("split.count")? {
        Some(count) if count > 1 => count,
        _ => return Ok(vec![named]),
    };
    let Some(part) = Part::parse(path).filter(|part| part.count as u64 == count) else {
        let rule = format!(
            "the other parts are found by this one's name, which must end in -00001-of-{count:05}\
             .gguf if it is the first"
        );
        return Err(Error::config(path, "split.count", count, rule));
    };
    let mut files = Vec::new();
    for (no, path) in part.paths()?.iter().enumerate() {
        let file = GgufFile::open(path)?;
        for (key, expected) in [("split.no", no as u64), ("split.count", count)] {
            let found = file.integer(key)?;
            if found != Some(expected) {
                let found = found.map_or("missing".into(), |found| found.to_string());
                let rule = format!("must be {expected} by the file's name");
                return Err(Error::config(path, key, found, rule));
            }
        }
        files.push(file);
    }
    let n_tensors: usize = files.iter().map(|file| file.header.tensors.len()).sum();
    for file in &files {
        let key = "split.tensors.count";
        if let Some(count) = file.integer(key)?.filter(|&count| count != n_tensors as u64) {
            let rule = format!("must be {n_tensors}, the tensors of all parts");
            return Err(Error::config(&file.path, key, count, rule));
        }
    }
    Ok(files)
}

impl GgufFile {
    fn open(path: &Path) -> Result<Self> {
        let map = map(path, "GGUF")?;
        let header = Header::read(&map, path)?;
        Ok(Self { path: path.into(), map, header })
    }

    fn integer(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.header.metadata.get(key) else { return Ok(None) };
        let wrong = || value.wrong(&self.path, key, "an unsigned integer");
        value.integer().map(Some).ok_or_else(wrong)
    }
}

/// Maps a file of this format that is not empty.
pub(crate) fn map(path: &Path, format: &'static str) -> Result<Arc<Mmap>> {
    let io = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: path.into(), hint: String::new() },
        _ => Error::Io { path: path.into(), source },
    };
    let file = File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() == 0 {
        let why = "the file is empty".into();
        return Err(Error::Malformed { path: path.into(), format, why });
    }
    // SAFETY: the map is read-only. As with every memory-mapped reader, another process that
    // truncates or rewrites the file meanwhile breaks the contract that `load` documents.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    Ok(Arc::new(map))
}
