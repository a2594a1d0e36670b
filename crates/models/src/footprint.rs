//! What a model takes of memory while it runs, and what would make it fit where it does not.

use std::fmt;

use kv_cubecl::{Bits, layout::CacheLayout};

use crate::{Error, ModelCacheConfig, ModelSpec, Result, load::Planned};

/// How a model is going to be used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// What its cache stores, with the tokens it is allocated for.
    pub cache: ModelCacheConfig,
    /// Sequences of the cache.
    pub batch: usize,
    /// Tokens of all sequences that pass through the model together, at most.
    pub pass: usize,
}

impl Usage {
    /// One sequence, and passes of as many tokens as there are in a prompt's chunk.
    pub fn new(cache: impl Into<ModelCacheConfig>) -> Self {
        let cache = cache.into();
        let pass = cache.cache.capacity.min(crate::GenerateOptions::default().prefill_chunk);
        Self { cache, batch: 1, pass }
    }

    /// The same with so many sequences.
    #[must_use]
    pub fn with_batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// The same with passes of so many tokens.
    #[must_use]
    pub fn with_pass(self, pass: usize) -> Self {
        Self { pass, ..self }
    }

    fn with_capacity(&self, capacity: usize) -> Self {
        let cache = self.cache.cache.with_capacity(capacity);
        let cache = ModelCacheConfig { cache, ..self.cache.clone() };
        Self { cache, pass: self.pass.min(capacity * self.batch), ..*self }
    }
}

/// Bytes of memory, part by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// The weights, as they are kept.
    pub weights: usize,
    /// The caches of all layers, and the rotary tables.
    pub cache: usize,
    /// What a pass computes with, estimated from the widths of the model.
    pub activations: usize,
}

impl Footprint {
    /// Bytes of all parts.
    pub fn total(&self) -> usize {
        self.weights.saturating_add(self.cache).saturating_add(self.activations)
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
    /// So many bytes, and where that is said.
    pub fn new(total: Option<u64>, source: impl Into<String>) -> Self {
        Self { total, source: source.into(), buffer: None }
    }

    /// The same on a device whose buffers have no more than so many bytes.
    #[must_use]
    pub fn with_buffer(self, buffer: Option<u64>) -> Self {
        Self { buffer, ..self }
    }
}

/// The memory that a model needs and there is not.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shortage {
    /// What is needed.
    pub needed: Footprint,
    /// Bytes of weights by type.
    pub by_type: Vec<(String, usize)>,
    /// How the model was going to be used.
    pub usage: Usage,
    /// What there is.
    pub available: u64,
    /// Where that number is from.
    pub source: String,
    /// What would make it fit, what costs least first; empty if nothing here does.
    pub advice: Vec<Advice>,
}

/// What makes a model fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// A cache for so many tokens.
    Context(usize),
    /// A cache of this name for as many tokens as were asked for.
    Cache(String),
    /// The projection to the vocabulary in 4 bits, which takes so many bytes less.
    Int4Head(usize),
}

/// Caches that take less and less memory.
const CHEAPER: [(Bits, Bits); 3] =
    [(Bits::Eight, Bits::Eight), (Bits::Four, Bits::Four), (Bits::Two, Bits::Two)];

/// Fewer tokens than these are no context to advise.
const LEAST: usize = 64;

