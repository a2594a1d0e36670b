//! The prompts of a measurement of retrieval.

use core::fmt;

use kv_models::{LanguageModel, ModelCacheConfig};
use serde::Serialize;

use crate::{Error, Result};

/// The kind of needles and of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum RetrievalTask {
    /// One key with one value.
    Single,
    /// Several keys with a value each; the question is about one of them.
    MultiKey,
    /// One key with several values; the question is about all of them.
    MultiValue,
    /// Several keys with a value each; the question is about all of them.
    MultiQuery,
    /// A tool call in JSON, to be repeated exactly.
    ToolCall,
}

/// The type of keys or of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum NeedleType {
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
    /// A few sentences, repeated as in RULER.
    Noise,
    /// Random words.
    Words,
    /// The sentences of a text.
    Text {
        /// The name of the text.
        name: String,
        /// The sentences.
        #[serde(skip)]
        sentences: Vec<String>,
    },
}

/// The prompts of a measurement of retrieval. Tasks, contexts and depths are different from each
/// other.
#[derive(Clone, Debug, Serialize)]
pub struct RetrievalPlan {
    /// The tasks.
    pub tasks: Vec<RetrievalTask>,
    /// The type of keys.
    pub keys: NeedleType,
    /// The type of values.
    pub values: NeedleType,
    /// The text around the needles.
    pub haystack: Haystack,
    /// Tokens of prompt and answer. Prompts have as many sentences as fit.
    pub contexts: Vec<usize>,
    /// The place of the needle that the question is about, in percent of the haystack: 0 is the
    /// beginning. Tasks that ask for all needles spread them evenly instead.
    pub depths: Vec<usize>,
    /// The number of needles in the tasks with several.
    pub count: usize,
    /// Prompts with other needles, for each task, context and depth.
    pub samples: usize,
    /// The seed of the needles.
    pub seed: u64,
    /// The token that prompts start with.
    pub bos: Option<u32>,
}

impl RetrievalTask {
    /// Returns whether the question is about all needles.
    const fn asks_for_all(self) -> bool {
        matches!(self, Self::MultiValue | Self::MultiQuery)
    }
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

/// Keeps the search for random words that differ short.
const MAX_COUNT: usize = 64;

impl RetrievalPlan {
    /// Returns the number of prompts.
    pub fn prompts(&self) -> usize {
        let of_task = |&task: &RetrievalTask| self.depths_of(task).len();
        let depths: usize = self.tasks.iter().map(of_task).sum();
        depths.saturating_mul(self.contexts.len()).saturating_mul(self.samples)
    }

    /// Returns the places of the needle of a task.
    pub(super) fn depths_of(&self, task: RetrievalTask) -> Vec<Option<usize>> {
        match task.asks_for_all() {
            true => vec![None],
            false => self.depths.iter().copied().map(Some).collect(),
        }
    }

    pub(super) fn check(&self, model: &LanguageModel, caches: &[ModelCacheConfig]) -> Result<()> {
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
        if !(1..=MAX_COUNT).contains(&self.count) {
            let rule = format!("must be from 1 to {MAX_COUNT}");
            return Err(Error::plan("count", self.count, rule));
        }
        given_once("task", &self.tasks)?;
        given_once("context", &self.contexts)?;
        given_once("depth", &self.depths)?;
        // Only the name identifies a cache in the results.
        given_once("cache", &caches.iter().map(ToString::to_string).collect::<Vec<_>>())
    }
}

fn given_once<T: PartialEq + ToString>(field: &'static str, all: &[T]) -> Result<()> {
    let twice = all.iter().enumerate().find(|(i, it)| all[..*i].contains(it));
    twice.map_or(Ok(()), |(_, it)| Err(Error::plan(field, it.to_string(), "is given twice")))
}
