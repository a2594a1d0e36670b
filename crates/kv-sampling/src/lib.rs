//! Sampling of the next token on the device that holds its logits.
//!
//! A decode step ends with a logit for every token of the vocabulary. Reading them all to pick a
//! token on the host takes longer than picking. Here the device picks in one launch. The launch
//! also writes the token and its position to where the next step reads them, so no step waits for
//! the host.
//!
//! ```
//! use burn::tensor::Tensor;
//! use kv_sampling::{Cursor, Draw};
//!
//! let device = burn::tensor::Device::flex();
//! let mut cursor = Cursor::new(&[1], 0, &[], &device)?;
//! let logits = Tensor::<2>::from_data([[0.0, 3.0, -1.0, 2.0]], &device);
//! cursor.advance(logits, &Draw::GREEDY)?;
//! assert_eq!(cursor.ids().clone().into_scalar::<i32>(), 1);
//! # Ok::<(), kv_sampling::Error>(())
//! ```
//!
//! No backend is enabled by default: choose `flex`, `wgpu` or `cuda`.

mod backends;
mod cursor;
mod draw;
mod error;
#[cfg(feature = "flex")]
mod host;
#[cfg(feature = "cube")]
mod kernel;
mod noise;
mod ops;
#[cfg(feature = "remote")]
pub mod remote;

pub use cursor::Cursor;
pub use draw::Draw;
pub use error::{Error, Result};
pub use noise::uniform;
pub use ops::{CursorState, SamplingOps};
