//! Saves a [`LanguageModel`] as a Hugging Face folder that [`load`](crate::load()) and the
//! transformers library read.

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::HashMap,
    fs,
    io::{self, Write},
    path::Path,
};

use burn::tensor::DType;
use safetensors::{Dtype, SafeTensorError, View};
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;

pub(crate) mod file;
mod folder;
mod options;
mod packed;

pub use folder::{check_absent, new_folder};
pub use options::QuantizeOptions;
pub use packed::{QuantizedExports, save_quantized};

pub use crate::files::staged;

use crate::{
    cache_config::{KV_CACHE_FILE, ModelCacheConfig},
    dtype::WeightDtype,
    error::{Error, Result},
    exports::{Export, Exports, Values},
    files::{failed, pretty, staged::stage},
    float::{Float, append, with_float},
    model::LanguageModel,
    tokenizer::Tokenizer,
};

/// Options of [`save()`].
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions<'a> {
    /// The float type of the weights, which are rounded if they have another type.
    pub dtype: WeightDtype,
    /// The cache that the model was trained with, written as [`KV_CACHE_FILE`].
    pub cache: Option<&'a ModelCacheConfig>,
}

impl Default for SaveOptions<'_> {
    /// Keeps the type of the model, and writes no cache.
    fn default() -> Self {
        Self { dtype: WeightDtype::Auto, cache: None }
    }
}

impl SaveOptions<'_> {
    fn dtype_of(&self, model: &LanguageModel) -> DType {
        self.dtype.dtype().unwrap_or_else(|| model.dtype())
    }
}

/// Checks that [`save()`] can write the model, except for the values of its weights and the folder.
/// Call it before hours of training.
///
/// # Errors
/// Fails if no Hugging Face family has the configuration, or if the model lacks ids of the
/// tokenizer or layers of the cache.
pub fn check_savable(
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    options: SaveOptions<'_>,
) -> Result<()> {
    configured(model, tokenizer, options, Path::new("config.json")).map(drop)
}

/// Checks the model, and returns the content of `config.json`.
fn configured(
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    options: SaveOptions<'_>,
    path: &Path,
) -> Result<Map<String, Value>> {
    let (n_ids, vocab_size) = (tokenizer.n_ids(), model.vocab_size());
    if n_ids > vocab_size {
        return Err(Error::tokenizer(format!("has {n_ids} ids, but the model has {vocab_size}")));
    }
    if let Some(cache) = options.cache {
        cache.validate(model)?;
    }
    config(model, tokenizer, options.dtype_of(model), path)
}

/// Writes a Hugging Face folder: `model.safetensors`, `config.json`, `tokenizer.json`,
/// `tokenizer_config.json` and, with a cache, [`KV_CACHE_FILE`].
///
/// Creates the folder if it does not exist. Other files in it are unchanged, but the
/// [`KV_CACHE_FILE`] of an earlier model is removed. All files are complete before the first one is
/// replaced.
///
/// The transformers library loads the folder with `AutoModelForCausalLM` and `AutoTokenizer`. For
/// models with Qwen2's biases, its version 5 replaces the tokenizer's rules by Qwen2's, which
/// normalize to NFC; `PreTrainedTokenizerFast` returns the ids of this crate there too.
///
/// # Errors
/// Fails with one line that names the file. Reasons are a file that cannot be written, a weight
/// that is not finite or exceeds the type, a configuration that no Hugging Face family has, and ids
/// of the tokenizer or layers of the cache that the model lacks. The folder is then unchanged.
pub fn save(
    folder: impl AsRef<Path>,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    options: SaveOptions<'_>,
) -> Result<()> {
    let folder = folder.as_ref();
    let config = configured(model, tokenizer, options, &folder.join("config.json"))?;
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let dtype = options.dtype_of(model);
    let weights = |path: &Path| write_weights(path, model.decoder().export(), dtype);
    write_folder(folder, model, tokenizer, &config, options.cache, weights)
}

/// Writes all files of a folder, then renames them; `weights` writes the weights for this path.
fn write_folder(
    folder: &Path,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    config: &Map<String, Value>,
    cache: Option<&ModelCacheConfig>,
    weights: impl FnOnce(&Path) -> Result<NamedTempFile>,
) -> Result<()> {
    let cache_path = folder.join(KV_CACHE_FILE);
    let mut texts = vec![
        (folder.join("config.json"), pretty(config)),
        (folder.join("tokenizer.json"), tokenizer.to_json()?.into_bytes()),
        (folder.join("tokenizer_config.json"), pretty(&tokenizer_config(model, tokenizer))),
    ];
    texts.extend(cache.map(|cache| (cache_path.clone(), pretty(cache))));
    // The weights come first, because they are most likely to fail.
    let path = folder.join("model.safetensors");
    let mut files = vec![(weights(&path)?, path)];
    for (path, bytes) in texts {
        let mut file = stage(&path).map_err(failed(&path))?;
        file.write_all(&bytes).map_err(failed(&path))?;
        files.push((file, path));
    }
    for (file, path) in &files {
        // The file is opened by name, because its writer may have replaced it.
        fs::File::open(file).and_then(|file| file.sync_all()).map_err(failed(path))?;
    }
    for (file, path) in files {
        file.persist(&path).map_err(|error| failed(&path)(error.error))?;
    }
    if cache.is_none() {
        match fs::remove_file(&cache_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed(&cache_path)(error));
            }
            _ => {}
        }
    }
    Ok(())
}

