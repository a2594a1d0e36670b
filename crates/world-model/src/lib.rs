//! GameRFT, a world model: a diffusion transformer that predicts the next frame of a game from the
//! frames before it and from the mouse and the buttons (Wayfarer Labs, 2025,
//! <https://github.com/Wayfarer-Labs/owl-wms>).
//!
//! A frame is a square of latent pixels, one token each. The tokens of a frame see one another and
//! the frames of a window before it, which is short in most layers. The inputs are frames with
//! their noise levels t, `x = (1 - t) picture + t noise`, and the output is `noise - picture` (a
//! rectified flow). A world model has no vocabulary, so it is not a
//! [`Decoder`](kv_models::Decoder), but it uses the same `nn` and `checkpoint`.
//!
//! ```no_run
//! use burn::tensor::Device;
//! use kv_cubecl::Frames;
//! use kv_world_model::{CausvidPipeline, Controls, GameRft};
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
mod new_cache;
mod pipeline;
mod rope;

pub use cache::{Store, WorldCache};
pub use config::Config;
pub use controls::{Controls, Noised};
pub use embed::{ControlEmbedding, Mlp};
pub use model::{Block, FrameTrace, GameRft};
pub use new_cache::Rings;
pub use pipeline::CausvidPipeline;
