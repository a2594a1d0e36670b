//! Saves caches to files; a later program resumes without computing the text again.
//!
//! The file is in the format safetensors. It holds the tensors of every layer, `layers.N.PART`,
//! laid out as for a cache of the saved length; `tokens`, the ids of all sequences;
//! `checkpoints.C.layers.N.PART`, the parts that layers had at shorter lengths, see
//! [`PromptCache`]; and `checksums`, the CRC-32 of the file's header and of every other tensor, by
//! name. The metadata `kv_cache` describe the model and the cache.
//!
//! A layer of keys and values has the parts `keys`, `values` and `floats`, as in
//! [`CacheParts`](kv_cubecl::CacheParts). A layer of sparse attention has the parts of
//! [`SparseCache::parts`](kv_cubecl::sparse::SparseCache::parts), and a recurrent layer has `conv`
//! and `state`, as in [`DeltaPart`](kv_cubecl::delta::DeltaPart).
//!
//! A restored cache continues bit for bit, with any capacity. On another backend it has the same
//! state, and that backend's rounding.

mod fingerprint;
mod header;
mod prefix;
mod write;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::tensor::{DType, Device, TensorData};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use self::header::{Header, Layer, Maker, RopeMark, VERSION};
use super::{
    LayerCache, ModelCache,
    layer::{LayerPlan, Part, PartName},
    prompt::{Checkpoint, Checkpoints, PromptCache},
};
use crate::{
    cache_config::ModelCacheConfig,
    chat::Message,
    error::{Error, Result, unreadable},
    gguf::map,
    model::LanguageModel,
};

/// The key of the metadata.
const KEY: &str = "kv_cache";
/// The tensors that do not belong to a layer.
const TOKENS: &str = "tokens";
const CHECKSUMS: &str = "checksums";
/// The bytes of the length at the start of a safetensors file.
const LENGTH: usize = 8;

/// Returns the name of a part of a layer's cache.
fn name(layer: usize, part: &str) -> String {
    format!("layers.{layer}.{part}")
}

/// Returns the name of a part of a layer's cache at a checkpoint.
fn checkpoint_name(checkpoint: usize, layer: usize, part: &str) -> String {
    format!("checkpoints.{checkpoint}.{}", name(layer, part))
}

/// Names and the conversation, saved with a cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct SavedAs<'a> {
    /// The name of the model in messages.
    pub model: &'a str,
    /// The name of the cache's policy in messages.
    pub cache: Option<&'a str>,
    /// The conversation whose tokens the cache holds; empty if there is none.
    pub talk: &'a [Message],
}

/// A complete cache in a file, written by [`ModelCache::save`].
#[derive(Debug)]
pub struct SavedCache {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Header,
    tokens: Vec<Vec<u32>>,
}

const FORMAT: &str = "saved cache";

