//! Caches in files, so that a text that was read once is not read again by the next program.
//!
//! The file is of safetensors: the packed words and float rows of every layer, `layers.N.keys`,
//! `layers.N.values` and `layers.N.floats`, as [`CacheParts`] has them for a cache of no more
//! tokens than are saved; `tokens`, those of all sequences; `checkpoints.C.layers.N.PART`, what the
//! caches of layers had when they held fewer tokens, see [`PromptCache`]; `checksums`, the CRC-32
//! of the file's header and of every other tensor, by name. The metadata `kv_cache` say by which
//! model and how. A cache goes on from it bit for bit, with any capacity; on another backend with
//! the same state and the numbers of that backend.

mod fingerprint;
mod header;
mod write;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_cubecl::{CacheParts, KvCache, layout::CacheLayout};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use self::header::{Header, Layer, Maker, RopeMark, VERSION};
use super::{
    ModelCache,
    prompt::{Checkpoint, Checkpoints, PromptCache, kept, kept_shape},
};
use crate::{Error, LanguageModel, ModelCacheConfig, Result, chat::Message, gguf::map};

/// The key of the metadata.
const KEY: &str = "kv_cache";
/// The tensors that are not of a layer.
const TOKENS: &str = "tokens";
const CHECKSUMS: &str = "checksums";
/// Bytes of the length that a safetensors file begins with.
const LENGTH: usize = 8;

/// The name of a part of a layer's cache.
fn name(layer: usize, part: &str) -> String {
    format!("layers.{layer}.{part}")
}

/// The name of a part of a layer's cache at a checkpoint.
fn checkpoint_name(checkpoint: usize, layer: usize, part: &str) -> String {
    format!("checkpoints.{checkpoint}.{}", name(layer, part))
}

/// What a file says of a cache beside its content.
#[derive(Clone, Copy, Debug, Default)]
pub struct SavedAs<'a> {
    /// What messages call the model.
    pub model: &'a str,
    /// What messages call the policy of the cache.
    pub cache: Option<&'a str>,
    /// The conversation whose tokens the cache holds, if it is one.
    pub talk: &'a [Message],
}

/// A cache in a file that has been found to be whole: see [`ModelCache::save`].
#[derive(Debug)]
pub struct SavedCache {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Header,
    tokens: Vec<Vec<u32>>,
}

