//! Loads a [`LanguageModel`] from Hugging Face folders, PyTorch checkpoints and GGUF files.

mod gguf;
mod hf;
mod outline;
mod quantization;
mod safetensors;

use std::{fs, io, path::Path};

use burn::tensor::Device;
use kv_weights::{Activations, WeightFormat};

pub use self::hf::{open_folder, random};
pub use self::outline::{ModelOutline, outline, outline_config};
pub use crate::checkpoint::{LoadObserver, Planned, WeightBytes};
use crate::{
    cache_config::ModelCacheConfig,
    checkpoint::{Watcher, Weights},
    dtype::WeightDtype,
    error::{Error, Result},
    model::LanguageModel,
    tokenizer::Tokenizer,
};

/// The result of [`load()`].
#[derive(Debug)]
pub struct Loaded {
    /// The model on the device, in f32 unless [`LoadOptions`] select another type.
    pub model: LanguageModel,
    /// The tokenizer, or the reason why there is none. A model can be evaluated on ids without one.
    pub tokenizer: Result<Tokenizer>,
    /// The cache that the model was trained with, from [`KV_CACHE_FILE`](crate::KV_CACHE_FILE)
    /// beside the weights.
    pub cache: Option<ModelCacheConfig>,
    /// The name in the files, or else the name of the file or folder.
    pub name: String,
    /// The format of the files.
    pub format: Format,
    /// Notes for users about how the model is computed, one line each. Programs print them.
    pub notes: Vec<String>,
}

/// The formats that [`load()`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A folder with `config.json` and `*.safetensors`.
    Safetensors,
    /// A folder with `config.json` and `pytorch_model*.bin`.
    Pytorch,
    /// A GGUF file, or its parts.
    Gguf,
}

/// Options of [`load_with`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The type of the weights, in which the model computes.
    pub dtype: WeightDtype,
    /// The precision of activations for packed weights; `None` restores the weights. Quantized
    /// matrices of GGUF files and of [`save_quantized`](crate::save_quantized), and matrices in f16
    /// and bf16, then stay packed and are not trained. The model computes in f32; with another
    /// [`dtype`](Self::dtype), blocks are restored.
    pub packed: Option<Activations>,
    /// The most bytes of a buffer. Larger packed matrices are divided into several with neighboring
    /// rows. `None` uses the limit of the device.
    pub largest_buffer: Option<u64>,
    /// The format to which the head of a language model is quantized as it is loaded: int4, int8 or
    /// MXFP4. A head that is not stored as floats is refused. A tied head is also the embedding.
    /// `None` keeps it as stored.
    pub head: Option<WeightFormat>,
    /// The format in which an [`outline`] counts matrices, as if
    /// [`save_quantized`](crate::save_quantized) had written them. Matrices whose rows are not
    /// whole blocks are unchanged. A load ignores this option.
    pub planned: Option<WeightFormat>,
}

impl Default for LoadOptions {
    /// Restores all weights to f32.
    fn default() -> Self {
        let dtype = WeightDtype::F32;
        Self { dtype, packed: None, largest_buffer: None, head: None, planned: None }
    }
}

impl LoadOptions {
    /// Sets the type of weights.
    #[must_use]
    pub fn with_dtype(self, dtype: WeightDtype) -> Self {
        Self { dtype, ..self }
    }

    /// Sets the precision of activations for packed weights; `None` restores the weights.
    #[must_use]
    pub fn with_packed(self, packed: Option<Activations>) -> Self {
        Self { packed, ..self }
    }

    /// Sets the most bytes of a buffer of packed matrices.
    #[must_use]
    pub fn with_largest_buffer(self, largest_buffer: Option<u64>) -> Self {
        Self { largest_buffer, ..self }
    }

    /// Sets the format to which the head is quantized.
    #[must_use]
    pub fn with_head(self, head: Option<WeightFormat>) -> Self {
        Self { head, ..self }
    }

    /// Sets the format in which an [`outline`] counts matrices.
    #[must_use]
    pub fn with_planned(self, planned: Option<WeightFormat>) -> Self {
        Self { planned, ..self }
    }

    fn apply(self, weights: &mut Weights) -> Result<()> {
        weights.set_dtype(self.dtype)?;
        weights.set_packed(self.packed)?;
        weights.set_head(self.head)?;
        weights.largest_buffer = self.largest_buffer;
        weights.planned = self.planned;
        Ok(())
    }
}

/// Reads a model in f32, with the default options of [`load_with`].
///
/// # Errors
/// Fails as [`load_with`] does.
pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<Loaded> {
    load_with(path, device, LoadOptions::default())
}

/// Reads a model from a folder with `config.json` or from a `.gguf` file. If a model has several
/// files, any of them can be named and all are read.
///
/// Weights are memory-mapped and read one tensor at a time. On the CPU, packed weights are used in
/// the mapped file. Other weights are rounded to the requested type, or copied if they have it, and
/// their pages are returned to the system. No other process may truncate the file meanwhile.
///
/// # Errors
/// Fails with one line that names the file, the tensor or field, its value and the rule. Reasons
/// are a missing, truncated or foreign file, a missing part or tensor, a tensor that the model does
/// not use, a wrong shape, weights that are not finite or exceed the type, a type that the device
/// does not support, quantized weights of other formats, an unsupported architecture or GGML type,
/// and a cache configuration that does not fit the model.
pub fn load_with(path: impl AsRef<Path>, device: &Device, options: LoadOptions) -> Result<Loaded> {
    read(path.as_ref(), device, options, Watcher::default())
}

/// Reads a model as [`load_with`] does. `observer` receives the sizes of the model before anything
/// is allocated, and then the progress.
///
/// # Errors
/// Fails as [`load_with`] does, or with the error of the observer.
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
        // The configuration of a weights file is in the same folder.
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
        let why = format!("{}: has {n_ids} ids, but the model has {vocab_size}", path.display());
        loaded.tokenizer = Err(Error::tokenizer(why));
    }
    if let Ok(tokenizer) = &loaded.tokenizer {
        loaded.notes.extend_from_slice(tokenizer.notes());
    }
    Ok(loaded)
}

/// Returns a note for users who request integer activations on a device that does not round them.
fn activations_note(packed: Option<Activations>, is_cpu: bool) -> Option<&'static str> {
    let rounded = !matches!(packed, None | Some(Activations::Exact));
    (rounded && !is_cpu).then_some(
        "activations are rounded on the CPU only: this device multiplies packed weights with \
         exact activations",
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
