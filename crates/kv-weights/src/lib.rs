//! Linear layers over packed weights.
//!
//! A matrix of weights stays in the blocks of its file, with 4 to 8 bits per number, or in f16 or
//! bf16. [Burn](https://burn.dev) operations read the blocks directly to multiply, look up rows and
//! compute gradients. The matrix is never restored as a whole.
//!
//! ```
//! use burn::tensor::{Bytes, Distribution, Tensor};
//! use kv_weights::{Activations, PackedMatrix, WeightFormat, project};
//!
//! let device = burn::tensor::Device::flex();
//! // Two rows of 64 numbers in two blocks each, with scale 1, minimum 0 and codes 0.
//! let block = [&[0x00, 0x3c, 0x00, 0x00][..], &[0; 16]].concat();
//! let blocks = Bytes::from_bytes_vec(block.repeat(4));
//! let matrix = PackedMatrix::from_bytes(blocks, WeightFormat::Q4_1, [2, 64], &device)?;
//!
//! // [batch, seq, columns] by [rows, columns]
//! let x = Tensor::<3>::random([1, 5, 64], Distribution::Default, &device);
//! let y = project(x, &matrix, Activations::Exact)?;
//! assert_eq!(y.dims(), [1, 5, 2]);
//! # Ok::<(), kv_weights::Error>(())
//! ```
//!
//! No backend is enabled by default: choose `flex`, `wgpu` or `cuda`, and `autodiff` for gradients.

mod activations;
mod backends;
mod error;
mod experts;
mod formats;
mod functions;
mod fused;
#[cfg(feature = "cube")]
mod kernels;
mod layout;
mod matrix;
mod ops;
mod quantize;
pub mod reference;
#[cfg(feature = "remote")]
pub mod remote;
#[cfg(any(feature = "fusion", feature = "remote"))]
mod shapes;

/// Target of the [`tracing`] events that report the weights read by each launch on a GPU.
///
/// The fields are `kernel` and `bytes`: blocks, gains of norms and biases. Without a subscriber, an
/// event costs one load and one branch.
pub const READ: &str = "kv::read";

pub use activations::Activations;
pub use backends::{check_device, largest_buffer};
pub use error::{Error, Result};
pub use experts::{ExpertSelection, PackedExperts};
pub use formats::{GroupSize, WeightFormat};
pub use functions::{
    back_project, fuses, gated, lookup, lookup_parts, project, project_fused, project_heads,
    project_picked,
};
pub use fused::{Fused, FusedInputs, FusedPlan, Gate, MaybeFloat, Norm, PartWords};
pub use layout::PackedLayout;
pub use matrix::PackedMatrix;
pub use ops::WeightOps;
pub use quantize::{Quantize, Range, quantize};
