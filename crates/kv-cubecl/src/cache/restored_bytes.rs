//! A counter of restored bytes, shared by clones of a cache.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

use crate::layout::{Side, Sides};

/// Bytes of keys and of values; `None` until counting starts. Clones count into the same numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct RestoredBytes(Option<Arc<[AtomicUsize; 2]>>);

impl RestoredBytes {
    /// Returns a counter that starts at 0.
    pub(super) fn counting() -> Self {
        Self(Some(Arc::default()))
    }

    /// Returns the bytes counted so far.
    pub(super) fn read(&self) -> Option<Sides<usize>> {
        let [keys, values] = self.0.as_deref()?;
        Some(Sides { keys: keys.load(Relaxed), values: values.load(Relaxed) })
    }

    /// Adds `bytes` to a side, if counting has started.
    pub(super) fn add(&self, side: Side, bytes: impl FnOnce() -> usize) {
        if let Some(counts) = &self.0 {
            counts[side as usize].fetch_add(bytes(), Relaxed);
        }
    }
}
