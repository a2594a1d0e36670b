//! Outputs of a command that are files it reads, or one file twice.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// The arguments of a command that name files.
#[derive(Debug, Default)]
pub struct NamedFiles<'a> {
    read: Vec<(&'static str, &'a Path)>,
    models: Vec<(&'static str, &'a Path)>,
    written: Vec<(&'static str, &'a Path)>,
}

impl<'a> NamedFiles<'a> {
    /// Adds a file that the argument `name` has the command read. What is no file is ignored.
    #[must_use]
    pub fn reads(mut self, name: &'static str, path: &'a (impl AsRef<Path> + ?Sized)) -> Self {
        self.read.push((name, path.as_ref()));
        self
    }

    /// Adds a file that the argument `name`, if given, has the command read.
    #[must_use]
    pub fn reads_optional(
        self,
        name: &'static str,
        path: Option<&'a (impl AsRef<Path> + ?Sized)>,
    ) -> Self {
        match path {
            Some(path) => self.reads(name, path),
            None => self,
        }
    }

    /// Adds a model, which is a folder or one of the files of a folder.
    #[must_use]
    pub fn reads_model(
        mut self,
        name: &'static str,
        path: &'a (impl AsRef<Path> + ?Sized),
    ) -> Self {
        self.models.push((name, path.as_ref()));
        self
    }

    /// Adds a model that the argument `name` may have the command read.
    #[must_use]
    pub fn reads_models(
        self,
        name: &'static str,
        paths: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        paths.into_iter().fold(self, |files, path| files.reads_model(name, path))
    }

    /// Adds a file that the argument `name` has the command write.
    #[must_use]
    pub fn writes(mut self, name: &'static str, path: Option<&'a Path>) -> Self {
        self.written.extend(path.filter(|path| *path != Path::new("-")).map(|path| (name, path)));
        self
    }

    /// Checks that no output is an input or another output.
    ///
    /// # Errors
    /// Names the two arguments.
    pub fn check(&self) -> Result<()> {
        let (read, models, written) =
            (whole(&self.read), whole(&self.models), whole(&self.written));
        for (i, (name, path)) in written.iter().enumerate() {
            let shown = self.written[i].1.display();
            let twin = written[..i].iter().find(|(_, other)| other == path);
            if let Some((other, _)) = twin {
                bail!("{name} {shown}: --{other} writes that file too; name another one");
            }
            let input = read.iter().find(|(_, input)| input == path);
            let model = models.iter().find(|(_, model)| belongs(path, model));
            if let Some((input, _)) = input.or(model) {
                bail!(
                    "{name} {shown}: would overwrite a file that --{input} reads; name another one"
                );
            }
        }
        Ok(())
    }
}

/// Returns the files with canonical paths; a new file has its folder's.
fn whole<'a>(files: &[(&'a str, &Path)]) -> Vec<(&'a str, PathBuf)> {
    let whole = |path: &Path| {
        path.canonicalize().ok().or_else(|| {
            let folder = path.parent().filter(|folder| *folder != Path::new(""));
            let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
            Some(folder.join(path.file_name()?))
        })
    };
    let or_as_named = |path: &Path| whole(path).unwrap_or_else(|| path.into());
    files.iter().map(|(name, path)| (*name, or_as_named(path))).collect()
}

/// Returns whether `file` exists and `model` is read from it.
fn belongs(file: &Path, model: &Path) -> bool {
    /// The files of a model besides its weights.
    const BESIDE: [&str; 11] = [
        "config.json",
        "generation_config.json",
        "kv_cache.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "world.json",
    ];
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    if file == model {
        return true;
    }
    if !model.exists() || !file.exists() || file.parent() != folder {
        return false;
    }
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let weights = [".safetensors", ".bin", ".gguf", ".model", ".index.json"];
    BESIDE.contains(&&*name) || weights.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use super::*;

    #[test]
    fn an_output_that_is_read_is_refused_by_any_path() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("model")).unwrap();
        for name in ["text", "model/config.json", "model/notes.json"] {
            std::fs::write(at(name), "x").unwrap();
        }
        let (text, model) = (at("text"), at("model"));
        let refusal = |output: &Path| {
            let files = NamedFiles::default().reads("text", &text).reads_model("model", &model);
            files.writes("json", Some(output)).check().err().map(|error| error.to_string())
        };
        for (output, input) in
            [("text", "--text"), ("model/../text", "--text"), ("model/config.json", "--model")]
        {
            let error = refusal(&at(output)).unwrap();
            assert!(error.starts_with("json ") && error.contains(input), "{error}");
        }
        for output in ["new", "model/new.safetensors", "model/notes.json"] {
            assert_eq!(refusal(&at(output)), None, "{output}");
        }
        let (a, b) = (at("new"), at("model/../new"));
        let twice = NamedFiles::default().writes("json", Some(&a)).writes("plot", Some(&b));
        let error = twice.check().unwrap_err().to_string();
        assert!(error.starts_with("plot ") && error.contains("--json"), "{error}");
        let screen = Some(Path::new("-"));
        assert!(NamedFiles::default().writes("a", screen).writes("b", screen).check().is_ok());
    }
}
