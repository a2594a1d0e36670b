//! What a model takes of memory while it runs, and what would make it fit where it does not.

use kv_cubecl::{KvCacheConfig, KvFormat, MemoryBytes, layout::CacheLayout};

use crate::{
    cache_config::ModelCacheConfig,
    checkpoint::Planned,
    error::{Error, Result},
    generate::GenerateOptions,
    shortage::{Advice, Footprint, Shortage, advice_text, decimal_size},
    spec::{LayerSpec, ModelSpec},
};

/// The use a model is planned for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// The cache configuration, with its capacity.
    pub cache: ModelCacheConfig,
    /// Sequences of the cache.
    pub batch: usize,
    /// Tokens of all sequences that pass through the model together, at most: a pass has no more
    /// than the caches hold, and no fewer than a step, which has one of every sequence. With 0,
    /// what passes compute with is not counted.
    pub pass: usize,
}

impl Usage {
    /// One sequence, and passes of as many tokens as there are in a prompt's chunk by default. What
    /// generates in [other chunks](crate::GenerateOptions::prefill_chunk_for) sets it by
    /// [`with_pass`](Self::with_pass).
    pub fn new(cache: impl Into<ModelCacheConfig>) -> Self {
        let pass = GenerateOptions::default().prefill_chunk;
        Self { cache: cache.into(), batch: 1, pass }
    }

    /// Sets the number of sequences.
    #[must_use]
    pub fn with_batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// Sets the most tokens of one [pass](Self::pass).
    #[must_use]
    pub fn with_pass(self, pass: usize) -> Self {
        Self { pass, ..self }
    }

    fn with_capacity(&self, capacity: usize) -> Self {
        let cache = self.cache.clone().with_capacity(capacity);
        Self { cache, ..*self }
    }

    /// Tokens of the largest pass. This is the one place where a cache and a batch bound it, so
    /// that what is said of one context and the search for the longest go by the same rule.
    fn passing(&self) -> usize {
        match self.pass {
            0 => 0,
            most => most.min(self.cache.capacity.saturating_mul(self.batch)).max(self.batch),
        }
    }
}

/// Bytes of the caches of all layers, part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheBytes {
    /// Packed keys: codes and parameters.
    pub keys: usize,
    /// Packed values: codes and parameters.
    pub values: usize,
    /// Sinks, windows, and sides that are not quantized.
    pub floats: usize,
    /// The tables of the rotary encodings.
    pub rope_tables: usize,
    /// The largest buffer among these.
    pub largest_buffer: usize,
}

impl CacheBytes {
    /// Bytes of all parts.
    pub fn total(&self) -> usize {
        self.keys + self.values + self.floats + self.rope_tables
    }

    fn add(&mut self, MemoryBytes { keys, values, floats }: MemoryBytes) {
        self.keys += keys;
        self.values += values;
        self.floats += floats;
        self.largest_buffer = self.largest_buffer.max(keys).max(values).max(floats);
    }
}

/// The memory that there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// Bytes that may be taken; `None` if it is not known.
    pub total: Option<u64>,
    /// Where that number is from, as `MemAvailable`.
    pub source: String,
    /// Bytes of the largest buffer of the device, where it has a limit.
    pub buffer: Option<u64>,
}

impl MemoryLimit {
    /// Creates a limit of `total` bytes; `source` names its origin in errors.
    pub fn new(total: Option<u64>, source: impl Into<String>) -> Self {
        Self { total, source: source.into(), buffer: None }
    }

    /// Sets the most bytes of one buffer of the device.
    #[must_use]
    pub fn with_buffer(self, buffer: Option<u64>) -> Self {
        Self { buffer, ..self }
    }
}

/// Caches that take less and less memory.
const CHEAPER: [(KvFormat, KvFormat); 3] = [
    (KvFormat::Affine8, KvFormat::Affine8),
    (KvFormat::Affine4, KvFormat::Affine4),
    (KvFormat::Affine2, KvFormat::Affine2),
];

/// Fewer tokens than these are no context to advise.
const LEAST: usize = 64;

/// No cache has more tokens.
const MOST_TOKENS: usize = 1 << 24;
/// With more sequences every buffer of a cache has too many elements.
const MOST_SEQUENCES: usize = u32::MAX as usize;

