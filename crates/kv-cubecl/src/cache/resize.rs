//! Changes the capacity of a cache.

use core::ops::Range;

use burn::tensor::{DType, Tensor};

use super::{KvCache, state::State};
use crate::{
    CacheShape, Error, Result,
    layout::{CacheLayout, SideLayout, Sides},
};

impl KvCache {
    /// Returns a cache of another capacity with the same tokens, in new memory. For example, a
    /// prefix is stored with a capacity of exactly its tokens, and resized when it is loaded.
    ///
    /// The new cache continues as if it had always had its capacity.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if the cache holds more tokens, and the errors of
    /// [`new`](Self::new).
    pub fn resized(&self, capacity: usize) -> Result<Self> {
        let len = self.len();
        if len > capacity {
            return Err(Error::CapacityExceeded { len: 0, added: len, capacity });
        }
        let config = self.layout.config().with_capacity(capacity);
        let layout = Self::layout_on(&config, self.layout.shape(), &self.device())?;
        let state = match layout == self.layout {
            true => self.state.clone(),
            false => self.state.resized(&self.layout, &layout),
        };
        let (lens, restored) = (self.lens.clone(), self.restored.clone());
        Ok(Self { layout, state, lens, restored, ..*self })
    }
}

impl State {
    /// Copies the tensors of a cache from layout `from` to layout `to`, with the tokens that fit
    /// into both.
    ///
    /// A region of a slice starts with the same contents in both layouts. A ring is shorter in one
    /// layout only if the capacity limits it, and then no token is past the end of the shorter
    /// ring.
    fn resized(&self, from: &CacheLayout, to: &CacheLayout) -> Self {
        let CacheShape { batch, n_kv_heads, .. } = to.shape();
        let slices = to.slices();
        let words = Sides::from_fn(|side| {
            let [old, new] = [from, to].map(|layout| layout.slice_words(side));
            let words = (old > 0 && new > 0).then(|| {
                let words = self.packed_words(side).narrow(0, 0, slices * old);
                let words = words.reshape([slices, old]);
                let [from, to] = [from, to].map(|layout| regions(&layout.sides()[side]));
                let mut parts = vec![];
                for (from, to) in from.into_iter().zip(to) {
                    let kept = from.len().min(to.len());
                    if kept > 0 {
                        parts.push(words.clone().narrow(1, from.start, kept));
                    }
                    if to.len() > kept {
                        let options = (&words.device(), DType::U32);
                        parts.push(Tensor::zeros([slices, to.len() - kept], options));
                    }
                }
                Tensor::cat(parts, 1)
            });
            words.map(|words| words.reshape([batch, slices / batch * new]))
        });

        let floats = self.floats();
        let options = (&floats.device(), floats.dtype());
        let rows = floats.reshape([slices, from.float_elements()]);
        let mut parts = vec![];
        for &side in to.stored_sides() {
            let [old, new] = [from, to].map(|layout| layout.sides()[side]);
            let [n, wanted] = [old, new].map(|side| side.rows() * side.head_dim);
            if n.min(wanted) > 0 {
                parts.push(rows.clone().narrow(1, old.first_element, n.min(wanted)));
            }
            if wanted > n {
                parts.push(Tensor::zeros([slices, wanted - n], options));
            }
        }
        let [.., rows, width] = to.float_shape();
        let floats = Tensor::cat(parts, 1).reshape([batch, n_kv_heads, rows, width]);
        Self::of_sequences(to, words, floats)
    }
}

/// Returns the regions of a slice that grow separately: codes, and parameters if they share words.
fn regions(side: &SideLayout) -> Vec<Range<usize>> {
    let words = side.slice_words();
    let codes = match side.packed() {
        Some(place) if place.spec.packs_parameters() => place.parameters(),
        _ => words,
    };
    vec![0..codes, codes..words]
}
