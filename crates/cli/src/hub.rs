//! Finds the files of a model by path, or downloads them by its id on the hub.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, bail};
use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        RepoInfo,
        sync::{Api, ApiBuilder},
    },
};

use crate::note;

/// The arguments that name a model.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelSource {
    /// A folder with config.json, a .gguf file, or a model of the Hugging Face hub: owner/name, or
    /// owner/name/FILE.gguf.
    #[arg(long, short)]
    model: String,
    /// The branch, tag or commit of a model of the hub.
    #[arg(long)]
    revision: Option<String>,
}

impl ModelSource {
    /// Names a model in the same way as the argument.
    pub fn of(model: &str) -> Self {
        Self { model: model.into(), revision: None }
    }

    /// Returns the path of the model on this machine, after a download if necessary. Downloads stay
    /// in the hub's cache.
    ///
    /// # Errors
    /// A name that is neither path nor id, a revision of a local path, a repository without weights
    /// or with several GGUF files to choose from, and a failed download.
    pub fn find(&self) -> Result<PathBuf> {
        resolve(&self.model, self.revision.as_deref())
    }

    /// The model as it was named.
    pub fn given(&self) -> &str {
        &self.model
    }

    /// The branch, tag or commit of the hub that was named.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// Returns the model's id on the hub, or the name of its file or folder.
    pub fn name(&self) -> String {
        match Path::new(&self.model) {
            path if path.exists() => name_of(path),
            _ => self.model.clone(),
        }
    }
}

/// The name of a model's file or folder.
pub fn name_of(path: &Path) -> String {
    // A path such as `.` has no name of its own.
    let whole = path.canonicalize().unwrap_or_else(|_| path.into());
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// A local path as it is, else a model of the Hugging Face hub, as `owner/name`, or
/// `owner/name/FILE` for one of the GGUF files of a repository that has several. What is downloaded
/// stays in the hub's cache and is not downloaded again. `revision` is a branch, tag or commit of a
/// model of the hub.
///
/// Of the weights a repository has, one kind is downloaded: safetensors, else PyTorch's, else GGUF.
fn resolve(model: &str, revision: Option<&str>) -> Result<PathBuf> {
    let path = Path::new(model);
    if path.try_exists().with_context(|| format!("model {model}: cannot read"))? {
        if let Some(revision) = revision {
            bail!("revision {revision}: model {model} lies here, only models of the hub have one");
        }
        return Ok(path.into());
    }
    let Some(id) = Id::parse(model) else {
        bail!("model {model}: no such file or folder, and not a model id of the form owner/name");
    };
    let context = || format!("model {model}: no such path here, and the hub did not give it");
    let repository = |revision: &str| {
        let id = format!("{}/{}", id.owner, id.name);
        Repo::with_revision(id, RepoType::Model, revision.into())
    };
    let asked = repository(revision.unwrap_or("main"));
    let (cache, api) = open().with_context(context)?;
    let (commit, files) = match api.repo(asked.clone()).info() {
        Ok(RepoInfo { siblings, sha }) => {
            let top = siblings.into_iter().map(|file| file.rfilename).filter(|f| !f.contains('/'));
            (sha, top.collect())
        }
        Err(error) => {
            // Perhaps there is no network, and no need for it.
            let Some((commit, files)) = known(&cache, &asked) else {
                return Err(error).with_context(context);
            };
            note(format_args!("the hub did not answer ({error}); {model} is what it gave before"));
            (commit, files)
        }
    };
    if !commit.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(anyhow!("{commit:?} is no commit")).with_context(context);
    }
    let wanted = wanted(&files, id.file).with_context(|| format!("model {model}"))?;
    // All files are of one commit, even if the branch changes meanwhile.
    let at = repository(&commit);
    let folder = cache.repo(at.clone()).pointer_path(&commit);
    let missing: Vec<_> = wanted.files.iter().filter(|file| !folder.join(file).exists()).collect();
    if !missing.is_empty() {
        note(format_args!("downloading {} files of {model}", missing.len()));
    }
    for file in missing {
        api.repo(at.clone()).download(file).with_context(|| file.clone()).with_context(context)?;
    }
    cache.repo(asked).create_ref(&commit).with_context(context)?;
    Ok(wanted.model.map_or(folder.clone(), |file| folder.join(file)))
}

/// Returns the path in an environment variable.
fn set(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The folder of the `huggingface_hub` package.
fn home() -> Option<PathBuf> {
    set("HF_HOME")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(env::home_dir()?.join(".cache/huggingface")))
}

/// The folder that models of the hub are downloaded to; `None` without a home folder.
pub fn hub_folder() -> Option<PathBuf> {
    set("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
}

/// The cache, and the way to the hub, where the environment variables of the `huggingface_hub`
/// package say.
fn open() -> Result<(Cache, Api)> {
    let home =
        home().context("there is no home folder; HF_HOME names one for what is downloaded")?;
    let cache = Cache::new(set("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")));
    let of_file = || fs::read_to_string(set("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token")));
    let token = match set("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        Some(_) => None,
        None => env::var("HF_TOKEN").or_else(|_| of_file()).ok(),
    };
    let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
    let mut api = ApiBuilder::from_cache(cache.clone()).with_token(token).with_retries(3);
    if let Ok(endpoint) = env::var("HF_ENDPOINT") {
        api = api.with_endpoint(endpoint.trim_end_matches('/').into());
    }
    Ok((cache, api.build()?))
}

/// Returns the commit of a repository in the cache, and its files there.
fn known(cache: &Cache, repository: &Repo) -> Option<(String, Vec<String>)> {
    let revision = repository.revision();
    let of_branch = cache.path().join(repository.folder_name()).join("refs").join(revision);
    let commit = fs::read_to_string(of_branch).map_or(revision.into(), |s| s.trim().to_string());
    let folder = cache.repo(repository.clone()).pointer_path(&commit);
    let entries = fs::read_dir(folder).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Some((commit, names.collect()))
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

/// The files to download.
struct Wanted {
    files: Vec<String>,
    /// The file of the model, if it is not the whole folder.
    model: Option<String>,
}

fn is_gguf(file: &str) -> bool {
    file.ends_with(".gguf")
}

/// Lists the parts of a split model by the name of one, such as `NAME-00001-of-00003.gguf`.
fn parts_of<'a>(file: &str, files: &'a [String]) -> Vec<&'a String> {
    let of = |file: &str| {
        let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, _) = rest.rsplit_once('-')?;
        Some((stem.to_string(), count.to_string()))
    };
    let whole = of(file);
    files.iter().filter(|other| *other == file || (whole.is_some() && of(other) == whole)).collect()
}

/// Picks the files that a model is read from among all files at the top of a repository.
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

    #[cfg(unix)]
    #[test]
    fn a_path_that_cannot_be_read_is_no_id() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = resolve(&format!("{}/model", file.path().display()), None).unwrap_err();
        let message = format!("{error:#}");
        assert!(message.contains("/model: cannot read: Not a directory"), "{message}");
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
