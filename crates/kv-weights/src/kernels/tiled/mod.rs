//! Products of many rows of activations with packed rows: tiles of both in shared memory.
//!
//! A cube makes a tile of the output. Of each 32 columns every unit unpacks those of one row of weights in its registers
//! and writes the numbers to shared memory, where all units of the cube multiply them with a tile of the activations.
//! Blocks are read where they lie, once for 32 or 64 rows of activations.
//!
//! **Supported**: all formats, any number of rows.
//!
//! **Rejected** ([`Error::Unsupported`](crate::Error::Unsupported)): sizes for which the device has too few cubes or
//! too narrow indices.

mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-source"))]
mod tests;

pub(crate) use launch::launch;