impl SavedCache {
    /// Opens a file and checks its contents.
    ///
    /// # Errors
    /// Fails for a file that cannot be read, is not a saved cache, is truncated, or has changed
    /// since it was written.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let map = map(path, FORMAT)?;
        let (header, tokens) = read(path, &map)?;
        Ok(Self { path: path.into(), map, header, tokens })
    }

    /// Returns whether a file is a saved cache as far as its header says.
    pub fn is_one(path: impl AsRef<Path>) -> bool {
        let Ok(map) = map(path.as_ref(), FORMAT) else { return false };
        let has_key = |named: &HashMap<String, String>| named.contains_key(KEY);
        SafeTensors::read_metadata(&map)
            .is_ok_and(|(_, metadata)| metadata.metadata().as_ref().is_some_and(has_key))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the model that filled the cache.
    pub fn model(&self) -> &str {
        &self.header.model.name
    }

    /// Returns the name of the cache's policy, if one was saved.
    pub fn cache(&self) -> Option<&str> {
        self.header.cache.as_deref()
    }

    /// Returns the conversation that was saved with the cache; empty if there is none.
    pub fn talk(&self) -> &[Message] {
        &self.header.talk
    }

    /// Returns the tokens of each sequence.
    pub fn tokens(&self) -> &[Vec<u32>] {
        &self.tokens
    }

    /// Checks that a prompt begins with the tokens of a sequence and continues after them. Returns
    /// their number.
    ///
    /// # Errors
    /// Fails with the first position that differs, and for a prompt that ends too early.
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
            let rule =
                format!("the prompt has {} tokens and must continue after these", prompt.len());
            return Err(wrong(rule));
        }
        Ok(n)
    }

    /// Restores the cache for `model`, with the capacity of `config`.
    ///
    /// # Errors
    /// Fails with [`Error::Config`] naming the first difference from the saved cache (model, rope,
    /// a layer's cache), for a capacity below the saved tokens, and on a device that does not
    /// support the cache.
    pub fn restore(
        &self,
        model: &LanguageModel,
        config: impl Into<ModelCacheConfig>,
        device: &Device,
    ) -> Result<ModelCache> {
        let (config, spec) = (config.into(), model.spec());
        config.validate(model)?;
        let device = device.clone().without_autodiff();
        let layers = self.layers(model, &Maker::new(model, "")?, &config, &device)?;
        let owners = layers.into_iter().zip(spec.owners());
        let layers = owners.map(|(layer, (i, _))| layer.resized(config.layer(spec, i).capacity));
        let layers = layers.collect::<Result<_>>()?;
        Ok(ModelCache::of_layers(layers, &config, spec, self.tokens.len(), &device))
    }

    /// Restores the layers that own a cache, with a capacity of the saved tokens. `maker` describes
    /// `model`, and `config` is valid for it.
    fn layers(
        &self,
        model: &LanguageModel,
        maker: &Maker,
        config: &ModelCacheConfig,
        device: &Device,
    ) -> Result<Vec<LayerCache>> {
        self.check(model, maker, config)?;
        let (spec, tensors) = (model.spec(), self.tensors()?);
        let n = self.longest().max(1);
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (n_th, (i, layer)) in spec.owners().enumerate() {
            let own = config.layer(spec, i);
            let plan = LayerPlan::new(layer, &own, self.tokens.len()).with_capacity(n);
            let wrong = |error: Error| self.malformed(format!("layer {i}: {error}"));
            let mut data = vec![];
            for part in plan.parts().map_err(wrong)? {
                let read =
                    self.part(&tensors, &name(n_th, part.name), &part, &format!("layer {i}: "))?;
                if !device.supports_dtype(read.dtype()) {
                    let what = format!("floats of {:?} on {device:?}", read.dtype());
                    return Err(Error::unsupported(what, "the device does not support the type"));
                }
                data.push(read);
            }
            layers.push(plan.restore(self.header.lens.clone(), data, device).map_err(wrong)?);
        }
        Ok(layers)
    }

    /// Restores a cache of one sequence with its tokens and checkpoints. Later prompts reuse the
    /// common prefix.
    ///
    /// # Errors
    /// Fails as [`restore`](Self::restore) does, and for a file with several sequences.
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
        let checkpoints = self.checkpoints(cache.layers())?;
        Ok(PromptCache::of_saved(cache, tokens.clone(), checkpoints, taken))
    }

    /// Reads the checkpoints of these restored layers.
    fn checkpoints(&self, cache: &[LayerCache]) -> Result<Vec<Checkpoint>> {
        let tensors = self.tensors()?;
        let mut checkpoints = vec![];
        for (i, &len) in self.header.checkpoints.iter().enumerate() {
            let mut layers = vec![];
            for (n, layer) in cache.iter().enumerate() {
                let kept = layer.plan().with_capacity(len).kept()?;
                let read =
                    |part: &Part| self.part(&tensors, &checkpoint_name(i, n, part.name), part, "");
                layers.push(kept.iter().map(read).collect::<Result<_>>()?);
            }
            checkpoints.push(Checkpoint { len, layers });
        }
        Ok(checkpoints)
    }

    /// Checks that the cache was filled by `model`, which `own` describes, and has the formats of
    /// `config`.
    fn check(&self, model: &LanguageModel, own: &Maker, config: &ModelCacheConfig) -> Result<()> {
        let wrong = |field: String, saved: String, rule: String| {
            Err(Error::config(&self.path, field, saved, rule))
        };
        let (spec, capacity) = (model.spec(), config.capacity);
        let Header { model: maker, layers, ropes, .. } = &self.header;
        if let Some((field, saved, rule)) = maker.other_sizes(own) {
            return wrong(field.into(), saved, rule);
        }
        let asked = Layer::all(spec, config, self.longest().max(1));
        if layers.len() != asked.len() {
            let rule = format!("this model has {}", asked.len());
            return wrong("number of layers".into(), layers.len().to_string(), rule);
        }
        for (i, (saved, asked)) in layers.iter().zip(&asked).enumerate() {
            if let Some((field, saved, asked)) = saved.difference(asked) {
                let rule = match field {
                    "cache" => format!("{asked} is requested; use the same --cache"),
                    "state" | "rollback" => format!("{asked} is requested"),
                    _ => format!("this model has {asked}; load the model that filled the cache"),
                };
                return wrong(format!("layers.{i}.{field}"), saved, rule);
            }
        }
        // This comes after the caches, because a Hadamard transform may be folded into the weights.
        if let Some((field, saved, rule)) = maker.other_weights(own) {
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
            let describe = |rope: Option<&RopeMark>| {
                rope.map_or("none".into(), |rope| {
                    format!("{} of {} channels", rope.frequencies, rope.rotary_dim)
                })
            };
            let rule = format!(
                "this model has {} at capacity {capacity}; the saved keys have another rope",
                describe(asked.get(i))
            );
            return wrong(format!("ropes.{i}"), describe(ropes.get(i)), rule);
        }
        match maker.other_config(own) {
            Some((field, saved, rule)) => wrong(field, saved, rule),
            None => Ok(()),
        }
    }

    /// Returns the length of the longest sequence.
    fn longest(&self) -> usize {
        self.header.lens.iter().copied().max().unwrap_or(0)
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map).map_err(|error| self.malformed(error))
    }

    fn malformed(&self, why: impl ToString) -> Error {
        malformed(&self.path, why)
    }

    /// Reads a tensor that must have the type and the shape of `part`. `place` begins the message
    /// of an error.
    fn part(
        &self,
        tensors: &SafeTensors<'_>,
        name: &str,
        part: &Part,
        place: &str,
    ) -> Result<TensorData> {
        let view = tensors.tensor(name).map_err(|error| self.malformed(error))?;
        let dtype = match view.dtype() {
            Dtype::U32 => DType::U32,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(self.malformed(format!("{place}{name} has type {other:?}"))),
        };
        let Part { dtype: expected, shape, .. } = part;
        if (dtype, view.shape()) != (*expected, &shape[..]) {
            let found = format!("{dtype:?} of shape {:?}", view.shape());
            let why =
                format!("{place}{name} is {found}, and must be {expected:?} of shape {shape:?}");
            return Err(self.malformed(why));
        }
        Ok(TensorData::from_bytes_vec(view.data().to_vec(), shape.clone(), dtype))
    }
}

