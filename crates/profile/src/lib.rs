//! Where the time of a model goes: a [`Recorder`] keeps the spans of `kv-models`
//! ([`kv_models::spans`]) of every thread and, with the features `wgpu` and `cuda`, when the device
//! ran each launch, and makes a [`Timeline`](kv_report::Timeline) of them, with sums by phase,
//! operation and kernel.
//!
//! ```
//! use kv_profile::Recorder;
//!
//! # fn main() -> kv_profile::Result<()> {
//! let recorder = Recorder::new();
//! recorder.install()?;
//! // Load a model: recorder.name_operations(model.operation_names()). Run it.
//! let page = recorder.finish("a run", vec![("model".into(), "SmolLM2".into())]).html();
//! # assert!(page.contains("SmolLM2"));
//! # Ok(())
//! # }
//! ```
//!
//! Costs nothing where no recorder is installed: a span without a subscriber is a load and a
//! branch, and launches are observed by CubeCL in the same way.

#[cfg_attr(
    not(any(feature = "cube", test)),
    expect(dead_code, reason = "only devices have a clock of their own")
)]
mod clock;
#[cfg(feature = "cube")]
mod device;
mod error;
mod label;
mod launch;
mod log;
mod page;
mod recorder;
mod sums;

pub use error::{Error, Result};
pub use recorder::Recorder;
