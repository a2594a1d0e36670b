//! `kv-eval world`.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

use anyhow::{Result, bail};
use kv_cli::{
    Backend, NamedFiles, OutFile, Plain, Screen, dispatch, exit_on_interrupt, note, open_folder,
};
use kv_cubecl::{Frames, On, Side, Target};
use kv_eval::{
    device_name,
    world::{
        LayerCaches, LayerScales, RolloutPlan, Truth, World, WorldPoint, compare, compare_bytes,
        decibels, mean, squared_error,
    },
};
use kv_eval_models::WORLD;
use kv_models::LoadOptions;
use kv_report::{
    Table,
    chart::{Chart, Series, Style},
};
use kv_world::{Frame, Picture};
use kv_world_model::{Config, Rings, WorldCache};
use serde::Serialize;

use crate::{
    arguments::{Named, RunningArgs, configs, has_frame_scales, policies},
    built_in,
    common::{Weights, check_memory},
    json::{JsonArgs, write_json},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval world --seeds 2 --frames 40
  kv-eval world --cache kint8vint8 --cache kint8vint8@2 --json out.json --out charts")]
pub(crate) struct Args {
    /// The world model's folder [default: the built-in model world].
    #[arg(long, short, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Representation of quantized, f16 and bf16 weights in memory.
    #[arg(long, value_enum, default_value = "restored")]
    weights: Weights,
    /// Folder of a model whose frames with a float cache the others are compared with, such as this
    /// model before its weights were quantized [default: this model].
    #[arg(long, value_name = "FOLDER")]
    reference: Option<PathBuf>,
    /// Cache format to compare with float: a short name such as k4v4 or kint8vint8, or a policy
    /// file (.json or .toml); repeatable. The suffix @2 applies it to the last two layers alone,
    /// @k2 to the keys of the last two and all values, @k2v4 to keys of two and values of four.
    #[arg(long = "cache", default_values = [
        "float-f16", "k16vint8", "kint8v16", "kint8vint8", "kint8fvint8f", "kint8pvint8p",
        "ke4m3ve4m3", "kint8vint8@2",
        "k8v16-r32", "kint8gv16-r32", "k4v4-r32",
    ])]
    caches: Vec<Named<LayerCaches>>,
    /// Number of frames that the model generates.
    #[arg(long, default_value_t = 200)]
    frames: usize,
    /// Number of games.
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// Seed of the first game. The model was trained only on seeds from 2^63 on.
    #[arg(long, default_value_t = 1000)]
    first_seed: u64,
    /// Number of true frames that the model sees first.
    #[arg(long, default_value_t = 8)]
    context: usize,
    /// Frames of the rings of global layers [default: as in training].
    #[arg(long)]
    ring: Option<u64>,
    /// Number of first frames that stay in the rings.
    #[arg(long, default_value_t = 0)]
    sinks: u64,
    #[command(flatten)]
    running: RunningArgs,
    /// Write the scales that layers take from frames, and the share of numbers that saturate, into
    /// this file: a line of JSON for each cache and every SCALES_EVERY-th frame. It is written when
    /// all games have been played.
    #[arg(long, value_name = "FILE")]
    scales: Option<PathBuf>,
    /// Frames from one line of --scales to the next.
    #[arg(long, default_value_t = 10, requires = "scales")]
    scales_every: u64,
    /// Seed of the initial noise of frames.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Backend to run on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Fail if a frame's mean PSNR is more than this many decibels below the float cache's, or the
    /// reference's. Results are written first.
    #[arg(long, value_name = "DB")]
    max_drop: Option<f64>,
    /// Write psnr.svg, twin.svg and sheet.png into this folder.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

impl FromStr for Named<LayerCaches> {
    type Err = kv_eval::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Ok(Self { name: name.to_string(), value: name.parse()? })
    }
}

#[derive(Serialize)]
struct Output<'a> {
    command: Vec<String>,
    target: &'static str,
    device: String,
    seeds: u64,
    context: usize,
    points: &'a [WorldPoint],
}