fn malformed(path: &Path, why: impl ToString) -> Error {
    Error::Malformed { path: path.into(), format: FORMAT, why: why.to_string() }
}

/// Checks a file and reads everything except the tensors of layers.
fn read(path: &Path, bytes: &[u8]) -> Result<(Header, Vec<Vec<u32>>)> {
    let wrong = |why: String| malformed(path, why);
    let (length, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|error| wrong(unreadable(&error)))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| wrong(error.to_string()))?;
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
    let text = text.ok_or_else(|| wrong(format!("its metadata have no {KEY}")))?;
    check_sums(&bytes[LENGTH..LENGTH + length], &tensors).map_err(wrong)?;
    let header: Header = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let Header { version, layers, lens, model, checkpoints, .. } = &header;
    if !(1..=VERSION).contains(version) {
        return Err(wrong(format!("has version {version}; versions 1 to {VERSION} are supported")));
    }
    let ascending = checkpoints.is_sorted_by(|a, b| a < b);
    let inside = checkpoints.iter().all(|len| lens.first().is_some_and(|n| (1..=*n).contains(len)));
    let valid = lens.len() == 1 && ascending && inside;
    if !checkpoints.is_empty() && !valid {
        return Err(wrong(format!("it has checkpoints at {checkpoints:?} of {lens:?} tokens")));
    }
    // The names of all tensors, and whether each is a list of words.
    let mut expected = vec![(TOKENS.to_string(), true), (CHECKSUMS.to_string(), true)];
    for (i, layer) in layers.iter().enumerate() {
        let of_layer = |error: Error| wrong(format!("layer {i}: {error}"));
        let parts = layer.cache.names().map_err(of_layer)?.into_iter();
        expected.extend(parts.map(|PartName { name: part, words }| (name(i, part), words)));
        let kept = layer.cache.kept_names().map_err(of_layer)?;
        for checkpoint in 0..checkpoints.len() {
            let parts = kept.iter();
            expected.extend(parts.map(|PartName { name: part, words }| {
                (checkpoint_name(checkpoint, i, part), *words)
            }));
        }
    }
    let mut found: Vec<&str> = tensors.names();
    expected.sort_unstable();
    found.sort_unstable();
    if !found.iter().eq(expected.iter().map(|(name, _)| name)) {
        return Err(wrong(format!("its tensors do not match {} layers", layers.len())));
    }
    for (name, _) in expected.iter().filter(|(_, words)| *words) {
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
        return Err(wrong(format!("it has {n} tokens for sequences of {lens:?}")));
    }
    let longest = lens.iter().copied().max().unwrap_or(0).max(1);
    if let Some(layer) = layers.iter().find(|layer| layer.cache.capacity() != longest) {
        let room = layer.cache.capacity();
        return Err(wrong(format!("a layer has capacity {room} for {longest} saved tokens")));
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= model.vocab_size) {
        let n = model.vocab_size;
        return Err(wrong(format!("it has token {token}; the model's vocabulary is {n}")));
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

/// Verifies the checksums of a file's header and tensors.
fn check_sums(header: &[u8], tensors: &SafeTensors<'_>) -> Result<(), String> {
    let sums = tensors.tensor(CHECKSUMS).map_err(|error| error.to_string())?;
    let sums = u32s(sums.data());
    let mut names: Vec<&str> = tensors.names().into_iter().filter(|n| *n != CHECKSUMS).collect();
    names.sort_unstable();
    if sums.len() != names.len() + 1 {
        return Err(format!("it has {} checksums for {} tensors", sums.len(), names.len()));
    }
    if crc32fast::hash(header) != sums[0] {
        return Err("its header has another checksum".into());
    }
    for (name, sum) in names.into_iter().zip(&sums[1..]) {
        let tensor = tensors.tensor(name).map_err(|error| error.to_string())?;
        if crc32fast::hash(tensor.data()) != *sum {
            return Err(format!("tensor {name} has another checksum"));
        }
    }
    Ok(())
}
