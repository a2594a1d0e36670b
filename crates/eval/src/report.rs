//! Results as a table, as JSON, and as a page with charts.

use core::{f64::consts::LN_2, fmt};
use std::path::{Path, PathBuf};

use kv_cubecl::{On, Target};
use kv_models::{WeightDtype, one_line};
use kv_report::{
    HtmlReport, Table,
    chart::{Chart, Series, Style},
};
use serde::Serialize;

use crate::{
    LayerError, PositionKl, Result, Run, Versions,
    files::{NewFile, write_together},
    memory::DeviceUse,
};

/// The results of an evaluation, and the settings to repeat it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The command line.
    pub command: Vec<String>,
    /// Versions.
    pub versions: Versions,
    /// The target's name.
    pub backend: &'static str,
    /// The device, as the backend names it.
    pub device: String,
    /// The text's name.
    pub text: String,
    /// Tokens of the text that were used.
    pub text_tokens: usize,
    /// Bytes that these tokens encode, if known.
    pub text_bytes: Option<usize>,
    /// Tokens per window, including the begin-of-text token it may start with.
    pub window: usize,
    /// The token that every window starts with, as the vocabulary spells it.
    pub bos: Option<String>,
    /// Tokens from the start of one window to that of the next.
    pub stride: usize,
    /// Notes on the computation for the user.
    pub notes: Vec<String>,
    /// The memory used on a GPU, if it was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<DeviceUse>,
    /// The runs, grouped by model, the `float` run of each model first.
    pub runs: Vec<Run>,
}

impl Report {
    /// Creates a report without runs on `text_tokens` of `text` in eval windows of `window`.
    pub fn new<T: Target>(
        device: &On<T>,
        command: Vec<String>,
        text: String,
        text_tokens: usize,
        window: usize,
    ) -> Self {
        Self {
            command,
            versions: Versions::BUILT,
            backend: T::NAME,
            device: device_name(device),
            text,
            text_tokens,
            text_bytes: None,
            window,
            bos: None,
            stride: window,
            notes: vec![],
            device_memory: None,
            runs: vec![],
        }
    }

    /// Sets the stride, see [`Plan::with_stride`](crate::Plan::with_stride).
    #[must_use]
    pub fn with_stride(self, stride: usize) -> Self {
        Self { stride, ..self }
    }

    /// Sets the spelling of the begin-of-text token, see [`Plan::with_bos`](crate::Plan::with_bos).
    #[must_use]
    pub fn with_bos(self, bos: Option<String>) -> Self {
        Self { bos, ..self }
    }

    /// Adds notes to the report.
    #[must_use]
    pub fn with_notes(self, notes: Vec<String>) -> Self {
        Self { notes, ..self }
    }

    /// Sets the bytes of text that the tokens encode. Must be called before runs are added.
    #[must_use]
    pub fn with_text_bytes(self, bytes: usize) -> Self {
        Self { text_bytes: Some(bytes), ..self }
    }

    /// Adds the runs of one model.
    pub fn add(&mut self, model: &str, runs: Vec<Run>) {
        let tokens_per_byte = self.text_bytes.map(|bytes| self.text_tokens as f64 / bytes as f64);
        self.runs.extend(runs.into_iter().map(|run| Run {
            model: model.to_string(),
            bits_per_byte: tokens_per_byte.map(|rate| run.nll / LN_2 * rate),
            ..run
        }));
    }

    /// Returns the runs as a table. It has a column for the model if there are several, and one for
    /// bits per byte if they are known. `over float` is [`Run::nll_excess`].
    pub fn table(&self) -> Table {
        let rows: Vec<_> = self.runs.iter().map(|run| self.row(run)).collect();
        let names = rows.first().into_iter().flatten().map(|&(name, _)| name);
        let mut table = Table::new(names);
        for row in rows {
            table.push(row.into_iter().map(|(_, cell)| cell));
        }
        table
    }

