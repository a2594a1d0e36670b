//! Metrics of tasks, as tables and as JSON: [`TaskReport`].

use core::fmt;

use kv_report::Table;
use serde::Serialize;

use super::{TaskFormat, TaskPlan, read::Task, score::ItemScore};
use crate::{Error, Result};

/// A mean, or a function of one, and its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// The standard error; `None` for a single sample.
    pub stderr: Option<f64>,
}

impl Estimate {
    /// Returns the mean, and the sample standard deviation divided by the root of the number of
    /// samples.
    pub fn mean(samples: &[f64]) -> Self {
        let n = samples.len() as f64;
        let value = samples.iter().sum::<f64>() / n;
        let squares: f64 = samples.iter().map(|x| (x - value).powi(2)).sum();
        let stderr = (samples.len() > 1).then(|| (squares / (n - 1.0)).sqrt() / n.sqrt());
        Self { value, stderr }
    }

    /// Returns the perplexity of continuations with these log-likelihoods. By the delta method, its
    /// standard error is the mean's standard error times the perplexity.
    pub fn perplexity(log_likelihoods: &[f64]) -> Self {
        let Self { value, stderr } = Self::mean(log_likelihoods);
        let perplexity = (-value).exp();
        Self { value: perplexity, stderr: stderr.map(|stderr| stderr * perplexity) }
    }

    /// Returns the cells of a table.
    fn cells(self) -> [String; 2] {
        let number = |x: f64| {
            let text = format!("{x:.4}");
            if text == "-0.0000" { "0.0000".to_string() } else { text }
        };
        [number(self.value), self.stderr.map_or(String::new(), number)]
    }
}

/// The metrics of one task with one cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskScore {
    /// The name of the task.
    pub task: String,
    /// Its format.
    pub format: TaskFormat,
    /// The short name of the cache.
    pub cache: String,
    /// The number of items.
    pub items: usize,
    /// The number of continuations that were scored: all choices of all items.
    pub continuations: usize,
    /// Continuations whose context lost its first tokens to fit the model.
    pub truncated: usize,
    /// Continuations for whose last token the cache had quantized tokens. The others are scored as
    /// with a float cache.
    pub quantized: usize,
    /// Share of the items with the right answer: the choice with the highest log-likelihood, or a
    /// continuation whose tokens are all the most likely ones.
    pub acc: Estimate,
    /// Share of the items whose right choice has the highest log-likelihood per character; `None`
    /// for continuations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acc_norm: Option<Estimate>,
    /// `exp` of the negative mean log-likelihood of the continuations; `None` for choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<Estimate>,
    /// The comparison to the first cache; `None` for the first cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_first: Option<TaskDifference>,
}

/// The difference between a cache and the first cache on the same items, with standard errors of
/// paired samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskDifference {
    /// The difference of `acc`.
    pub acc: Estimate,
    /// The difference of `acc_norm`; `None` for continuations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acc_norm: Option<Estimate>,
    /// The mean difference of the log-likelihood of the right choices or of the continuations,
    /// nats.
    pub log_likelihood: Estimate,
    /// The mean magnitude of the change of a log-likelihood, over all choices of all items, nats.
    pub mean_abs_change: f64,
    /// Items with another answer, or with another prediction of the continuation as greedy or not.
    pub changed: usize,
    /// Items with another answer by log-likelihood per character; `None` for continuations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed_norm: Option<usize>,
}

/// The metrics of tasks with each cache.
#[derive(Clone, Debug, Serialize)]
pub struct TaskReport {
    /// The id of the begin-of-text token, if texts start with it.
    pub bos: Option<u32>,
    /// For each task, the metrics with each cache.
    pub scores: Vec<TaskScore>,
    /// The scores of the items, by task, item and cache.
    #[serde(skip)]
    pub items: Vec<ItemScore>,
}

impl TaskReport {
    /// Computes the metrics of the scores that [`score_tasks`](super::score_tasks) returned for
    /// `plan`.
    pub fn new(plan: &TaskPlan, scores: Vec<Vec<ItemScore>>) -> Self {
        let n_caches = plan.caches.len();
        let mut metrics = vec![];
        for ((task, encoded), scores) in plan.tasks.iter().zip(&plan.encoded).zip(&scores) {
            let truncated = encoded.iter().flatten().filter(|it| it.truncated).count();
            let of_cache = |nth: usize| scores.iter().skip(nth).step_by(n_caches).collect();
            let first: Vec<&ItemScore> = of_cache(0);
            for nth in 0..n_caches {
                let items: Vec<&ItemScore> = of_cache(nth);
                let over_first = (nth > 0).then(|| difference(task, &items, &first));
                metrics.push(TaskScore { truncated, over_first, ..score(task, &items) });
            }
        }
        let items = scores.into_iter().flatten().collect();
        Self { bos: plan.bos, scores: metrics, items }
    }

