//! Training a world model on the frames of the game of `kv-world`.

mod batch;
mod config;
mod history;
mod model;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use burn::{module::Module, tensor::Device};
use burn_optim::{AdamWConfig, ModuleOptimizer};
use kv_eval::world::World;
use kv_models::{
    Roles,
    gamerft::{self, GameRft},
    kv_cubecl::{On, Target},
    save::staged,
};
use kv_world::{Codec, Frame, Maze, Wanderer};

pub use config::WorldConfig;
pub use history::{WorldHistory, WorldStep, WorldValid};

use self::{history::Log, model::TrainState};
use crate::{
    Checkpoints, Error, Result, Resume, Tell,
    checkpoint::PARTS,
    folder::{Claim, check_new, check_room},
    optimize::schedule,
    setup::{group, weights},
};

/// Where a run keeps its files, and how it shows what it does.
pub struct WorldRun {
    /// Its folder: `world-run.json`, `history.jsonl`, the codec and `checkpoints/`.
    pub folder: PathBuf,
    /// Whether to start a new run, or to continue after the last checkpoint or that of a given step.
    pub resume: Resume,
    /// The folder of a model whose weights and codec a new run starts from, instead of random ones.
    pub from: Option<PathBuf>,
    /// Called with a line of text for every validation, and for every `tell_every`-th step.
    pub tell: Option<Tell>,
    /// Optimizer steps from one that is told to the next.
    pub tell_every: usize,
    /// Stops the run when it becomes true, with a checkpoint of the last whole optimizer step.
    pub stop: Option<Arc<AtomicBool>>,
    /// Names and contents of files written into the folder of a new run once it is sure to start.
    pub files: Vec<(&'static str, Vec<u8>)>,
}

impl WorldRun {
    /// A new run in `folder`, silent.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        let (resume, from, tell, stop) = (Resume::No, None, None, None);
        Self { folder, resume, from, tell, tell_every: 1, stop, files: vec![] }
    }
}

impl core::fmt::Debug for WorldRun {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { folder, resume, from, .. } = self;
        f.debug_struct("WorldRun")
            .field("folder", folder)
            .field("resume", resume)
            .field("from", from)
            .finish_non_exhaustive()
    }
}

/// The configuration of a run in `folder`; `None` where there is no such run.
///
/// # Errors
/// A file that is not one.
pub fn world_config(folder: &Path) -> Result<Option<WorldConfig>> {
    let path = settings(folder);
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path)(error)),
        Ok(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::Damaged { path, why: error.to_string() }),
    }
}

fn settings(folder: &Path) -> PathBuf {
    folder.join("world-run.json")
}

fn write_settings(folder: &Path, config: &WorldConfig) -> Result<()> {
    let text = serde_json::to_string_pretty(config);
    let text = text.map_err(|error| Error::Stopped(error.to_string()))? + "\n";
    let path = settings(folder);
    staged::write(&path, text.as_bytes()).map_err(Error::io(&path))
}

/// Checks that the run in `folder` is the one of `config`, whose length alone may be another.
fn check_settings(folder: &Path, config: &WorldConfig) -> Result<()> {
    let WorldConfig { steps, two_step, .. } = *config;
    let found = world_config(folder)?.map(|found| WorldConfig { steps, two_step, ..found });
    match found.as_ref() == Some(config) {
        true => Ok(()),
        false => {
            let why = "is not there, or another configuration than the one to resume with".into();
            Err(Error::Damaged { path: settings(folder), why })
        }
    }
}

