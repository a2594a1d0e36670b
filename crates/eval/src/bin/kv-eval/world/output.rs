//! The tables and pictures of `kv-eval world`.

use std::path::Path;

use anyhow::Result;
use kv_cli::{OutFile, Screen};
use kv_eval::{
    memory::DeviceUse,
    world::{LayerScales, Truth, WorldPoint, decibels, mean, squared_error},
};
use kv_report::{
    Table,
    chart::{Chart, Series, Style},
    create_folder,
};
use kv_world::{Frame, Picture};

/// Frames of a row of the contact sheet.
const COLUMNS: usize = 12;
/// Side of a frame's pixel in pixels of the contact sheet.
const ZOOM: usize = 2;

pub(super) fn print_points(
    screen: Screen,
    points: &[WorldPoint],
    truth: &Truth,
    context: usize,
    memory: Option<DeviceUse>,
) -> Result<()> {
    screen.print(table(points))?;
    for point in points.iter().filter(|point| !point.scales.is_empty()) {
        screen.line(format_args!("scales of frames of {}, after the last one:", point.cache))?;
        screen.print(scales(point))?;
    }
    // The error is averaged before it is converted to decibels. If a player stands still, the last
    // frame is exact, and its PSNR would dominate a mean of decibels.
    let last = &truth.frames[context - 1];
    let errors = truth.frames[context..]
        .iter()
        .flat_map(|frames| frames.iter().zip(last).map(|(frame, last)| squared_error(frame, last)));
    screen.line(format_args!(
        "PSNR of the mean squared error of all frames: {:.2} dB, \
             of the last true frame, repeated: {:.2} dB",
        decibels(mean(&points[0].squared_error)),
        decibels(mean(&errors.collect::<Vec<_>>())),
    ))?;
    if let Some(memory) = memory {
        screen.line(format_args!("device memory: {memory}"))?;
    }
    Ok(())
}

/// Writes the charts, and the contact sheet with a row of true frames and a row per cache, into
/// `folder`, which is created if missing.
pub(super) fn write_pictures(
    folder: &Path,
    points: &[WorldPoint],
    rows: &[Vec<Frame>],
) -> Result<()> {
    let by_frame = |title: &str, of: fn(&WorldPoint) -> &Vec<f64>, skip: usize| Chart {
        title: title.into(),
        x_label: "frame".into(),
        y_label: "PSNR, dB".into(),
        series: points
            .iter()
            .skip(skip)
            .map(|point| {
                let points = of(point).iter().enumerate().map(|(i, &y)| (i as f64 + 1.0, y));
                Series::new(&*point.cache, points.collect(), Style::Line)
            })
            .collect(),
        ..Chart::default()
    };
    let truth = by_frame("Against the true frames", |point| &point.psnr, 0);
    let mut files = vec![("psnr.svg", truth.svg()?.into_bytes())];
    if points.len() > 1 {
        let twin = by_frame(&format!("Against {}", points[0].cache), |point| &point.twin_psnr, 1);
        files.push(("twin.svg", twin.svg()?.into_bytes()));
    }
    files.push(("sheet.png", Picture::grid(rows, ZOOM)?.png()?));
    create_folder(folder)?;
    files
        .iter()
        .try_for_each(|(name, bytes)| OutFile::open("out", &folder.join(name))?.write(bytes))
}

/// Returns evenly spread frames of the first game, including the first and the last.
pub(super) fn sheet_row(frames: &[Vec<Frame>]) -> Vec<Frame> {
    let columns = frames.len().min(COLUMNS);
    let at = |i: usize| i * (frames.len() - 1) / (columns - 1).max(1);
    (0..columns).map(|i| frames[at(i)][0].clone()).collect()
}

fn scales(point: &WorldPoint) -> Table {
    let mut table = Table::new(["layer", "side", "min", "mean", "max", "changed by", "saturated"]);
    for LayerScales { layer, side, min, mean, max, change, saturated } in &point.scales {
        let most = saturated.iter().copied().fold(0.0, f32::max);
        table.push([
            layer.to_string(),
            (*side).into(),
            format!("{min:.3e}"),
            format!("{mean:.3e}"),
            format!("{max:.3e}"),
            format!("{:.2}%", 100.0 * change),
            format!("{:.2}%", 100.0 * most),
        ]);
    }
    table
}

fn table(points: &[WorldPoint]) -> Table {
    let mut table = Table::new([
        "cache",
        "PSNR 1-20",
        "PSNR",
        "at the end",
        "worst drop",
        "SSIM",
        "twin PSNR",
        "twin SSIM",
        "v error %",
        "KB",
        "saved",
        "ms",
        "attention",
        "store",
        "projections",
        "decoder",
    ]);
    for point in points {
        let milliseconds = |seconds: f64| format!("{:.1}", 1e3 * seconds);
        table.push([
            point.cache.clone(),
            format!("{:.2}", mean(&point.psnr[..point.psnr.len().min(20)])),
            format!("{:.2}", mean(&point.psnr)),
            format!("{:.2}", point.last_psnr()),
            format!("{:.2}", point.worst_drop(&points[0])),
            format!("{:.3}", mean(&point.ssim)),
            format!("{:.2}", mean(&point.twin_psnr)),
            format!("{:.3}", mean(&point.twin_ssim)),
            format!("{:.2}", 100.0 * point.velocity_error),
            format!("{:.0}", point.bytes as f64 / 1e3),
            format!("{:.2}", points[0].bytes as f64 / point.bytes as f64),
            milliseconds(point.model_seconds),
            milliseconds(point.attention_seconds),
            milliseconds(point.store_seconds),
            milliseconds(point.projection_seconds()),
            milliseconds(point.decoder_seconds),
        ]);
    }
    table
}
