//! Matrices that stay packed in the blocks of their file.

use burn::tensor::{Bytes, DType, Device};
use kv_weights::{Activations, PackedLayout, PackedMatrix, WeightFormat};

use super::{
    entry::{BlockSource, Blocks, Entry, split_pairs},
    mapped::Mapped,
    weights::Weights,
};
use crate::{
    error::Result,
    nn::{Matrix, PackedSize},
};

impl Entry {
    fn packed_bytes(&self) -> Result<Source> {
        if let Some(mapped) = self.packed_at() {
            return Ok(Source::Mapped(mapped.clone()));
        }
        Ok(Source::Copied(match &self.blocks {
            Some(Blocks { source: BlockSource::Joined(joined), .. }) => joined.blocks()?,
            _ => self.bytes()?.to_vec(),
        }))
    }
}

struct Rows {
    format: WeightFormat,
    rows: usize,
    bytes: Source,
}

enum Source {
    /// A range of a file.
    Mapped(Mapped),
    /// Bytes joined from several places, with capacity for all that follow.
    Copied(Vec<u8>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) => mapped.bytes(),
            Self::Copied(bytes) => bytes,
        }
    }

    /// Returns the bytes in a buffer with capacity for `more`, and returns pages of a file to the
    /// system.
    fn into_vec(self, more: usize) -> Vec<u8> {
        match self {
            Self::Mapped(mapped) => Self::copy(&mapped, more),
            Self::Copied(bytes) => bytes,
        }
    }

    /// Copies bytes of a file with capacity for `more`, and returns their pages to the system.
    fn copy(mapped: &Mapped, more: usize) -> Vec<u8> {
        let mut copied = Vec::with_capacity(mapped.range.len() + more);
        copied.extend_from_slice(mapped.bytes());
        mapped.give_back();
        copied
    }

    /// Appends the bytes of `next`, with capacity for `more` bytes.
    fn then(self, next: Self, more: usize) -> Self {
        if let (Self::Mapped(first), Self::Mapped(next)) = (&self, &next)
            && let Some(both) = first.then(next)
        {
            return Self::Mapped(both);
        }
        let mut joined = self.into_vec(next.len() + more);
        match next {
            Self::Mapped(mapped) => {
                joined.extend_from_slice(mapped.bytes());
                mapped.give_back();
            }
            Self::Copied(bytes) => joined.extend(bytes),
        }
        Self::Copied(joined)
    }

    fn len(&self) -> usize {
        match self {
            Self::Mapped(mapped) => mapped.range.len(),
            Self::Copied(bytes) => bytes.len(),
        }
    }
}

impl Weights {
    /// Sets whether matrices stay packed in the blocks of the file, and the precision of
    /// activations. Packed weights compute in f32; a model of another type restores them.
    ///
    /// # Errors
    /// Fails if the device does not multiply packed weights.
    pub(crate) fn set_packed(&mut self, packed: Option<Activations>) -> Result<()> {
        if packed.is_some() {
            kv_weights::check_device("packed weights", &self.device)?;
        }
        self.packed = packed.filter(|_| self.dtype == DType::F32);
        Ok(())
    }

    /// Takes a packed matrix with the rows of `parts`, if it is to stay packed and all parts are
    /// stored as blocks. Otherwise takes nothing.
    pub(super) fn take_packed(
        &mut self,
        parts: &[(String, usize)],
        columns: usize,
    ) -> Result<Option<Matrix>> {
        let Some(activations) = self.packed else { return Ok(None) };
        if parts.iter().any(|(name, _)| self.names.is_some_and(|names| names.restores(name))) {
            return Ok(None);
        }
        let mut stacked: Vec<Rows> = vec![];
        let mut left: usize = parts.iter().map(|(_, rows)| rows).sum();
        for (name, rows) in parts {
            left -= rows;
            let Some(entry) = self.tensors.get(name) else { return Ok(None) };
            let alike = entry.tensor.shape.to_vec() == [*rows, columns];
            let Some(format) = entry.packed_format().filter(|_| alike) else { return Ok(None) };
            let layout = PackedLayout::new(format, [*rows, columns])
                .map_err(|error| entry.flawed(error.to_string()))?;
            let bytes = entry.packed_bytes()?;
            entry.check_finite(layout, bytes.bytes())?;
            let to_come = layout.row_bytes() * left;
            let bytes = match entry.interleaved {
                None => bytes,
                Some(head_dim) => {
                    entry.check_pairs(*rows, head_dim)?;
                    let mut bytes = bytes.into_vec(to_come);
                    split_pairs(&mut bytes, *rows, head_dim);
                    Source::Copied(bytes)
                }
            };
            match stacked.pop() {
                Some(last) if last.format == format => {
                    let bytes = last.bytes.then(bytes, to_come);
                    stacked.push(Rows { format, rows: last.rows + rows, bytes });
                }
                last => {
                    stacked.extend(last);
                    stacked.push(Rows { format, rows: *rows, bytes });
                }
            }
        }
        let is_copied = stacked.iter().any(|rows| matches!(rows.bytes, Source::Copied(_)));
        for (name, _) in parts {
            if let Some(entry) = self.tensors.remove(name) {
                self.watcher.read(entry.in_file());
                let mapped = entry.blocks.as_ref().and_then(Blocks::mapped);
                self.kept.copied.extend(mapped.filter(|_| is_copied).cloned());
            }
        }
        let mut matrices = Vec::with_capacity(stacked.len());
        for Rows { format, rows, bytes } in stacked {
            matrices.extend(self.pack(bytes, format, [rows, columns])?);
        }
        Matrix::packed(matrices, activations).map(Some)
    }