/// Trains a world model, from scratch or [from](WorldRun::from) the weights of another run. A run may be resumed with
/// another length, which its learning rate then follows.
///
/// Frames of a sequence have noise levels of their own, as in Diffusion Forcing (Chen et al., 2024,
/// <https://arxiv.org/abs/2407.01392>), and the model learns `noise - picture` (rectified flow; Liu et al., 2022,
/// <https://arxiv.org/abs/2209.03003>). The last [`two_step`](WorldConfig::two_step) steps are those of the pipeline
/// that will play: frames have the two levels that it uses, and some of those at the lower one are what the model itself
/// made of noise, so that it learns to finish and to go on from its own pictures.
///
/// # Errors
/// A setting out of range, a folder that holds another run, cannot be written or has no room, or a damaged checkpoint or
/// none to resume from: nothing has been changed then. A loss that is not finite or a full disk: checkpoints written
/// before are complete. [`Error::Interrupted`] when it was asked to stop.
pub fn train_world<T: Target>(
    device: &On<T>,
    config: &WorldConfig,
    run: WorldRun,
) -> Result<(World, WorldHistory)> {
    config.validate()?;
    let folder = &run.folder;
    let claim = match run.resume {
        Resume::No => check_new(folder).map(|()| None)?,
        _ => Some(Claim::new(folder)?),
    };
    if run.resume != Resume::No {
        check_settings(folder, config)?;
    }
    let checkpoints = Checkpoints::of(folder);
    let done = match run.resume {
        Resume::No => None,
        Resume::Last => checkpoints.resume(None)?,
        Resume::Step(step) => checkpoints.resume(Some(step))?,
    };
    if let Some(step) = done.filter(|&step| step > config.steps) {
        let rule = format!("must not be below the {step} steps that were made");
        return Err(Error::setting("steps", config.steps, rule));
    }
    if run.resume != Resume::No && done.is_none() {
        // Whether it started from another model is not in its folder, so that it cannot be started as it was.
        let (path, why) = (checkpoints.folder().into(), "holds no checkpoint to resume from");
        let why = format!("{why}: start the run again in another folder");
        return Err(Error::Damaged { path, why });
    }
    let autodiff = (**device).clone().autodiff();
    autodiff.seed(config.seed);
    let started_from = match (&run.from, run.resume) {
        (Some(from), Resume::No) => Some(start_from(from, config, &autodiff)?),
        _ => None,
    };
    let (model, codec) = match started_from {
        Some(World { model, codec, .. }) => (model, Some(codec)),
        None => (GameRft::init(config.model(), &autodiff)?, None),
    };
    let bytes = 4 * model.num_params() as u64;
    let _claim = claim.map_or_else(|| Claim::new(folder), Ok)?;
    let codec = match run.resume {
        Resume::No => {
            check_new(folder)?;
            // Three checkpoints of weights and two moments each, since the oldest of two is deleted once the next is
            // whole, and the model in 16 bits.
            check_room(folder, &[9 * bytes, bytes / 2])?;
            let codec = codec.map_or_else(|| fit_codec(config), Ok)?;
            codec.save(folder).map_err(kv_eval::Error::from)?;
            for (name, bytes) in run.files {
                let path = folder.join(name);
                staged::write(&path, &bytes).map_err(Error::io(&path))?;
            }
            codec
        }
        _ => Codec::load(folder).map_err(kv_eval::Error::from)?,
    };
    // With its configuration there is a run; or it has another length now.
    write_settings(folder, config)?;
    checkpoints.delete_after(done)?;
    let log = Log::new(folder, done, config, run.tell, run.tell_every)?;
    let mut course = TrainState {
        optimizer: optimizer(config, &model),
        schedule: schedule(config.schedule, config.steps)?,
        world: World::new(model, codec, config.maze)?,
        config,
        device: autodiff,
        log,
    };
    if let Some(step) = done {
        course.restore(&checkpoints, step)?;
    }
    course.run(done.unwrap_or(0), &checkpoints, run.stop.as_deref())?;
    let TrainState { mut world, .. } = course;
    world.model = world.model.valid();
    Ok((world, WorldHistory::read(folder)?))
}

/// The model as the run in `folder` had it after a step, or after its last checkpoint, and that step.
///
/// # Errors
/// No such checkpoint, or a damaged one.
pub fn checkpointed_world<T: Target>(
    device: &On<T>,
    config: &WorldConfig,
    folder: &Path,
    step: Option<usize>,
) -> Result<(World, usize)> {
    let checkpoints = Checkpoints::of(folder);
    let Some(step) = checkpoints.resume(step)? else {
        let (path, why) = (checkpoints.folder().into(), "holds no checkpoint".into());
        return Err(Error::Damaged { path, why });
    };
    checkpoints.check(step)?;
    let [weights, ..] = PARTS;
    let model = GameRft::init(config.model(), device)?;
    let model = model.load_record(checkpoints.restore(weights, step)?);
    let codec = Codec::load(folder).map_err(kv_eval::Error::from)?;
    Ok((World::new(model, codec, config.maze)?, step))
}

/// The model in `folder`, whose shape and maze must be those of `config`.
fn start_from(folder: &Path, config: &WorldConfig, device: &Device) -> Result<World> {
    let world = World::load(folder, device)?;
    let (found, wanted) = (world.model.config(), config.model());
    let of_model = |field, of: fn(&gamerft::Config) -> u64| (field, of(&wanted), of(found));
    for (field, value, found) in [
        ("maze", config.maze, world.maze_seed),
        ("patch", config.patch as u64, (Frame::SIZE / world.codec.latent_size()) as u64),
        of_model("channels", |model| model.channels as u64),
        of_model("hidden", |model| model.d_model as u64),
        of_model("layers", |model| model.n_layers as u64),
        of_model("heads", |model| model.n_heads as u64),
        of_model("local-idx", |model| model.local_idx as u64),
        of_model("local-window", |model| model.local_window.0),
        of_model("frames", |model| model.n_frames as u64),
    ] {
        if value != found {
            let rule = format!("must be {found}, as in {}", folder.display());
            return Err(Error::setting(field, value, rule));
        }
    }
    Ok(world)
}

/// The codec of frames that wanderers of their own seeds see.
fn fit_codec(config: &WorldConfig) -> Result<Codec> {
    let maze = Maze::new(config.maze);
    let frames = (0..CODEC_EPISODES).flat_map(|i| {
        let episode = Wanderer::new(&maze, config.episode(u64::MAX - i));
        episode.step_by(5).take(CODEC_FRAMES).map(|(_, frame)| frame)
    });
    let frames: Vec<_> = frames.collect();
    let codec = Codec::fit(&frames, config.patch, config.channels);
    Ok(codec.map_err(kv_eval::Error::from)?)
}

/// Episodes that the codec is fitted to, and frames of each.
const CODEC_EPISODES: u64 = 40;
const CODEC_FRAMES: usize = 50;

/// AdamW, of which matrices decay.
fn optimizer(config: &WorldConfig, model: &GameRft) -> ModuleOptimizer {
    let adamw = AdamWConfig::new().with_beta_2(config.beta_2).with_epsilon(1e-8);
    let decaying = adamw.clone().with_weight_decay(config.weight_decay).init();
    let vectors = group(weights(model, &Roles::default()), |weight| weight.rank < 2);
    decaying.with_group(vectors, adamw.with_weight_decay(0.0).build(), None)
}
