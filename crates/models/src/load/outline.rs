//! Sizes of a model, found without reading its weights.

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    rc::Rc,
};

use burn::tensor::Device;

use super::{LoadOptions, hf};
use crate::{
    cache_config::{KV_CACHE_FILE, ModelCacheConfig},
    checkpoint::{LoadObserver, Planned, Watcher, WeightBytes},
    dtype::WeightDtype,
    error::{Error, Result},
    family::ConfigJson,
    files::read_to_string,
    spec::ModelSpec,
};

/// The sizes of a model, see [`outline`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelOutline {
    /// The sizes of every layer.
    pub spec: ModelSpec,
    /// The sizes of its weights.
    pub weights: WeightBytes,
    /// The cache that the model was trained with, if its files name one.
    pub cache: Option<ModelCacheConfig>,
}

impl ModelOutline {
    /// Creates an outline from sizes.
    pub fn new(spec: ModelSpec, weights: WeightBytes) -> Self {
        Self { spec, weights, cache: None }
    }

    /// Returns the description that observers of a load receive.
    pub fn planned(&self) -> Planned<'_> {
        Planned::new(&self.spec, &self.weights, self.cache.as_ref())
    }
}

/// Returns the sizes that the model at `path` would have with these options, from the headers of
/// its files. `path` is a folder, a `.gguf` file, or a `config.json` without weights. In the last
/// case, the tensors are those that the family's importer requests.
///
/// # Errors
/// Fails as [`load_with`](super::load_with) does before the first tensor is read. Also fails for
/// quantized weights with only a `config.json`, which does not name the quantized matrices.
pub fn outline(
    path: impl AsRef<Path>,
    device: &Device,
    options: LoadOptions,
) -> Result<ModelOutline> {
    let path = path.as_ref();
    let Some(config) = config_alone(path)? else {
        return observed(|watcher| super::read(path, device, options, watcher).map(drop));
    };
    let text = read_to_string(&config)?;
    let beside = config.parent().unwrap_or(Path::new("."));
    let cache = hf::own_cache(&beside.join(KV_CACHE_FILE))?;
    let config = ConfigJson { text: &text, path: &config };
    observed(|watcher| hf::outline(&config, None, cache, device, options, watcher))
}

/// Returns the [`outline`] of a model from its `config.json`. `stored` is the type of its
/// checkpoint's floats; by default it is the type that the file names.
///
/// # Errors
/// Fails as [`outline`] does.
pub fn outline_config(
    config: &ConfigJson<'_>,
    stored: Option<WeightDtype>,
    device: &Device,
    options: LoadOptions,
) -> Result<ModelOutline> {
    observed(|watcher| hf::outline(config, stored, None, device, options, watcher))
}

/// Returns the path of the configuration, if there are no weights.
fn config_alone(path: &Path) -> Result<Option<PathBuf>> {
    if path.extension().is_some_and(|extension| extension == "json") {
        return Ok(Some(path.into()));
    }
    let config = path.join("config.json");
    if !config.is_file() {
        return Ok(None);
    }
    match hf::weight_files(path) {
        Ok(_) => Ok(None),
        Err(Error::NotFound { .. }) => Ok(Some(config)),
        Err(error) => Err(error),
    }
}

/// Returns what an observer receives first, from a load that it then ends.
fn observed(load: impl FnOnce(Watcher) -> Result<()>) -> Result<ModelOutline> {
    struct Ends(Rc<RefCell<Option<ModelOutline>>>);
    impl LoadObserver for Ends {
        fn begin(&mut self, planned: &Planned<'_>) -> Result<()> {
            let (spec, weights) = (planned.spec.clone(), planned.weights.clone());
            let cache = planned.cache.cloned();
            self.0.replace(Some(ModelOutline { spec, weights, cache }));
            Err(Error::unsupported("reading weights", "no more than an outline was asked for"))
        }
    }
    let found = Rc::default();
    let result = load(Watcher::new(Ends(Rc::clone(&found))));
    match (found.take(), result) {
        (Some(outline), _) => Ok(outline),
        (None, Err(error)) => Err(error),
        (None, Ok(())) => {
            let why = "its importer does not begin with Weights::begin";
            Err(Error::unsupported("outline of the model", why))
        }
    }
}
