//! The report of a run: curves as SVG and PNG, and one HTML page.

use std::path::{Path, PathBuf};

use kv_eval::Report;
use kv_report::{
    HtmlReport, Table,
    chart::{Chart, Series, Style},
};

use crate::{History, Result, StepRecord, TrainConfig, ValidRecord};

/// Largest number of points in a smoothed curve of training steps.
const POINTS: usize = 200;

/// Writes charts of the run as SVG and PNG, and `report.html` with all of them, into the run's
/// folder.
///
/// `saved` is the optimizer step after which the saved model was taken. `evaluation`, of the model
/// before and after training, adds its own charts. Returns the path of the page.
///
/// # Errors
/// A history without a step, or a file that cannot be written.
pub fn write_report(
    folder: &Path,
    config: &TrainConfig,
    history: &History,
    saved: usize,
    evaluation: Option<&Report>,
) -> Result<PathBuf> {
    let charts = [("loss", loss(history)), ("perplexity", perplexity(config, history))];
    let settings = serde_json::to_string_pretty(config).unwrap_or_default();
    let table = validations(config, history, saved);
    let mut page = HtmlReport::new("Training").heading("Validations").table(&table);
    for (name, chart) in &charts {
        chart.write_svg(folder.join(format!("{name}.svg")))?;
        chart.write_png(folder.join(format!("{name}.png")))?;
        page = page.chart(chart)?;
    }
    if let Some(evaluation) = evaluation {
        page = evaluation.write_charts(folder, page.heading("Before and after"))?.0;
    }
    let path = folder.join("report.html");
    page.heading("Configuration").pre(&settings).write(&path)?;
    Ok(path)
}

/// Returns the means of `value` over equal pieces of the run, by optimizer step.
fn smooth(records: &[StepRecord], value: impl Fn(&StepRecord) -> Option<f64>) -> Vec<(f64, f64)> {
    let piece = records.len().div_ceil(POINTS).max(1);
    records
        .chunks(piece)
        .filter_map(|piece| {
            let values: Vec<f64> = piece.iter().filter_map(&value).collect();
            let step = piece.last()?.step + 1;
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            (!values.is_empty()).then_some((step as f64, mean))
        })
        .collect()
}

fn by_step(records: &[ValidRecord], value: impl Fn(&ValidRecord) -> f64) -> Vec<(f64, f64)> {
    records.iter().map(|record| (record.step as f64, value(record))).collect()
}

fn loss(history: &History) -> Chart {
    let mut series = vec![Series::new(
        "objective, training",
        smooth(&history.train, |record| Some(record.loss)),
        Style::Line,
    )];
    if history.train.iter().any(|record| record.kl.is_some()) {
        series.push(Series::new(
            "KL, validation",
            by_step(&history.valid, |record| record.kl),
            Style::LinePoints,
        ));
        series.push(Series::new(
            "KL with a float cache, validation",
            by_step(&history.valid, |record| record.kl_float),
            Style::LinePoints,
        ));
    }
    Chart {
        title: "Loss".into(),
        x_label: "optimizer step".into(),
        y_label: "nats per token".into(),
        series,
        ..Chart::default()
    }
}

fn perplexity(config: &TrainConfig, history: &History) -> Chart {
    let curve = |name: &str, value: fn(&ValidRecord) -> f64| {
        Series::new(name, by_step(&history.valid, value), Style::LinePoints)
    };
    let mut series = vec![curve("float cache", |record| record.nll_float.exp())];
    if let Some(qat) = &config.qat {
        series.insert(0, curve(&qat.cache.to_string(), |record| record.nll.exp()));
    }
    let values = || series.iter().flat_map(|series| &series.points).map(|point| point.1);
    // Training from scratch starts with a perplexity of about the size of the vocabulary.
    let log_y = values().fold(0.0, f64::max) > 10.0 * values().fold(f64::INFINITY, f64::min);
    Chart {
        title: "Perplexity of the held-out text".into(),
        x_label: "optimizer step".into(),
        y_label: "perplexity".into(),
        log_y,
        series,
        ..Chart::default()
    }
}

fn validations(config: &TrainConfig, history: &History, saved: usize) -> Table {
    let mut table = Table::new([
        "step",
        "perplexity",
        "float cache",
        "KL",
        "KL float cache",
        "clipped elements",
        "constant groups",
        "model",
    ]);
    let best = history.best(config.objective).map(|best| best.step);
    for record in &history.valid {
        let share = |share: Option<f64>| share.map_or(String::new(), |x| format!("{x:.5}"));
        let marks = [(best == Some(record.step), "best"), (saved as u64 == record.step, "saved")];
        let marks: Vec<&str> =
            marks.into_iter().filter_map(|(is, mark)| is.then_some(mark)).collect();
        table.push([
            record.step.to_string(),
            format!("{:.4}", record.nll.exp()),
            format!("{:.4}", record.nll_float.exp()),
            format!("{:.5}", record.kl),
            format!("{:.5}", record.kl_float),
            share(record.shares.map(|shares| shares.clipped)),
            share(record.shares.map(|shares| shares.constant)),
            marks.join(", "),
        ]);
    }
    table
}