impl Planned<'_> {
    /// What the model takes.
    ///
    /// # Errors
    ///
    /// A cache that does not fit the model.
    pub fn footprint(&self, usage: &Usage) -> Result<Footprint> {
        Ok(Footprint {
            weights: self.weights.total(),
            cache: cache_bytes(self.spec, usage)?,
            activations: self.activations(usage),
        })
    }

    /// Bytes that a step of one token of each sequence reads after `len` tokens: weights once, and the caches of all
    /// layers.
    ///
    /// # Errors
    ///
    /// A cache that does not fit the model.
    pub fn read_by_a_step(&self, usage: &Usage, len: usize) -> Result<[usize; 2]> {
        let layers = self.spec.layers.iter().enumerate();
        let caches = layers.map(|(i, layer)| {
            let config = usage.cache.layer(i, layer);
            Ok(CacheLayout::new(&config, layer.cache_shape(usage.batch))?.bytes_read(len + 1))
        });
        Ok([self.weights.of_a_token(), caches.sum::<Result<usize>>()?])
    }

    /// Checks that the model fits, before it is loaded.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] with what would help, [`Error::Unsupported`] for a tensor that is larger than
    /// a buffer of the device, or a cache that does not fit the model.
    pub fn check(&self, usage: &Usage, limit: &MemoryLimit) -> Result<()> {
        usage.cache.validate(self.spec)?;
        let (name, bytes) = &self.weights.largest;
        if let Some(most) = limit.buffer.filter(|&most| *bytes as u64 > most) {
            let what = format!("tensor {name} of {}", size(*bytes as u64));
            let why = format!("a buffer of the device has at most {}", size(most));
            return Err(Error::unsupported(what, why));
        }
        let Some(available) = limit.total else { return Ok(()) };
        let needed = self.footprint(usage)?;
        if needed.total() as u64 <= available {
            return Ok(());
        }
        Err(Error::Memory(Box::new(Shortage {
            needed,
            by_type: self.weights.by_type.clone().into_iter().collect(),
            usage: usage.clone(),
            available,
            source: limit.source.clone(),
            advice: self.advice(usage, available, needed.total()),
        })))
    }

    fn advice(&self, usage: &Usage, available: u64, needed: usize) -> Vec<Advice> {
        let fits = |usage: &Usage| {
            self.footprint(usage).is_ok_and(|needed| needed.total() as u64 <= available)
        };
        let mut advice = vec![];
        // The most tokens that fit: below `most` all do, from `least` on none does.
        let (mut most, mut least) = (0, usage.cache.cache.capacity);
        while least - most > 1 {
            let middle = most + (least - most) / 2;
            if fits(&usage.with_capacity(middle)) { most = middle } else { least = middle }
        }
        if most >= LEAST {
            advice.push(Advice::Context(most));
        }
        for (keys, values) in CHEAPER {
            let cache = usage.cache.cache.with_bits(keys, values);
            let cheaper = ModelCacheConfig { cache, ..usage.cache.clone() };
            let less = |usage: &Usage| cache_bytes(self.spec, usage).unwrap_or(usize::MAX);
            let with_it = Usage { cache: cheaper, ..usage.clone() };
            let valid = with_it.cache.validate(self.spec).is_ok();
            if valid && less(&with_it) < less(usage) && fits(&with_it) {
                advice.push(Advice::Cache(with_it.cache.to_string()));
                break;
            }
        }
        let (bytes, numbers) = self.weights.head;
        let saved = bytes.saturating_sub(numbers / 32 * 18);
        if saved > 0 && (needed - saved) as u64 <= available {
            advice.push(Advice::Int4Head(saved));
        }
        advice
    }

    /// The residual stream and its norm, queries, keys and values, what attention returns, and the widest part of the
    /// MLP, of which the CPU computes a few hundred tokens at a time; logits of the last token of each sequence.
    fn activations(&self, usage: &Usage) -> usize {
        /// Tokens of the MLP that are computed together.
        const ROWS: usize = 512;
        let layers = &self.spec.layers;
        let qkv = layers.iter().map(|layer| layer.qkv_rows()).max().unwrap_or(0);
        let all = usage.pass.saturating_mul(4 * self.spec.hidden_size + 2 * qkv);
        let mlp = usage.pass.min(ROWS).saturating_mul(2 * self.weights.widest);
        let logits = 2 * usage.batch.saturating_mul(self.spec.vocab_size);
        size_of::<f32>().saturating_mul(all.saturating_add(mlp).saturating_add(logits))
    }
}

/// Bytes of the caches of all layers and of the rotary tables.
fn cache_bytes(spec: &ModelSpec, usage: &Usage) -> Result<usize> {
    let mut bytes = 0usize;
    for (i, layer) in spec.layers.iter().enumerate() {
        let layout =
            CacheLayout::new(&usage.cache.layer(i, layer), layer.cache_shape(usage.batch))?;
        bytes = bytes.saturating_add(layout.memory_bytes().total());
    }
    let room = usage.cache.cache.capacity.min(spec.max_positions);
    // Sine and cosine of every pair of channels.
    let tables: usize = spec.ropes.iter().map(|rope| rope.rotary_dim()).sum();
    Ok(bytes.saturating_add(room.saturating_mul(size_of::<f32>() * tables)))
}

/// Bytes in decimal units, as disks and files have them.
fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e9 => format!("{:.2} GB", bytes / 1e9),
        bytes => format!("{:.1} MB", bytes / 1e6),
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, usage, available, source, advice, .. } = self;
        let bytes = |n: usize| size(n as u64);
        let types = self.by_type.iter().map(|(name, n)| format!("{name} {}", bytes(*n)));
        let capacity = usage.cache.cache.capacity;
        write!(
            f,
            "memory: {} are needed and {} are there by {source}: weights {} ({}), the {} cache of {capacity} tokens",
            bytes(needed.total()),
            size(*available),
            bytes(needed.weights),
            types.collect::<Vec<_>>().join(", "),
            usage.cache,
        )?;
        if usage.batch > 1 {
            write!(f, " for {} sequences", usage.batch)?;
        }
        write!(f, " {}, activations {}; ", bytes(needed.cache), bytes(needed.activations))?;
        if advice.is_empty() {
            return write!(
                f,
                "neither a shorter context nor a cheaper cache nor a head in 4 bits fits"
            );
        }
        let told = advice.iter().map(|advice| match advice {
            Advice::Context(tokens) => format!("a context of {tokens} tokens"),
            Advice::Cache(name) => format!("a {name} cache of {capacity} tokens"),
            Advice::Int4Head(saved) => format!("a head in 4 bits ({} less)", bytes(*saved)),
        });
        write!(f, "what fits: {}", told.collect::<Vec<_>>().join(", or "))
    }
}
