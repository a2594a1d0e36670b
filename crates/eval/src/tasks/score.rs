//! Log-likelihoods of tasks with each cache: [`score_tasks`].

use burn::tensor::{DType, Tensor};
use kv_cubecl::{On, QuantizedCounts, Target, layout::Schedule};
use kv_models::{LanguageModel, ModelCacheConfig, ids_to_tensor, spans::PHASE};
use serde::Serialize;
use tracing::trace_span;

use super::{
    encode::{Encoded, TaskPlan},
    fields::{Problem, quoted},
    item::{TaskItem, TaskTarget},
    read::{Task, in_line},
};
use crate::{
    Devices, Error, HEAD_ROWS, Result,
    score::{negative_log_likelihood, top},
};

/// The scores of one item with one cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ItemScore {
    /// The name of the task.
    pub task: String,
    /// The line of the item in its file, counted from 1.
    pub line: usize,
    /// The `id` of the line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The short name of the cache.
    pub cache: String,
    /// The log-likelihood of each choice or of the continuation, nats.
    pub log_likelihoods: Vec<f64>,
    /// For each, true if every token is the most likely one given all before.
    pub greedy: Vec<bool>,
    /// For each, the number of its tokens.
    pub tokens: Vec<usize>,
    /// For each, true if the cache had quantized tokens when its last token was predicted.
    pub quantized: Vec<bool>,
    /// The number of the right choice; `None` for a continuation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gold: Option<usize>,
    /// The choice with the highest log-likelihood; `None` for a continuation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<usize>,
    /// The choice with the highest log-likelihood per character; `None` for a continuation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_norm: Option<usize>,
}

impl ItemScore {
    /// Returns whether the answer is right, or the continuation is the greedy one.
    pub fn is_right(&self) -> bool {
        match self.gold {
            Some(gold) => self.answer == Some(gold),
            None => self.greedy.first() == Some(&true),
        }
    }

    /// Returns whether the answer by log-likelihood per character is right.
    pub fn is_right_norm(&self) -> bool {
        self.gold.is_some() && self.answer_norm == self.gold
    }
}

/// Scores every item of `plan` with every cache, on one or several devices. Returns the scores of
/// each task, by item and then by cache. `progress` is called after each continuation.
///
/// Each continuation is processed with its context at once, in the closed form of the cache. This
/// gives the numbers of a cache that is filled token by token, up to rounding.
///
/// # Errors
/// [`Error::TaskLine`] naming the item when a log-likelihood is NaN or infinite, and the errors of
/// the model and of its caches.
pub fn score_tasks<'a, T: Target>(
    devices: impl Into<Devices<'a, T>>,
    model: &LanguageModel,
    plan: &TaskPlan,
    mut progress: impl FnMut(),
) -> Result<Vec<Vec<ItemScore>>> {
    let caches: Vec<Cache<'_>> =
        plan.caches.iter().map(|config| Cache::new(config, model, plan.longest())).collect();
    let items = plan.tasks.iter().enumerate();
    let items: Vec<(usize, usize)> =
        items.flat_map(|(t, task)| (0..task.items.len()).map(move |i| (t, i))).collect();
    let mut scores: Vec<Vec<ItemScore>> = plan.tasks.iter().map(|_| vec![]).collect();
    devices.into().share_out(
        model,
        items.len(),
        |_, _| Ok(()),
        |device, model, at, send| {
            let (t, i) = items[at];
            let (task, encoded) = (&plan.tasks[t], &plan.encoded[t][i]);
            let item = &task.items[i];
            for cache in &caches {
                let _phase = trace_span!(target: PHASE, "item", cache = %cache.name).entered();
                let mut score = Scorer { device, model, cache, last: None };
                let mut likelihoods = vec![];
                for (i, encoded) in encoded.iter().enumerate() {
                    let likelihood = score.likelihood(encoded)?;
                    check(task, item, cache, i, likelihood.0)?;
                    likelihoods.push(likelihood);
                    send(None);
                }
                send(Some((t, item_score(task, item, cache, encoded, &likelihoods))));
            }
            Ok(())
        },
        |event| {
            match event {
                None => progress(),
                Some((t, score)) => scores[t].push(score),
            }
            Ok(())
        },
    )?;
    Ok(scores)
}

/// A cache with its name.
struct Cache<'a> {
    config: &'a ModelCacheConfig,
    name: String,
    /// The tokens in the cache when it quantizes the first of them; `None` if it quantizes none of
    /// the longest text.
    first_quantized: Option<usize>,
}

