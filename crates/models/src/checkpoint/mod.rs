//! The tensors of a checkpoint under their Hugging Face names. Importers take them from
//! [`Weights`]; exporters add them to [`Exports`].

mod byte_float;
mod conv1d;
mod dtype;
mod entry;
mod experts;
mod head;
mod kept;
mod latent;
mod mapped;
mod modules;
mod observer;
mod outline;
mod packed;
pub(crate) mod quantized;
mod scaled;
mod sizes;
mod weights;

pub(crate) use byte_float::ByteFloat;
pub(crate) use entry::{BlockSource, Blocks};
pub(crate) use experts::ExpertRows;
pub(crate) use latent::OF_HEADS;
pub(crate) use mapped::{Mapped, Stored};
pub(crate) use observer::Watcher;
pub use observer::{LoadObserver, Planned, WeightBytes};
pub(crate) use weights::Outline;
pub use weights::Weights;

pub(crate) use crate::exports::{Export, RowOrder};
pub use crate::exports::{Exports, Names};
