//! The tensors of a [`SparseCache`](super::SparseCache) before they are allocated.

use burn::tensor::DType;

use super::{Compression, SparseConfig, cache::Layouts, slots};
use crate::{Result, error::invalid};

/// A tensor of [`SparseCache::parts`](super::SparseCache::parts) without its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparsePartLayout {
    /// Its name.
    pub name: &'static str,
    /// u32 for codes, or a float type.
    pub dtype: DType,
    /// `[words]` for codes, and `[batch, rows, width]` for floats.
    pub shape: Vec<usize>,
    /// True if later tokens overwrite the tensor. The rows of other tensors never change.
    pub recent: bool,
}

impl SparsePartLayout {
    /// Returns the bytes of the tensor.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

impl SparseConfig {
    /// Lists the tensors of [`SparseCache::parts`](super::SparseCache::parts) for `batch`
    /// sequences, in the same order.
    ///
    /// # Errors
    /// Fails as [`memory_bytes`](Self::memory_bytes) does.
    pub fn parts(&self, batch: usize) -> Result<Vec<SparsePartLayout>> {
        let Layouts { window, entries, keys } = self.layouts(batch)?;
        let mut stores = vec![(slots::WINDOW, window, true)];
        for (pair, [content, gate, rows]) in [(entries, slots::ENTRIES), (keys, slots::KEYS)] {
            if let Some([open, compressed]) = pair {
                stores.extend([(content, open, true), (gate, open, true)]);
                stores.push((rows, compressed, false));
            }
        }
        let mut parts = vec![];
        for ([codes, floats], layout, recent) in stores {
            if layout.sequence_words() > 0 {
                let shape = vec![layout.words()];
                parts.push(SparsePartLayout { name: codes, dtype: DType::U32, shape, recent });
            }
            if layout.floats() > 0 {
                let (dtype, shape) = (layout.format.float.dtype(), layout.float_shape().to_vec());
                parts.push(SparsePartLayout { name: floats, dtype, shape, recent });
            }
        }
        Ok(parts)
    }

    /// Returns the layouts of all stores.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the first field that breaks a
    /// rule, for a batch of 0, and for a store that is too large for one buffer.
    pub(super) fn layouts(&self, batch: usize) -> Result<Layouts> {
        self.validate()?;
        if batch == 0 {
            return Err(invalid("batch", batch, "must be at least 1"));
        }
        let fits = |rows: Option<usize>, width: Option<usize>| {
            let elements = rows.zip(width).and_then(|(rows, width)| rows.checked_mul(width));
            let elements = elements.and_then(|elements| elements.checked_mul(batch));
            elements.is_some_and(|elements| elements < u32::MAX as usize)
        };
        let plain = Compression::new(1);
        let Compression { ratio, overlap } = self.compression.unwrap_or(plain);
        let lanes = 1 + usize::from(overlap);
        let index = self.index.map_or(0, |index| index.head_dim);
        let window = self.sliding_window.min(self.capacity).checked_add(self.rollback);
        let open = ratio.checked_mul(lanes).and_then(|span| span.checked_add(self.rollback));
        let widths = [self.head_dim, index];
        let rows = self.entry_capacity();
        let fit = fits(window, Some(self.head_dim))
            && widths.iter().all(|width| {
                fits(open, width.checked_mul(lanes)) && fits(Some(rows), Some(*width))
            });
        if !fit {
            let rule = format!(
                "too large for one buffer of 2^32 elements with batch {batch} and head_dim {}",
                self.head_dim
            );
            return Err(invalid("capacity", self.capacity, rule));
        }
        Ok(Layouts::new(self, batch))
    }
}