fn config(
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    dtype: DType,
    path: &Path,
) -> Result<Map<String, Value>> {
    let mut config = model.decoder().config_json(path)?;
    let eos: Vec<_> = tokenizer.eos().iter().collect();
    let eos = match eos[..] {
        [] => Value::Null,
        [id] => json!(id),
        _ => json!(eos),
    };
    let dtype = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    // Some families have other models' ids as defaults.
    for (key, value) in [
        ("bos_token_id", json!(tokenizer.bos())),
        ("eos_token_id", eos),
        ("pad_token_id", Value::Null),
        ("torch_dtype", json!(dtype)),
    ] {
        config.insert(key.into(), value);
    }
    Ok(config)
}

fn tokenizer_config(model: &LanguageModel, tokenizer: &Tokenizer) -> Value {
    let (bos, eos) = tokenizer.template_tokens();
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": tokenizer.chat_template(),
        "model_max_length": model.max_positions(),
        "clean_up_tokenization_spaces": false,
    })
}

/// Writes weights as safetensors to a temporary file beside `path`, with one tensor at a time in
/// host memory. The caller moves the file to `path`.
///
/// # Errors
/// An [`Error`] for weights that cannot be read or a file that cannot be written.
pub fn write_weights(path: &Path, exports: Exports, dtype: DType) -> Result<NamedTempFile> {
    let failure = RefCell::new(None);
    let failure = &failure;
    let views = exports.into_tensors().into_iter().map(|Export { name, values }| {
        let (shape, dtype) = (values.shape(), values.stored_as(dtype));
        (name.clone(), Weight { name, values, shape, dtype, path, failure })
    });
    let file = stage(path).map_err(failed(path))?;
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let written = safetensors::serialize_to_file(views, Some(metadata), file.path());
    if let Some(error) = failure.take() {
        return Err(error);
    }
    written.map_err(|error| match error {
        SafeTensorError::IoError(source) => failed(path)(source),
        other => {
            Error::Malformed { path: path.into(), format: "safetensors", why: other.to_string() }
        }
    })?;
    // The safetensors crate replaces the file by one that only its owner can read.
    let permissions = file.as_file().metadata().map(|metadata| metadata.permissions());
    permissions
        .and_then(|permissions| fs::set_permissions(file.path(), permissions))
        .map_err(failed(path))?;
    Ok(file)
}

struct Weight<'a> {
    name: String,
    values: Values,
    shape: Vec<usize>,
    dtype: DType,
    path: &'a Path,
    /// The first error; the trait cannot return it.
    failure: &'a RefCell<Option<Error>>,
}

impl Weight<'_> {
    fn bytes(&self) -> Result<Vec<u8>> {
        rounded(&self.values, self.dtype, self.path, &self.name)
    }
}

/// Returns the bytes of numbers in this type, little-endian.
fn rounded(values: &Values, dtype: DType, path: &Path, name: &str) -> Result<Vec<u8>> {
    let wrong = |why| Error::Tensor { path: path.into(), tensor: name.into(), why };
    let data = values.data().map_err(wrong)?;
    if dtype == DType::I64 {
        return Ok(data.iter::<i64>().flat_map(i64::to_le_bytes).collect());
    }
    with_float!(
        dtype,
        T => {
            let mut values = Vec::<T>::with_capacity(data.num_elements());
            append(data.as_bytes(), data.dtype(), &mut values)
                .map_err(|flaw| flaw.of(path, name))?;
            let mut bytes = Vec::with_capacity(size_of_val(&values[..]));
            values.into_iter().for_each(|value| value.put_le(&mut bytes));
            Ok(bytes)
        },
        else Err(wrong(format!("cannot be written as {dtype:?}, which is not a float type")))
    )
}

impl View for Weight<'_> {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I64 => Dtype::I64,
            _ => Dtype::F32,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut failure = self.failure.borrow_mut();
        if failure.is_none() {
            match self.bytes() {
                Ok(bytes) => return bytes.into(),
                Err(error) => *failure = Some(error),
            }
        }
        // The file is discarded after an error.
        Cow::Borrowed(&[])
    }

    fn data_len(&self) -> usize {
        self.dtype.size() * self.shape.iter().product::<usize>()
    }
}