impl SavedCache {
    /// Opens a file and checks all of it.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, is no saved cache, is truncated, or was changed since it was written.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if fs::metadata(path).is_ok_and(|found| found.len() == 0) {
            return Err(malformed(path, "the file is empty"));
        }
        let map = map(path)?;
        let (header, tokens) = read(path, &map)?;
        Ok(Self { path: path.into(), map, header, tokens })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the model that filled it was called.
    pub fn model(&self) -> &str {
        &self.header.model.name
    }

    /// What the policy of the cache was called, if the file says it.
    pub fn cache(&self) -> Option<&str> {
        self.header.cache.as_deref()
    }

    /// The conversation that was saved with it; empty if it is none.
    pub fn talk(&self) -> &[Message] {
        &self.header.talk
    }

    /// The tokens of each sequence.
    pub fn tokens(&self) -> &[Vec<u32>] {
        &self.tokens
    }

    /// Checks that a prompt begins with the tokens of a sequence and goes on after them. Returns how many tokens these
    /// are.
    ///
    /// # Errors
    ///
    /// The first position at which they differ, or a prompt that ends before.
    pub fn check_prompt(&self, sequence: usize, prompt: &[u32]) -> Result<usize> {
        let batch = self.tokens.len();
        let saved = self.tokens.get(sequence).ok_or_else(|| {
            Error::argument("sequence", sequence, format!("must be below batch {batch}"))
        })?;
        let (n, wrong) = (saved.len(), |rule| Error::config(&self.path, TOKENS, saved.len(), rule));
        if let Some(at) = saved.iter().zip(prompt).position(|(saved, given)| saved != given) {
            let rule = format!(
                "the prompt differs at position {at}: it has token {}, the cache {}",
                prompt[at], saved[at]
            );
            return Err(wrong(rule));
        }
        if prompt.len() <= n {
            let rule = format!("the prompt has {} and must go on after these", prompt.len());
            return Err(wrong(rule));
        }
        Ok(n)
    }

    /// The cache, for `model` and with the capacity of `config`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] naming the first thing that is not as it was when the cache was saved (model, rotary encoding,
    /// what a layer's cache stores), a capacity below the tokens that it holds, or a device that the cache does not
    /// support. Nothing is changed.
    pub fn restore(
        &self,
        model: &LanguageModel,
        config: impl Into<ModelCacheConfig>,
        device: &Device,
    ) -> Result<ModelCache> {
        let (config, spec) = (config.into(), model.spec());
        config.validate(model)?;
        self.check(model, &config)?;
        let device = device.clone().without_autodiff();
        let tensors = self.tensors()?;
        let n = self.longest().max(1);
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (i, layer) in spec.layers.iter().enumerate() {
            let own = config.layer(spec, i);
            let view = |part| tensors.tensor(&name(i, part)).map_err(|e| self.malformed(e));
            let [keys, values, floats] = [view("keys")?, view("values")?, view("floats")?];
            let parts = CacheParts {
                keys: to_device(words(&keys), &device),
                values: to_device(words(&values), &device),
                floats: self.floats_on(&floats, &device)?,
                lens: self.header.lens.clone(),
            };
            let shape = layer.cache_shape(self.tokens.len());
            let cache = KvCache::from_parts(&own.with_capacity(n), shape, parts)
                .map_err(|error| self.malformed(format!("layer {i}: {error}")))?;
            let cache = cache.with_options(layer.options)?;
            layers.push(cache.resized(own.capacity)?);
        }
        Ok(ModelCache::of_layers(layers, &config, spec, self.tokens.len(), &device))
    }

    /// The cache of one sequence with its tokens and checkpoints, for prompts to reuse what they
    /// share with it.
    ///
    /// # Errors
    ///
    /// Those of [`restore`](Self::restore), and a file of several sequences.
    pub fn restore_prompt(
        &self,
        model: &LanguageModel,
        config: impl Into<ModelCacheConfig>,
        device: &Device,
        taken: Checkpoints,
    ) -> Result<PromptCache> {
        let [tokens] = &self.tokens[..] else {
            let rule = "must be 1 for a prompt cache";
            return Err(Error::config(&self.path, "sequences", self.tokens.len(), rule));
        };
        let cache = self.restore(model, config, device)?;
        let tensors = self.tensors()?;
        let mut checkpoints = vec![];
        for (i, &len) in self.header.checkpoints.iter().enumerate() {
            let mut layers = vec![];
            for (n, layer) in cache.layers().iter().enumerate() {
                let (config, shape) =
                    (layer.layout().config().with_capacity(len), layer.layout().shape());
                let layout = CacheLayout::new(&config, shape)?;
                let part = |part: &&str| {
                    let name = checkpoint_name(i, n, part);
                    let view = tensors.tensor(&name).map_err(|error| self.malformed(error))?;
                    let (data, expected) = match *part {
                        "keys" => (words(&view), vec![layout.sides().keys.words(layout.slices())]),
                        "values" => {
                            (words(&view), vec![layout.sides().values.words(layout.slices())])
                        }
                        _ => (self.floats(&view)?, kept_shape(&layout).to_vec()),
                    };
                    let dtype = if *part == "floats" { config.float.dtype() } else { DType::U32 };
                    match data.shape()[..] == expected[..] && data.dtype() == dtype {
                        true => Ok(data),
                        false => {
                            Err(self.malformed(format!("{name} is not {dtype:?} of {expected:?}")))
                        }
                    }
                };
                layers.push(kept(&config).iter().map(part).collect::<Result<_>>()?);
            }
            checkpoints.push(Checkpoint { len, layers });
        }
        Ok(PromptCache::of_saved(cache, tokens.clone(), checkpoints, taken))
    }

    /// Checks that the cache is one of `model` and like `config`.
    fn check(&self, model: &LanguageModel, config: &ModelCacheConfig) -> Result<()> {
        let wrong = |field: String, saved: String, rule: String| {
            Err(Error::config(&self.path, field, saved, rule))
        };
        let (spec, capacity) = (model.spec(), config.capacity);
        let Header { model: maker, layers, ropes, .. } = &self.header;
        let own = Maker::new(model, "")?;
        if let Some((field, saved, rule)) = maker.other_sizes(&own) {
            return wrong(field.into(), saved, rule);
        }
        let asked = Layer::all(spec, config, self.longest().max(1));
        if layers.len() != asked.len() {
            let rule = format!("this model has {}", asked.len());
            return wrong("number of layers".into(), layers.len().to_string(), rule);
        }
        for (i, (saved, asked)) in layers.iter().zip(&asked).enumerate() {
            if let Some((field, saved, asked)) = saved.difference(asked) {
                let remedy = if field == "cache" { "; use the same --cache" } else { "" };
                let rule = format!("{asked} is asked for{remedy}");
                return wrong(format!("layers.{i}.{field}"), saved, rule);
            }
        }
        // After the caches: the rotation of one may be in the weights.
        if let Some((field, saved, rule)) = maker.other_weights(&own) {
            return wrong(field.into(), saved, rule);
        }
        let longest = self.longest();
        if longest > capacity {
            let rule = format!("the saved cache holds {longest} tokens");
            return Err(Error::argument("capacity", capacity, rule));
        }
        let asked = RopeMark::all(spec, capacity.min(spec.max_positions));
        if *ropes != asked {
            let differs = |i: &usize| ropes.get(*i) != asked.get(*i);
            let i = (0..ropes.len().max(asked.len())).find(differs).unwrap_or(0);
            let say = |rope: Option<&RopeMark>| {
                rope.map_or("none".into(), |rope| {
                    format!("{} of {} channels", rope.frequencies, rope.rotary_dim)
                })
            };
            let rule = format!(
                "this model with room for {capacity} tokens has {}: the saved keys have another rope",
                say(asked.get(i))
            );
            return wrong(format!("ropes.{i}"), say(ropes.get(i)), rule);
        }
        Ok(())
    }

    /// Tokens of the longest sequence.
    fn longest(&self) -> usize {
        self.header.lens.iter().copied().max().unwrap_or(0)
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map).map_err(|error| self.malformed(error))
    }

    fn malformed(&self, why: impl ToString) -> Error {
        malformed(&self.path, why)
    }

    fn floats_on(&self, view: &TensorView<'_>, device: &Device) -> Result<Tensor<4>> {
        let data = self.floats(view)?;
        if data.shape().len() != 4 {
            return Err(self.malformed(format!("floats have shape {:?}", view.shape())));
        }
        if !device.supports_dtype(data.dtype()) {
            let what = format!("floats of {:?} on {device:?}", data.dtype());
            return Err(Error::unsupported(what, "the device does not have the type"));
        }
        let dtype = data.dtype();
        Ok(Tensor::from_data(data, (device, dtype)))
    }

    fn floats(&self, view: &TensorView<'_>) -> Result<TensorData> {
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(self.malformed(format!("floats are {other:?}"))),
        };
        Ok(TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype))
    }
}

