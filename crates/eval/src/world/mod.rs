//! Evaluation of world models in a game whose true frames are known.

mod compare;
mod inspect;
mod layers;
mod quality;
mod rollout;
mod search;

use std::{fs, path::Path};

use burn::tensor::{Device, Tensor, TensorData};
use kv_models::{LoadOptions, QuantizeOptions, WeightDtype};
use kv_world::{Codec, Frame, Input, Maze, Wanderer};
use kv_world_model::{Controls, GameRft};
use serde::{Deserialize, Serialize};

pub use compare::{LayerScales, WorldPoint, compare, compare_bytes, mean};
pub use inspect::{Inspected, InspectedLayer, POWERS, magnitudes};
pub use layers::LayerCaches;
pub use quality::{MOST_DB, decibels, psnr, squared_error, ssim};
pub use rollout::{Rollout, RolloutPlan, roll_out};
pub use search::{WorldFound, WorldSearch, WorldSensitivity, search};

use crate::{Error, Result};

/// A world model, its codec, and the maze it knows.
#[derive(Clone, Debug)]
pub struct World {
    /// The model.
    pub model: GameRft,
    /// Encodes frames to latents and decodes them.
    pub codec: Codec,
    /// The seed of the maze.
    pub maze_seed: u64,
    maze: Maze,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    /// The seed of the maze.
    maze: u64,
}

const ABOUT: &str = "world.json";

impl World {
    /// Creates the world of a model and its codec in the maze of a seed.
    ///
    /// # Errors
    /// [`Error::Plan`] for a codec or buttons that do not match the model.
    pub fn new(model: GameRft, codec: Codec, maze_seed: u64) -> Result<Self> {
        let config = model.config();
        for (field, found, wanted) in [
            ("sample_size", config.sample_size, codec.latent_size()),
            ("channels", config.channels, codec.channels()),
            ("n_buttons", config.n_buttons, Input::BUTTONS),
        ] {
            if found != wanted {
                let rule = format!("must be {wanted}, as in the codec and the game");
                return Err(Error::plan(field, found, rule));
            }
        }
        Ok(Self { model, codec, maze_seed, maze: Maze::new(maze_seed) })
    }

    /// Reads a folder that [`save`](Self::save) wrote, with weights in f32.
    ///
    /// # Errors
    /// A file that is missing, damaged or of another model; the message names it.
    pub fn load(folder: &Path, device: &Device) -> Result<Self> {
        Self::load_with(folder, device, LoadOptions::default())
    }

    /// Reads a folder that [`save`](Self::save) or [`save_quantized`](Self::save_quantized) wrote,
    /// with these options for the weights.
    ///
    /// # Errors
    /// Fails as [`load`](Self::load) does, and for options that the device does not support.
    pub fn load_with(folder: &Path, device: &Device, options: LoadOptions) -> Result<Self> {
        let model = GameRft::load_with(folder, device, options)?;
        let path = folder.join(ABOUT);
        let about = fs::read_to_string(&path).map_err(|error| error.to_string());
        let about = about.and_then(|text| {
            serde_json::from_str::<About>(&text).map_err(|error| error.to_string())
        });
        let about = about.map_err(|why| kv_world::Error::Malformed { path: path.clone(), why })?;
        Self::new(model, Codec::load(folder)?, about.maze)
    }

    /// Writes the model's folder, with the codec and the maze's seed beside it.
    ///
    /// # Errors
    /// A file that cannot be written; the message names it.
    pub fn save(&self, folder: &Path, dtype: WeightDtype) -> Result<()> {
        self.model.save(folder, dtype)?;
        self.save_others(folder)
    }

    /// Writes a new folder as [`save`](Self::save) does, with [quantized
    /// matrices](GameRft::save_quantized).
    ///
    /// # Errors
    /// A folder that exists, a file that cannot be written, and the errors of
    /// [`GameRft::save_quantized`]. Nothing is left on the disk then.
    pub fn save_quantized(&self, folder: &Path, options: QuantizeOptions<'_>) -> Result<()> {
        self.model.save_quantized(folder, options, |folder| self.save_others(folder))
    }

    /// Returns whether a folder holds a world.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(ABOUT).is_file()
    }

    fn save_others(&self, folder: &Path) -> Result<()> {
        self.codec.save(folder)?;
        let path = folder.join(ABOUT);
        let about = serde_json::json!({ "maze": self.maze_seed });
        fs::write(&path, format!("{about:#}\n"))
            .map_err(|source| kv_world::Error::Io { path, source }.into())
    }

    /// Returns the maze.
    pub fn maze(&self) -> &Maze {
        &self.maze
    }

    /// Encodes a frame of each sequence of a batch as latents `[batch, channels, size, size]`.
    pub fn latents(&self, frames: &[Frame], device: &Device) -> Tensor<4> {
        let numbers: Vec<f32> = frames.iter().flat_map(|frame| self.codec.encode(frame)).collect();
        let (size, channels) = (self.codec.latent_size(), self.codec.channels());
        Tensor::from_data(TensorData::new(numbers, [frames.len(), channels, size, size]), device)
    }

    /// Decodes latents to frames.
    ///
    /// # Errors
    /// [`Error::Device`] if the latents cannot be read.
    pub fn frames(&self, latents: Tensor<4>) -> Result<Vec<Frame>> {
        let [_, channels, height, width] = latents.dims();
        let data = latents.into_data().convert::<f32>();
        let numbers = data
            .try_to_vec::<f32>()
            .map_err(|error| Error::Device { cache: "frames".into(), why: format!("{error:?}") })?;
        let frames = numbers.chunks(channels * height * width);
        Ok(frames.map(|latent| self.codec.decode(latent)).collect())
    }
}

/// Inputs and frames of wandering players.
#[derive(Clone, Debug)]
pub struct Truth {
    /// Inputs of each player, by frame.
    pub inputs: Vec<Vec<Input>>,
    /// Frames each player saw after the input.
    pub frames: Vec<Vec<Frame>>,
}

impl Truth {
    /// Plays the games of some seeds for a number of frames.
    pub fn new(maze: &Maze, seeds: impl IntoIterator<Item = u64>, frames: usize) -> Self {
        let mut wanderers: Vec<_> =
            seeds.into_iter().map(|seed| Wanderer::new(maze, seed)).collect();
        let next = |_| wanderers.iter_mut().filter_map(Iterator::next).unzip();
        let (inputs, frames) = (0..frames).map(next).unzip();
        Self { inputs, frames }
    }

    /// Returns the inputs of frame `i`.
    ///
    /// # Errors
    /// [`Error::Model`] without seeds.
    ///
    /// # Panics
    /// If there are too few frames.
    pub fn controls(&self, i: usize, device: &Device) -> Result<Controls> {
        controls(&self.inputs[i], device)
    }
}

/// Returns the players' input in a frame as model controls.
///
/// # Errors
/// [`Error::Model`] without players.
pub fn controls(inputs: &[Input], device: &Device) -> Result<Controls> {
    let buttons: Vec<_> = inputs.iter().map(Input::buttons).collect();
    let players: Vec<_> =
        inputs.iter().zip(&buttons).map(|(input, buttons)| (input.mouse(), &buttons[..])).collect();
    Ok(Controls::of(&players, device)?)
}
