//! Tokens of tasks: [`TaskPlan`].
//!
//! Follows `TemplateLM.loglikelihood` and `_encode_pair` in lm-evaluation-harness
//! (`lm_eval/api/model.py`), and of `_loglikelihood_tokens` in `lm_eval/models/huggingface.py`.

use kv_models::{LanguageModel, ModelCacheConfig, Tokenizer};

use super::{
    fields::{Problem, quoted},
    item::TaskItem,
    python::is_space,
    read::{Task, in_line},
};
use crate::{Error, Result, ids};

/// Tasks as tokens, and the caches to score them with.
#[derive(Clone, Debug)]
pub struct TaskPlan {
    pub(super) tasks: Vec<Task>,
    /// For each task and item, the tokens of each choice.
    pub(super) encoded: Vec<Vec<Vec<Encoded>>>,
    pub(super) caches: Vec<ModelCacheConfig>,
    pub(super) bos: Option<u32>,
}

/// Tokens to process. The last ones are to be predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Encoded {
    /// Context and continuation.
    pub(super) ids: Vec<u32>,
    /// Tokens of the continuation, fewer than all.
    pub(super) scored: usize,
    /// True if the context begins before `ids`, which have the most tokens that fit the model.
    pub(super) truncated: bool,
}

impl Encoded {
    /// Returns the tokens that the model processes: all but the last, which only is predicted.
    pub(super) fn input(&self) -> &[u32] {
        &self.ids[..self.ids.len() - 1]
    }

    pub(super) fn targets(&self) -> &[u32] {
        &self.ids[self.ids.len() - self.scored..]
    }
}

impl TaskPlan {
    /// Encodes `tasks`, with the begin-of-text token `bos` before each text, if it is given. The
    /// first of `caches` is the baseline and should be float.
    ///
    /// An empty context is replaced by the tokenizer's begin-of-text token, or else by its
    /// end-of-text token. A context that is too long loses its first tokens.
    ///
    /// # Errors
    /// [`Error::TaskLine`] for a continuation that adds no token or has more tokens than the model
    /// has positions, and for a context without a token; [`Error::Plan`] for no task or no cache,
    /// and for a cache or a task that is given twice; [`Error::Model`] for a cache that does not
    /// fit the model's heads or layers, and if the tokenizer fails.
    pub fn new(
        model: &LanguageModel,
        tokenizer: &Tokenizer,
        caches: impl IntoIterator<Item = impl Into<ModelCacheConfig>>,
        tasks: Vec<Task>,
        bos: Option<u32>,
    ) -> Result<Self> {
        ids::check(bos.as_slice(), model)?;
        let encoder = Encoder::new(model, tokenizer, bos)?;
        let mut encoded = vec![];
        for (i, task) in tasks.iter().enumerate() {
            if tasks[..i].iter().any(|other| other.name == task.name) {
                return Err(Error::plan("task", &task.name, "is given twice"));
            }
            let items = task.items.iter().map(|item| encoder.item(&task.name, item));
            encoded.push(items.collect::<Result<Vec<_>>>()?);
        }
        let mut plan = Self { tasks, encoded, caches: vec![], bos };
        if plan.longest() == 0 {
            return Err(Error::plan("task", "none", "must be at least one"));
        }
        for cache in caches {
            let cache = cache.into().with_capacity(plan.longest());
            cache.validate(model)?;
            // Only the name identifies a cache in the results.
            if plan.caches.iter().any(|other| other.to_string() == cache.to_string()) {
                return Err(Error::plan("cache", cache, "is given twice"));
            }
            plan.caches.push(cache);
        }
        if plan.caches.is_empty() {
            return Err(Error::plan("cache", "none", "must be at least one"));
        }
        Ok(plan)
    }

    fn all(&self) -> impl Iterator<Item = &Encoded> {
        self.encoded.iter().flatten().flatten()
    }

    /// Returns the most tokens that the model processes at once.
    pub fn longest(&self) -> usize {
        self.all().map(|it| it.input().len()).max().unwrap_or(0)
    }

    /// Returns the number of continuations. Each cache scores them all.
    pub fn continuations(&self) -> usize {
        self.all().count()
    }

