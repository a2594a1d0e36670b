//! From files to a [`LanguageModel`]: Hugging Face folders, PyTorch checkpoints, GGUF.

mod gguf;
mod hf;
mod outline;

use std::{fs, io, path::Path};

use burn::tensor::Device;
use kv_weights::{Activations, WeightFormat};

pub(crate) use self::hf::open_folder;
pub use self::outline::{ModelOutline, outline, outline_config};
pub use crate::checkpoint::{LoadObserver, Planned, WeightBytes};
use crate::{
    cache_config::ModelCacheConfig,
    checkpoint::Watcher,
    dtype::WeightDtype,
    error::{Error, Result},
    model::LanguageModel,
    tokenizer::Tokenizer,
};

/// What [`load()`] read.
#[derive(Debug)]
pub struct Loaded {
    /// The model on the device, in f32 unless [`LoadOptions`] say otherwise.
    pub model: LanguageModel,
    /// Its tokenizer, or why there is none: a model can be evaluated on ids without one.
    pub tokenizer: Result<Tokenizer>,
    /// The cache it was trained with: [`KV_CACHE_FILE`](crate::KV_CACHE_FILE) beside the weights.
    pub cache: Option<ModelCacheConfig>,
    /// The name the files give the model, else the file's or folder's.
    pub name: String,
    /// What it was read from.
    pub format: Format,
    /// What a user should know of how the model is computed, a line each: programs print them.
    pub notes: Vec<String>,
}

/// The formats [`load()`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A folder with `config.json` and `*.safetensors`.
    Safetensors,
    /// A folder with `config.json` and `pytorch_model*.bin`.
    Pytorch,
    /// A GGUF file, or the parts of one.
    Gguf,
}

/// How [`load_with`] reads a model.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The type of the weights, in which the model then computes.
    pub dtype: WeightDtype,
    /// Whether quantized matrices, in the blocks of a GGUF file or as [`save_quantized`](crate::save_quantized) writes
    /// them, and those in f16 and bf16 stay packed, and what they are multiplied with; `None` restores them. The model then computes in f32: of another [`dtype`](Self::dtype), blocks are restored. They are not
    /// trained.
    pub packed: Option<Activations>,
    /// The most bytes of a buffer: packed matrices with more become several of neighboring rows, as they do beyond what
    /// the device has. `None` leaves it at the device's.
    pub largest_buffer: Option<u64>,
    /// The format that an [`outline`] counts matrices in, as if
    /// [`save_quantized`](crate::save_quantized) had written them so; those whose rows are no whole
    /// blocks stay as they are. A load ignores it.
    pub planned: Option<WeightFormat>,
}

impl Default for LoadOptions {
    /// Restored to f32, whatever the file holds.
    fn default() -> Self {
        Self { dtype: WeightDtype::F32, packed: None, largest_buffer: None, planned: None }
    }
}

impl LoadOptions {
    /// The same options with weights of `dtype`.
    #[must_use]
    pub fn with_dtype(self, dtype: WeightDtype) -> Self {
        Self { dtype, ..self }
    }

    /// The same options, with matrices that stay in the blocks of a GGUF file or are restored.
    #[must_use]
    pub fn with_packed(self, packed: Option<Activations>) -> Self {
        Self { packed, ..self }
    }

    /// The same options, with buffers of at most so many bytes for packed matrices.
    #[must_use]
    pub fn with_largest_buffer(self, largest_buffer: Option<u64>) -> Self {
        Self { largest_buffer, ..self }
    }

    /// The same options for an [`outline`] of the model in another format.
    #[must_use]
    pub fn with_planned(self, planned: Option<WeightFormat>) -> Self {
        Self { planned, ..self }
    }
}

/// Reads a model in f32: [`load_with`] the default options.
///
/// # Errors
///
/// Those of [`load_with`].
pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<Loaded> {
    load_with(path, device, LoadOptions::default())
}

/// Reads a model: a folder with `config.json`, or a `.gguf` file. Of a model in several files, all are
/// read whichever one is named.
///
/// Weights are memory mapped and read one tensor at a time: those that stay packed are used where they lie on the CPU,
/// others are rounded to the type that is asked for, or copied if they are of it, and the pages of the file that they
/// were copied from are given back. The file must not be truncated by another process meanwhile.
///
/// # Errors
///
/// One line naming the file, the tensor or field, its value and the rule: nothing there, a
/// truncated or foreign file, a missing part or tensor, a tensor the model has no place for, a wrong
/// shape, NaN or infinite weights or ones that the type does not reach, a device without the type,
/// quantized weights of other formats, an unsupported architecture or GGML type, a cache configuration that
/// does not fit the model.
pub fn load_with(path: impl AsRef<Path>, device: &Device, options: LoadOptions) -> Result<Loaded> {
    read(path.as_ref(), device, options, Watcher::default())
}

/// [`load_with`], of which `observer` is told: what the model will take before anything is allocated, and then how
/// much has been read.
///
/// # Errors
///
/// Those of [`load_with`], and what the observer says.
pub fn load_observed(
    path: impl AsRef<Path>,
    device: &Device,
    options: LoadOptions,
    observer: impl LoadObserver + 'static,
) -> Result<Loaded> {
    read(path.as_ref(), device, options, Watcher::new(observer))
}

fn read(path: &Path, device: &Device, options: LoadOptions, watcher: Watcher) -> Result<Loaded> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::NotFound { path: path.into(), hint: String::new() });
        }
        Err(source) => return Err(Error::Io { path: path.into(), source }),
    };
    let mut loaded = if metadata.is_dir() {
        hf::load(path, device, options, watcher)?
    } else if path.extension().is_some_and(|ext| ext == "safetensors" || ext == "bin") {
        // A weights file: its configuration lies beside it.
        hf::load_file(path, device, options, watcher)?
    } else {
        gguf::load(path, device, options, watcher)?
    };

    let packed = options.packed.filter(|_| loaded.model.is_packed());
    loaded.notes.extend(activations_note(packed, is_cpu(device)).map(str::to_string));
    let vocab_size = loaded.model.vocab_size();
    if let Ok(tokenizer) = &loaded.tokenizer
        && tokenizer.n_ids() > vocab_size
    {
        let n_ids = tokenizer.n_ids();
        let why = format!("{}: has {n_ids} ids, the model knows {vocab_size}", path.display());
        loaded.tokenizer = Err(Error::tokenizer(why));
    }
    if let Ok(tokenizer) = &loaded.tokenizer {
        loaded.notes.extend_from_slice(tokenizer.notes());
    }
    Ok(loaded)
}

/// What a user should know who asks for activations in integers.
fn activations_note(packed: Option<Activations>, is_cpu: bool) -> Option<&'static str> {
    let rounded = !matches!(packed, None | Some(Activations::Exact));
    (rounded && !is_cpu).then_some(
        "activations are rounded on the CPU only: this device multiplies packed weights with \
         activations as they are",
    )
}

fn is_cpu(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if <kv_cubecl::Flex as kv_cubecl::Target>::hosts(device) {
        return true;
    }
    let _ = device;
    false
}

fn file_stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_rounds_no_activations_is_noted() {
        for rounded in [Activations::Int16, Activations::Int8] {
            assert!(
                activations_note(Some(rounded), false)
                    .is_some_and(|note| note.contains("CPU only"))
            );
            assert_eq!(activations_note(Some(rounded), true), None);
        }
        assert_eq!(activations_note(Some(Activations::Exact), false), None);
        assert_eq!(activations_note(None, false), None);
    }
}