    /// Returns one line of the table, with the names of the columns.
    fn row(&self, run: &Run) -> Vec<(&'static str, String)> {
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let mut row = Vec::with_capacity(14);
        if self.models().len() > 1 {
            row.push(("model", run.model.clone()));
        }
        row.extend([
            ("cache", run.cache.clone()),
            ("perplexity", format!("{:.4}", run.perplexity)),
            ("nll", format!("{:.4}", run.nll)),
            ("+-", format!("{:.4}", run.nll_stderr)),
            ("over float", signed(run.nll_excess)),
            ("+-", format!("{:.4}", run.nll_excess_stderr)),
        ]);
        if self.text_bytes.is_some() {
            let bits = run.bits_per_byte.map_or(String::new(), |bits| format!("{bits:.4}"));
            row.push(("bits/byte", bits));
        }
        row.extend([
            ("kl mean", format!("{:.6}", run.kl_mean)),
            ("kl 99.9%", format!("{:.4}", run.kl_p999)),
            ("same top", percent(run.same_top)),
            ("cache MiB", format!("{:.2}", mib(run.cache_bytes))),
            ("of float", percent(run.cache_bytes as f64 / run.float_cache_bytes as f64)),
            ("tokens/s", format!("{:.1}", run.tokens_per_second())),
        ]);
        row
    }

    /// Draws the loss by position in the eval window, one line per run.
    pub fn position_chart(&self) -> Chart {
        let curve = |run: &Run| run.position_nll.iter().map(|at| (at.middle(), at.nll)).collect();
        Chart {
            title: "Loss by position in the window".to_string(),
            y_label: "nats per token".to_string(),
            series: self.series(&self.runs, curve),
            ..self.positions()
        }
    }

    /// Draws the loss by position above the model's float run, one line per other run.
    pub fn excess_chart(&self) -> Chart {
        let curve = |run: &Run| {
            let float = self.runs.iter().find(|other| other.model == run.model);
            let pairs = run.position_nll.iter().zip(float.map_or(&[][..], |f| &f.position_nll));
            pairs.map(|(at, float)| (at.middle(), at.nll - float.nll)).collect()
        };
        let others: Vec<&Run> = self.runs.iter().filter(|run| !run.is_float()).collect();
        Chart {
            title: "Loss added by the cache, by position".to_string(),
            y_label: "nats per token above the float cache".to_string(),
            series: self.series(others, curve),
            ..self.positions()
        }
    }

    /// Draws the 99th percentile of the divergence by position, one line per quantized run.
    pub fn divergence_chart(&self) -> Chart {
        let curve = |run: &Run| {
            run.position_kl.iter().filter_map(|at| Some((at.middle(), at.p99?))).collect()
        };
        let mut series = self.series(self.runs.iter().filter(|run| !run.is_float()), curve);
        series.retain(|series| !series.points.is_empty());
        series.iter_mut().for_each(|series| series.style = Style::LinePoints);
        Chart {
            title: "Divergence from the float cache, by position".to_string(),
            y_label: "99th percentile, nats".to_string(),
            series,
            ..self.positions()
        }
    }

    /// Draws the error of the attention output by layer, one line per run that has it.
    pub fn layers_chart(&self) -> Chart {
        let measured = self.runs.iter().filter(|run| !run.layers.is_empty());
        let curve = |run: &Run| {
            run.layers.iter().map(|layer| (layer.layer as f64, layer.output_error)).collect()
        };
        let mut series = self.series(measured, curve);
        series.iter_mut().for_each(|series| series.style = Style::LinePoints);
        Chart {
            title: "Error of the attention output by layer".to_string(),
            x_label: "layer".to_string(),
            y_label: "relative to the float cache's (RMS)".to_string(),
            series,
            ..Chart::default()
        }
    }

    /// Draws perplexity against the bytes of the cache, one point per run.
    pub fn quality_chart(&self) -> Chart {
        let point = |run: &Run| vec![(mib(run.cache_bytes), run.perplexity)];
        let mut series = self.series(&self.runs, point);
        series.iter_mut().for_each(|series| series.style = Style::Points);
        let best = self.runs.iter().map(|run| run.perplexity).fold(f64::INFINITY, f64::min);
        Chart {
            title: format!("Perplexity against the size of a cache of {} tokens", self.window),
            x_label: "cache, MiB".to_string(),
            y_label: "perplexity".to_string(),
            log_y: self.runs.iter().any(|run| run.perplexity > 10.0 * best),
            series,
            ..Chart::default()
        }
    }

