//! What a model takes, found without reading its weights.

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

/// A model as it would be loaded: see [`outline`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelOutline {
    /// Its sizes, layer by layer.
    pub spec: ModelSpec,
    /// What its weights would take.
    pub weights: WeightBytes,
    /// The cache that it was trained with, if its files say so.
    pub cache: Option<ModelCacheConfig>,
}

impl ModelOutline {
    /// A model of `spec` with these weights.
    pub fn new(spec: ModelSpec, weights: WeightBytes) -> Self {
        Self { spec, weights, cache: None }
    }

    /// What is asked of a model that is about to be loaded.
    pub fn planned(&self) -> Planned<'_> {
        Planned::new(&self.spec, &self.weights, self.cache.as_ref())
    }
}

/// What the model at `path` would take if it were loaded so, by the headers of its files: a folder, a `.gguf` file,
/// or a `config.json`, or a folder that has nothing else, whose tensors are then those that its family's importer
/// asks for.
///
/// # Errors
///
/// Those of [`load_with`](super::load_with) up to the first tensor that is read; quantized weights of which there is
/// only a `config.json`, which does not say which of its matrices are.
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

/// [`outline`] of the model of a `config.json`, whose checkpoint's floats are of the type `stored`, or of that which
/// the file names.
///
/// # Errors
///
/// Those of [`outline`].
pub fn outline_config(
    config: &ConfigJson<'_>,
    stored: Option<WeightDtype>,
    device: &Device,
    options: LoadOptions,
) -> Result<ModelOutline> {
    observed(|watcher| hf::outline(config, stored, None, device, options, watcher))
}

/// The configuration of a model whose weights are not there.
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

/// What an observer is told first, by a load that it then ends.
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
    let told = Rc::default();
    let result = load(Watcher::new(Ends(Rc::clone(&told))));
    match (told.take(), result) {
        (Some(outline), _) => Ok(outline),
        (None, Err(error)) => Err(error),
        (None, Ok(())) => {
            let why = "its importer does not begin with Weights::begin";
            Err(Error::unsupported("outline of the model", why))
        }
    }
}