impl Planned<'_> {
    /// Returns the memory the model takes.
    ///
    /// # Errors
    ///
    /// A cache that does not fit the model, or one that has a buffer of 2^32 elements or more.
    pub fn footprint(&self, usage: &Usage) -> Result<Footprint> {
        Ok(Footprint {
            weights: self.weights.total(),
            cache: self.cache_bytes(usage)?.total(),
            activations: self.activations(usage),
        })
    }

    /// Returns the memory the caches of all layers take.
    ///
    /// # Errors
    ///
    /// Those of [`footprint`](Self::footprint).
    pub fn cache_bytes(&self, usage: &Usage) -> Result<CacheBytes> {
        cache_bytes(self.spec, usage)
    }

    /// The most tokens, up to the model's limit, that a cache can be allocated for so that
    /// everything fits; `None` if not even one does.
    pub fn longest_context(&self, usage: &Usage, limit: &MemoryLimit) -> Option<usize> {
        let most = self.spec.max_positions.min(MOST_TOKENS);
        most_that_fits(most, |tokens| self.fits(&usage.with_capacity(tokens), limit))
    }

    /// Returns the most sequences with a cache of this capacity each for which everything fits;
    /// `None` if not even one does.
    pub fn largest_batch(&self, usage: &Usage, limit: &MemoryLimit) -> Option<usize> {
        most_that_fits(MOST_SEQUENCES, |batch| self.fits(&usage.clone().with_batch(batch), limit))
    }

    /// Returns whether everything fits, including each cache buffer in a device buffer.
    pub fn fits(&self, usage: &Usage, limit: &MemoryLimit) -> bool {
        let (Ok(needed), Ok(cache)) = (self.footprint(usage), self.cache_bytes(usage)) else {
            return false;
        };
        let within = |bytes: usize, most: Option<u64>| most.is_none_or(|most| bytes as u64 <= most);
        within(needed.total(), limit.total) && within(cache.largest_buffer, limit.buffer)
    }

    /// Bytes that a step of one token of each sequence reads after `len` tokens: weights once, and
    /// the caches of all layers.
    ///
    /// # Errors
    ///
    /// A cache that does not fit the model.
    pub fn read_by_a_step(&self, usage: &Usage, len: usize) -> Result<[usize; 2]> {
        let layers = self.spec.layers.iter().enumerate();
        let caches = layers.map(|(i, layer)| {
            let config = usage.cache.layer(self.spec, i);
            Ok(CacheLayout::new(&config, layer.cache_shape(usage.batch))?.bytes_read(len + 1))
        });
        Ok([self.weights.bytes_per_token(), caches.sum::<Result<usize>>()?])
    }

    /// Checks that the model fits, before it is loaded.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] with what would help, [`Error::Unsupported`] for a tensor or a part of a
    /// layer's cache that is larger than a buffer of the device, or a cache that does not fit the
    /// model.
    pub fn check(&self, usage: &Usage, limit: &MemoryLimit) -> Result<()> {
        usage.cache.validate(self.spec)?;
        let (name, bytes) = &self.weights.largest;
        if let Some(most) = limit.buffer.filter(|&most| *bytes as u64 > most) {
            let what = format!("tensor {name} of {}", decimal_size(*bytes as u64));
            let why = format!("the device allows buffers of at most {}", decimal_size(most));
            return Err(Error::unsupported(what, why));
        }
        let needed = self.footprint(usage)?;
        let buffer = self.cache_bytes(usage)?.largest_buffer as u64;
        if let Some(most) = limit.buffer.filter(|&most| buffer > most) {
            return Err(self.buffer_too_large(usage, limit, [buffer, most]));
        }
        let Some(available) = limit.total else { return Ok(()) };
        if needed.total() as u64 <= available {
            return Ok(());
        }
        Err(Error::Memory(Box::new(Shortage {
            needed,
            by_type: self.weights.by_type.clone().into_iter().collect(),
            cache: usage.cache.to_string(),
            capacity: usage.cache.capacity,
            batch: usage.batch,
            available,
            source: limit.source.clone(),
            advice: self.advice(usage, limit),
        })))
    }

    fn buffer_too_large(
        &self,
        usage: &Usage,
        limit: &MemoryLimit,
        [buffer, most]: [u64; 2],
    ) -> Error {
        let capacity = usage.cache.capacity;
        let mut what = format!("{} cache of {capacity} tokens", usage.cache);
        if usage.batch > 1 {
            what = format!("{what} for {} sequences", usage.batch);
        }
        let advice = self.advice(usage, limit);
        let advice = match advice.is_empty() {
            true => "no shorter context and no cheaper cache fits".into(),
            false => format!("try {}", advice_text(&advice, capacity)),
        };
        let why = format!(
            "a layer needs a buffer of {}, but the device allows at most {}; {advice}",
            decimal_size(buffer),
            decimal_size(most)
        );
        Error::unsupported(what, why)
    }

    fn advice(&self, usage: &Usage, limit: &MemoryLimit) -> Vec<Advice> {
        let mut advice = vec![];
        if let Some(packed) = self.weights.packed {
            // What is given back is more memory to the others.
            let less = self.weights.total().saturating_sub(packed) as u64;
            let total = limit.total.map(|total| total.saturating_add(less));
            if self.fits(usage, &MemoryLimit { total, ..limit.clone() }) {
                advice.push(Advice::Packed(packed));
            }
        }
        let shorter = usage.cache.capacity.saturating_sub(1);
        let context =
            most_that_fits(shorter, |tokens| self.fits(&usage.with_capacity(tokens), limit));
        if let Some(tokens) = context.filter(|&tokens| tokens >= LEAST) {
            advice.push(Advice::Context(tokens));
        }
        for (keys, values) in CHEAPER {
            let cheaper = usage.cache.with_formats(keys, values);
            let less = |usage: &Usage| self.cache_bytes(usage).map_or(usize::MAX, |it| it.total());
            let with_it = Usage { cache: cheaper, ..usage.clone() };
            let valid = with_it.cache.validate(self.spec).is_ok();
            if valid && less(&with_it) < less(usage) && self.fits(&with_it, limit) {
                advice.push(Advice::Cache(with_it.cache.to_string()));
                break;
            }
        }
        let (bytes, numbers) = self.weights.head;
        let saved = bytes.saturating_sub(numbers / 32 * 18);
        // The saved bytes help only if memory is short, not a buffer.
        let more = limit.total.map(|total| total.saturating_add(saved as u64));
        if saved > 0 && self.fits(usage, &MemoryLimit { total: more, ..limit.clone() }) {
            advice.push(Advice::Int4Head(saved));
        }
        advice
    }

    /// The residual stream and its norm, queries, keys and values, what attention returns, and the
    /// widest part of the MLP (the CPU computes a few hundred tokens of it at a time); logits of
    /// the last token of each sequence.
    fn activations(&self, usage: &Usage) -> usize {
        /// Tokens of the MLP that are computed together.
        const ROWS: usize = 512;
        let pass = usage.passing();
        if pass == 0 {
            return 0;
        }
        let layers = &self.spec.layers;
        let qkv = layers.iter().map(|layer| layer.qkv_rows()).max().unwrap_or(0);
        let all = pass.saturating_mul(4 * self.spec.hidden_size + 2 * qkv);
        let mlp = pass.min(ROWS).saturating_mul(2 * self.weights.widest);
        let logits = 2 * usage.batch.saturating_mul(self.spec.vocab_size);
        size_of::<f32>().saturating_mul(all.saturating_add(mlp).saturating_add(logits))
    }
}

