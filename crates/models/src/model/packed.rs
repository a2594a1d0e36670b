//! [`PackedSize`]: the size of the weights that are not parameters.

use kv_weights::WeightFormat;

/// The size of the packed weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PackedSize {
    pub(crate) bytes: usize,
    pub(crate) numbers: usize,
    /// The number of matrices with an adapter.
    pub(crate) adapters: usize,
    /// The bytes of each of [`WeightFormat::ALL`].
    pub(crate) formats: [usize; WeightFormat::ALL.len()],
}

impl PackedSize {
    /// Adds a matrix of `numbers` weights that takes `bytes` in `format`.
    pub(crate) fn add(&mut self, format: WeightFormat, bytes: usize, numbers: usize) {
        self.bytes += bytes;
        self.numbers += numbers;
        let index = WeightFormat::ALL.iter().position(|other| *other == format);
        if let Some(index) = index {
            self.formats[index] += bytes;
        }
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        self.bytes -= other.bytes;
        self.numbers -= other.numbers;
        self.adapters -= other.adapters;
        self.formats.iter_mut().zip(other.formats).for_each(|(bytes, less)| *bytes -= less);
    }
}
