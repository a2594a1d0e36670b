//! Recall of indexers: how many of the entries that exact keys select are selected with quantized
//! keys.

use core::fmt;
use std::collections::BTreeSet;

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
    check(model, formats)?;
    let mut cells: Vec<RecallCell> = vec![];
    let float = ModelCacheConfig::from(kv_cubecl::KvCacheConfig::float());
    let n_windows = plan.spans().count();
    for (done, span) in plan.spans().enumerate() {
        let (ids, _) = plan.input(&span);
        let _phase = trace_span!(target: PHASE, "window", n = ids.len()).entered();
        let mut outcome = Ok(());
        let mut observe = |trace: AttentionTrace| {
            let Some(sparse) = trace.sparse().filter(|_| outcome.is_ok()) else { return };
            outcome = formats
                .iter()
                .try_for_each(|format| add_layer(&mut cells, trace.layer, sparse, *format));
        };
        let ids = ids_to_tensor(&ids, [1, ids.len()], device);
        model.hidden_with(ids, &float, Default::default(), Some(&mut observe))?;
        outcome?;
        progress(done + 1, n_windows);
    }
    if cells.is_empty() {
        let rule = "must be longer, so that tokens see more entries than they select";
        return Err(Error::plan("window", plan.window(), rule));
    }
    cells.sort_by_key(|cell| (cell.layer, order(formats, &cell.format), cell.from));
    for cell in &mut cells {
        cell.recall /= (cell.tokens * cell.top_k) as f64;
    }
    Ok(IndexRecall { cells })
}

fn order(formats: &[KeyFormat], name: &str) -> usize {
    formats.iter().position(|format| format.to_string() == name).unwrap_or(formats.len())
}

/// Checks that the model has an indexer and that the formats fit its keys.
fn check(model: &LanguageModel, formats: &[KeyFormat]) -> Result<()> {
    let mut widths = BTreeSet::new();
    for layer in &model.spec().layers {
        widths.extend(layer.sparse.and_then(|it| it.selection).map(|it| it.head_dim));
    }
    if widths.is_empty() {
        return Err(Error::plan("model", "without an indexer", "must have sparse attention"));
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

/// Adds the selections of one layer in one window to `cells`. Until the end, their recall is a
/// count.
fn add_layer(
    cells: &mut Vec<RecallCell>,
    layer: usize,
    trace: &SparseTrace,
    format: KeyFormat,
) -> Result<()> {
    let (Some(index), Some(config), Some(compression)) =
        (&trace.index, trace.config.index, trace.config.compression)
    else {
        return Ok(());
    };
    let IndexTrace { query, keys, .. } = index;
    let select = |query: &IndexQuery, keys: &Tensor<4>| -> Result<Vec<BTreeSet<i64>>> {
        let selection = select_entries(index_scores(query, keys)?, 0, compression, config.top_k)?;
        rows(selection.indices().clone())
    };
    let exact = select(query, keys)?;
    let (query, keys) = match format.hadamard {
        false => (query.clone(), keys.clone()),
        true => {
            let transformed = hadamard(query.query.clone().cast(DType::F32))?;
            (IndexQuery { query: transformed, ..query.clone() }, hadamard(keys.clone())?)
        }
    };
    let stored = select(&query, &RowFormat::codes(format.codes).rounded(keys))?;
    for (token, (exact, stored)) in exact.iter().zip(&stored).enumerate() {
        let entries = compression.entries(token + 1);
        if entries <= config.top_k {
            continue;
        }
        // Twice as many entries from one cell to the next.
        let from = 1 << entries.ilog2();
        let cell = cells.iter_mut().find(|cell| {
            cell.layer == layer && cell.from == from && cell.format == format.to_string()
        });
        let hits = exact.intersection(stored).count() as f64;
        match cell {
            Some(cell) => {
                cell.tokens += 1;
                cell.recall += hits;
            }
            None => cells.push(RecallCell {
                layer,
                format: format.to_string(),
                top_k: config.top_k,
                from,
                to: 2 * from,
                tokens: 1,
                recall: hits,
            }),
        }
    }
    Ok(())
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