impl<'a> Cache<'a> {
    fn new(config: &'a ModelCacheConfig, model: &LanguageModel, longest: usize) -> Self {
        let of_layer = config.caches(model.spec()).filter_map(|cache| {
            let schedule = Schedule::new(&cache);
            (1..=longest).find(|&len| schedule.counts(len) != QuantizedCounts::default())
        });
        Self { config, name: config.to_string(), first_quantized: of_layer.min() }
    }
}

struct Scorer<'a, T: Target> {
    device: &'a On<T>,
    model: &'a LanguageModel,
    cache: &'a Cache<'a>,
    /// The last tokens that were processed, and their final hidden states. Choices of one token
    /// share them.
    last: Option<(Vec<u32>, Tensor<3>)>,
}

impl<T: Target> Scorer<'_, T> {
    /// Returns the log-likelihood of the tokens to predict, and whether they are the greedy ones.
    fn likelihood(&mut self, encoded: &Encoded) -> Result<(f64, bool)> {
        let (input, targets) = (encoded.input(), encoded.targets());
        let hidden = match self.last.take() {
            Some((ids, hidden)) if ids == input => hidden,
            _ => {
                let ids = ids_to_tensor(input, [1, input.len()], self.device);
                self.model.hidden(ids, self.cache.config.clone())?
            }
        };
        let first = input.len() - targets.len();
        let (mut sum, mut greedy) = (0.0, true);
        for (block, targets) in targets.chunks(HEAD_ROWS).enumerate() {
            let rows = hidden.clone().narrow(1, first + block * HEAD_ROWS, targets.len());
            let logits = self.read(self.model.head(rows))?;
            let losses = negative_log_likelihood(&logits, targets);
            sum -= losses.into_iter().map(f64::from).sum::<f64>();
            let rows = logits.chunks_exact(logits.len() / targets.len());
            greedy &= rows.zip(targets).all(|(row, &id)| top(row) == Some(id as usize));
        }
        self.last = Some((input.to_vec(), hidden));
        Ok((sum, greedy))
    }

    /// Copies logits to the host.
    fn read(&self, logits: Tensor<3>) -> Result<Vec<f32>> {
        let fail = |why: String| Error::Device { cache: self.cache.name.clone(), why };
        let data = logits.cast(DType::F32).try_into_data();
        let data = data.map_err(|error| fail(format!("{error:?}")))?;
        data.try_into_vec().map_err(|error| fail(format!("{error:?}")))
    }
}

fn check(task: &Task, item: &TaskItem, cache: &Cache<'_>, i: usize, sum: f64) -> Result<()> {
    if sum.is_finite() {
        return Ok(());
    }
    let text = item.target.continuations().swap_remove(i);
    let rule = format!("has log-likelihood {sum} with {}, which is not finite", cache.name);
    Err(in_line(&task.name, item.line, Problem::new(item.target.field(i), quoted(&text), rule)))
}

fn item_score(
    task: &Task,
    item: &TaskItem,
    cache: &Cache<'_>,
    encoded: &[Encoded],
    likelihoods: &[(f64, bool)],
) -> ItemScore {
    let log_likelihoods: Vec<f64> = likelihoods.iter().map(|&(sum, _)| sum).collect();
    let lengths = item.target.lengths();
    let per_character: Vec<f64> =
        log_likelihoods.iter().zip(lengths).map(|(sum, length)| sum / length as f64).collect();
    let (answer, answer_norm) = match item.target {
        TaskTarget::Choices { .. } => (highest(&log_likelihoods), highest(&per_character)),
        TaskTarget::Continuation(_) => (None, None),
    };
    let is_quantized = |encoded: &Encoded| {
        cache.first_quantized.is_some_and(|first| encoded.input().len() >= first)
    };
    ItemScore {
        task: task.name.clone(),
        line: item.line,
        id: item.id.clone(),
        cache: cache.name.clone(),
        log_likelihoods,
        greedy: likelihoods.iter().map(|&(_, greedy)| greedy).collect(),
        tokens: encoded.iter().map(|it| it.scored).collect(),
        quantized: encoded.iter().map(is_quantized).collect(),
        gold: item.target.gold(),
        answer,
        answer_norm,
    }
}

/// Returns the index of the highest number, the first of equals, as NumPy's `argmax` does.
fn highest(numbers: &[f64]) -> Option<usize> {
    let best = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    numbers.iter().position(|&number| number == best)
}