    /// Writes `report.html`, and each of its charts as `NAME.svg` and `NAME.png`, into `folder`,
    /// which is created if missing. The charts are `quality` and `position`, with quantized caches
    /// also `excess` and `divergence`, and `layers` if it was measured. Returns the paths, the page
    /// first.
    ///
    /// # Errors
    /// A folder or file that cannot be written, and no runs to draw. No file is then written.
    pub fn write_folder(&self, folder: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        let folder = folder.as_ref();
        let html = HtmlReport::new(format!("KV caches of {}", self.models().join(" and ")));
        let (html, charts) = self.charts(folder, html.paragraph(&self.summary()))?;
        let html = html.heading("Settings").pre(&format!(
            "{}\n\n{}\nbackend {}, device {}\n{}{}",
            self.command.join(" "),
            self.versions,
            self.backend,
            self.device,
            self.memory_line(),
            self.notes.iter().map(|note| format!("note: {note}\n")).collect::<String>()
        ));
        let page = (folder.join("report.html"), html.html().into_bytes());
        write_together(folder, [vec![page], charts].concat())
    }

    /// Returns a line for the memory of a GPU, if it was read.
    fn memory_line(&self) -> String {
        self.device_memory.map_or(String::new(), |memory| format!("device memory: {memory}\n"))
    }

    /// Writes the charts into `folder`, which must exist, and adds table, charts and errors by
    /// layer to `html`. Returns the page and the charts' paths.
    ///
    /// # Errors
    /// Fails as [`write_folder`](Self::write_folder) does.
    pub fn write_charts(
        &self,
        folder: &Path,
        html: HtmlReport,
    ) -> Result<(HtmlReport, Vec<PathBuf>)> {
        let (html, charts) = self.charts(folder, html)?;
        Ok((html, write_together(folder, charts)?))
    }

    /// Draws the charts for `folder`, and adds them, the table and the errors by layer to `html`.
    fn charts(&self, folder: &Path, html: HtmlReport) -> Result<(HtmlReport, Vec<NewFile>)> {
        let charts = [
            ("quality", self.quality_chart()),
            ("position", self.position_chart()),
            ("excess", self.excess_chart()),
            ("divergence", self.divergence_chart()),
            ("layers", self.layers_chart()),
        ];
        let (mut html, mut files) = (html.table(&self.table()), Vec::new());
        for (name, chart) in charts {
            if chart.series.is_empty() && matches!(name, "excess" | "divergence" | "layers") {
                continue;
            }
            files.push((folder.join(format!("{name}.svg")), chart.svg()?.into_bytes()));
            files.push((folder.join(format!("{name}.png")), chart.png()?));
            html = html.chart(&chart)?;
        }
        for run in self.runs.iter().filter(|run| !run.is_float()) {
            let heading = format!("Divergence by position: {}", self.name(run));
            html = html
                .heading(&heading)
                .paragraph(&divergence(run))
                .table(&position_table(&run.position_kl));
        }
        for run in self.runs.iter().filter(|run| !run.layers.is_empty()) {
            html = html
                .heading(&format!("Error by layer: {}", self.name(run)))
                .table(&layer_table(&run.layers));
        }
        Ok((html, files))
    }

    fn models(&self) -> Vec<&str> {
        let mut models: Vec<&str> = Vec::new();
        for run in &self.runs {
            if !models.contains(&run.model.as_str()) {
                models.push(&run.model);
            }
        }
        models
    }

    /// Returns a name that distinguishes `run` from the others.
    fn name(&self, run: &Run) -> String {
        match self.models().len() {
            0 | 1 => run.cache.clone(),
            _ => format!("{}, {}", run.model, run.cache),
        }
    }

