//! Generates and writes texts, and keeps the cache for the next one: [`Writer`].

use std::{path::Path, time::Instant};

use anyhow::{Result, bail};
use kv_cli::{MemoryBudget, Screen};
use kv_cubecl::{On, Target};
use kv_models::{
    Checkpoints, GenerateOptions, Generated, LanguageModel, ModelCacheConfig, PromptCache, SavedAs,
    SavedCache, Tokenizer, Usage,
    chat::Message,
    generate::{Stop, StopStrings},
};

use crate::{
    generate_interrupt::Interrupt,
    generate_reply::{End, JsonLines, Reply, TextOut},
};

/// Generates and writes texts, and keeps the cache for the next turn.
pub(crate) struct Writer<'a, T: Target> {
    pub(crate) device: &'a On<T>,
    pub(crate) model: &'a LanguageModel,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) options: GenerateOptions,
    pub(crate) config: ModelCacheConfig,
    /// The requested cache. Its Hadamard transform may be folded into the weights of `model`.
    pub(crate) cache_name: String,
    /// Capacity of the cache; `None` for the prompt and its continuation.
    pub(crate) capacity: Option<usize>,
    /// The memory budget of the caches.
    pub(crate) budget: MemoryBudget,
    /// The cache of the turns so far.
    pub(crate) held: Option<PromptCache>,
    /// The positions to which the cache can be cut back.
    pub(crate) checkpoints: Checkpoints,
    /// `Some` if the cache is saved at the end; `true` to save the last reply as well.
    pub(crate) saves: Option<bool>,
    /// Tokens of the last prompt.
    pub(crate) n_prompt: usize,
    pub(crate) n_turns: usize,
    /// The saved cache that the first text reuses.
    pub(crate) saved: Option<SavedCache>,
    pub(crate) stops: StopStrings,
    pub(crate) json: JsonLines,
    pub(crate) interrupt: Interrupt,
    /// Set if the last text was interrupted.
    pub(crate) interrupted: bool,
}

