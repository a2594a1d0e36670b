//! Matrices that stay in the blocks of their file.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use burn::tensor::{AllocationProperty, Bytes, DType};
use kv_weights::{Activations, PackedLayout, PackedMatrix, WeightFormat};
use memmap2::Mmap;

use super::{Weights, pairs::split_pairs, quantized::Quantized, weights::Entry};
use crate::{Result, model::PackedSize, nn::Matrix};

/// The blocks of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    /// What their type is called.
    pub(crate) name: String,
    /// `None` for a type that is not multiplied packed.
    pub(crate) format: Option<WeightFormat>,
    pub(crate) source: BlockSource,
}

/// Where blocks come from.
#[derive(Clone, Debug)]
pub(crate) enum BlockSource {
    /// As they lie in a GGUF file.
    Mapped(Mapped),
    /// Put together from several tensors when they are taken.
    Joined(Arc<Quantized>),
}

impl Blocks {
    /// Where they lie in a file.
    pub(super) fn mapped(&self) -> Option<&Mapped> {
        match &self.source {
            BlockSource::Mapped(mapped) => Some(mapped),
            BlockSource::Joined(_) => None,
        }
    }

    /// How many bytes they are.
    fn len(&self) -> usize {
        match &self.source {
            BlockSource::Mapped(mapped) => mapped.range.len(),
            BlockSource::Joined(quantized) => quantized.layout().bytes(),
        }
    }

    fn take(&self) -> Result<Source> {
        Ok(match &self.source {
            BlockSource::Mapped(mapped) => Source::Mapped(mapped.clone()),
            BlockSource::Joined(quantized) => Source::Copied(quantized.blocks()?),
        })
    }
}

/// A range of a memory-mapped file.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub(crate) map: Arc<Mmap>,
    pub(crate) range: Range<usize>,
}

impl Mapped {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }

    /// The same bytes, which keep the file mapped.
    pub(super) fn shared(&self) -> Bytes {
        struct File(Arc<Mmap>);
        impl AsRef<[u8]> for File {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let mapped = bytes::Bytes::from_owner(File(self.map.clone())).slice(self.range.clone());
        Bytes::from_shared(mapped, AllocationProperty::File)
    }
}

/// What became of the blocks of a file.
#[derive(Debug, Default)]
pub(super) struct Kept {
    size: PackedSize,
    /// Matrices that were restored although packed ones were asked for: their number, bytes and numbers by type.
    restored: BTreeMap<String, [usize; 3]>,
}

/// Rows of blocks of one format.
struct Rows {
    format: WeightFormat,
    rows: usize,
    bytes: Source,
}

enum Source {
    /// As they lie in the file.
    Mapped(Mapped),
    /// Put together from several places.
    Copied(Vec<u8>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) => mapped.bytes(),
            Self::Copied(bytes) => bytes,
        }
    }

    fn into_vec(self) -> Vec<u8> {
        match self {
            Self::Mapped(mapped) => mapped.bytes().to_vec(),
            Self::Copied(bytes) => bytes,
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::Mapped(mapped) => mapped.shared(),
            Self::Copied(bytes) => Bytes::from_bytes_vec(bytes),
        }
    }
}

impl Weights {
    /// Says whether matrices stay in the blocks of the file, and what they are then multiplied with. Blocks are
    /// computed with in f32; of a model of another type they are restored.
    ///
    /// # Errors
    ///
    /// An error for a device that does not multiply them.
    pub(crate) fn set_packed(&mut self, packed: Option<Activations>) -> Result<()> {
        if packed.is_some() {
            kv_weights::check_device("packed weights", &self.device)?;
        }
        self.packed = packed.filter(|_| self.dtype == DType::F32);
        Ok(())
    }

    /// Takes a matrix of the rows of `parts` as it is in the file, if it is to stay packed and its parts are there in
    /// blocks; the others are left to be restored.
    pub(super) fn take_packed(
        &mut self,
        parts: &[(String, usize)],
        columns: usize,
    ) -> Result<Option<Matrix>> {
        let Some(activations) = self.packed else { return Ok(None) };
        let mut stacked: Vec<Rows> = vec![];
        for (name, rows) in parts {
            let Some(entry) = self.tensors.get(name) else { return Ok(None) };
            let Some(blocks) = &entry.blocks else { return Ok(None) };
            let alike = entry.tensor.shape.to_vec() == [*rows, columns];
            let Some(format) = blocks.format.filter(|_| alike) else { return Ok(None) };
            let layout = PackedLayout::new(format, [*rows, columns])
                .map_err(|error| entry.flawed(error.to_string()))?;
            let bytes = blocks.take()?;
            entry.check_finite(layout, bytes.bytes())?;
            let bytes = match entry.interleaved {
                None => bytes,
                Some(head_dim) => {
                    entry.check_pairs(*rows, head_dim)?;
                    let mut bytes = bytes.into_vec();
                    split_pairs(&mut bytes, *rows, head_dim);
                    Source::Copied(bytes)
                }
            };
            match stacked.pop() {
                Some(last) if last.format == format => {
                    let joined = [last.bytes.into_vec(), bytes.into_vec()].concat();
                    let rows = last.rows + rows;
                    stacked.push(Rows { format, rows, bytes: Source::Copied(joined) });
                }
                last => {
                    stacked.extend(last);
                    stacked.push(Rows { format, rows: *rows, bytes });
                }
            }
        }
        for (name, _) in parts {
            self.tensors.remove(name);
        }
        let mut matrices = Vec::with_capacity(stacked.len());
        for Rows { format, rows, bytes } in stacked {
            matrices.push(self.pack(bytes.into_bytes(), format, [rows, columns])?);
        }
        Matrix::packed(matrices, activations).map(Some)
    }

    /// A packed matrix on the device.
    pub(super) fn pack(
        &mut self,
        bytes: Bytes,
        format: WeightFormat,
        shape: [usize; 2],
    ) -> Result<PackedMatrix> {
        let matrix = PackedMatrix::from_bytes(bytes, format, shape, &self.device)?;
        self.kept.size.bytes += matrix.layout().bytes();
        self.kept.size.numbers += shape[0] * shape[1];
        Ok(matrix)
    }

    /// Counts a tensor that is restored although blocks were to stay.
    pub(super) fn count_restored(&mut self, name: &str) {
        if self.packed.is_none() {
            return;
        }
        let Some(entry) = self.tensors.get(name) else { return };
        if let Some(blocks) = &entry.blocks {
            let [tensors, bytes, numbers] =
                self.kept.restored.entry(blocks.name.clone()).or_default();
            *tensors += 1;
            *bytes += blocks.len();
            *numbers += entry.tensor.shape.num_elements();
        }
    }

    /// How much stayed packed; says what was restored although packed weights were asked for, and what that costs.
    pub(crate) fn kept(&mut self) -> PackedSize {
        let kept = std::mem::take(&mut self.kept);
        for (name, [tensors, bytes, numbers]) in &kept.restored {
            let [file, memory] = [*bytes, 4 * numbers].map(|n| n as f64 / 1e6);
            self.notes.push(format!(
                "{tensors} tensors of {name} are restored to f32: {memory:.1} MB, {file:.1} in the file"
            ));
        }
        kept.size
    }
}

impl Entry {
    /// Checks the numbers of all rows of a matrix, or of several of one layout.
    pub(super) fn check_finite(&self, layout: PackedLayout, blocks: &[u8]) -> Result<()> {
        match layout.not_finite(blocks) {
            None => Ok(()),
            Some([row, column]) => Err(self.flawed(format!(
                "holds numbers that are not finite in row {row} from {column} on"
            ))),
        }
    }
}
