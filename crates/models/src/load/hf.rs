//! Hugging Face folders: `config.json` with safetensors or PyTorch weights.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, Device};
use burn_store::{ModuleStore, PytorchStore};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Format, LoadOptions, Loaded, file_stem, quantization, safetensors};
use crate::{
    cache_config::{KV_CACHE_FILE, ModelCacheConfig},
    checkpoint::{
        Outline, Watcher, Weights,
        quantized::{FP8, INTEGER_FORMAT, INTEGERS, MXFP4},
    },
    dtype::WeightDtype,
    error::{Error, Result},
    family::{ConfigJson, Family},
    files::{Part, read_to_string},
    model::LanguageModel,
    registry,
    tokenizer::Tokenizer,
};

pub(super) fn load(
    folder: &Path,
    device: &Device,
    options: LoadOptions,
    watcher: Watcher,
) -> Result<Loaded> {
    let path = folder.join("config.json");
    match fs::metadata(&path) {
        Ok(found) if found.is_file() => {}
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(Error::Io { path, source });
        }
        _ => {
            let hint = ", a model is a folder with config.json and weights, or a .gguf file".into();
            return Err(Error::NotFound { path, hint });
        }
    }
    let (format, files) = weight_files(folder)?;
    build(folder, (file_stem(folder), format), &files, device, options, watcher)
}

/// Reads one weights file, or all shards of its model, with the `config.json` beside it.
pub(super) fn load_file(
    file: &Path,
    device: &Device,
    options: LoadOptions,
    watcher: Watcher,
) -> Result<Loaded> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let format = match file.extension() {
        Some(ext) if ext == "bin" => Format::Pytorch,
        _ => Format::Safetensors,
    };
    let Some(part) = Part::parse(file) else {
        let file = &[file.to_path_buf()];
        return build(folder, (file_stem(&file[0]), format), file, device, options, watcher);
    };
    let index = folder.join(format!("{}.{}.index.json", part.stem, part.extension));
    let files = if index.is_file() { shards(folder, &index)? } else { part.paths()? };
    if !files.iter().any(|listed| listed.file_name() == file.file_name()) {
        let rule = format!("does not name {}", file.display());
        return Err(Error::config(index, "weight_map", format!("{} files", files.len()), rule));
    }
    build(folder, (part.stem, format), &files, device, options, watcher)
}

fn build(
    folder: &Path,
    (name, format): (String, Format),
    files: &[PathBuf],
    device: &Device,
    options: LoadOptions,
    watcher: Watcher,
) -> Result<Loaded> {
    let config_path = folder.join("config.json");
    let config = read_to_string(&config_path)?;
    let header = Header::read(&config, &config_path)?;
    let family = header.family(&config_path)?;

    let cache_path = folder.join(KV_CACHE_FILE);
    let cache = own_cache(&cache_path)?;
    let mut eos = header.eos_token_id.clone().map_or(vec![], Ids::into_vec);
    eos.extend(generation_eos(&folder.join("generation_config.json"))?);

    let mut weights = open_files(folder, format, files, device)?;
    weights.watcher = watcher;
    weights.cache.clone_from(&cache);
    weights.join_quantized()?;
    weights.join_scaled(header.block(&config_path)?)?;
    options.apply(&mut weights)?;
    let config = ConfigJson { text: &config, path: &config_path };
    let model = family.import(&config, &mut weights)?;
    let model = model.with_packed(weights.kept());
    let notes = std::mem::take(weights.notes());
    if let Some(cache) = &cache {
        cache.validate(&model).map_err(|error| error.in_file(&cache_path))?;
    }
    let tokenizer = Tokenizer::from_folder(folder, &eos);
    Ok(Loaded { model, tokenizer, cache, name, format, notes })
}

/// Reads the end-of-text ids of `generation_config.json`, if the file exists.
fn generation_eos(path: &Path) -> Result<Vec<u32>> {
    match read_to_string(path) {
        Ok(text) => {
            let Generation { eos_token_id } = ConfigJson { text: &text, path }.parse()?;
            Ok(eos_token_id.map_or(vec![], Ids::into_vec))
        }
        Err(Error::NotFound { .. }) => Ok(vec![]),
        Err(error) => Err(error),
    }
}

