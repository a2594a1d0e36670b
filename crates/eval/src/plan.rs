//! What to evaluate.

use core::{fmt, ops::Range, str::FromStr};

use kv_cubecl::{CacheFloat, KvCacheConfig};
use kv_models::{LanguageModel, ModelCacheConfig};
use serde::Serialize;

use crate::{Error, Result, ids};

/// How a window's tokens pass through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Token by token from an empty cache, as in serving: generates nothing, recomputes nothing.
    Streaming,
    /// All at once by the closed form, which gives the same numbers.
    Parallel,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Streaming => "streaming",
            Mode::Parallel => "parallel",
        })
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "streaming" => Ok(Mode::Streaming),
            "parallel" => Ok(Mode::Parallel),
            _ => Err(Error::plan("mode", format!("{text:?}"), "must be streaming or parallel")),
        }
    }
}

/// A checked evaluation: windows of one text, the float cache, and the caches to compare with it.
#[derive(Clone, Debug)]
pub struct Plan {
    mode: Mode,
    caches: Vec<ModelCacheConfig>,
    ids: Vec<u32>,
    window: usize,
    stride: usize,
}

/// Tokens that pass through the model together, from an empty cache, and those of them that are
/// scored: their losses count, and each is predicted from all tokens before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) tokens: Range<usize>,
    pub(crate) scored: Range<usize>,
}

impl Plan {
    /// Checks a plan over the first `tokens` of `ids` (all of them if `None`), in windows of
    /// `window` tokens, each from an empty cache. The `float` cache always runs, first.
    ///
    /// # Errors
    /// [`Error::Plan`] for a text shorter than two tokens, a window below 2 or beyond the model's
    /// limit, a cache named twice, or an id the model does not know; [`Error::Model`] for a cache that
    /// does not fit the model's heads or layers.
    pub fn new(
        model: &LanguageModel,
        mode: Mode,
        caches: impl IntoIterator<Item = impl Into<ModelCacheConfig>>,
        mut ids: Vec<u32>,
        window: usize,
        tokens: Option<usize>,
    ) -> Result<Self> {
        ids.truncate(tokens.unwrap_or(usize::MAX));
        if ids.len() < 2 {
            let rule = "a perplexity needs at least two tokens, one to see and one to score";
            return Err(Error::plan("tokens", ids.len(), rule));
        }
        if window < 2 {
            return Err(Error::plan("window", window, "must be at least 2 tokens"));
        }
        let window = window.min(ids.len());
        let limit = model.max_positions();
        if window > limit {
            let rule = format!("exceeds the model's limit of {limit} positions");
            return Err(Error::plan("window", window, rule));
        }
        ids::check(&ids, model)?;
        let is_float = |config: &ModelCacheConfig| {
            !config.cache.is_quantized() && config.cache.float == CacheFloat::F32
        };
        let others = caches.into_iter().map(Into::into).filter(|config| !is_float(config));
        let mut all: Vec<ModelCacheConfig> = Vec::new();
        for mut config in [KvCacheConfig::float().into()].into_iter().chain(others) {
            config.cache.capacity = window;
            config.validate(model)?;
            if all.contains(&config) {
                return Err(Error::plan("cache", config, "is given twice"));
            }
            all.push(config);
        }
        Ok(Self { mode, caches: all, ids, window, stride: window })
    }

    /// Lets each window begin `stride` tokens after the one before. A window then scores only the
    /// tokens that the one before it does not reach, so that all but the first have at least
    /// `window - stride` tokens before them. By default windows do not overlap.
    ///
    /// # Errors
    /// [`Error::Plan`] for a stride of 0 or above the window.
    pub fn with_stride(self, stride: usize) -> Result<Self> {
        if !(1..=self.window).contains(&stride) {
            let rule = format!("must be at least 1 and at most the window of {}", self.window);
            return Err(Error::plan("stride", stride, rule));
        }
        Ok(Self { stride, ..self })
    }

    /// How tokens pass through the model.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The caches, `float` first, each with the window as capacity.
    pub fn caches(&self) -> &[ModelCacheConfig] {
        &self.caches
    }

    /// Tokens per window.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Tokens from the start of one window to that of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Tokens of the text that are used.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// The token ids.
    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The windows, in order. Every token but those that begin a window that overlaps no other is
    /// scored once.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> + use<'_> {
        let n = self.ids.len();
        let end = move |start: usize| (start + self.window).min(n);
        (0..n)
            .step_by(self.stride)
            .map_while(move |start| {
                // What the window before reached; the first token of a text has nothing before it.
                let before = start.checked_sub(self.stride).map_or(0, end);
                let scored = before.max(start + 1)..end(start);
                (before < n).then_some(Span { tokens: start..end(start), scored })
            })
            .filter(|span| !span.scored.is_empty())
    }

    /// Tokens scored by one run.
    pub fn scored_tokens(&self) -> usize {
        self.spans().map(|span| span.scored.len()).sum()
    }
}
