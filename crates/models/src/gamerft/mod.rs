//! GameRFT, a world model: a diffusion transformer that predicts the next frame of a game from the frames before it and
//! from the mouse and the buttons (Wayfarer Labs, 2025, <https://github.com/Wayfarer-Labs/owl-wms>).
//!
//! A frame is a square of latent pixels, a token each. Tokens of a frame see one another and the frames before it: all
//! of a window, in most layers a short one. The model is given frames `x = (1 - t) picture + t noise`, each with its
//! noise level t, and predicts `noise - picture` (a rectified flow). It is no language model: it has no vocabulary, so it
//! is no [`Decoder`](crate::Decoder), but its parts and files are those of `nn` and `checkpoint`.
//!
//! ```no_run
//! use burn::tensor::Device;
//! use kv_models::{
//!     gamerft::{CausvidPipeline, Controls, GameRft},
//!     kv_cubecl::Frames,
//! };
//!
//! # fn main() -> kv_models::Result<()> {
//! let device = Device::default();
//! let model = GameRft::load("world", &device)?;
//! let cache = model.new_cache("k16vint8".parse()?, Frames(60), 1, &device)?;
//! let mut pipeline = CausvidPipeline::new(model, cache, 7)?;
//! let forward = Controls::of(&[([0.0, 0.0], &[true, false])], &device)?;
//! let frame = pipeline.next_frame(&forward)?; // [1, channels, height, width]
//! # Ok(())
//! # }
//! ```

mod cache;
mod config;
mod controls;
mod embed;
mod files;
mod init;
mod model;
mod pipeline;
mod rope;

pub use cache::{Store, WorldCache};
pub use config::Config;
pub use controls::{Controls, Noised};
pub use embed::{ControlEmbedding, Mlp};
pub use model::{Block, GameRft};
pub use pipeline::CausvidPipeline;