    /// Returns a packed matrix on the device, divided if it is larger than a buffer.
    fn pack(
        &mut self,
        source: Source,
        format: WeightFormat,
        shape: [usize; 2],
    ) -> Result<Vec<PackedMatrix>> {
        match source {
            Source::Mapped(mapped) => {
                let matrix = self.pack_bytes(mapped.shared(), format, shape)?;
                // Bytes that are not aligned to words were copied.
                let word = size_of::<u32>();
                let at_words = mapped.bytes().as_ptr().addr().is_multiple_of(word)
                    && mapped.range.len().is_multiple_of(word);
                if !at_words || !reads_mapped(&self.device) {
                    mapped.give_back();
                }
                Ok(matrix)
            }
            Source::Copied(bytes) => self.pack_bytes(Bytes::from_bytes_vec(bytes), format, shape),
        }
    }

    /// Returns a packed matrix of these bytes on the device, divided if it is larger than a buffer.
    pub(super) fn pack_bytes(
        &mut self,
        bytes: Bytes,
        format: WeightFormat,
        shape: [usize; 2],
    ) -> Result<Vec<PackedMatrix>> {
        let (most, device) = (self.largest_buffer, &self.device);
        let parts = PackedMatrix::parts_from_bytes(bytes, format, shape, most, device)?;
        for part in &parts {
            self.kept.add(part.layout(), 1);
        }
        Ok(parts)
    }

    /// Counts a tensor that is restored although packed weights were requested.
    pub(super) fn count_restored(&mut self, name: &str) {
        if self.packed.is_none() {
            return;
        }
        let Some(entry) = self.tensors.get(name) else { return };
        if let Some((name, _)) = entry.packed_type() {
            let [tensors, bytes, numbers] = self.kept.restored.entry(name).or_default();
            *tensors += 1;
            *bytes += entry.in_file();
            *numbers += entry.tensor.shape.num_elements();
        }
    }

    /// Returns the size of packed weights, and notes which tensors were restored and what that
    /// costs.
    ///
    /// Called after all tensors have been read. Copied ranges are returned to the system once more,
    /// because reading a neighbor for the first time maps the large page that contains both.
    pub(crate) fn kept(&mut self) -> PackedSize {
        let kept = std::mem::take(&mut self.kept);
        kept.copied.iter().for_each(Mapped::give_back);
        for (name, [tensors, bytes, numbers]) in &kept.restored {
            let [file, memory] = [*bytes, 4 * numbers].map(|n| n as f64 / 1e6);
            self.notes.push(format!(
                "{tensors} tensors of {name} are restored to f32: {memory:.1} MB, {file:.1} MB in \
                 the file"
            ));
        }
        kept.size
    }
}

/// Returns whether packed weights are read from the mapped file rather than copied to a device.
pub(super) fn reads_mapped(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if <kv_cubecl::Flex as kv_cubecl::Target>::hosts(device) {
        return true;
    }
    let _ = device;
    false
}

impl Entry {
    /// Checks that all numbers of one matrix, or of several with one layout, are finite.
    pub(super) fn check_finite(&self, layout: PackedLayout, blocks: &[u8]) -> Result<()> {
        match layout.not_finite(blocks) {
            None => Ok(()),
            Some([row, column]) => Err(self.flawed(format!(
                "holds numbers that are not finite in row {row} from {column} on"
            ))),
        }
    }
}
