//! Recall of indexers: how many of the entries that exact keys select are selected with quantized
//! keys.

use core::fmt;
use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{DType, Int, Tensor};
use kv_cubecl::{
    KvFormat, On, Target, hadamard,
    sparse::{
        Compression, IndexConfig, IndexQuery, IndexTrace, RowFormat, SparseConfig, SparseTrace,
        index_scores, select_entries,
    },
};
use kv_models::{AttentionTrace, LanguageModel, ModelCacheConfig, ids_to_tensor, spans::PHASE};
use kv_report::{
    Table,
    chart::{Chart, Series, Style},
};
use serde::Serialize;
use tracing::trace_span;

use crate::{Error, Plan, Result};

/// The storage of an indexer's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyFormat {
    /// The codes of all channels.
    pub codes: KvFormat,
    /// True if queries and keys have a Hadamard transform, which spreads outlier channels and keeps
    /// exact scores.
    pub hadamard: bool,
}

impl fmt::Display for KeyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.codes.name())?;
        if self.hadamard { f.write_str("-hadamard") } else { Ok(()) }
    }
}

/// The recall of the indexers of a model, see [`index_recall`].
#[derive(Clone, Debug, Serialize)]
pub struct IndexRecall {
    /// The recall of every layer with an indexer, for every format and number of entries.
    pub cells: Vec<RecallCell>,
}

/// The recall of one layer with one format, over tokens that see about equally many entries.
#[derive(Clone, Debug, Serialize)]
pub struct RecallCell {
    /// The layer, counted from 0.
    pub layer: usize,
    /// The name of the format.
    pub format: String,
    /// The entries that are selected.
    pub top_k: usize,
    /// Tokens saw at least this number of entries, which is more than `top_k`.
    pub from: usize,
    /// They saw fewer entries than this number.
    pub to: usize,
    /// The number of tokens.
    pub tokens: usize,
    /// The share of the entries with the highest exact scores that were selected.
    pub recall: f64,
}

/// Compares selections with quantized keys to selections with keys in f32, for the queries and keys
/// that `model` computes over the windows of `plan` with a float cache. Tokens that see at most
/// `top_k` entries select all of them, and are not counted.
///
/// Keys are computed at once, so contexts are as long as a window of the plan. `progress` receives
/// the number of windows that are done, and of all.
///
/// # Errors
/// [`Error::Plan`] for a model without an indexer, for windows in which no token has to select, and
/// for a format that does not fit the keys; and the errors of the model.
pub fn index_recall<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    plan: &Plan,
    formats: &[KeyFormat],
    mut progress: impl FnMut(usize, usize),
) -> Result<IndexRecall> {
    check(model, plan, formats)?;
    let mut counts = Counts::new();
    let float = ModelCacheConfig::from(kv_cubecl::KvCacheConfig::float());
    let n_windows = plan.spans().count();
    for (done, span) in plan.spans().enumerate() {
        let (ids, _) = plan.input(&span);
        let _phase = trace_span!(target: PHASE, "window", n = ids.len()).entered();
        let mut outcome = Ok(());
        let mut observe = |trace: AttentionTrace| {
            let Some(sparse) = trace.sparse().filter(|_| outcome.is_ok()) else { return };
            outcome = add_layer(&mut counts, trace.layer, sparse, formats);
        };
        let ids = ids_to_tensor(&ids, [1, ids.len()], device);
        model.hidden_with(ids, &float, Default::default(), Some(&mut observe))?;
        outcome?;
        progress(done + 1, n_windows);
    }
    let cell = |((layer, format, from), Count { top_k, tokens, hits }): (Key, Count)| RecallCell {
        layer,
        format: formats[format].to_string(),
        top_k,
        from,
        to: 2 * from,
        tokens,
        recall: hits as f64 / (tokens * top_k) as f64,
    };
    Ok(IndexRecall { cells: counts.into_iter().map(cell).collect() })
}

/// The layer, the number of the format, and the fewest entries of a cell.
type Key = (usize, usize, usize);

type Counts = BTreeMap<Key, Count>;

/// The tokens of a cell, and how many of their entries were selected right.
struct Count {
    top_k: usize,
    tokens: usize,
    hits: usize,
}

