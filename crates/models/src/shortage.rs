//! Errors of models that do not fit into memory.

use std::fmt;

/// Bytes of memory, by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// Bytes of the weights in their stored format.
    pub weights: usize,
    /// Bytes of the caches of all layers and of the rope tables:
    /// [`CacheBytes::total`](crate::CacheBytes::total).
    pub cache: usize,
    /// Bytes of activations, estimated from the widths of the model.
    pub activations: usize,
}

impl Footprint {
    /// Returns the bytes of all parts.
    pub fn total(&self) -> usize {
        self.weights.saturating_add(self.cache).saturating_add(self.activations)
    }
}

/// A model that needs more memory than is available.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shortage {
    /// The memory needed.
    pub needed: Footprint,
    /// Bytes of weights by type.
    pub by_type: Vec<(String, usize)>,
    /// The name of the planned cache.
    pub cache: String,
    /// Tokens per sequence of the planned cache.
    pub capacity: usize,
    /// Sequences of the planned cache.
    pub batch: usize,
    /// Bytes available.
    pub available: u64,
    /// The origin of that number.
    pub source: String,
    /// Changes that make the model fit, least costly first; empty if none does.
    pub advice: Vec<Advice>,
}

/// A change that makes a model fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// Keep the weights packed, in this number of bytes.
    Packed(usize),
    /// Allocate the cache for this number of tokens.
    Context(usize),
    /// Use a cache of this name with the requested capacity.
    Cache(String),
    /// Quantize the output projection to int4 as it is loaded, which saves this number of bytes.
    Int4Head(usize),
}

/// Formats bytes in decimal units, as for disks and files.
pub fn decimal_size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e9 => format!("{:.2} GB", bytes / 1e9),
        bytes => format!("{:.1} MB", bytes / 1e6),
    }
}

/// Describes `advice` for a cache of `capacity` tokens.
pub(crate) fn advice_text(advice: &[Advice], capacity: usize) -> String {
    let parts = advice.iter().map(|advice| match advice {
        Advice::Packed(bytes) => {
            format!("--weights packed (weights take {})", decimal_size(*bytes as u64))
        }
        Advice::Context(tokens) => format!("a context of {tokens} tokens"),
        Advice::Cache(name) => format!("a {name} cache of {capacity} tokens"),
        Advice::Int4Head(saved) => {
            format!("--head int4 ({} less)", decimal_size(*saved as u64))
        }
    });
    parts.collect::<Vec<_>>().join(", or ")
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, cache, capacity, batch, available, source, advice, .. } = self;
        let bytes = |n: usize| decimal_size(n as u64);
        let types = self.by_type.iter().map(|(name, n)| format!("{name} {}", bytes(*n)));
        write!(
            f,
            "memory: needs {}, but {source} allows {}: weights {} ({}), the {cache} cache of \
             {capacity} tokens",
            bytes(needed.total()),
            decimal_size(*available),
            bytes(needed.weights),
            types.collect::<Vec<_>>().join(", "),
        )?;
        if *batch > 1 {
            write!(f, " for {batch} sequences")?;
        }
        write!(f, " {}, activations {}; ", bytes(needed.cache), bytes(needed.activations))?;
        if advice.is_empty() {
            return write!(f, "no shorter context, cheaper cache or --head int4 fits");
        }
        write!(f, "try {}", advice_text(advice, *capacity))
    }
}