const COLUMNS: usize = 12;
/// Side of a frame's pixel in pixels of the contact sheet.
const ZOOM: usize = 2;

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = NamedFiles::default();
    let files = args.model.iter().fold(files, |files, model| files.reads_model("model", model));
    let files =
        args.reference.iter().fold(files, |files, model| files.reads_model("reference", model));
    policies(files, &args.caches)
        .writes("json", args.json.path())
        .writes("scales", args.scales.as_deref())
        .check()?;
    exit_on_interrupt()?;
    args.check_gate()?;
    dispatch!(args.backend, Plain, play(args))
}

impl Args {
    /// Checks that the gate has a valid limit, and a cache to compare.
    fn check_gate(&self) -> Result<()> {
        let Some(most) = self.max_drop else { return Ok(()) };
        if !(most >= 0.0 && most.is_finite()) {
            bail!("max-drop {most}: must be finite and at least 0");
        }
        let floats = self.caches.iter().all(|cache| cache.value == LayerCaches::default());
        if floats && self.reference.is_none() {
            bail!(
                "max-drop {most}: compares caches with the float one; add another --cache or \
                 --reference"
            );
        }
        Ok(())
    }

    /// Fails if a cache is worse than the gate allows.
    fn gate(&self, points: &[WorldPoint]) -> Result<()> {
        let Some(most) = self.max_drop else { return Ok(()) };
        let first = &points[0];
        let drops = points.iter().map(|point| (point.worst_drop(first), &point.cache));
        match drops.max_by(|(a, _), (b, _)| a.total_cmp(b)) {
            Some((drop, cache)) if drop > most => bail!(
                "max-drop {most}: a frame with {cache} is {drop:.2} dB below the one with {}",
                first.cache
            ),
            _ => Ok(()),
        }
    }

    /// Plans the rollout of a model. Prints a note if the model cannot see the whole ring.
    fn plan(&self, model: &Config) -> RolloutPlan {
        let trained = model.global_window.unwrap_or(Frames(model.n_frames as u64));
        let mut ring = self.ring.map_or(trained, Frames);
        if let Some(most) = model.global_window.filter(|&most| ring > most) {
            note(format_args!("ring {}: the model sees at most {most}, so these are kept", ring.0));
            ring = most;
        }
        let rings = Rings::new(ring).with_sinks(Frames(self.sinks));
        let rings = rings.with_running(self.running.rules());
        RolloutPlan { context: self.context, rings, seed: self.seed }
    }

    fn describe(&self, model: &Config, ring: Frames, target: &str) -> String {
        let (layers, heads) = (model.n_layers, model.n_heads);
        format!(
            "{} games of {} frames after {} true ones on {target}: {layers} layers of {heads} \
             heads of {}, {} tokens a frame, rings of {ring}",
            self.seeds,
            self.frames,
            self.context,
            model.head_dim(),
            model.tokens_per_frame(),
        )
    }

    /// Returns the number of true frames per game, and the seeds of the games.
    fn games(&self) -> Result<(usize, Range<u64>)> {
        let Self { frames, seeds, first_seed, context, .. } = *self;
        for (field, value) in [
            ("frames", frames as u64),
            ("seeds", seeds),
            ("context", context as u64),
            ("scales-every", self.scales_every),
        ] {
            if value == 0 {
                bail!("{field} 0: must be at least 1");
            }
        }
        let Some(end) = first_seed.checked_add(seeds) else {
            let most = u64::MAX - seeds;
            bail!("first-seed {first_seed}: must be at most {most}, for {seeds} games");
        };
        // All frames are held in memory.
        let of_games = |all: usize| all.checked_mul(usize::try_from(seeds).ok()?);
        let bytes = |frames: usize| frames.checked_mul(3 * Frame::SIZE * Frame::SIZE);
        let all = context.checked_add(frames).filter(|&all| {
            of_games(all).and_then(bytes).is_some_and(|bytes| isize::try_from(bytes).is_ok())
        });
        let Some(all) = all else {
            bail!(
                "frames {frames}: with {context} true ones in {seeds} games, they exceed any memory"
            );
        };
        Ok((all, first_seed..end))
    }
}

