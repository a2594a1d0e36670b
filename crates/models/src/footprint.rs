//! Memory that a model needs at run time, and changes that would make it fit.

use kv_cubecl::{KvCacheConfig, KvFormat, MemoryBytes};

use crate::{
    cache::LayerPlan,
    cache_config::ModelCacheConfig,
    checkpoint::Planned,
    error::{Error, Result},
    generate::GenerateOptions,
    shortage::{Advice, Footprint, Shortage, advice_text, decimal_size},
    spec::{LayerSpec, ModelSpec},
};

/// The planned use of a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// The cache configuration, with its capacity.
    pub cache: ModelCacheConfig,
    /// Sequences of the cache.
    pub batch: usize,
    /// The most tokens of all sequences in one pass. A pass has at most as many tokens as the
    /// caches, and at least one per sequence. With 0, activations are not counted.
    pub pass: usize,
}

impl Usage {
    /// Creates a use with one sequence and the default number of tokens per prefill chunk. Set
    /// [other chunks](crate::GenerateOptions::prefill_chunk_for) with
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

    /// Returns the tokens of the largest pass. Only this function limits a pass by cache and batch,
    /// so that [`Planned::footprint`] and [`Planned::longest_context`] agree.
    fn passing(&self) -> usize {
        match self.pass {
            0 => 0,
            most => most.min(self.cache.capacity.saturating_mul(self.batch)).max(self.batch),
        }
    }
}

/// Bytes of the caches of all layers, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheBytes {
    /// Packed keys: codes and parameters.
    pub keys: usize,
    /// Packed values: codes and parameters.
    pub values: usize,
    /// Sinks, residuals, and sides that are not quantized.
    pub floats: usize,
    /// The rope tables.
    pub rope_tables: usize,
    /// The largest of these buffers.
    pub largest_buffer: usize,
}

impl CacheBytes {
    /// Returns the bytes of all parts.
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

/// The available memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// Available bytes; `None` if unknown.
    pub total: Option<u64>,
    /// The origin of that number, such as `MemAvailable`.
    pub source: String,
    /// Bytes of the largest buffer that the device allows, if it has a limit.
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

/// Cache formats to advise, largest first.
const CHEAPER: [(KvFormat, KvFormat); 3] = [
    (KvFormat::Affine8, KvFormat::Affine8),
    (KvFormat::Affine4, KvFormat::Affine4),
    (KvFormat::Affine2, KvFormat::Affine2),
];

/// The fewest tokens of a context to advise.
const LEAST: usize = 64;

/// The most tokens of a cache.
const MOST_TOKENS: usize = 1 << 24;
/// The most sequences. With more, every buffer of a cache would have too many elements.
const MOST_SEQUENCES: usize = u32::MAX as usize;

impl Planned<'_> {
    /// Returns the memory the model takes.
    ///
    /// # Errors
    /// Fails if the cache does not fit the model, or has a buffer of 2^32 elements or more.
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
    /// Fails as [`footprint`](Self::footprint) does.
    pub fn cache_bytes(&self, usage: &Usage) -> Result<CacheBytes> {
        cache_bytes(self.spec, usage)
    }

    /// Returns the most tokens, up to the model's limit, for which everything fits; `None` if not
    /// even one token does.
    pub fn longest_context(&self, usage: &Usage, limit: &MemoryLimit) -> Option<usize> {
        let most = self.spec.max_positions.min(MOST_TOKENS);
        most_that_fits(most, |tokens| self.fits(&usage.with_capacity(tokens), limit))
    }

    /// Returns the most sequences with a cache of this capacity for which everything fits; `None`
    /// if not even one does.
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

    /// Returns the bytes that a decode step of one token per sequence reads after `len` tokens: of
    /// all weights, and of the caches of all layers.
    ///
    /// # Errors
    /// Fails if the cache does not fit the model.
    pub fn read_by_a_step(&self, usage: &Usage, len: usize) -> Result<[usize; 2]> {
        let layers = self.spec.layers.iter().enumerate();
        let caches = layers.map(|(i, layer)| {
            let config = usage.cache.layer(self.spec, i);
            LayerPlan::new(layer, &config, usage.batch).bytes_read(len + 1)
        });
        Ok([self.weights.bytes_per_token(), caches.sum::<Result<usize>>()?])
    }

