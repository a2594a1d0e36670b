//! Layers that attend to the keys and values of an earlier layer, in place of a cache of their own.

use std::sync::Arc;

use super::{LayerSpec, ModelSpec};
use crate::error::{Error, Result};

impl ModelSpec {
    /// Returns the layers that keep tokens or a state themselves, with their numbers: all except
    /// those that share the cache of another.
    pub fn owners(&self) -> impl Iterator<Item = (usize, &LayerSpec)> {
        self.layers.iter().enumerate().filter(|(_, layer)| layer.shared.is_none())
    }

    /// Returns, for each layer, the number of the cache that it attends to, counted among
    /// [`owners`](Self::owners).
    pub(crate) fn cache_places(&self) -> Arc<[usize]> {
        let place = |index| self.owners().take_while(|(i, _)| *i < self.owner(index)).count();
        (0..self.layers.len()).map(place).collect()
    }

    /// Returns the number of the layer whose cache layer `index` attends to: its own number, or
    /// that of the layer that it shares the cache of.
    pub fn owner(&self, index: usize) -> usize {
        self.layers[index].shared.unwrap_or(index)
    }

    /// Returns whether a later layer shares the cache of layer `index`.
    pub fn is_shared(&self, index: usize) -> bool {
        self.layers[index + 1..].iter().any(|layer| layer.shared == Some(index))
    }

    /// Checks that each layer that shares a cache attends like an earlier layer with keys and
    /// values of its own.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] for the first layer that does not.
    pub fn check_shared(&self) -> Result<()> {
        for (i, layer) in self.layers.iter().enumerate() {
            let Some(owner) = layer.shared else { continue };
            let alike = |it: &LayerSpec| {
                let attention = (it.n_kv_heads, it.head_dim, it.options, it.sliding_window);
                it.has_cache()
                    && it.sparse.is_none()
                    && attention
                        == (layer.n_kv_heads, layer.head_dim, layer.options, layer.sliding_window)
            };
            if owner >= i || !alike(&self.layers[owner]) {
                let rule = "must be an earlier layer with a cache of its own, and with the same \
                            key heads, channels, scale and sliding window";
                let owner = format!("{owner} of layer {i}");
                return Err(Error::argument("shared", owner, rule));
            }
        }
        Ok(())
    }
}
