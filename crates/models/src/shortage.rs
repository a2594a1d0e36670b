//! A model that does not fit into memory, and what would make it fit.

use std::fmt;

/// Bytes of memory, part by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// The weights, as they are kept.
    pub weights: usize,
    /// The caches of all layers, and the rotary tables: [`CacheBytes::total`].
    pub cache: usize,
    /// Bytes of activations, estimated from the widths of the model.
    pub activations: usize,
}

impl Footprint {
    /// Bytes of all parts.
    pub fn total(&self) -> usize {
        self.weights.saturating_add(self.cache).saturating_add(self.activations)
    }
}

/// The memory that a model needs and there is not.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shortage {
    /// The memory needed.
    pub needed: Footprint,
    /// Bytes of weights by type.
    pub by_type: Vec<(String, usize)>,
    /// The name of the cache that was planned.
    pub cache: String,
    /// The tokens that it holds.
    pub capacity: usize,
    /// The sequences that it holds.
    pub batch: usize,
    /// Bytes available.
    pub available: u64,
    /// Where that number is from.
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
    /// A cache of this name for as many tokens as were asked for.
    Cache(String),
    /// Quantize the output projection to 4 bits, which saves this number of bytes.
    Int4Head(usize),
}

/// Bytes in decimal units, as disks and files have them.
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
            format!("a head in 4 bits ({} less)", decimal_size(*saved as u64))
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
            "memory: needs {}, but {source} allows {}: weights {} ({}), the {cache} cache of {capacity} \
             tokens",
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
            return write!(f, "no shorter context, cheaper cache or head in 4 bits fits");
        }
        write!(f, "try {}", advice_text(advice, *capacity))
    }
}
