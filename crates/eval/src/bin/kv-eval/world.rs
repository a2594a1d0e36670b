//! `kv-eval world`.

mod output;
mod search;

use std::{
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

use anyhow::{Result, bail};
use kv_cli::{Backend, NamedFiles, OutFile, Plain, Screen, Weights, check_folder, dispatch, note};
use kv_cubecl::{Frames, On, Side, Target};
use kv_eval::{
    device_name,
    memory::DeviceUse,
    world::{
        LayerCaches, LayerScales, RolloutPlan, Truth, World, WorldPoint, compare, compare_bytes,
    },
};
use kv_eval_models::WORLD;
use kv_models::{LoadOptions, WeightDtype};
use kv_world::Frame;
use kv_world_model::{Config, Rings, WorldCache};
use serde::Serialize;

use self::{
    output::{print_points, sheet_row, write_pictures},
    search::SearchArgs,
};
use crate::{
    arguments::{Named, RunningArgs, configs, has_frame_scales, policies},
    built_in,
    common::check_memory,
    json::{JsonArgs, write_json},
    profile::ProfileArgs,
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
    /// Type of the weights and of computation: f32, f16 or bf16, or auto for the type of the file.
    /// Frames, noise and the rope stay in f32.
    #[arg(long, default_value = "f32")]
    dtype: WeightDtype,
    /// Folder of a model in f32 whose frames with a float cache the others are compared with, such
    /// as this model before its weights were quantized [default: this model].
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
    #[command(flatten)]
    search: SearchArgs,
    /// Write the scales that layers take from frames, and the share of numbers that saturate, into
    /// this file: a line of JSON for each cache and every SCALES_EVERY-th frame. It is written when
    /// all games have been played.
    #[arg(long, value_name = "FILE")]
    scales: Option<PathBuf>,
    /// Frames from one line of --scales to the next.
    #[arg(long, default_value_t = 10, requires = "scales")]
    scales_every: u64,
    /// Write what one frame of each cache attends to, and histograms of its keys and values, into
    /// this file: a line of JSON for each cache, when all games have been played.
    #[arg(long, value_name = "FILE")]
    inspect: Option<PathBuf>,
    /// The frame of --inspect, counted from 0 with the true ones [default: the last].
    #[arg(long, value_name = "N", requires = "inspect")]
    inspect_frame: Option<usize>,
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
    #[command(flatten)]
    profile: ProfileArgs,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    device_memory: Option<DeviceUse>,
    points: &'a [WorldPoint],
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = NamedFiles::default();
    let files = args.model.iter().fold(files, |files, model| files.reads_model("model", model));
    let files =
        args.reference.iter().fold(files, |files, model| files.reads_model("reference", model));
    policies(files, &args.caches)
        .writes("json", args.json.path())
        .writes("scales", args.scales.as_deref())
        .writes("inspect", args.inspect.as_deref())
        .writes("policy", args.search.policy())
        .writes("profile", args.profile.path())
        .check()?;
    args.profile.end_on_interrupt()?;
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
        if floats && self.reference.is_none() && self.search.policy().is_none() {
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
        let last = self.context + self.frames - 1;
        let inspect = self.inspect.as_ref().map(|_| self.inspect_frame.unwrap_or(last));
        RolloutPlan { context: self.context, rings, seed: self.seed, inspect }
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
    let mut profile = args.profile.start()?;
    if let Some(folder) = &args.out {
        check_folder("out", folder)?;
    }
    let asked = args.search.open()?;
    // The tables are not written where another program reads.
    let out = [args.json.path(), args.scales.as_deref(), args.inspect.as_deref()];
    let screen = Screen::beside(out);
    let (_, json) = args.json.open()?;
    let scales = args.scales.as_deref().map(|path| OutFile::open("scales", path)).transpose()?;
    let inspect = args.inspect.as_deref().map(|path| OutFile::open("inspect", path)).transpose()?;
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let options =
        LoadOptions::default().with_dtype(args.dtype).with_packed(args.weights.activations());
    let load = |path: &Path| Ok(World::load_with(path, &device, options)?);
    let world = built_in::load(args.model.as_deref(), &WORLD, load)?;
    profile.world(&world.model);
    let reference = args.reference.as_deref().map(|path| World::load(path, &device)).transpose()?;
    let config = world.model.config();
    if let (Some(path), Some(reference)) = (&args.reference, &reference)
        && (reference.maze_seed != world.maze_seed || reference.model.config() != config)
    {
        bail!("reference {}: must have the shape and the maze of the model", path.display());
    }
    let plan = args.plan(config);
    plan.check(frames)?;
    let rings = plan.rings;
    let mut caches = configs(&args.caches);
    let mut of_layers: Vec<_> = caches.iter().flat_map(|cache| cache.cache.candidates()).collect();
    of_layers.extend(args.search.candidates());
    args.running.check(&of_layers)?;
    let followed = Side::BOTH.into_iter().any(|side| has_frame_scales(&of_layers, side));
    if let (Some(path), false) = (&args.scales, followed) {
        bail!(
            "scales {}: no cache takes scales from frames; add --cache kint8fvint8f",
            path.display()
        );
    }
    let mut needed = compare_bytes(&world, [args.seeds, frames as u64], &plan, &caches)?;
    if let Some(games) = args.search.games(&plan) {
        let plan = RolloutPlan { inspect: None, ..plan };
        needed = needed.max(compare_bytes(&world, games, &plan, &[])?);
    }
    check_memory(needed, 0, &device, "play fewer --frames or --seeds")?;
    for cache in &caches {
        // A cache that is not supported is an error before the true frames are rendered, which
        // takes long.
        world.model.new_cache_with(&cache.formats(config.n_layers)?, rings, 1, &device)?;
    }
    if let Some(asked) = asked {
        let policy = args.search.search(asked, &device, &world, &plan, seeds.end, &screen)?;
        caches.push(policy.into());
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
                log += &format!("{line}\n");
            }
        }
    };
    compare(&device, (&world, reference.as_ref()), &truth, &plan, &caches, on_point, on_frame)?;
    // A file that cannot be written is reported after the results are printed and the others
    // written.
    let logged = scales.map_or(Ok(()), |file| file.write(log.as_bytes()));
    let inspected = inspect.map_or(Ok(()), |file| {
        let line = |point: &WorldPoint| {
            let line = serde_json::json!({ "cache": point.cache, "inspected": point.inspected });
            format!("{line}\n")
        };
        file.write(points.iter().map(line).collect::<String>().as_bytes())
    });
    let output = Output {
        command: kv_cli::command_line(),
        target: T::NAME,
        device: device_name(&device),
        seeds: args.seeds,
        context: args.context,
        device_memory: DeviceUse::now(&device),
        points: &points,
    };
    let json = json.map_or(Ok(()), |file| write_json(file, &output));
    let pictures = args.out.as_ref().map(|folder| write_pictures(folder, &points, &rows));
    let printed = print_points(screen, &points, &truth, args.context, output.device_memory);
    let profiled = profile.finish();
    let written = logged.and(inspected).and(json).and(pictures.unwrap_or(Ok(())));
    written.and(printed).and(profiled)?;
    args.gate(&points)
}
