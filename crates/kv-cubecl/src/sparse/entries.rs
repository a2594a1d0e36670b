//! [`Entries`]: the compressed entries of a layer, for itself and for others.

use burn::tensor::Tensor;

use super::store::RowStore;

/// The compressed entries that a layer has computed. Other layers may attend to them.
#[derive(Clone, Debug)]
pub struct Entries(Kept);

#[derive(Clone, Debug)]
enum Kept {
    /// `[batch, 1, entries, head_dim]`, if there are any.
    Parallel(Option<Box<Tensor<4>>>),
    Cached(Box<RowStore>),
}

impl Entries {
    pub(super) fn parallel(rows: Option<Tensor<4>>) -> Self {
        Self(Kept::Parallel(rows.map(Box::new)))
    }

    pub(super) fn of_cache(rows: RowStore) -> Self {
        Self(Kept::Cached(Box::new(rows)))
    }

    /// Returns the entries of a whole sequence as attention reads them,
    /// `[batch, 1, entries, head_dim]`; `None` for a cache, which keeps them in their format, and
    /// for a sequence without entries.
    pub fn tensor(&self) -> Option<&Tensor<4>> {
        match &self.0 {
            Kept::Parallel(rows) => rows.as_deref(),
            Kept::Cached(_) => None,
        }
    }

    pub(super) fn is_cached(&self) -> bool {
        self.cached().is_some()
    }

    pub(super) fn cached(&self) -> Option<&RowStore> {
        match &self.0 {
            Kept::Parallel(_) => None,
            Kept::Cached(rows) => Some(rows),
        }
    }
}
