//! Products of many rows of activations with packed rows, by tiles in shared memory.
//!
//! A cube computes a tile of the output, 32 columns at a time. Every unit unpacks one row of
//! weights in registers and writes it to shared memory. There, all units multiply the weights with
//! a tile of the activations. Blocks are read once per 32 or 64 rows of activations.
//!
//! **Supported**: all formats, any number of rows.
//!
//! **Rejected** ([`Error::Unsupported`](crate::Error::Unsupported)): sizes for which the device has
//! too few cubes or too narrow indices.

mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-source"))]
mod tests;

pub(crate) use launch::launch;
