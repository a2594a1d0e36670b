//! Names of files that hold one part of a model, such as `model-00002-of-00003.safetensors`.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// One part of a model, by the name of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    folder: PathBuf,
    /// The common prefix of the names of all parts; `extension` is their suffix.
    pub(crate) stem: String,
    pub(crate) extension: String,
    width: usize,
    /// The number of this part, from 1.
    pub(crate) index: usize,
    /// The number of parts.
    pub(crate) count: usize,
}

impl Part {
    /// Parses the name of a file; `None` if it is not the name of a part.
    pub(crate) fn parse(path: &Path) -> Option<Self> {
        let (name, extension) = (path.file_stem()?.to_str()?, path.extension()?.to_str()?);
        let (name, count) = name.rsplit_once("-of-")?;
        let (stem, index) = name.rsplit_once('-')?;
        let number = |digits: &str| {
            let plain = digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse::<usize>().ok()).flatten()
        };
        let part = Self {
            folder: path.parent().map(Path::to_path_buf).unwrap_or_default(),
            stem: stem.into(),
            extension: extension.into(),
            width: index.len(),
            index: number(index)?,
            count: number(count)?,
        };
        (1..=part.count).contains(&part.index).then_some(part)
    }

    /// Returns the path of part `index`, counted from 1.
    pub(crate) fn path(&self, index: usize) -> PathBuf {
        let Self { folder, stem, extension, width, count, .. } = self;
        folder.join(format!("{stem}-{index:0width$}-of-{count:0width$}.{extension}"))
    }

    /// Returns the paths of all parts, in order.
    ///
    /// # Errors
    /// Returns [`Error::NotFound`] for the first part that does not exist.
    pub(crate) fn paths(&self) -> Result<Vec<PathBuf>> {
        let find = |index| {
            let path = self.path(index);
            if path.is_file() {
                return Ok(path);
            }
            let hint = format!(", part {index} of {} is needed", self.count);
            Err(Error::NotFound { path, hint })
        };
        (1..=self.count).map(find).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let part = Part::parse(Path::new("a/some-model-of-00007-00002-of-00003.gguf")).unwrap();
        assert_eq!((part.index, part.count), (2, 3));
        assert_eq!(part.stem, "some-model-of-00007");
        assert_eq!(part.path(3), Path::new("a/some-model-of-00007-00003-of-00003.gguf"));
        for name in [
            "model.safetensors",
            "model-00004-of-00003.gguf",
            "model-00000-of-00003.gguf",
            "model-1-of-3.gguf",
            "model-+0001-of-00003.gguf",
            "model-00001-of-00003",
            "00001-of-00003.gguf",
            "m-99999999999999999999999-of-99999999999999999999999.gguf",
        ] {
            assert_eq!(Part::parse(Path::new(name)), None, "{name}");
        }
    }
}
