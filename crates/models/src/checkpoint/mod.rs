//! The tensors of a checkpoint under their Hugging Face names: [`Weights`] to import a model from,
//! [`Exports`] to export one to.

mod conv1d;
mod dtype;
mod entry;
mod experts;
mod exports;
mod mapped;
mod modules;
mod outline;
mod packed;
pub(crate) mod quantized;
mod sizes;
mod weights;

pub(crate) use experts::ExpertRows;
pub use exports::Exports;
pub(crate) use exports::{Export, RowOrder, Values};
pub(crate) use mapped::{Mapped, Stored};
pub(crate) use outline::Outline;
pub(crate) use packed::{BlockSource, Blocks};
pub use weights::Weights;

/// The names that a family's checkpoints have in common.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// What messages call the family.
    pub family: &'static str,
    /// The prefix of all names but the head's, as `model.`; the importer's names are without it.
    pub prefix: &'static str,
    /// What the names of the layers' tensors begin with, before the number, as `layers.`.
    pub layers: &'static str,
    /// The token embedding, as `embed_tokens.weight`.
    pub embedding: &'static str,
    /// The output projection, as `lm_head.weight`.
    pub head: &'static str,
    /// Which tensors may be left over, because they follow from the configuration.
    pub harmless: fn(&str) -> bool,
}