/// Reads the cache configuration, if the file exists.
pub(super) fn own_cache(path: &Path) -> Result<Option<ModelCacheConfig>> {
    match ModelCacheConfig::read(path) {
        Ok(cache) => Ok(Some(cache)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reports the sizes of a model to the observer, from its configuration alone. `stored` is the type
/// of its checkpoint's floats, if known.
pub(super) fn outline(
    config: &ConfigJson<'_>,
    stored: Option<WeightDtype>,
    cache: Option<ModelCacheConfig>,
    device: &Device,
    options: LoadOptions,
    watcher: Watcher,
) -> Result<()> {
    let header = Header::read(config.text, config.path)?;
    let family = header.family(config.path)?;
    let mxfp4 = match header.method() {
        None => false,
        Some(MXFP4) if family.quantizations().contains(&MXFP4) => true,
        Some(method) => {
            let why = format!(
                "{} does not name the quantized matrices; name the folder with its weights",
                config.path.display()
            );
            return Err(Error::unsupported(format!("weights quantized by {method}"), why));
        }
    };
    let stored = match stored.and_then(WeightDtype::dtype) {
        Some(stored) => stored,
        None => header.stored(config.path)?,
    };
    let mut weights = Weights::new(config.path, None, device);
    weights.watcher = watcher;
    weights.cache = cache;
    weights.outline(Outline::new(stored, mxfp4));
    let dtype = match options.dtype {
        WeightDtype::Auto => WeightDtype::of(stored).unwrap_or(WeightDtype::F32),
        requested => requested,
    };
    options.with_dtype(dtype).apply(&mut weights)?;
    family.import(config, &mut weights).map(drop)
}

/// Builds the model that `config` describes with random weights, which depend on the device's seed.
///
/// # Errors
/// Fails for a field that is missing or breaks a rule, for a family that is not known, and for one
/// whose models cannot be trained from scratch.
pub fn random(config: &ConfigJson<'_>, device: &Device) -> Result<LanguageModel> {
    let header = Header::read(config.text, config.path)?;
    header.family(config.path)?.random(config, device)
}

/// Opens the tensors of a Hugging Face folder without reading them.
///
/// # Errors
/// An [`Error`] for a folder without weight files, or with files that cannot be read, and for
/// options that the device does not support.
pub fn open_folder(folder: &Path, device: &Device, options: LoadOptions) -> Result<Weights> {
    let (format, files) = weight_files(folder)?;
    let mut weights = open_files(folder, format, &files, device)?;
    weights.join_quantized()?;
    options.apply(&mut weights)?;
    Ok(weights)
}

fn open_files(
    folder: &Path,
    format: Format,
    files: &[PathBuf],
    device: &Device,
) -> Result<Weights> {
    // Messages name a single file, or the folder of several shards.
    let checkpoint = if let [file] = files { file } else { folder };
    let mut weights = Weights::new(checkpoint, None, device);
    for file in files {
        open(format, file, &mut weights)?;
    }
    Ok(weights)
}

/// The fields of `config.json` that all families have.
#[derive(Deserialize)]
struct Header {
    model_type: String,
    eos_token_id: Option<Ids>,
    quantization_config: Option<Map<String, Value>>,
    compression_config: Option<Map<String, Value>>,
    /// The type of the floats, under its old and its new name.
    torch_dtype: Option<String>,
    dtype: Option<String>,
    /// The fields of the language model, in a checkpoint that contains more.
    text_config: Option<TextHeader>,
}

/// The fields of a language model that can be beside `text_config` or in it.
#[derive(Default, Deserialize)]
struct TextHeader {
    eos_token_id: Option<Ids>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
}

impl Header {
    /// Reads the fields; those beside `text_config` come first.
    fn read(text: &str, path: &Path) -> Result<Self> {
        let mut header: Self = ConfigJson { text, path }.parse()?;
        let text = header.text_config.take().unwrap_or_default();
        header.eos_token_id = header.eos_token_id.or(text.eos_token_id);
        header.torch_dtype = header.torch_dtype.or(text.torch_dtype);
        header.dtype = header.dtype.or(text.dtype);
        Ok(header)
    }

    fn family(&self, path: &Path) -> Result<&'static dyn Family> {
        let model_type = &self.model_type;
        let family = registry::by_model_type(model_type).map_err(|known| {
            let why = format!("{} has it; {known} are supported", path.display());
            Error::unsupported(format!("model_type {model_type}"), why)
        })?;
        self.check(path, family.quantizations())?;
        Ok(family)
    }

    /// Returns the method by which weights are quantized, if they are.
    fn method(&self) -> Option<&str> {
        let config = self.quantization_config.as_ref().or(self.compression_config.as_ref())?;
        Some(config.get("quant_method").and_then(Value::as_str).unwrap_or("another method"))
    }

    /// Returns the shape of the blocks of 8-bit floats, if weights are quantized to them.
    fn block(&self, path: &Path) -> Result<Option<[usize; 2]>> {
        match &self.quantization_config {
            Some(config) if self.method() == Some(FP8) => {
                quantization::block(config, path).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the type of the checkpoint's floats.
    fn stored(&self, path: &Path) -> Result<DType> {
        match self.dtype.as_deref().or(self.torch_dtype.as_deref()) {
            None | Some("float32") => Ok(DType::F32),
            Some("float16") => Ok(DType::F16),
            Some("bfloat16") => Ok(DType::BF16),
            Some(other) => {
                let rule = "must be float32, float16 or bfloat16";
                Err(Error::config(path, "torch_dtype", other, rule))
            }
        }
    }

    /// Rejects quantized weights of other methods than the family's own. Their tensors have the
    /// names of ordinary weights but hold codes.
    fn check(&self, path: &Path, known: &[&str]) -> Result<()> {
        for (field, config) in [
            ("quantization_config", &self.quantization_config),
            ("compression_config", &self.compression_config),
        ] {
            let Some(config) = config else { continue };
            let method = match config.get("quant_method").and_then(Value::as_str) {
                Some(method) if known.contains(&method) || method == MXFP4 => continue,
                Some(method @ INTEGERS) => match config.get("format").and_then(Value::as_str) {
                    Some(INTEGER_FORMAT) => continue,
                    format => format!(
                        " with quant_method {method} and format {}",
                        format.unwrap_or("none")
                    ),
                },
                Some(method) => format!(" with quant_method {method}"),
                None => String::new(),
            };
            let why = format!(
                "{} has one{method}; supported are weights in f32, f16 and bf16, {MXFP4}, \
                 {INTEGERS} with format {INTEGER_FORMAT}, blocks of GGUF files, and {FP8} for \
                 DeepSeek",
                path.display()
            );
            return Err(Error::unsupported(field, why));
        }
        Ok(())
    }
}

/// The fields of `generation_config.json`.
#[derive(Deserialize)]
struct Generation {
    eos_token_id: Option<Ids>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged, expecting = "must be a token id or a list of them, each from 0 to 4294967295")]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

fn json<T: for<'de> Deserialize<'de>>(text: &str, path: &Path) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::Malformed {
        path: path.into(),
        format: "json",
        why: error.to_string(),
    })
}

/// Returns the files that hold the weights: a single file, the shards that an index lists, or the
/// shards found by their names.
pub(super) fn weight_files(folder: &Path) -> Result<(Format, Vec<PathBuf>)> {
    for (format, stem, extension) in
        [(Format::Safetensors, "model", "safetensors"), (Format::Pytorch, "pytorch_model", "bin")]
    {
        let single = folder.join(format!("{stem}.{extension}"));
        if single.is_file() {
            return Ok((format, vec![single]));
        }
        let index = folder.join(format!("{stem}.{extension}.index.json"));
        if index.is_file() {
            return Ok((format, shards(folder, &index)?));
        }
        if let Some(part) = any_part(folder, stem, extension)? {
            return Ok((format, part.paths()?));
        }
    }
    Err(Error::NotFound {
        path: folder.join("model.safetensors"),
        hint: ", nor model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json"
            .into(),
    })
}

/// Returns one of the shards in `folder`, if any. Shards with different counts are an error,
/// because they are ambiguous.
fn any_part(folder: &Path, stem: &str, extension: &str) -> Result<Option<Part>> {
    let io = |source| Error::Io { path: folder.into(), source };
    let mut parts = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let part = Part::parse(&entry.map_err(io)?.path());
        if let Some(part) = part.filter(|part| part.stem == stem && part.extension == extension) {
            parts.insert(part.count, part);
        }
    }
    if parts.len() > 1 {
        let counts: Vec<_> = parts.keys().map(|count| format!("{stem}-*-of-{count}")).collect();
        let rule = "must be the shards of one model";
        return Err(Error::config(folder, "shards", counts.join(", "), rule));
    }
    Ok(parts.into_values().next())
}

fn shards(folder: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index_text = read_to_string(index)?;
    let Index { weight_map } = json(&index_text, index)?;
    let names: BTreeSet<_> = weight_map.into_values().collect();
    let mut files = Vec::new();
    for name in names {
        // An index must not refer to files outside its folder.
        if Path::new(&name).file_name() != Some(name.as_ref()) {
            return Err(Error::config(index, "weight_map", name, "must be a bare file name"));
        }
        let file = folder.join(&name);
        if !file.is_file() {
            let hint = format!(", listed in {}", index.display());
            return Err(Error::NotFound { path: file, hint });
        }
        files.push(file);
    }
    Ok(files)
}

/// Lists the tensors of one file; their data stays on disk.
fn open(format: Format, file: &Path, weights: &mut Weights) -> Result<()> {
    if format != Format::Pytorch {
        return safetensors::open(file, weights);
    }
    let malformed = |why| Error::Malformed { path: file.into(), format: "pytorch", why };
    let tensors = PytorchStore::from_file(file)
        // Keep the layer numbers of the file: the importers report a gap as a missing tensor.
        .map_indices_contiguous(false)
        .get_all_tensors()
        .map_err(|error| malformed(error.to_string()))?
        .clone();
    tensors.into_iter().try_for_each(|(name, tensor)| weights.insert(name, tensor, None, file))
}
