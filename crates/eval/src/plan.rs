//! Evaluation plans: [`Plan`].

use core::{fmt, ops::Range, str::FromStr};

use kv_cubecl::KvCacheConfig;
use kv_models::{LanguageModel, ModelCacheConfig};
use serde::Serialize;

use crate::{Error, Result, ids};

/// The way the tokens of an eval window are processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Token by token from an empty cache, as in serving.
    Streaming,
    /// All at once in the closed form of the cache: the same numbers up to rounding.
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

/// A checked evaluation: eval windows of a text, and the caches to compare with the float cache.
#[derive(Clone, Debug)]
pub struct Plan {
    mode: Mode,
    caches: Vec<ModelCacheConfig>,
    ids: Vec<u32>,
    bos: Option<u32>,
    /// The requested window; `window` is smaller for a shorter text.
    asked: usize,
    window: usize,
    stride: Option<usize>,
}

/// An eval window: its tokens, and the part of them that is scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) tokens: Range<usize>,
    pub(crate) scored: Range<usize>,
}

impl Plan {
    /// Creates a plan over the first `tokens` of `ids` (all of them if `None`), in eval windows of
    /// `window` tokens. The `float` cache always runs first.
    ///
    /// # Errors
    /// [`Error::Plan`] for a text shorter than two tokens, a window below 2 or beyond the model's
    /// limit, a cache named twice, or an id the model does not know; [`Error::Model`] for a cache
    /// that does not fit the model's heads or layers.
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
            let rule = "must be at least two tokens, one of context and one to score";
            return Err(Error::plan("tokens", ids.len(), rule));
        }
        if window < 2 {
            return Err(Error::plan("window", window, "must be at least 2 tokens"));
        }
        let asked = window;
        let window = limited(asked, ids.len(), model)?;
        ids::check(&ids, model)?;
        let mut all = vec![ModelCacheConfig::from(KvCacheConfig::float().with_capacity(window))];
        for config in caches {
            let config = config.into().with_capacity(window);
            config.validate(model)?;
            if config.is_float(model.spec()) {
                continue;
            }
            // Compares names, since only the name identifies a row.
            if all.iter().any(|other| other.to_string() == config.to_string()) {
                return Err(Error::plan("cache", config, "is given twice"));
            }
            all.push(config);
        }
        Ok(Self { mode, caches: all, ids, bos: None, asked, window, stride: None })
    }

    /// Starts every eval window with the begin-of-text token `bos`, if it is given. It counts as
    /// one of the window's tokens but is not part of the text. A window then holds one token of the
    /// text less and scores all of them; the first is predicted from `bos` alone.
    ///
    /// For a text that fits one window, this is the loss that the transformers library computes.
    /// For longer texts llama.cpp's `perplexity` differs: it replaces each window's first token by
    /// `bos`, and it scores only the second half of each window.
    ///
    /// # Errors
    /// [`Error::Plan`] for an id that the model does not know, a window that exceeds the model's
    /// limit with it, or a stride that is too long for the tokens of text left in a window.
    pub fn with_bos(self, model: &LanguageModel, bos: impl Into<Option<u32>>) -> Result<Self> {
        let Some(bos) = bos.into() else { return Ok(self) };
        ids::check(&[bos], model)?;
        let window = limited(self.asked, self.ids.len() + 1, model)?;
        let mut plan = Self { bos: Some(bos), window, ..self };
        plan.caches.iter_mut().for_each(|config| config.capacity = window);
        match plan.stride {
            Some(stride) => plan.with_stride(stride),
            None => Ok(plan),
        }
    }

    /// Returns the token that every eval window starts with, if any.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the tokens of the text per eval window.
    fn text_window(&self) -> usize {
        self.window - usize::from(self.bos.is_some())
    }

    /// Makes each eval window begin `stride` tokens after the previous one. A window then scores
    /// only the tokens after the previous window, so each has at least `window - stride` tokens of
    /// context, except in the first window. By default windows do not overlap.
    ///
    /// # Errors
    /// [`Error::Plan`] for a stride of 0 or above the window.
    pub fn with_stride(self, stride: usize) -> Result<Self> {
        let most = self.asked - usize::from(self.bos.is_some());
        if !(1..=most).contains(&stride) {
            let rule = format!("must be at least 1 and at most the window's {most} tokens of text");
            return Err(Error::plan("stride", stride, rule));
        }
        // A text shorter than the window is one window.
        Ok(Self { stride: Some(stride.min(self.text_window())), ..self })
    }

    /// Returns the way tokens are processed.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the caches, `float` first. Their capacity is the eval window.
    pub fn caches(&self) -> &[ModelCacheConfig] {
        &self.caches
    }

    /// Returns the tokens per eval window, including its begin-of-text token.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Returns the tokens from the start of one eval window to that of the next.
    pub fn stride(&self) -> usize {
        self.stride.unwrap_or_else(|| self.text_window())
    }

    /// Returns the number of tokens of the text that are used.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Returns the input tokens of a span, and the number of its first tokens that are not scored.
    pub(crate) fn input(&self, span: &Span) -> (Vec<u32>, usize) {
        let ids: Vec<u32> =
            self.bos.iter().chain(&self.ids[span.tokens.clone()]).copied().collect();
        let context = ids.len() - (span.tokens.end - span.scored.start);
        (ids, context)
    }

    /// Returns the eval windows in order. Every token is scored once, except the first token of a
    /// window without a begin-of-text token or overlap, which nothing predicts.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> + use<'_> {
        let n = self.ids.len();
        let (window, stride) = (self.text_window(), self.stride());
        let end = move |start: usize| (start + window).min(n);
        // Nothing predicts the first token without a begin-of-text token.
        let unseen = usize::from(self.bos.is_none());
        (0..n)
            .step_by(stride)
            .map_while(move |start| {
                // The end of the previous window.
                let before = start.checked_sub(stride).map_or(0, end);
                let scored = before.max(start + unseen)..end(start);
                (before < n).then_some(Span { tokens: start..end(start), scored })
            })
            .filter(|span| !span.scored.is_empty())
    }

    /// Returns the number of tokens that one run scores.
    pub fn scored_tokens(&self) -> usize {
        self.spans().map(|span| span.scored.len()).sum()
    }
}

/// Returns the eval window for a text of `tokens`, which must be within the model's limit.
fn limited(asked: usize, tokens: usize, model: &LanguageModel) -> Result<usize> {
    let (window, limit) = (asked.min(tokens), model.max_positions());
    if window > limit {
        let rule = format!("exceeds the model's limit of {limit} positions");
        return Err(Error::plan("window", window, rule));
    }
    Ok(window)
}