impl<T: Target> Writer<'_, T> {
    /// Continues `ids`. Writes the text as it is generated, then the reason why it ended. Returns
    /// the text. If prefill fails before it appended a token, the held cache is unchanged.
    pub(crate) fn write(&mut self, ids: &[u32]) -> Result<String> {
        let (mut held, before) = self.begin(ids)?;
        let reuses = before.is_some() || !held.tokens().is_empty();
        let start = Instant::now();
        let Self { model, device, options, interrupt, json, .. } = self;
        let proceed = || !interrupt.stops();
        let prefilled = held.reuse(ids).and_then(|n_held| {
            let logits = held.prefill(model, ids, options.prefill_chunk, device, proceed)?;
            Ok((n_held, logits))
        });
        let (n_held, logits) = match prefilled {
            Ok(prefilled) => prefilled,
            Err(error) => {
                // Nothing was appended, so the cache still holds the previous turns.
                self.held = before.or(Some(held).filter(|held| !held.tokens().is_empty()));
                return Err(error.into());
            }
        };
        let (prefill_time, n_prefilled) = (start.elapsed(), held.tokens().len() - n_held);
        self.n_prompt = held.tokens().len();
        let mut out = TextOut::after(self.tokenizer, ids, &self.stops);
        let mut failure = None;
        // Generation stops if the output is closed.
        let on_token = |id| {
            let continues = out.push(id).and_then(|part| json.print(part));
            let continues = continues.unwrap_or_else(|error| {
                failure = Some(error);
                false
            });
            continues && out.stopped().is_none() && !interrupt.stops()
        };
        let generated = match logits {
            Some(logits) => held.generate(model, logits, options, device, on_token).map(Some),
            None => Ok(None),
        };
        // The cache holds the generated tokens even if they could not be written.
        self.held = Some(held);
        self.interrupted = interrupt.stops();
        self.budget.see(device);
        let mut generated = generated?.unwrap_or_else(|| Generated::new(Stop::Callback));
        if let Some(error) = failure {
            return Err(error);
        }
        let rest = out.finish()?;
        if json.prints_texts() && options.max_tokens > 0 {
            Screen::Out.line(&rest)?;
        }
        (generated.prefill_tokens, generated.prefill_time) = (n_prefilled, prefill_time);
        if !generated.ids.is_empty() {
            generated.first_token_time += prefill_time;
        }
        let end = End::new(generated.stop, out.stopped(), options.max_tokens);
        let prompt = n_held + n_prefilled;
        let text = out.into_text();
        let reply = Reply { index: self.n_turns, text, end, prompt, generated };
        self.n_turns += 1;
        self.json.push(&reply)?;
        self.tell(&reply, reuses)?;
        Ok(reply.text)
    }

    /// Returns the cache that `ids` continue, and an unrelated held cache to keep if they fail.
    fn begin(&mut self, ids: &[u32]) -> Result<(PromptCache, Option<PromptCache>)> {
        if let Some(saved) = self.saved.take() {
            let capacity = ids.len().max(saved.tokens()[0].len());
            let config = self.fitting(capacity, 1)?;
            let restored = saved.restore_prompt(self.model, config, self.device, self.checkpoints);
            return match (restored, saved.cache()) {
                (Ok(held), _) => Ok((held, None)),
                (Err(error), Some(cache)) if cache != self.cache_name => {
                    let path = saved.path().display();
                    let other = format!(
                        "load-cache {path}: it was saved with --cache {cache}, and {} is asked for",
                        self.cache_name
                    );
                    match &error {
                        kv_models::Error::Config { field, .. } if field.ends_with(".cache") => {
                            Err(anyhow::Error::from(error).context(other))
                        }
                        // A Hadamard transform that is folded into the weights changes them.
                        _ => bail!("{other}; give --cache {cache}"),
                    }
                }
                (Err(error), _) => Err(error.into()),
            };
        }
        let shares = |held: &PromptCache| held.tokens().first() == ids.first();
        match self.held.take() {
            Some(held) if shares(&held) => Ok((held, None)),
            // It is saved if this turn fails.
            other => {
                let other = other.filter(|_| self.saves.is_some());
                let cache = self.model.new_cache(self.fitting(ids.len(), 1)?, 1, self.device)?;
                Ok((PromptCache::new(cache, self.checkpoints)?, other))
            }
        }
    }

    /// Returns the configuration of a cache for `batch` sequences whose longest prompt has
    /// `n_prompt` tokens, after checking that it fits into memory.
    pub(crate) fn fitting(&self, n_prompt: usize, batch: usize) -> Result<ModelCacheConfig> {
        let most = self.model.max_positions();
        // Prefill refuses a prompt beyond the model's limit; the allocation does not.
        let wanted = n_prompt.saturating_add(self.options.max_tokens).min(most);
        let mut config = self.config.clone();
        config.capacity = self.capacity.unwrap_or(wanted);
        let usage = Usage::new(config.clone()).with_batch(batch);
        let usage = usage.with_pass(self.options.prefill_chunk);
        self.budget.check(self.model.spec(), &usage)?;
        Ok(config)
    }

    /// Writes the cache and its tokens to a file.
    pub(crate) fn save(&mut self, path: &Path, name: &str, talk: &[Message]) -> Result<()> {
        let Some(held) = &mut self.held else {
            bail!(
                "save-cache {}: there is no cache to save, because no prompt was processed",
                path.display()
            );
        };
        if self.saves == Some(false) {
            held.cut_back(self.n_prompt)?;
        }
        let named = SavedAs { model: name, cache: Some(&self.cache_name), talk };
        held.save(path, self.model, &named)?;
        let n = held.tokens().len();
        Screen::Error.line(format_args!("saved the cache of {n} tokens: {}", path.display()))?;
        Ok(())
    }

    fn tell(&self, reply: &Reply, reuses: bool) -> Result<bool> {
        let Reply { end, prompt, generated, .. } = reply;
        let reused = match reuses {
            true => format!("reused {} of {prompt} prompt tokens; ", reply.reused()),
            false => String::new(),
        };
        let first = match generated.ids.is_empty() {
            true => String::new(),
            false => {
                format!("first token after {:.3} s; ", generated.first_token_time.as_secs_f64())
            }
        };
        let cache = self.held.as_ref().map_or_else(String::new, |held| {
            let cache = held.cache();
            format!(
                "cache {}: {} of {} tokens, {:.2} MiB",
                self.cache_name,
                cache.len(),
                cache.len() + cache.remaining(),
                cache.memory_bytes().total() as f64 / (1 << 20) as f64
            )
        });
        let guessed = match generated.guesses.right {
            0 => String::new(),
            right => format!(", {right} of them guessed"),
        };
        Screen::Error.line(format_args!(
            "{end}; {reused}prefill {} tokens, {:.1} tokens/s; {first}decode {} tokens{guessed}, \
             {:.1} tokens/s; {cache}",
            generated.prefill_tokens,
            generated.prefill_tokens_per_second(),
            generated.decode_tokens,
            generated.decode_tokens_per_second(),
        ))
    }
}
