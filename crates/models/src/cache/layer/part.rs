//! The tensors of a layer's cache.

use std::{iter, ops::Range};

use burn::tensor::{DType, TensorData};
use kv_cubecl::layout::PackedLayout;

use crate::error::{Error, Result};

/// The name of a tensor of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct PartName {
    pub(in crate::cache) name: &'static str,
    /// True for a list of u32 words, false for rows of floats.
    pub(in crate::cache) words: bool,
}

/// A tensor of a layer's cache without its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cache) struct Part {
    pub(in crate::cache) name: &'static str,
    pub(in crate::cache) dtype: DType,
    pub(in crate::cache) shape: Vec<usize>,
}

impl Part {
    /// Returns the number of elements.
    pub(in crate::cache) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The elements of a tensor that a longer cache keeps, and those that it overwrites. The cache has
/// a capacity of exactly its tokens. Other elements were never written or are not read any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::cache) struct Growth {
    /// The regions that a longer cache continues after their last element. Their order and number
    /// are the same for every length.
    pub(in crate::cache) appended: Vec<Range<usize>>,
    /// The elements that a longer cache overwrites.
    pub(in crate::cache) lost: Vec<Range<usize>>,
}

impl Growth {
    /// Describes a tensor that a longer cache overwrites as a whole.
    pub(super) fn none(part: &Part) -> Self {
        Self { appended: vec![], lost: iter::once(0..part.elements()).collect() }
    }

    /// Adds elements that a longer cache overwrites, after those before them.
    pub(super) fn lose(&mut self, elements: Range<usize>) {
        match self.lost.last_mut() {
            Some(last) if last.end == elements.start => last.end = elements.end,
            _ => self.lost.push(elements),
        }
    }

    /// Adds the words of a slice, which begin at `start`. Its first `stored` tokens are written.
    ///
    /// The last word of parameters may have room for the parameters of later tokens, so a longer
    /// cache overwrites it.
    pub(super) fn add_packed(&mut self, packed: &PackedLayout, stored: usize, start: usize) {
        let place = PackedLayout { tokens: stored, ..*packed };
        if !packed.spec.packs_parameters() {
            self.appended.push(start..start + place.words());
            return;
        }
        self.appended.push(start..start + place.parameters());
        let (end, bit) = place.parameter(stored, 0);
        let parameters = start + packed.parameters();
        let end = parameters + end - place.parameters();
        self.appended.push(parameters..end);
        if bit > 0 {
            self.lose(end..end + 1);
        }
    }
}

/// Names an error of reading a tensor from the device.
pub(super) fn readable<E: ToString>(
    data: core::result::Result<TensorData, E>,
) -> Result<TensorData> {
    data.map_err(|error| Error::argument("cache", error.to_string(), "must be readable"))
}
