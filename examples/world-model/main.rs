//! A world model to play: in the terminal, or as an animated PNG file. What the model shows with
//! caches of several kinds stands side by side, with the truth at the left.
#![allow(clippy::print_stdout, reason = "programs print")]

mod terminal;

use std::{
    io::{IsTerminal, stdin, stdout},
    path::PathBuf,
};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use burn_kv::{
    cache::{Flex, Frames, On},
    eval::world::{LayerCaches, World, controls},
    world_model::{CausvidPipeline, Rings},
};
use kv_world::{Frame, Input, Picture, Player, Wanderer, animation};

/// True frames that the models see first.
const CONTEXT: usize = 8;
/// Seed of the player's start and of noise.
const SEED: u64 = 2000;
/// Pictures a second of the file.
const PER_SECOND: u16 = 12;

const USAGE: &str = "usage: world-model [--model FOLDER] [--out FILE.png [--frames N]] [CACHE..]";

/// The command line's options.
struct Options {
    model: PathBuf,
    /// `None` plays in the terminal.
    out: Option<PathBuf>,
    frames: usize,
    caches: Vec<LayerCaches>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self> {
        let model = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/world"));
        let mut options = Self { model, out: None, frames: 120, caches: vec![] };
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg}: {USAGE}"));
            match arg.as_str() {
                "--model" => options.model = value()?.into(),
                "--out" => options.out = Some(value()?.into()),
                "--frames" => {
                    let text = value()?;
                    let frames = text.parse().ok().filter(|&frames| frames > 0);
                    options.frames =
                        frames.with_context(|| format!("frames {text}: must be at least 1"))?;
                }
                _ if arg.starts_with('-') => bail!("{arg}: {USAGE}"),
                cache => options.caches.push(cache.parse()?),
            }
        }
        if options.caches.is_empty() {
            options.caches = vec!["float".parse()?, "kint8vint8".parse()?];
        }
        Ok(options)
    }
}

/// A player in the maze, and models that dream what the player sees.
struct Game {
    world: World,
    device: Device,
    player: Player,
    dreams: Vec<CausvidPipeline>,
}

impl Game {
    /// After a few frames that somebody played, which all models have seen.
    fn new(options: &Options) -> Result<Self> {
        let device = (*On::<Flex>::open()?).clone();
        let world = World::load(&options.model, &device)?;
        let config = world.model.config().clone();
        let ring = config.global_window.unwrap_or(Frames(config.n_frames as u64));
        let dream = |cache: &LayerCaches| -> Result<CausvidPipeline> {
            let formats = cache.formats(config.n_layers)?;
            let model = world.model.clone();
            let cache = model.new_cache_with(&formats, Rings::new(ring), 1, &device)?;
            Ok(CausvidPipeline::new(model, cache, SEED)?)
        };
        let mut dreams = options.caches.iter().map(dream).collect::<Result<Vec<_>>>()?;
        let mut wanderer = Wanderer::new(world.maze(), SEED);
        for (input, frame) in wanderer.by_ref().take(CONTEXT) {
            let controls = controls(&[input], &device)?;
            for dream in &mut dreams {
                dream.see(world.latents(std::slice::from_ref(&frame), &device), &controls)?;
            }
        }
        let player = *wanderer.player();
        Ok(Self { world, device, player, dreams })
    }

    /// The next frames: the true one, and what each model shows.
    fn next(&mut self, input: Input) -> Result<Vec<Frame>> {
        self.player.step(self.world.maze(), input);
        let controls = controls(&[input], &self.device)?;
        let mut frames = vec![Frame::render(self.world.maze(), &self.player)];
        for dream in &mut self.dreams {
            let latents = dream.next_frame(&controls)?;
            frames.extend(self.world.frames(latents)?);
        }
        Ok(frames)
    }
}

fn main() -> Result<()> {
    let options = Options::parse(std::env::args().skip(1))?;
    let mut game = Game::new(&options)?;
    let mut names = vec!["truth".to_string()];
    names.extend(options.caches.iter().map(ToString::to_string));
    if let Some(path) = &options.out {
        // Who played the frames that the models have seen goes on.
        let mut wanderer = Wanderer::new(game.world.maze(), SEED);
        wanderer.walk(CONTEXT);
        let inputs: Vec<_> = wanderer.take(options.frames).map(|(input, _)| input).collect();
        let mut pictures = Vec::with_capacity(inputs.len());
        for input in inputs {
            pictures.push(Picture::grid(&[game.next(input)?], 3)?);
        }
        let file = animation(&pictures, PER_SECOND)?;
        std::fs::write(path, file).with_context(|| format!("{}", path.display()))?;
        for (name, dream) in names[1..].iter().zip(&game.dreams) {
            println!("{name}: {} bytes of cache", dream.cache().memory_bytes().total());
        }
        println!("{}: {} frames of {}", path.display(), options.frames, names.join(", "));
        return Ok(());
    }
    ensure!(
        stdin().is_terminal() && stdout().is_terminal(),
        "this is no terminal to play in; --out FILE.png writes an animated picture"
    );
    terminal::play(&names, |input| game.next(input))
}
