//! Arguments and outputs shared by all benchmarks.

use std::path::Path;

use anyhow::Result;
use kv_cli::{Backend, MemoryBudget, OutFile, Screen};
use kv_cubecl::{On, Target};
use kv_eval::{
    bench::{COPIED, copy_bandwidth},
    memory::DeviceUse,
};
use kv_report::{
    Table,
    chart::{Chart, Series, Style},
};
use serde::Serialize;

use crate::json::{JsonArgs, write_json};

/// Arguments shared by all benchmarks.
#[derive(Debug, clap::Args)]
pub(super) struct Common {
    /// Backend to run on.
    #[arg(long, value_enum, default_value = "flex")]
    pub(super) backend: Backend,
    /// Number of samples; the median is reported.
    #[arg(long, default_value_t = 21)]
    pub(super) samples: usize,
    #[command(flatten)]
    pub(super) json: JsonArgs,
}

#[derive(Serialize)]
struct Output<'a, P> {
    command: Vec<String>,
    target: &'static str,
    device: String,
    /// Bytes copied per second, each read once and written once.
    copy_bandwidth: f64,
    /// The memory of a GPU, for a benchmark of a model.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_memory: Option<DeviceUse>,
    points: &'a [P],
}

/// Checks that a benchmark's tensors fit into memory, before they are allocated.
pub(super) fn check_memory<T: Target>(needed: u64, device: &On<T>) -> Result<()> {
    let copied = if T::NAME == "flex" { 2 * COPIED as u64 } else { 0 };
    crate::common::check_memory(needed, copied, device, "time a smaller shape")
}

pub(super) struct Sinks {
    screen: Screen,
    json: Option<OutFile>,
    plot: Option<OutFile>,
    /// The budget of the benchmark's model.
    pub(super) budget: Option<MemoryBudget>,
}

impl Sinks {
    /// Opens the outputs, so a file that cannot be written is reported before the measurement.
    pub(super) fn open(json: &JsonArgs, plot: Option<&Path>) -> Result<Self> {
        let screen = Screen::beside([json.path(), plot]);
        let (_, json) = json.open()?;
        let plot = plot.map(|path| OutFile::open("plot", path)).transpose()?;
        Ok(Self { screen, json, plot, budget: None })
    }

    /// Prints what is timed, then measures and prints the copy bandwidth.
    pub(super) fn start<T: Target>(&self, device: &On<T>, what: &str) -> Result<f64> {
        self.screen.line(what)?;
        let copied = copy_bandwidth(device, COPIED, 9)?;
        let rate = format!("{} copies {:.1} GB/s", T::NAME, copied / 1e9);
        self.screen.line(format_args!("{rate}: it reads that much and writes as much"))?;
        Ok(copied)
    }

    /// Prints the table, and the memory of a GPU if a model has a budget, and writes the files. If
    /// a file cannot be written, the error is returned after the others are written.
    pub(super) fn finish<T: Target, P: Serialize>(
        self,
        device: &On<T>,
        copy_bandwidth: f64,
        table: &Table,
        chart: Option<&Chart>,
        points: &[P],
    ) -> Result<()> {
        let device_memory = self.budget.and_then(|budget| budget.device_use(device));
        let (command, device) = (kv_cli::command_line(), format!("{:?}", **device));
        let target = T::NAME;
        let output = Output { command, target, device, copy_bandwidth, device_memory, points };
        let json = self.json.map_or(Ok(()), |file| write_json(file, &output));
        let plot = match (self.plot, chart) {
            (Some(file), Some(chart)) => {
                chart.svg().map_err(Into::into).and_then(|svg| file.write(svg.as_bytes()))
            }
            _ => Ok(()),
        };
        self.screen.print(table)?;
        if let Some(memory) = device_memory {
            self.screen.line(format_args!("device memory: {memory}"))?;
        }
        json.and(plot)
    }
}

/// Draws a line per cache over the context length.
pub(super) fn by_context(
    title: String,
    y_label: &str,
    log_y: bool,
    points: impl Iterator<Item = (String, usize, f64)>,
) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for (name, context, y) in points {
        let point = (context as f64, y);
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series::new(name, vec![point], Style::LinePoints)),
        }
    }
    let (x_label, y_label) = ("tokens in the cache".to_string(), y_label.to_string());
    Chart { title, x_label, y_label, log_x: true, log_y, series, ..Chart::default() }
}

pub(super) fn us(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}