/// The largest number from 1 to `most` that fits, where all below one that fits do.
pub fn most_that_fits(most: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    if most > 0 && fits(most) {
        return Some(most);
    }
    // `fitting` fits, but for 0, and `least` does not.
    let (mut fitting, mut least) = (0, most);
    while least.saturating_sub(fitting) > 1 {
        let middle = fitting + (least - fitting) / 2;
        if fits(middle) { fitting = middle } else { least = middle }
    }
    (fitting > 0).then_some(fitting)
}

/// Bytes of the caches of all layers and of the rotary tables. They do not overflow: no buffer of a
/// layout has 2^32 elements, nor has any model 2^17 layers.
fn cache_bytes(spec: &ModelSpec, usage: &Usage) -> Result<CacheBytes> {
    let mut bytes = CacheBytes::default();
    for (i, layer) in spec.layers.iter().enumerate() {
        bytes.add(layout(&usage.cache.layer(spec, i), layer, usage.batch)?.memory_bytes());
    }
    let room = usage.cache.capacity.min(spec.max_positions).min(MOST_TOKENS);
    for rope in &spec.ropes {
        // Sine and cosine of every pair of channels.
        let table = room.saturating_mul(size_of::<f32>() * rope.rotary_dim());
        bytes.rope_tables += table;
        bytes.largest_buffer = bytes.largest_buffer.max(table);
    }
    Ok(bytes)
}

/// The layout of a layer's cache. Where one sequence could have it, the error is about their
/// number.
fn layout(config: &KvCacheConfig, layer: &LayerSpec, batch: usize) -> Result<CacheLayout> {
    CacheLayout::new(config, layer.cache_shape(batch)).map_err(|error| {
        match batch > 1 && CacheLayout::new(config, layer.cache_shape(1)).is_ok() {
            true => {
                let rule = format!(
                    "caches of {} tokens are too large for one buffer of 2^32 elements a layer",
                    config.capacity
                );
                Error::argument("batch", batch, rule)
            }
            false => error.into(),
        }
    })
}