    /// Checks that the model fits, before it is loaded.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] with advice, or [`Error::Unsupported`] for a tensor or a part of a
    /// layer's cache that is larger than a buffer of the device. Also fails if the cache does not
    /// fit the model.
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
            // Memory that packed weights save is available to the others.
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
        let (bytes, int4) = self.weights.head;
        let saved = bytes.saturating_sub(int4.unwrap_or(bytes));
        // The saved bytes help only if memory is short, not a buffer.
        let more = limit.total.map(|total| total.saturating_add(saved as u64));
        if saved > 0 && self.fits(usage, &MemoryLimit { total: more, ..limit.clone() }) {
            advice.push(Advice::Int4Head(saved));
        }
        advice
    }

    /// Returns the bytes of the residual stream and its norm, of inputs of layers, of queries,
    /// keys, values and attention, of the widest part of the MLP, and of the logits of each
    /// sequence's last token.
    fn activations(&self, usage: &Usage) -> usize {
        /// The CPU computes the MLP for this many tokens at a time.
        const ROWS: usize = 512;
        let pass = usage.passing();
        if pass == 0 {
            return 0;
        }
        let layers = &self.spec.layers;
        // The convolution and the chunks of a recurrent layer take twice as much again.
        let of = |layer: &LayerSpec| layer.qkv_rows() * if layer.delta.is_none() { 1 } else { 3 };
        let qkv = layers.iter().map(of).max().unwrap_or(0);
        // The table's rows, their projection and the sum of both.
        let inputs = 3 * layers.len() * self.spec.per_layer_inputs;
        let all = pass.saturating_mul(4 * self.spec.hidden_size + 2 * qkv + inputs);
        let mlp = pass.min(ROWS).saturating_mul(2 * self.weights.widest);
        let logits = 2 * usage.batch.saturating_mul(self.spec.vocab_size);
        size_of::<f32>().saturating_mul(all.saturating_add(mlp).saturating_add(logits))
    }
}

/// Returns the largest number from 1 to `most` that fits. All numbers below a number that fits must
/// fit.
pub fn most_that_fits(most: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    if most > 0 && fits(most) {
        return Some(most);
    }
    // `fitting` fits or is 0, and `least` does not fit.
    let (mut fitting, mut least) = (0, most);
    while least.saturating_sub(fitting) > 1 {
        let middle = fitting + (least - fitting) / 2;
        if fits(middle) { fitting = middle } else { least = middle }
    }
    (fitting > 0).then_some(fitting)
}

/// Returns the bytes of the caches of all layers and of the rope tables. They do not overflow: no
/// buffer of a layout has 2^32 elements, and no model has 2^17 layers.
fn cache_bytes(spec: &ModelSpec, usage: &Usage) -> Result<CacheBytes> {
    let mut bytes = CacheBytes::default();
    for (i, layer) in spec.layers.iter().enumerate() {
        bytes.add(layer_bytes(&usage.cache.layer(spec, i), layer, usage.batch)?);
    }
    let capacity = usage.cache.capacity.min(spec.max_positions).min(MOST_TOKENS);
    for rope in &spec.ropes {
        // Sine and cosine of every pair of channels.
        let table = capacity.saturating_mul(size_of::<f32>() * rope.rotary_dim());
        bytes.rope_tables += table;
        bytes.largest_buffer = bytes.largest_buffer.max(table);
    }
    Ok(bytes)
}

/// Returns the bytes of a layer's cache. If one sequence could have it, the error is about their
/// number.
fn layer_bytes(config: &KvCacheConfig, layer: &LayerSpec, batch: usize) -> Result<MemoryBytes> {
    layer.cache_bytes(config, batch).map_err(|error| {
        match batch > 1 && layer.cache_bytes(config, 1).is_ok() {
            true => {
                let rule = format!(
                    "caches of {} tokens are too large for one buffer of 2^32 elements per layer",
                    config.capacity
                );
                Error::argument("batch", batch, rule)
            }
            false => error,
        }
    })
}