/// Checks that the model has an indexer, that windows are long enough for it to select, and that
/// the formats fit its keys.
fn check(model: &LanguageModel, plan: &Plan, formats: &[KeyFormat]) -> Result<()> {
    let layers = model.spec().layers.iter().filter_map(|layer| layer.sparse);
    let indexers = layers.filter_map(|layer| layer.entries.zip(layer.selection));
    let widths: BTreeSet<usize> = indexers.clone().map(|(_, index)| index.head_dim).collect();
    let fewest = indexers.map(|(entries, index)| entries.compression.ratio * (index.top_k + 1));
    let Some(fewest) = fewest.min() else {
        return Err(Error::plan("model", "without an indexer", "must have sparse attention"));
    };
    if plan.window() < fewest {
        let rule =
            format!("must be at least {fewest} tokens; with fewer, indexers select all entries");
        return Err(Error::plan("window", plan.window(), rule));
    }
    for (format, width) in formats.iter().flat_map(|it| widths.iter().map(move |w| (it, *w))) {
        let index = IndexConfig { head_dim: width, top_k: 1, keys: RowFormat::codes(format.codes) };
        let config = SparseConfig::new(width, 1).with_compression(Compression::new(1));
        config.with_index(index).validate()?;
        if format.hadamard && (!width.is_power_of_two() || width > 256) {
            let rule = format!("needs keys of 2^n channels up to 256, and they have {width}");
            return Err(Error::plan("keys", format, rule));
        }
    }
    Ok(())
}

/// Counts the selections of one layer in one window with each format.
fn add_layer(
    counts: &mut Counts,
    layer: usize,
    trace: &SparseTrace,
    formats: &[KeyFormat],
) -> Result<()> {
    let (Some(index), Some(config), Some(compression)) =
        (&trace.index, trace.config.index, trace.config.compression)
    else {
        return Ok(());
    };
    // The float cache stores keys in f32, so the layer has selected by exact scores.
    let exact = rows(index.selection.indices().clone())?;
    for (number, format) in formats.iter().enumerate() {
        let (query, keys) = format.inputs(index)?;
        let keys = RowFormat::codes(format.codes).rounded(keys);
        let scores = index_scores(&query, &keys)?;
        let stored = select_entries(scores, 0, compression, config.top_k)?;
        let stored = rows(stored.indices().clone())?;
        for (token, (exact, stored)) in exact.iter().zip(&stored).enumerate() {
            let entries = compression.entries(token + 1);
            if entries <= config.top_k {
                continue;
            }
            // Twice as many entries from one cell to the next.
            let key = (layer, number, 1 << entries.ilog2());
            let none = Count { top_k: config.top_k, tokens: 0, hits: 0 };
            let count = counts.entry(key).or_insert(none);
            count.tokens += 1;
            count.hits += exact.intersection(stored).count();
        }
    }
    Ok(())
}

impl KeyFormat {
    /// Returns queries and keys as they are before keys are stored.
    fn inputs(&self, index: &IndexTrace) -> Result<(IndexQuery, Tensor<4>)> {
        let (query, keys) = (index.query.clone(), index.keys.clone());
        if !self.hadamard {
            return Ok((query, keys));
        }
        let transformed = hadamard(query.query.cast(DType::F32))?;
        Ok((IndexQuery { query: transformed, ..query }, hadamard(keys)?))
    }
}

/// Reads the selected entries of each token of one sequence.
fn rows(indices: Tensor<3, Int>) -> Result<Vec<BTreeSet<i64>>> {
    let width = indices.dims()[2];
    let fail = |why: String| Error::Device { cache: "the selection of an indexer".into(), why };
    let data = indices.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    let numbers: Vec<i64> = data.iter::<i64>().collect();
    let row = |row: &[i64]| row.iter().copied().filter(|entry| *entry >= 0).collect();
    Ok(numbers.chunks(width).map(row).collect())
}

impl IndexRecall {
    /// Lists all cells.
    pub fn table(&self) -> Table {
        let mut table = Table::new(["layer", "keys", "top", "entries", "tokens", "recall"]);
        for cell in &self.cells {
            table.push(vec![
                cell.layer.to_string(),
                cell.format.clone(),
                cell.top_k.to_string(),
                format!("{}..{}", cell.from.max(cell.top_k + 1), cell.to),
                cell.tokens.to_string(),
                format!("{:.2}%", 100.0 * cell.recall),
            ]);
        }
        table
    }

    /// Draws the recall by entries, one line for each layer and format.
    pub fn chart(&self) -> Chart {
        let mut series: Vec<Series> = vec![];
        for cell in &self.cells {
            let name = format!("layer {}, {}", cell.layer, cell.format);
            let point = (cell.from.max(cell.top_k + 1) as f64, 100.0 * cell.recall);
            match series.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => series.push(Series::new(name, vec![point], Style::LinePoints)),
            }
        }
        Chart {
            title: "Recall of indexers with quantized keys".into(),
            x_label: "entries that a token sees, at least".into(),
            y_label: "selected entries that exact keys select, %".into(),
            log_x: true,
            series,
            ..Chart::default()
        }
    }
}

impl fmt::Display for IndexRecall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.table())
    }
}
