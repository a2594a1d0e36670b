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
        Ok(Self { mode, caches: all, ids, window })
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

    /// Tokens of the text that are used.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// The token ids.
    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Windows of at least two tokens, in order.
    pub(crate) fn windows(&self) -> impl Iterator<Item = Range<usize>> + use<'_> {
        let n = self.ids.len();
        (0..n)
            .step_by(self.window)
            .map(move |start| start..(start + self.window).min(n))
            .filter(|window| window.len() >= 2)
    }

    /// Tokens scored by one run.
    pub fn scored_tokens(&self) -> usize {
        self.windows().map(|window| window.len() - 1).sum()
    }
}
