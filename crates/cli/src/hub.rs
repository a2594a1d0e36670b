//! From what a user names to files on this machine.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

use anyhow::{Context, Result, bail};
use hf_hub::{
    HFClientSync,
    progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler},
    repository::RepoTreeEntry,
};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use crate::{note, start::error_line};

/// A local path as it is, else a model of the Hugging Face hub, as `owner/name`, or `owner/name/FILE`
/// for one of the GGUF files of a repository that has several. What is downloaded stays in the hub's
/// cache and is not downloaded again. `revision` is a branch, tag or commit of a model of the hub.
///
/// Of the weights a repository has, one kind is downloaded: safetensors, else PyTorch's, else GGUF.
///
/// # Errors
/// What is neither path nor id, a revision of a local path, a repository without weights or with
/// several GGUF files to choose from, and what the hub does not give.
pub fn resolve(model: &str, revision: Option<&str>) -> Result<PathBuf> {
    let path = Path::new(model);
    if path.exists() {
        if let Some(revision) = revision {
            bail!("revision {revision}: model {model} lies here, only models of the hub have one");
        }
        return Ok(path.into());
    }
    let Some(id) = Id::parse(model) else {
        bail!("model {model}: no such file or folder, and not a model id of the form owner/name");
    };
    let context = || format!("model {model}: no such path here, and the hub did not give it");
    let repository = HFClientSync::new().with_context(context)?.model(id.owner, id.name);
    let of = revision.map(String::from);
    let listed = repository.list_tree().maybe_revision(of.clone()).send();
    let (files, known) = match listed {
        Ok(entries) => {
            let files = entries.into_iter().filter_map(|entry| match entry {
                RepoTreeEntry::File { path, .. } => Some(path),
                RepoTreeEntry::Directory { .. } => None,
            });
            (files.collect(), None)
        }
        Err(error) => {
            // Perhaps there is no network, and no need for it.
            let known = repository.snapshot_download().maybe_revision(of.clone());
            let Ok(folder) = known.local_files_only(true).send() else {
                return Err(error).with_context(context);
            };
            note(format_args!("the hub did not answer ({error}); {model} is what it gave before"));
            (files_of(&folder)?, Some(folder))
        }
    };
    let wanted = wanted(&files, id.file).with_context(|| format!("model {model}"))?;
    let folder = match known {
        Some(folder) => folder,
        None => {
            let files = repository.snapshot_download().maybe_revision(of);
            let files = files.allow_patterns(wanted.files).progress(Told::default());
            files.send().with_context(context)?
        }
    };
    Ok(wanted.model.map_or(folder.clone(), |file| folder.join(file)))
}

/// [`resolve`] for an argument that is a path.
///
/// # Errors
/// Those of [`resolve`], on one line.
pub fn parse(model: &str) -> Result<PathBuf, String> {
    resolve(model, None).map_err(|error| error_line(&error))
}

/// A model of the hub.
struct Id<'a> {
    owner: &'a str,
    name: &'a str,
    file: Option<&'a str>,
}

impl<'a> Id<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let part = |s: &str| {
            !s.is_empty()
                && !s.starts_with('.')
                && s.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        let parts: Vec<&str> = text.split('/').collect();
        let (owner, name, file) = match parts[..] {
            [owner, name] if !is_gguf(name) => (owner, name, None),
            [owner, name, file] if is_gguf(file) => (owner, name, Some(file)),
            _ => return None,
        };
        parts.iter().all(|s| part(s)).then_some(Self { owner, name, file })
    }
}

/// What to download.
struct Wanted {
    files: Vec<String>,
    /// The file that is the model, where it is not the whole folder.
    model: Option<String>,
}

fn is_gguf(file: &str) -> bool {
    file.ends_with(".gguf")
}

/// The files that belong to the one of a model in several parts: `NAME-00001-of-00003.gguf`.
fn parts_of<'a>(file: &str, files: &'a [String]) -> Vec<&'a String> {
    let of = |file: &str| {
        let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, _) = rest.rsplit_once('-')?;
        Some((stem.to_string(), count.to_string()))
    };
    let whole = of(file);
    files.iter().filter(|other| *other == file || (whole.is_some() && of(other) == whole)).collect()
}

/// Of all files at the top of a repository, those that a model is read from.
fn wanted(files: &[String], chosen: Option<&str>) -> Result<Wanted> {
    let weights = |stem: &str, extension: &str| -> Vec<&String> {
        let belongs = |file: &&String| file.starts_with(stem) && file.ends_with(extension);
        files.iter().filter(belongs).collect()
    };
    let gguf: Vec<&String> = files.iter().filter(|file| is_gguf(file)).collect();
    let all = || gguf.iter().map(|file| file.as_str()).collect::<Vec<_>>().join(", ");
    let of_gguf = |file: &str| {
        let parts = parts_of(file, files);
        // Of several parts the first is the model.
        let first = parts.iter().min().map_or(file, |first| first.as_str()).to_string();
        Wanted { files: parts.into_iter().cloned().collect(), model: Some(first) }
    };
    if let Some(file) = chosen {
        if !gguf.iter().any(|other| *other == file) {
            bail!("the repository has no {file}; its GGUF files: {}", all());
        }
        return Ok(of_gguf(file));
    }
    let kinds = [weights("model", ".safetensors"), weights("pytorch_model", ".bin")];
    if let Some(kind) = kinds.into_iter().find(|kind| !kind.is_empty()) {
        let beside = |file: &&String| {
            file.ends_with(".json") || file.starts_with("tokenizer") || file.ends_with(".jinja")
        };
        let files = kind.into_iter().chain(files.iter().filter(beside));
        return Ok(Wanted { files: files.cloned().collect(), model: None });
    }
    match gguf.first() {
        Some(file) if parts_of(file, files).len() == gguf.len() => Ok(of_gguf(file)),
        Some(_) => bail!("the repository has several files; name one behind the id: {}", all()),
        None => bail!("the repository has no model*.safetensors, pytorch_model*.bin or *.gguf"),
    }
}