    /// Returns the scores of the items as JSON, one line for each item and cache.
    ///
    /// # Errors
    /// [`Error::Plan`] for a score that JSON cannot hold.
    pub fn items_jsonl(&self) -> Result<String> {
        let mut lines = String::new();
        for item in &self.items {
            let json = serde_json::to_string(item);
            lines += &json.map_err(|error| Error::plan("items", &item.task, error.to_string()))?;
            lines.push('\n');
        }
        Ok(lines)
    }

    /// Lists the metrics of the tasks with choices, or of those with continuations.
    pub fn table(&self, has_choices: bool) -> Table {
        let shown = self.scores.iter().filter(|it| it.acc_norm.is_some() == has_choices);
        let start = ["task", "cache", "items", "acc", "+-"];
        let more: &[&str] = match has_choices {
            true => &["acc_norm", "+-", "acc change", "+-", "acc_norm change", "+-"],
            false => &["perplexity", "+-", "acc change", "+-", "ll change", "+-"],
        };
        let end = ["answers changed", "mean |ll change|", "quantized"];
        let mut table = Table::new([&start[..], more, &end].concat());
        for score in shown {
            let mut row = vec![score.task.clone(), score.cache.clone(), score.items.to_string()];
            row.extend(score.acc.cells());
            row.extend(score.acc_norm.or(score.perplexity).into_iter().flat_map(Estimate::cells));
            match &score.over_first {
                Some(change) => {
                    row.extend(change.acc.cells());
                    row.extend(change.acc_norm.unwrap_or(change.log_likelihood).cells());
                    row.push(change.changed.to_string());
                    row.push(format!("{:.4}", change.mean_abs_change));
                }
                None => row.extend([const { String::new() }; 6]),
            }
            let share = score.quantized as f64 / score.continuations as f64;
            row.push(format!("{:.1}%", 100.0 * share));
            table.push(row);
        }
        table
    }
}

/// Returns 1 if the answer is right, or else 0.
fn right(item: &ItemScore) -> f64 {
    f64::from(u8::from(item.is_right()))
}

/// Returns 1 if the answer by log-likelihood per character is right, or else 0.
fn right_norm(item: &ItemScore) -> f64 {
    f64::from(u8::from(item.is_right_norm()))
}

/// Returns the log-likelihood of the right choice or of the continuation.
fn right_likelihood(item: &ItemScore) -> f64 {
    item.log_likelihoods.get(item.gold.unwrap_or(0)).copied().unwrap_or(f64::NAN)
}

fn score(task: &Task, items: &[&ItemScore]) -> TaskScore {
    let has_choices = task.has_choices();
    let all = |of: fn(&ItemScore) -> f64| -> Vec<f64> { items.iter().map(|it| of(it)).collect() };
    TaskScore {
        task: task.name.clone(),
        format: task.format,
        cache: items.first().map_or(String::new(), |item| item.cache.clone()),
        items: items.len(),
        continuations: items.iter().map(|item| item.log_likelihoods.len()).sum(),
        truncated: 0,
        quantized: items.iter().flat_map(|item| &item.quantized).filter(|it| **it).count(),
        acc: Estimate::mean(&all(right)),
        acc_norm: has_choices.then(|| Estimate::mean(&all(right_norm))),
        perplexity: (!has_choices).then(|| Estimate::perplexity(&all(right_likelihood))),
        over_first: None,
    }
}

fn difference(task: &Task, items: &[&ItemScore], first: &[&ItemScore]) -> TaskDifference {
    let pairs = || items.iter().zip(first).map(|(item, first)| (*item, *first));
    let minus = |of: fn(&ItemScore) -> f64| {
        let differences: Vec<f64> = pairs().map(|(item, first)| of(item) - of(first)).collect();
        Estimate::mean(&differences)
    };
    let (mut changes, mut n) = (0.0, 0);
    for (item, first) in pairs() {
        for (a, b) in item.log_likelihoods.iter().zip(&first.log_likelihoods) {
            changes += (a - b).abs();
            n += 1;
        }
    }
    let has_choices = task.has_choices();
    let changed = pairs().filter(|(item, first)| match has_choices {
        true => item.answer != first.answer,
        false => item.greedy != first.greedy,
    });
    let changed_norm = pairs().filter(|(item, first)| item.answer_norm != first.answer_norm);
    TaskDifference {
        acc: minus(right),
        acc_norm: has_choices.then(|| minus(right_norm)),
        log_likelihood: minus(right_likelihood),
        mean_abs_change: changes / n as f64,
        changed: changed.count(),
        changed_norm: has_choices.then(|| changed_norm.count()),
    }
}

impl fmt::Display for TaskReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for has_choices in [true, false] {
            let table = self.table(has_choices);
            if !table.rows().is_empty() {
                write!(f, "{table}")?;
            }
        }
        let Some(first) = self.scores.first() else { return Ok(()) };
        if self.scores.iter().any(|score| score.over_first.is_some()) {
            writeln!(f, "changes are from {}, on the same items", first.cache)?;
        }
        Ok(())
    }
}
