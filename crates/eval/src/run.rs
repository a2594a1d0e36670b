//! The results of one cache.

use kv_models::WeightDtype;
use serde::Serialize;

use crate::Mode;

/// Mean loss of some positions of the eval windows. A position is the number of tokens in the cache
/// when the model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PositionNll {
    /// First position.
    pub start: usize,
    /// Position after the last.
    pub end: usize,
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// Number of tokens in all windows.
    pub tokens: usize,
}

impl PositionNll {
    pub(crate) fn middle(&self) -> f64 {
        (self.start + self.end - 1) as f64 / 2.0
    }
}

/// Divergence from the float run at some positions of the eval windows, nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PositionKl {
    /// First position.
    pub start: usize,
    /// Position after the last.
    pub end: usize,
    /// The divergence that half of the tokens do not exceed.
    pub median: f64,
    /// The divergence that 99% of the tokens do not exceed; `None` for fewer than 100 tokens.
    pub p99: Option<f64>,
    /// The divergence that 99.9% of the tokens do not exceed; `None` for fewer than 1000 tokens.
    pub p999: Option<f64>,
    /// Number of tokens in all windows.
    pub tokens: usize,
}

impl PositionKl {
    pub(crate) fn middle(&self) -> f64 {
        (self.start + self.end - 1) as f64 / 2.0
    }
}

/// The results of one cache over the whole text.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// The model's name; empty before [`Report::add`](crate::Report::add).
    pub model: String,
    /// The cache's short name.
    pub cache: String,
    /// The way tokens were processed.
    pub mode: Mode,
    /// The type of the model's weights, in which it computes.
    pub dtype: WeightDtype,
    /// Bytes of the model's weights.
    pub weight_bytes: usize,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// Standard error of `nll`, taking tokens as independent.
    pub nll_stderr: f64,
    /// Mean over all tokens of `nll` minus the `nll` of the float run.
    pub nll_excess: f64,
    /// Standard error of `nll_excess`, computed from blocks of tokens, because neighboring tokens
    /// are not independent.
    pub nll_excess_stderr: f64,
    /// `nll` in bits per byte of text; `None` before [`Report::add`](crate::Report::add), or if the
    /// bytes of the text are not known.
    pub bits_per_byte: Option<f64>,
    /// Mean divergence of the next-token distribution from the float run's, nats.
    pub kl_mean: f64,
    /// The 95% confidence interval of `kl_mean`, by a bootstrap over eval windows; `None` for fewer
    /// than ten windows.
    pub kl_interval: Option<[f64; 2]>,
    /// The divergence that half of the tokens do not exceed, nats.
    pub kl_median: f64,
    /// The divergence that 99% of tokens do not exceed, nats.
    pub kl_p99: f64,
    /// The divergence that 99.9% of tokens do not exceed, nats.
    pub kl_p999: f64,
    /// Share of tokens with the same most likely token as in the float run.
    pub same_top: f64,
    /// Tokens scored.
    pub tokens: usize,
    /// Seconds in the model and its head, of several devices their mean; computing the divergence
    /// is not counted.
    pub seconds: f64,
    /// Bytes that the cache of one window allocates in all layers.
    pub cache_bytes: usize,
    /// Bytes of an unquantized cache of the same capacity and float type.
    pub float_cache_bytes: usize,
    /// Tokens in the cache when it quantizes the first of them; `None` if it never does.
    pub first_quantized: Option<usize>,
    /// Loss by position, ascending.
    pub position_nll: Vec<PositionNll>,
    /// Divergence by position, ascending.
    pub position_kl: Vec<PositionKl>,
    /// Error by layer; empty where it was not measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerError>,
}

impl Run {
    /// Returns the scored tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// Returns whether this is the baseline run of its model.
    pub(crate) fn is_float(&self) -> bool {
        self.cache == "float"
    }
}

/// Errors of one layer, over the tokens that its cache holds quantized at the end of the sequence.
/// All are 0 if it holds none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerError {
    /// The layer, counted from 0.
    pub layer: usize,
    /// `rms(restored - key) / rms(key)`; of sparse attention for the keys of the indexer.
    pub key_error: f64,
    /// `rms(restored - value) / rms(value)`; of sparse attention for the compressed entries.
    pub value_error: f64,
    /// Error of the attention output of all tokens, compared with that of a float cache for the
    /// same queries, keys and values.
    pub output_error: f64,
    /// Share of quantized elements outside the range of the codes, because scale and minimum were
    /// rounded to f16.
    pub clipped: f64,
    /// Share of groups with scale 0: all of their elements are restored to one value.
    pub constant: f64,
}