/// The names of the files in `folder`.
fn files_of(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

/// A bar on standard error, as long as something is downloaded.
#[derive(Default)]
struct Told {
    bar: Mutex<Option<(ProgressBar, BytesOfFiles)>>,
}

/// Bytes of each file that have come so far, by its name.
type BytesOfFiles = BTreeMap<String, u64>;

impl ProgressHandler for Told {
    fn on_progress(&self, event: &ProgressEvent) {
        let (ProgressEvent::Download(event), Ok(mut bar)) = (event, self.bar.lock()) else {
            return;
        };
        match (event, &mut *bar) {
            // The first is of everything, those after it of single files.
            (&DownloadEvent::Start { total_bytes, .. }, None) if total_bytes > 0 => {
                note(format_args!("downloading {}", HumanBytes(total_bytes)));
                const STYLE: &str = "{bar:40} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
                let new = ProgressBar::new(total_bytes);
                let new = match ProgressStyle::with_template(STYLE) {
                    Ok(style) => new.with_style(style),
                    Err(_) => new,
                };
                *bar = Some((new, BytesOfFiles::new()));
            }
            (DownloadEvent::Progress { files }, Some((bar, done))) => {
                for file in files.iter().filter(|file| file.status != FileStatus::Started) {
                    let bytes = file.bytes_completed;
                    let known = done.entry(file.filename.clone()).or_default();
                    *known = bytes.max(*known);
                }
                bar.set_position(done.values().sum());
            }
            (&DownloadEvent::AggregateProgress { bytes_completed, .. }, Some((bar, _))) => {
                bar.set_position(bytes_completed.max(bar.position()));
            }
            (DownloadEvent::Complete, Some((bar, _))) => bar.finish_and_clear(),
            _ => (),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use super::*;

    fn chosen(files: &[&str], file: Option<&str>) -> Result<(Vec<String>, Option<String>)> {
        let files: Vec<String> = files.iter().map(ToString::to_string).collect();
        wanted(&files, file).map(|wanted| (wanted.files, wanted.model))
    }

    #[test]
    fn one_kind_of_weights_is_chosen() {
        let all = [
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "model.Q4_0.gguf",
            "tokenizer.model",
            "consolidated.safetensors",
        ];
        let (files, model) = chosen(&all, None).unwrap();
        assert!(files.contains(&all[2].to_string()) && files.contains(&all[4].to_string()));
        assert!(files.contains(&"config.json".to_string()) && model.is_none());
        for other in ["pytorch_model.bin", "model.Q4_0.gguf", "README.md", all[8]] {
            assert!(!files.contains(&other.to_string()), "{other} in {files:?}");
        }
        let (files, _) = chosen(&["config.json", "pytorch_model.bin", "x.gguf"], None).unwrap();
        assert_eq!(files, ["pytorch_model.bin", "config.json"]);
        let (files, model) = chosen(&all, Some("model.Q4_0.gguf")).unwrap();
        assert_eq!((files, model.as_deref()), (vec![all[6].to_string()], Some(all[6])));
    }

    #[test]
    fn a_gguf_file_is_named_where_there_are_several() {
        let several = chosen(&["a.Q4_0.gguf", "a.Q8_0.gguf"], None).unwrap_err().to_string();
        assert!(several.contains("a.Q4_0.gguf, a.Q8_0.gguf"), "{several}");
        let none = chosen(&["README.md"], None).unwrap_err().to_string();
        assert!(none.contains("no model*.safetensors"), "{none}");
        let wrong = chosen(&["a.gguf"], Some("b.gguf")).unwrap_err().to_string();
        assert!(wrong.contains("no b.gguf") && wrong.contains("a.gguf"), "{wrong}");
        // The parts of one model are one.
        let parts = ["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"];
        let (files, model) = chosen(&parts, None).unwrap();
        assert_eq!((files.len(), model.as_deref()), (2, Some("a-00001-of-00002.gguf")));
    }

    #[test]
    fn ids_are_told_from_paths() {
        for (text, file) in [("o/n", None), ("o-1/n.v2", None), ("o/n/f.gguf", Some("f.gguf"))] {
            assert_eq!(Id::parse(text).unwrap().file, file);
        }
        for text in ["n", "o/n.gguf", "../n", "o/n/f.bin", "/o/n", "o/n/", "a/b/c/d.gguf", "o/n m"]
        {
            assert!(Id::parse(text).is_none(), "{text}");
        }
    }
}
