//! [`PromptCache`]: a cache that reuses the longest common prefix of successive prompts.

use burn::tensor::{Device, Tensor, TensorData};
use tracing::trace_span;

use super::{LayerCache, ModelCache};
use crate::{
    error::{Error, Result},
    generate::{GenerateOptions, Generated, decode, finish, ids_to_tensor, last_logits},
    model::LanguageModel,
    spans::PHASE,
};

/// The distances of checkpoints from the end of a prompt. The next prompt is likely to differ near
/// the end: one that differs `n` tokens before it is computed again from at most 16 `n` before it.
const DISTANCES: [usize; 7] = [0, 16, 128, 1024, 8192, 65_536, 524_288];

/// The lengths that a [`PromptCache`] can be cut back to, in addition to those that
/// [`ModelCache::exact`] allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpoints {
    /// No other length.
    None,
    /// The end of each prompt.
    Ends,
    /// The end of each prompt, and growing distances before it, while they take no more memory than
    /// the cache.
    All,
}

impl Checkpoints {
    /// Returns the distances from the end of a prompt, ascending.
    fn distances(self) -> &'static [usize] {
        match self {
            Self::None => &[],
            Self::Ends => &DISTANCES[..1],
            Self::All => &DISTANCES,
        }
    }
}

/// A [`ModelCache`] of one sequence and its tokens. It is cut back to the prefix that the next
/// prompt shares with them.
///
/// A quantized cache loses its recent float tokens as it grows, and a sliding window loses the
/// tokens before it. [Checkpoints] keep copies of them at some lengths. A cache that continues from
/// a checkpoint gives the same logits as a cache that was never longer.
#[derive(Clone, Debug)]
pub struct PromptCache {
    pub(super) cache: ModelCache,
    pub(super) tokens: Vec<u32>,
    /// Sorted by length.
    pub(super) checkpoints: Vec<Checkpoint>,
    taken: Checkpoints,
}

impl PromptCache {
    /// Creates a prompt cache without tokens.
    ///
    /// # Errors
    /// Fails for a cache that holds tokens or has another batch than 1.
    pub fn new(cache: ModelCache, taken: Checkpoints) -> Result<Self> {
        if cache.batch() != 1 {
            return Err(Error::argument("batch", cache.batch(), "must be 1 for a prompt cache"));
        }
        if !cache.is_empty() {
            let held = format!("{} tokens", cache.len());
            return Err(Error::argument("cache", held, "must be empty for a new prompt cache"));
        }
        Ok(Self { cache, tokens: vec![], checkpoints: vec![], taken })
    }

    /// Creates a prompt cache that holds `tokens`.
    pub(super) fn of_saved(
        cache: ModelCache,
        tokens: Vec<u32>,
        checkpoints: Vec<Checkpoint>,
        taken: Checkpoints,
    ) -> Self {
        Self { cache, tokens, checkpoints, taken }
    }

    /// Returns the tokens in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the cache.
    pub fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// Cuts the cache back to the longest prefix of `prompt` from which it continues exactly, and
    /// returns its length. The last token of `prompt` is always left to compute.
    ///
    /// # Errors
    /// Fails for a prompt that exceeds the cache or the model, and for a checkpoint that does not
    /// fit on the device. The cache is then unchanged.
    pub fn reuse(&mut self, prompt: &[u32]) -> Result<usize> {
        let pairs = self.tokens.iter().zip(prompt);
        let common = pairs.take_while(|(held, asked)| held == asked).count();
        let shared = common.min(prompt.len().saturating_sub(1));
        self.cache.check_after(shared, prompt.len() - shared)?;
        self.cut_back(shared)
    }

    /// Cuts the cache back to `len` tokens, or to the largest smaller number that is exact, and
    /// returns that number.
    ///
    /// # Errors
    /// Fails for a checkpoint that does not fit on the device. The cache is then unchanged.
    pub fn cut_back(&mut self, len: usize) -> Result<usize> {
        let len = len.min(self.tokens.len());
        let exact = self.cache.exact(0, len)?;
        let better = |checkpoint: &&Checkpoint| (exact + 1..=len).contains(&checkpoint.len);
        let exact = match self.checkpoints.iter().rfind(better) {
            Some(checkpoint) => {
                checkpoint.restore(&mut self.cache)?;
                checkpoint.len
            }
            None => self.cache.cut_back(0, exact)?,
        };
        self.tokens.truncate(exact);
        self.checkpoints.retain(|checkpoint| checkpoint.len <= exact);
        Ok(exact)
    }

