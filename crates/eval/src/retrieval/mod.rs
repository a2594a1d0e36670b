//! Retrieval: whether a model still answers questions about a long prompt when its cache is
//! quantized.
//!
//! Most tasks come from RULER (Hsieh et al., 2024, <https://arxiv.org/abs/2404.06654>). They hide
//! needles in a haystack: sentences that give a value to a key. The model is asked for the values
//! of some keys, and generates greedily. A value is found if the answer contains it. Prompts have
//! no chat template and answers fewer tokens than in RULER, so numbers are for comparisons of
//! caches with each other.

mod plan;
mod prompt;
mod report;
mod words;

use kv_cubecl::{On, Target};
use kv_models::{
    GenerateOptions, LanguageModel, ModelCacheConfig, Tokenizer, generate, spans::PHASE,
};
use serde::Serialize;
use tracing::trace_span;

use crate::{Result, ids};
pub use plan::{Haystack, NeedleType, RetrievalPlan, RetrievalTask};
use prompt::Prompt;

/// The result of [`retrieval`].
#[derive(Clone, Debug, Serialize)]
pub struct Retrieval {
    /// The prompts.
    pub plan: RetrievalPlan,
    /// The answers: for each prompt, one with each cache.
    pub rows: Vec<RetrievalRow>,
    /// The number of caches.
    caches: usize,
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
    /// The place of the needle, in percent of the haystack; `None` if needles are spread evenly.
    pub depth: Option<usize>,
    /// The sample, counted from 0 for each task, context and depth.
    pub sample: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// The values that the answer should contain.
    pub expected: Vec<String>,
    /// True for each value that the answer contains.
    pub found: Vec<bool>,
    /// The answer, up to the last value if it contains them all.
    pub answer: String,
}

/// Asks `model` about the prompts of `plan` with each of `caches`. The first cache is the baseline
/// and should be float.
///
/// # Errors
/// [`Error::Plan`](crate::Error::Plan) for a setting out of range or given twice, and for a context
/// too short for the question or too long for the text, all before the first answer; and the errors
/// of the model and of its caches.
pub fn retrieval<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    caches: &[ModelCacheConfig],
    plan: RetrievalPlan,
    mut progress: impl FnMut(&RetrievalRow),
) -> Result<Retrieval> {
    plan.check(model, caches)?;
    let mut prompts = vec![];
    for &task in &plan.tasks {
        for &context in &plan.contexts {
            for depth in plan.depths_of(task) {
                for sample in 0..plan.samples {
                    let prompt = Prompt::new(task, context, depth, sample, &plan, tokenizer)?;
                    ids::check(&prompt.ids, model)?;
                    prompts.push((task, context, depth, sample, prompt));
                }
            }
        }
    }
    let mut rows = vec![];
    for (task, context, depth, sample, prompt) in prompts {
        for cache in caches {
            let name = cache.to_string();
            let _phase = trace_span!(target: PHASE, "prompt", cache = %name).entered();
            let answer = answer(device, model, tokenizer, cache, &prompt)?;
            let row = RetrievalRow {
                task,
                cache: name,
                context,
                depth,
                sample,
                tokens: prompt.ids.len(),
                expected: prompt.question.expected.clone(),
                found: prompt.question.found(&answer),
                answer,
            };
            progress(&row);
            rows.push(row);
        }
    }
    Ok(Retrieval { plan, rows, caches: caches.len() })
}

/// Generates the answer to a prompt, until it has all values.
fn answer<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    cache: &ModelCacheConfig,
    prompt: &Prompt,
) -> Result<String> {
    let config = cache.clone().with_capacity(prompt.ids.len() + prompt.answer_tokens);
    let mut cache = model.new_cache(&config, 1, device)?;
    let options = GenerateOptions {
        max_tokens: prompt.answer_tokens,
        eos: tokenizer.eos().clone(),
        ..GenerateOptions::suiting(model, device)
    };
    let mut ids = vec![];
    let mut text = Ok(String::new());
    generate(model, &mut cache, &prompt.ids, &options, device, |id| {
        ids.push(id);
        text = tokenizer.decode(&ids);
        text.as_ref().is_ok_and(|text| prompt.question.found(text).contains(&false))
    })?;
    Ok(text?)
}
