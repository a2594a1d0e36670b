//! A small game whose frames a world model is trained on and judged by: a maze seen by who walks in
//! it.
//!
//! Everything is a function of seeds, and of whole numbers and basic arithmetic, so that it is the
//! same on every machine: the [`Maze`], where a [`Player`] is after any [`Input`]s, the [`Frame`]
//! seen from there, and how a [`Wanderer`] plays.
//!
//! ```
//! use kv_world::{Frame, Input, Maze, Player};
//!
//! let maze = Maze::new(0);
//! let mut player = Player::new(&maze, 7);
//! player.step(&maze, Input { turn: 2, forward: true, ..Input::default() });
//! let frame = Frame::render(&maze, &player);
//! assert_eq!(frame.rgb().len(), 3 * Frame::SIZE * Frame::SIZE);
//! ```

mod codec;
mod error;
mod maze;
mod picture;
mod player;
mod render;
mod wander;

pub use codec::Codec;
pub use error::{Error, Result};
pub use maze::Maze;
pub use picture::{Picture, animation};
pub use player::{Input, Player};
pub use render::Frame;
pub use wander::Wanderer;