fn words(view: &TensorView<'_>) -> TensorData {
    let data = view.data().to_vec();
    let shape = [data.len() / size_of::<u32>()];
    TensorData::from_bytes_vec(data, shape, DType::U32)
}

fn to_device(words: TensorData, device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(words, (device, DType::U32))
}

fn malformed(path: &Path, why: impl ToString) -> Error {
    Error::Malformed { path: path.into(), format: "saved cache", why: why.to_string() }
}

/// Checks a file and reads everything but the tensors of layers.
fn read(path: &Path, bytes: &[u8]) -> Result<(Header, Vec<Vec<u32>>)> {
    let wrong = |why: String| malformed(path, why);
    let (length, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|error| wrong(error.to_string()))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| wrong(error.to_string()))?;
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
    let text = text.ok_or_else(|| wrong(format!("its metadata have no {KEY}")))?;
    check_sums(&bytes[LENGTH..LENGTH + length], &tensors).map_err(wrong)?;
    let header: Header = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let Header { version, layers, lens, model, checkpoints, .. } = &header;
    if !(1..=VERSION).contains(version) {
        return Err(wrong(format!("is of version {version}, 1 to {VERSION} are read")));
    }
    let ascending = checkpoints.is_sorted_by(|a, b| a < b);
    let inside = checkpoints.iter().all(|len| lens.first().is_some_and(|n| (1..=*n).contains(len)));
    let valid = lens.len() == 1 && ascending && inside;
    if !checkpoints.is_empty() && !valid {
        return Err(wrong(format!("it has checkpoints at {checkpoints:?} of {lens:?} tokens")));
    }
    let mut expected: Vec<String> = (0..layers.len())
        .flat_map(|i| ["keys", "values", "floats"].map(|part| name(i, part)))
        .chain([TOKENS.to_string(), CHECKSUMS.to_string()])
        .collect();
    for checkpoint in 0..checkpoints.len() {
        for (i, layer) in layers.iter().enumerate() {
            let parts = kept(&layer.cache).iter();
            expected.extend(parts.map(|part| checkpoint_name(checkpoint, i, part)));
        }
    }
    let mut found: Vec<&str> = tensors.names();
    expected.sort_unstable();
    found.sort_unstable();
    if found != expected {
        return Err(wrong(format!("its tensors are not those of {} layers", layers.len())));
    }
    for name in expected.iter().filter(|name| !name.ends_with(".floats")) {
        let of_words =
            tensors.tensor(name).is_ok_and(|it| it.dtype() == Dtype::U32 && it.shape().len() == 1);
        if !of_words {
            return Err(wrong(format!("{name} is not a list of U32")));
        }
    }
    let tokens = tensors.tensor(TOKENS).map_err(|error| wrong(error.to_string()))?;
    let tokens = u32s(tokens.data());
    let all = lens.iter().try_fold(0usize, |sum, len| sum.checked_add(*len));
    if lens.is_empty() || all != Some(tokens.len()) {
        let n = tokens.len();
        return Err(wrong(format!("it has {n} tokens, and sequences of {lens:?}")));
    }
    let longest = lens.iter().copied().max().unwrap_or(0).max(1);
    if let Some(layer) = layers.iter().find(|layer| layer.cache.capacity != longest) {
        let room = layer.cache.capacity;
        return Err(wrong(format!("a layer has room for {room} tokens, and {longest} are saved")));
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= model.vocab_size) {
        let n = model.vocab_size;
        return Err(wrong(format!("it has token {token}, the model's are below {n}")));
    }
    let mut rest = &tokens[..];
    let sequence = |len: &usize| {
        let (tokens, others) = rest.split_at(*len);
        rest = others;
        tokens.to_vec()
    };
    let tokens = lens.iter().map(sequence).collect();
    Ok((header, tokens))
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    bytes.chunks_exact(size_of::<u32>()).map(word).collect()
}

/// Checks the checksums of a file's header and tensors.
fn check_sums(header: &[u8], tensors: &SafeTensors<'_>) -> Result<(), String> {
    let sums = tensors.tensor(CHECKSUMS).map_err(|error| error.to_string())?;
    let sums = u32s(sums.data());
    let mut names: Vec<&str> = tensors.names().into_iter().filter(|n| *n != CHECKSUMS).collect();
    names.sort_unstable();
    if sums.len() != names.len() + 1 {
        return Err(format!("it has {} checksums for {} tensors", sums.len(), names.len()));
    }
    if crc32fast::hash(header) != sums[0] {
        return Err("its header is not what was written".into());
    }
    for (name, sum) in names.into_iter().zip(&sums[1..]) {
        let tensor = tensors.tensor(name).map_err(|error| error.to_string())?;
        if crc32fast::hash(tensor.data()) != *sum {
            return Err(format!("tensor {name} is not what was written"));
        }
    }
    Ok(())
}
