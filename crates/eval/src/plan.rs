//! What to evaluate.

use core::{fmt, ops::Range, str::FromStr};

use kv_cubecl::KvCacheConfig;
use kv_models::{LanguageModel, ModelCacheConfig};
use serde::Serialize;

use crate::{Error, Result, ids};

/// The passes of a window's tokens through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Token by token from an empty cache, as in serving.
    Streaming,
    /// All at once, with the keys and values that each token would find in the cache: the same
    /// numbers up to rounding.
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
    bos: Option<u32>,
    /// The window that was asked for; `window` is smaller for a text shorter than that.
    asked: usize,
    window: usize,
    stride: Option<usize>,
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
            let rule = "a perplexity needs at least two tokens, one to see and one to score";
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

    /// Starts every window with the token `bos`, if it is given, as models expect that were trained
    /// on texts with a begin-of-text token. It counts as one of the window's tokens but is not part
    /// of the text: a window holds one token of the text less, and all of them are scored, the
    /// first predicted from `bos` alone.
    ///
    /// For a text that fits one window, this is the loss that the transformers library computes
    /// from the ids of its tokenizer. For longer texts llama.cpp's `perplexity` differs: it
    /// replaces each window's first token by `bos`, so that this token is neither seen nor scored,
    /// and it scores only the second half of each window.
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

    /// The token that every window starts with, if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Tokens of the text per window.
    fn text_window(&self) -> usize {
        self.window - usize::from(self.bos.is_some())
    }

    /// Makes each window begin `stride` tokens after the one before. A window then scores only the
    /// tokens that the one before it does not reach, so that all but the first have at least
    /// `window - stride` tokens before them. By default windows do not overlap.
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

    /// The passes of tokens through the model.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The caches, `float` first, each with the window as capacity.
    pub fn caches(&self) -> &[ModelCacheConfig] {
        &self.caches
    }

    /// Tokens per window, including the begin-of-text token it may start with.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Tokens from the start of one window to that of the next.
    pub fn stride(&self) -> usize {
        self.stride.unwrap_or_else(|| self.text_window())
    }

    /// Tokens of the text that are used.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Returns the tokens of a span's pass, and the number of its first tokens that are not scored.
    pub(crate) fn input(&self, span: &Span) -> (Vec<u32>, usize) {
        let ids: Vec<u32> =
            self.bos.iter().chain(&self.ids[span.tokens.clone()]).copied().collect();
        let context = ids.len() - (span.tokens.end - span.scored.start);
        (ids, context)
    }

    /// The windows, in order. Every token is scored once. The exceptions, if windows do not start
    /// with a begin-of-text token, are the tokens that begin a window that does not overlap the one
    /// before: nothing predicts them.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> + use<'_> {
        let n = self.ids.len();
        let (window, stride) = (self.text_window(), self.stride());
        let end = move |start: usize| (start + window).min(n);
        // Without a begin-of-text token before it, the first token of a window is not predicted.
        let unseen = usize::from(self.bos.is_none());
        (0..n)
            .step_by(stride)
            .map_while(move |start| {
                // The end of the window before.
                let before = start.checked_sub(stride).map_or(0, end);
                let scored = before.max(start + unseen)..end(start);
                (before < n).then_some(Span { tokens: start..end(start), scored })
            })
            .filter(|span| !span.scored.is_empty())
    }

    /// Tokens scored by one run.
    pub fn scored_tokens(&self) -> usize {
        self.spans().map(|span| span.scored.len()).sum()
    }
}

/// The window for a text of `tokens`, if the model has room for it.
fn limited(asked: usize, tokens: usize, model: &LanguageModel) -> Result<usize> {
    let (window, limit) = (asked.min(tokens), model.max_positions());
    if window > limit {
        let rule = format!("exceeds the model's limit of {limit} positions");
        return Err(Error::plan("window", window, rule));
    }
    Ok(window)
}
