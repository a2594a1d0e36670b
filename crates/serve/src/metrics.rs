//! The metrics of `/metrics`, in Prometheus' text format.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kv_models::{Guesses, PrefixStats};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, text::encode},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

/// The way in which a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    /// With its last token.
    Finished,
    /// The client has gone.
    Cancelled,
    /// The deadline passed.
    Deadline,
    /// With an error.
    Failed,
    /// It did not start, because the queue was full or the server was stopping.
    Refused,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    outcome: Outcome,
}

/// Counters, gauges and histograms. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    texts: Family<Labels, Counter>,
    /// Tokens of prompts.
    pub prompt_tokens: Counter,
    generated_tokens: Counter,
    /// Texts that wait for a slot.
    pub waiting: Gauge,
    /// Texts that are prefilled or continued.
    pub active: Gauge,
    /// Bytes that the caches of all slots take.
    pub cache_bytes: Gauge,
    /// Bytes that they would take in f16.
    pub cache_f16_bytes: Gauge,
    guesses: Counter,
    right_guesses: Counter,
    first_token: Histogram,
    between_tokens: Histogram,
    prefixes: Arc<Mutex<PrefixStats>>,
}

impl Default for Metrics {
    /// Returns metrics that count from 0.
    fn default() -> Self {
        // 1 ms to 262 s, and 1 ms to 16 s.
        let seconds = |n| Histogram::new(exponential_buckets(1e-3, 2.0, n));
        Self {
            texts: Family::default(),
            prompt_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            waiting: Gauge::default(),
            active: Gauge::default(),
            cache_bytes: Gauge::default(),
            cache_f16_bytes: Gauge::default(),
            guesses: Counter::default(),
            right_guesses: Counter::default(),
            first_token: seconds(19),
            between_tokens: seconds(15),
            prefixes: Arc::default(),
        }
    }
}

impl Metrics {
    /// Counts a text by how it ended.
    pub fn count(&self, outcome: Outcome) {
        self.texts.get_or_create(&Labels { outcome }).inc();
    }

    /// Returns the number of texts that ended in this way.
    pub fn counted(&self, outcome: Outcome) -> u64 {
        self.texts.get_or_create(&Labels { outcome }).get()
    }

    /// Counts a generated token, `time` after the one before, or after the start for the first.
    pub fn token(&self, time: Duration, first: bool) {
        self.generated_tokens.inc();
        match first {
            true => self.first_token.observe(time.as_secs_f64()),
            false => self.between_tokens.observe(time.as_secs_f64()),
        }
    }

    /// Counts the guesses of a text.
    pub fn guesses(&self, guesses: Guesses) {
        self.guesses.inc_by(guesses.verified as u64);
        self.right_guesses.inc_by(guesses.right as u64);
    }

    /// Sets the contents and the use of the stored prefixes.
    pub fn prefixes(&self, stats: PrefixStats) {
        *self.prefixes.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }

    /// Returns all metrics in the text format of OpenMetrics.
    pub fn text(&self) -> String {
        let mut registry = Registry::with_prefix("kv_serve");
        registry.register("texts", "Texts by how they ended", self.texts.clone());
        registry.register("prompt_tokens", "Tokens of prompts", self.prompt_tokens.clone());
        let help = "Tokens that were generated";
        registry.register("generated_tokens", help, self.generated_tokens.clone());
        registry.register("guesses", "Tokens that were guessed", self.guesses.clone());
        let help = "Guesses that were right, and saved a step each";
        registry.register("right_guesses", help, self.right_guesses.clone());
        registry.register("waiting", "Texts that wait for a slot", self.waiting.clone());
        let help = "Texts that are prefilled or continued";
        registry.register("active", help, self.active.clone());
        let help = "Bytes of the caches of all slots";
        registry.register_with_unit("cache", help, Unit::Bytes, self.cache_bytes.clone());
        let help = "Bytes that these caches would take in f16";
        let f16 = self.cache_f16_bytes.clone();
        registry.register_with_unit("cache_f16", help, Unit::Bytes, f16);
        let help = "Time from a text's arrival at the engine to its first token";
        registry.register_with_unit("first_token", help, Unit::Seconds, self.first_token.clone());
        let help = "Time between two tokens of a text";
        let between = self.between_tokens.clone();
        registry.register_with_unit("between_tokens", help, Unit::Seconds, between);
        let stats = *self.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, help, n) in [
            ("prefix_lookups", "Prompts that were looked up in the stored prefixes", stats.lookups),
            ("prefix_hits", "Prompts with a stored prefix", stats.hits),
            ("prefix_hit_tokens", "Tokens that stored prefixes had", stats.hit_tokens),
            ("prefix_evicted_blocks", "Blocks that were removed for others", stats.evicted_blocks),
        ] {
            registry.register(name, help, ConstCounter::new(n as u64));
        }
        let (blocks, bytes) = (stats.blocks as i64, stats.bytes as i64);
        registry.register("prefix_blocks", "Stored blocks", ConstGauge::new(blocks));
        let help = "Bytes of stored prefixes";
        registry.register_with_unit("prefix", help, Unit::Bytes, ConstGauge::new(bytes));
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }
}