    fn summary(&self) -> String {
        let stride = match self.stride {
            stride if stride + usize::from(self.bos.is_some()) >= self.window => String::new(),
            stride => format!(" every {stride}"),
        };
        let bos = match &self.bos {
            Some(bos) => format!(", BOS {}", one_line(bos, 40)),
            None => ", no BOS".to_string(),
        };
        let mode = self.runs.first().map_or(String::new(), |run| format!(", {}", run.mode));
        // f32 weights are not mentioned.
        let dtype = match self.runs.iter().find(|run| run.dtype != WeightDtype::F32) {
            Some(run) => format!(", weights in {}", run.dtype),
            None => String::new(),
        };
        format!(
            "{} on {} ({}), {} tokens of {} in windows of {}{stride}{mode}{bos}{dtype}",
            self.models().join(" and "),
            self.backend,
            self.device,
            self.text_tokens,
            self.text,
            self.window
        )
    }

    fn series<'a>(
        &self,
        runs: impl IntoIterator<Item = &'a Run>,
        points: impl Fn(&Run) -> Vec<(f64, f64)>,
    ) -> Vec<Series> {
        let series = |run: &Run| Series::new(self.name(run), points(run), Style::Line);
        runs.into_iter().map(series).collect()
    }

    /// Returns an empty chart over positions, with a mark where quantization starts.
    fn positions(&self) -> Chart {
        let mut starts: Vec<usize> =
            self.runs.iter().filter_map(|run| run.first_quantized).collect();
        starts.sort_unstable();
        starts.dedup();
        let mark = |start: usize| (start as f64, format!("quantized from {start}"));
        Chart {
            x_label: "tokens in the cache".to_string(),
            vertical_marks: starts.into_iter().map(mark).collect(),
            ..Chart::default()
        }
    }
}

/// Formats four decimals, without a minus sign before zero.
fn signed(x: f64) -> String {
    let text = format!("{x:.4}");
    if text == "-0.0000" { "0.0000".into() } else { text }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// Describes the divergence of all tokens.
fn divergence(run: &Run) -> String {
    let interval = match run.kl_interval {
        Some([low, high]) => format!(" (95% confidence interval {low:.6} to {high:.6})"),
        None => String::new(),
    };
    let Run { kl_mean, kl_median, kl_p99, kl_p999, .. } = run;
    format!(
        "Mean {kl_mean:.6} nats{interval}, median {kl_median:.6}, p99 {kl_p99:.4}, p99.9 \
         {kl_p999:.4}."
    )
}

fn position_table(positions: &[PositionKl]) -> Table {
    let mut table = Table::new(["from", "to", "tokens", "median", "p99", "p99.9"]);
    let known = |kl: Option<f64>| kl.map_or(String::new(), |kl| format!("{kl:.4}"));
    for at in positions {
        table.push([
            at.start.to_string(),
            (at.end - 1).to_string(),
            at.tokens.to_string(),
            format!("{:.6}", at.median),
            known(at.p99),
            known(at.p999),
        ]);
    }
    table
}

fn layer_table(layers: &[LayerError]) -> Table {
    let mut table = Table::new(["layer", "keys", "values", "output", "clipped", "constant"]);
    for layer in layers {
        table.push([
            layer.layer.to_string(),
            format!("{:.4}", layer.key_error),
            format!("{:.4}", layer.value_error),
            format!("{:.4}", layer.output_error),
            format!("{:.2}%", 100.0 * layer.clipped),
            format!("{:.2}%", 100.0 * layer.constant),
        ]);
    }
    table
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.summary())?;
        write!(f, "{}{}", self.table(), self.memory_line())
    }
}

/// Returns the name of the hardware, if the backend knows it.
pub fn device_name<T: Target>(device: &On<T>) -> String {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let Some(identity) = device.as_dispatch().identity() {
        return identity.name;
    }
    match T::NAME {
        "flex" => format!("cpu, {} threads", rayon::current_num_threads()),
        _ => format!("{:?}", **device),
    }
}