    /// Appends the rest of `prompt` after the tokens in the cache, `chunk` tokens at a time.
    /// Returns the logits after the last token, `[1, vocab]`. `proceed` is called before each
    /// chunk; `None` is returned if it returned false.
    ///
    /// # Errors
    /// Fails for a prompt that does not begin with the tokens in the cache, and for one that
    /// exceeds the cache or the model. Nothing is then appended.
    pub fn prefill(
        &mut self,
        model: &LanguageModel,
        prompt: &[u32],
        chunk: usize,
        device: &Device,
        mut proceed: impl FnMut() -> bool,
    ) -> Result<Option<Tensor<2>>> {
        if chunk == 0 {
            return Err(Error::argument("prefill_chunk", 0, "must be at least 1"));
        }
        let held = self.tokens.len();
        if prompt.len() < held || prompt[..held] != self.tokens[..] {
            let rule = format!("must begin with the {held} tokens of the cache");
            return Err(Error::argument("prompt", format!("{} tokens", prompt.len()), rule));
        }
        self.cache.check(1, prompt.len() - held)?;
        let _phase = trace_span!(target: PHASE, "prefill").entered();
        let marks = self.marks(prompt.len())?;
        let mut logits = None;
        while self.tokens.len() < prompt.len() {
            if !proceed() {
                return Ok(None);
            }
            let start = self.tokens.len();
            let next = marks.iter().copied().filter(|&mark| mark > start).min();
            let next = next.unwrap_or(prompt.len());
            let end = next.min(start + chunk);
            let ids = &prompt[start..end];
            if end == prompt.len() {
                logits = Some(last_logits(model, &mut self.cache, ids, device)?);
            } else {
                model.hidden_step(ids_to_tensor(ids, [1, ids.len()], device), &mut self.cache)?;
            }
            self.tokens.extend_from_slice(ids);
            if marks.contains(&end) {
                self.checkpoints.push(Checkpoint::of(&self.cache)?);
            }
        }
        self.thin_out();
        finish(device)?;
        Ok(logits)
    }

    /// Continues the tokens in the cache, as [`generate`](crate::generate()) does. `logits` are
    /// those of the last token. Statistics do not include the prefill.
    ///
    /// # Errors
    /// Fails for invalid sampling options, for graph capture on a device that does not support it,
    /// and for logits that are not finite.
    pub fn generate(
        &mut self,
        model: &LanguageModel,
        logits: Tensor<2>,
        options: &GenerateOptions,
        device: &Device,
        mut on_token: impl FnMut(u32) -> bool,
    ) -> Result<Generated> {
        let text = self.tokens.clone();
        let tokens = &mut self.tokens;
        let push = |id| {
            tokens.push(id);
            on_token(id)
        };
        let generated = decode(model, &mut self.cache, text, logits, options, device, push);
        // The last token is never appended to the cache.
        self.tokens.truncate(self.cache.len());
        generated
    }

    /// Returns the lengths at which a prompt of `len` tokens gets a checkpoint.
    fn marks(&self, len: usize) -> Result<Vec<usize>> {
        let plans =
            |len: usize| self.cache.layers.iter().map(move |layer| layer.plan().with_capacity(len));
        let mut room = 0;
        for plan in plans(len) {
            room += plan.memory_bytes()?.total();
        }
        let mut marks = vec![];
        for distance in self.taken.distances() {
            let Some(mark) = len.checked_sub(*distance).filter(|mark| *mark > self.tokens.len())
            else {
                break;
            };
            let mut bytes = 0;
            for plan in plans(mark) {
                bytes += plan.kept_bytes()?;
            }
            // A cache that can be cut back to any length needs none. The next prompt drops the one
            // at the end.
            if bytes == 0 || *distance > 0 && bytes > room {
                break;
            }
            if *distance > 0 {
                room -= bytes;
            }
            marks.push(mark);
        }
        Ok(marks)
    }

    /// Drops checkpoints that are close to others, more of them near the end, so that their number
    /// grows with the logarithm of the tokens.
    fn thin_out(&mut self) {
        let end = self.tokens.len();
        let mut last: Option<usize> = None;
        let mut keeps: Vec<bool> = self
            .checkpoints
            .iter()
            .rev()
            .map(|checkpoint| {
                let distance = end - checkpoint.len;
                let keep = last.is_none_or(|last| distance > 0 && distance >= 4 * last);
                if keep {
                    last = Some(distance);
                }
                keep
            })
            .collect();
        self.checkpoints.retain(|_| keeps.pop().unwrap_or(true));
    }
}

/// The parts of a cache at some length that it loses as it grows.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    pub(super) len: usize,
    /// The parts that each layer loses, laid out as in a cache for `len` tokens.
    pub(super) layers: Vec<Vec<TensorData>>,
}

impl Checkpoint {
    pub(super) fn of(cache: &ModelCache) -> Result<Self> {
        let layers = cache.layers.iter().map(LayerCache::checkpoint).collect::<Result<_>>()?;
        Ok(Self { len: cache.len(), layers })
    }

    /// Cuts a longer cache back to this checkpoint.
    pub(super) fn restore(&self, cache: &mut ModelCache) -> Result<()> {
        let layers = cache.layers.iter().zip(&self.layers);
        let layers = layers.map(|(layer, kept)| layer.at_checkpoint(self.len, kept));
        cache.layers = layers.collect::<Result<_>>()?;
        Ok(())
    }
}