    /// Returns the number of continuations whose context lost its first tokens.
    pub fn truncated(&self) -> usize {
        self.all().filter(|it| it.truncated).count()
    }

    /// Returns the caches, the baseline first. Their capacity is the longest text.
    pub fn caches(&self) -> &[ModelCacheConfig] {
        &self.caches
    }

    /// Returns the tasks.
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }
}

struct Encoder<'a> {
    model: &'a LanguageModel,
    tokenizer: &'a Tokenizer,
    /// The token before texts, if any.
    bos: Option<u32>,
    /// The spelling of that token. A text that begins with it gets no second one.
    spelling: String,
    /// The token that replaces an empty context.
    prefix: Option<u32>,
}

impl<'a> Encoder<'a> {
    fn new(model: &'a LanguageModel, tokenizer: &'a Tokenizer, bos: Option<u32>) -> Result<Self> {
        let prefix = tokenizer.bos().or_else(|| tokenizer.eos_token());
        let spelling = bos.map_or(Ok(String::new()), |bos| tokenizer.decode(&[bos]))?;
        Ok(Self { model, tokenizer, bos, spelling, prefix })
    }

    fn item(&self, file: &str, item: &TaskItem) -> Result<Vec<Encoded>> {
        let failed = |problem| in_line(file, item.line, problem);
        let encode = |(i, continuation): (usize, &String)| {
            let (context, scored) = match (item.context.is_empty(), self.prefix) {
                (false, _) => self.pair(&item.context, continuation)?,
                (true, Some(prefix)) => self.after(prefix, continuation)?,
                (true, None) => {
                    let rule = "must have text, because the tokenizer has no token that begins or \
                                ends texts";
                    return Err(failed(Problem::new("context", "\"\"", rule)));
                }
            };
            let field = item.target.field(i);
            let whole = self.join(context, scored, &item.context, (field, continuation));
            let whole = whole.map_err(failed)?;
            ids::check(&whole.ids, self.model)?;
            Ok(whole)
        };
        item.target.continuations().iter().enumerate().map(encode).collect()
    }

    /// Encodes a continuation of `prefix` alone. A continuation that begins with it gets no second
    /// one.
    fn after(&self, prefix: u32, continuation: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut ids = self.tokenizer.encode(continuation)?;
        if ids.first() == Some(&prefix) {
            ids.remove(0);
        }
        Ok((vec![prefix], ids))
    }

    /// Encodes context and continuation together, so that the whole text has the usual tokens. The
    /// tokens of the context alone decide where the continuation begins.
    fn pair(&self, context: &str, continuation: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        // Most tokens of words begin with their space.
        let stripped = context.trim_end_matches(is_space);
        let whole = self.text(&format!("{context}{continuation}"))?;
        let context = self.text(stripped)?;
        let scored = whole.get(context.len()..).unwrap_or_default().to_vec();
        Ok((context, scored))
    }

    fn text(&self, text: &str) -> Result<Vec<u32>> {
        let has_bos = !self.spelling.is_empty() && text.starts_with(&self.spelling);
        let bos = self.bos.filter(|_| !has_bos);
        Ok(bos.into_iter().chain(self.tokenizer.encode(text)?).collect())
    }

    /// Joins context and continuation, and keeps the last tokens that fit the model.
    fn join(
        &self,
        context: Vec<u32>,
        scored: Vec<u32>,
        text: &str,
        (field, continuation): (String, &str),
    ) -> core::result::Result<Encoded, Problem> {
        let positions = self.model.max_positions();
        if context.is_empty() {
            let rule = "must have a token, or be empty; remove its spaces or give --bos";
            return Err(Problem::new("context", quoted(text), rule));
        }
        if scored.is_empty() {
            let rule = "must add a token to its context";
            return Err(Problem::new(field, quoted(continuation), rule));
        }
        if scored.len() > positions {
            let rule = format!(
                "has {} tokens and must have at most the model's {positions} positions",
                scored.len()
            );
            return Err(Problem::new(field, quoted(continuation), rule));
        }
        let mut ids = [&context[..], &scored].concat();
        // The last token is predicted but not processed.
        let left_out = ids.len().saturating_sub(positions.saturating_add(1));
        ids.drain(..left_out);
        Ok(Encoded { ids, scored: scored.len(), truncated: left_out > 0 })
    }
}
