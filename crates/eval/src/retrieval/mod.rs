//! Retrieval: whether a model still answers questions about a long prompt when its cache is
//! quantized.
//!
//! Most tasks are those of RULER (Hsieh et al., 2024, <https://arxiv.org/abs/2404.06654>) that hide
//! needles in a haystack: sentences that give a value to a key. The model is asked for the values of
//! some keys, and generates greedily. A value is found if the answer contains it.

mod prompt;
mod report;
mod words;

use core::fmt;

use kv_cubecl::{On, Target};
use kv_models::{
    GenerateOptions, LanguageModel, ModelCacheConfig, Tokenizer, generate, spans::PHASE,
};
use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};
use serde::Serialize;
use tracing::trace_span;

use crate::{Error, Result, ids};
use prompt::{Prompt, Question};

/// What is hidden in the haystack, and what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum RetrievalTask {
    /// One key with one value.
    Single,
    /// Several keys with a value each, one of which is asked for.
    MultiKey,
    /// One key with several values, which are all asked for.
    MultiValue,
    /// Several keys with a value each, which are all asked for.
    MultiQuery,
    /// A tool call in JSON, to be repeated character by character.
    ToolCall,
}

/// How keys or values are spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Spelling {
    /// An adjective and a noun, as in `brave-lion`.
    Word,
    /// A number of seven digits.
    Number,
    /// A random UUID.
    Uuid,
}

/// The text around the needles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Haystack {
    /// Random words.
    Noise,
    /// A few sentences, repeated.
    Repeated,
    /// The sentences of a text.
    Text(#[serde(skip)] Vec<String>),
}

/// The prompts of a measurement of retrieval.
#[derive(Clone, Debug, Serialize)]
pub struct RetrievalPlan {
    /// The tasks.
    pub tasks: Vec<RetrievalTask>,
    /// The spelling of keys.
    pub keys: Spelling,
    /// The spelling of values.
    pub values: Spelling,
    /// The text around the needles.
    pub haystack: Haystack,
    /// Tokens of prompt and answer. Prompts have as many sentences as fit.
    pub contexts: Vec<usize>,
    /// Where the first needle is, in percent of the haystack: 0 is the beginning. Further needles
    /// follow at equal distances, from the end on at the beginning.
    pub depths: Vec<usize>,
    /// Keys, or values of the key, in the tasks with several.
    pub needles: usize,
    /// Prompts with other needles, for each task, context and depth.
    pub samples: usize,
    /// The seed of the needles.
    pub seed: u64,
    /// The token that prompts start with.
    pub bos: Option<u32>,
}

/// The result of [`retrieval`].
#[derive(Clone, Debug, Serialize)]
pub struct Retrieval {
    /// The prompts.
    pub plan: RetrievalPlan,
    /// One line for each prompt and cache.
    pub rows: Vec<RetrievalRow>,
}

/// The answer to one prompt with one cache.
#[derive(Clone, Debug, Serialize)]
pub struct RetrievalRow {
    /// The task.
    pub task: RetrievalTask,
    /// The short name of the cache.
    pub cache: String,
    /// Tokens of prompt and answer, at most.
    pub context: usize,
    /// Where the first needle is, in percent of the haystack.
    pub depth: usize,
    /// The number of the prompt among those of this task, context and depth.
    pub sample: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Whether the answer contains each of the values.
    pub found: Vec<bool>,
    /// The answer, up to the last value if it contains them all.
    pub answer: String,
}

impl RetrievalTask {
    /// All tasks.
    pub const ALL: [Self; 5] =
        [Self::Single, Self::MultiKey, Self::MultiValue, Self::MultiQuery, Self::ToolCall];
}

impl fmt::Display for RetrievalTask {
    /// Writes the name, as in `multi-key`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single => "single",
            Self::MultiKey => "multi-key",
            Self::MultiValue => "multi-value",
            Self::MultiQuery => "multi-query",
            Self::ToolCall => "tool-call",
        })
    }
}

impl RetrievalPlan {
    /// Returns the number of answers to generate for each cache.
    pub fn prompts(&self) -> usize {
        self.tasks.len() * self.contexts.len() * self.depths.len() * self.samples
    }

    fn check(&self, model: &LanguageModel) -> Result<()> {
        let positions = model.max_positions();
        if let Some(&context) = self.contexts.iter().find(|&&context| context > positions) {
            let rule = format!("must be at most the {positions} positions of the model");
            return Err(Error::plan("context", context, rule));
        }
        if let Some(&depth) = self.depths.iter().find(|&&depth| depth > 100) {
            return Err(Error::plan("depth", depth, "must be at most 100 percent"));
        }
        if self.samples == 0 {
            return Err(Error::plan("samples", 0, "must be at least 1"));
        }
        if !(1..=MOST_NEEDLES).contains(&self.needles) {
            let rule = format!("must be from 1 to {MOST_NEEDLES}");
            return Err(Error::plan("needles", self.needles, rule));
        }
        Ok(())
    }
}

/// Far fewer than there are different words, so that random ones soon differ.
const MOST_NEEDLES: usize = 64;

/// Asks `model` about prompts of `plan` with each of `caches`. To compare with, the first one
/// should be float.
///
/// # Errors
/// [`Error::Plan`] for a setting out of range, and for a context too short for question and needles
/// or too long for the text; and the errors of the model and of its caches.
pub fn retrieval<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    caches: &[ModelCacheConfig],
    plan: RetrievalPlan,
    mut progress: impl FnMut(&RetrievalRow),
) -> Result<Retrieval> {
    plan.check(model)?;
    let mut rows = vec![];
    for &task in &plan.tasks {
        for &context in &plan.contexts {
            for sample in 0..plan.samples {
                let seed = plan.seed.rotate_left(32) ^ sample as u64;
                let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
                let question = Question::new(task, &plan, &mut rng);
                for &depth in &plan.depths {
                    let prompt = Prompt::new(&question, context, depth, &plan, tokenizer, &rng)?;
                    ids::check(&prompt.ids, model)?;
                    for cache in caches {
                        let name = cache.to_string();
                        let _phase = trace_span!(target: PHASE, "prompt", cache = %name).entered();
                        let answer = answer(device, model, tokenizer, cache, &prompt, &question)?;
                        let (found, tokens) = (question.found(&answer), prompt.ids.len());
                        let row = RetrievalRow {
                            task,
                            cache: name,
                            context,
                            depth,
                            sample,
                            tokens,
                            found,
                            answer,
                        };
                        progress(&row);
                        rows.push(row);
                    }
                }
            }
        }
    }
    Ok(Retrieval { plan, rows })
}

/// Generates the answer to a prompt, until it has all values.
fn answer<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    cache: &ModelCacheConfig,
    prompt: &Prompt,
    question: &Question,
) -> Result<String> {
    let config = cache.clone().with_capacity(prompt.ids.len() + prompt.room);
    let mut cache = model.new_cache(&config, 1, device)?;
    let options = GenerateOptions {
        max_tokens: prompt.room,
        eos: tokenizer.eos().clone(),
        ..GenerateOptions::suiting(model, device)
    };
    let mut ids = vec![];
    let mut text = Ok(String::new());
    generate(model, &mut cache, &prompt.ids, &options, device, |id| {
        ids.push(id);
        text = tokenizer.decode(&ids);
        text.as_ref().is_ok_and(|text| question.found(text).contains(&false))
    })?;
    Ok(text?)
}