fn play<T: Target>(args: &Args) -> Result<()> {
    let (frames, seeds) = args.games()?;
    if let Some(folder) = &args.out {
        open_folder("out", folder)?;
    }
    let (screen, json) = args.json.open()?;
    let scales = args.scales.as_deref().map(|path| OutFile::open("scales", path)).transpose()?;
    let device = On::<T>::open()?;
    let options = LoadOptions::default().with_packed(args.weights.activations());
    let load = |path: &Path| Ok(World::load_with(path, &device, options)?);
    let world = built_in::load(args.model.as_deref(), &WORLD, load)?;
    let reference = args.reference.as_deref().map(|path| World::load(path, &device)).transpose()?;
    let config = world.model.config();
    if let (Some(path), Some(reference)) = (&args.reference, &reference)
        && (reference.maze_seed != world.maze_seed || reference.model.config() != config)
    {
        bail!("reference {}: must have the shape and the maze of the model", path.display());
    }
    let plan = args.plan(config);
    let rings = plan.rings;
    let caches = configs(&args.caches);
    let of_layers: Vec<_> = caches.iter().flat_map(|cache| cache.cache.candidates()).collect();
    args.running.check(&of_layers)?;
    let followed = Side::BOTH.into_iter().any(|side| has_frame_scales(&of_layers, side));
    if let (Some(path), false) = (&args.scales, followed) {
        bail!(
            "scales {}: no cache takes scales from frames; add --cache kint8fvint8f",
            path.display()
        );
    }
    let needed = compare_bytes(&world, [args.seeds, frames as u64], &plan, &caches)?;
    check_memory(needed, 0, &device, "play fewer --frames or --seeds")?;
    for cache in &caches {
        // A cache that is not supported is an error before the true frames are rendered, which
        // takes long.
        world.model.new_cache_with(&cache.formats(config.n_layers)?, rings, 1, &device)?;
    }
    let truth = Truth::new(world.maze(), seeds, frames);
    screen.line(args.describe(config, rings.frames, T::NAME))?;
    let mut points: Vec<WorldPoint> = vec![];
    let mut rows = vec![sheet_row(&truth.frames[args.context..])];
    let mut started = Instant::now();
    let on_point = |point: WorldPoint, frames: &[Vec<Frame>]| {
        rows.push(sheet_row(frames));
        // An error is ignored, because standard error may be closed.
        let seconds = started.elapsed().as_secs_f64();
        let _ = Screen::Error.line(format_args!("{}: {seconds:.0} s", point.cache));
        started = Instant::now();
        points.push(point);
        Ok(())
    };
    let mut log = String::new();
    let on_frame = |cache: &str, rings: &WorldCache| {
        let Frames(frame) = rings.written();
        if scales.is_some() && frame.is_multiple_of(args.scales_every) {
            let layers = LayerScales::of(rings);
            if !layers.is_empty() {
                let line = serde_json::json!({ "cache": cache, "frame": frame, "layers": layers });
                log += &format!(
                    "{line}
"
                );
            }
        }
    };
    compare(&device, (&world, reference.as_ref()), &truth, &plan, &caches, on_point, on_frame)?;
    if let Some(scales) = scales {
        scales.write(log.as_bytes())?;
    }
    print_points(screen, &points, &truth, args.context)?;
    if let Some(folder) = &args.out {
        write_pictures(folder, &points, &rows)?;
    }
    if let Some(json) = json {
        let output = Output {
            command: kv_cli::command_line(),
            target: T::NAME,
            device: device_name(&device),
            seeds: args.seeds,
            context: args.context,
            points: &points,
        };
        write_json(json, &output)?;
    }
    args.gate(&points)
}

fn print_points(
    screen: Screen,
    points: &[WorldPoint],
    truth: &Truth,
    context: usize,
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
    Ok(())
}

/// Writes the charts, and the contact sheet with a row of true frames and a row per cache.
fn write_pictures(folder: &Path, points: &[WorldPoint], rows: &[Vec<Frame>]) -> Result<()> {
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
    truth.write_svg(folder.join("psnr.svg"))?;
    if points.len() > 1 {
        let twin = by_frame(&format!("Against {}", points[0].cache), |point| &point.twin_psnr, 1);
        twin.write_svg(folder.join("twin.svg"))?;
    }
    let sheet = Picture::grid(rows, ZOOM)?.png()?;
    OutFile::open("out", &folder.join("sheet.png"))?.write(&sheet)?;
    Ok(())
}

/// Returns evenly spread frames of the first game, including the first and the last.
fn sheet_row(frames: &[Vec<Frame>]) -> Vec<Frame> {
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
