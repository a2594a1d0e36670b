//! [`SparseStates`]: what layers of sparse attention leave to later ones.

use std::collections::BTreeMap;

use kv_cubecl::sparse::{Entries, Selection};

use crate::error::{Error, Result};

/// The entries and selections that the layers of one pass have computed, by layer. Later layers may
/// attend to them.
#[derive(Debug, Default)]
pub struct SparseStates {
    entries: BTreeMap<usize, Entries>,
    selections: BTreeMap<usize, Selection>,
}

impl SparseStates {
    /// Keeps the entries that layer `owner` has computed.
    pub fn insert_entries(&mut self, owner: usize, entries: Entries) {
        self.entries.insert(owner, entries);
    }

    /// Keeps the selection that layer `owner` has computed.
    pub fn insert_selection(&mut self, owner: usize, selection: Selection) {
        self.selections.insert(owner, selection);
    }

    /// Returns the entries of layer `owner`.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if the layer has computed none in this pass.
    pub fn entries(&self, owner: usize) -> Result<&Entries> {
        let rule = "must be a layer with entries, the layer itself or an earlier one";
        self.entries.get(&owner).ok_or_else(|| Error::argument("owner of entries", owner, rule))
    }

    /// Returns the selection of layer `owner`.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if the layer has computed none in this pass.
    pub fn selection(&self, owner: usize) -> Result<&Selection> {
        let rule = "must be a layer with an indexer, the layer itself or an earlier one";
        let found = self.selections.get(&owner);
        found.ok_or_else(|| Error::argument("owner of the selection", owner, rule))
    }
}
