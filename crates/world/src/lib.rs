//! A small game to train and evaluate world models on: a maze in the first person.
//!
//! Everything is a function of seeds and uses integers and basic arithmetic, so it is the same on
//! every machine: the [`Maze`], the position of a [`Player`] after any [`Input`]s, the [`Frame`]
//! seen from there, and the inputs of a [`Wanderer`].
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
