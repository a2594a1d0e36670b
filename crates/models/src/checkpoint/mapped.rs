//! Ranges of memory-mapped files.

use std::{ops::Range, sync::Arc};

use burn::tensor::{AllocationProperty, Bytes, DType};
use memmap2::Mmap;

use crate::{
    float::{Flaw, Float, append},
    gguf::NumberType,
};

#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub(crate) map: Arc<Mmap>,
    pub(crate) range: Range<usize>,
}

impl Mapped {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }

    /// Returns the bytes without copying them; they keep the file mapped.
    pub(crate) fn shared(&self) -> Bytes {
        struct File(Arc<Mmap>);
        impl AsRef<[u8]> for File {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let mapped = bytes::Bytes::from_owner(File(self.map.clone())).slice(self.range.clone());
        Bytes::from_shared(mapped, AllocationProperty::File)
    }

    /// Joins this range and the next, if they are neighbors in one file.
    pub(super) fn then(&self, next: &Self) -> Option<Self> {
        let neighbors = Arc::ptr_eq(&self.map, &next.map) && self.range.end == next.range.start;
        neighbors.then(|| Self { map: self.map.clone(), range: self.range.start..next.range.end })
    }

    /// Returns whole pages of the range to the system, once their bytes have been copied. The
    /// system would reclaim them only when memory is short, and until then the program would seem
    /// to hold two copies. A later access reads them from the file again.
    pub(super) fn give_back(&self) {
        #[cfg(unix)]
        {
            /// A multiple of the page size of every supported system.
            const PAGE: usize = 1 << 16;
            let start = self.range.start.next_multiple_of(PAGE);
            let end = self.range.end / PAGE * PAGE;
            if start < end {
                self.map_pages_one_by_one();
                // SAFETY: the mapping is read-only, so the pages have the same contents when they
                // are read again.
                let given = unsafe {
                    let advice = memmap2::UncheckedAdvice::DontNeed;
                    self.map.unchecked_advise_range(advice, start, end - start)
                };
                // If this fails, the program only uses more memory.
                let _ = given;
            }
        }
    }
}

#[cfg(unix)]
impl Mapped {
    /// Asks for small pages around the range. Linux maps large files in pages of 2 MB. Returning a
    /// part of such a page returns all of it, and the next read of any byte maps it again.
    fn map_pages_one_by_one(&self) {
        #[cfg(target_os = "linux")]
        {
            /// Bytes of a huge page. Systems with larger huge pages do not use them for files.
            const HUGE: usize = 2 << 20;
            let base = self.map.as_ptr().addr() % HUGE;
            let start = ((base + self.range.start) / HUGE * HUGE).saturating_sub(base);
            let end = (base + self.range.end).next_multiple_of(HUGE) - base;
            let end = end.min(self.map.len());
            // If this fails, the program only uses more memory.
            let _ = self.map.advise_range(memmap2::Advice::NoHugePage, start, end - start);
        }
    }
}

/// A tensor in a mapped file, and the type of its numbers.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) mapped: Mapped,
    pub(crate) kind: NumberType,
}

/// Numbers that are restored at a time: whole blocks of every type.
const PART: usize = 1 << 18;

impl Stored {
    /// Appends all numbers to `values` in its type, without an intermediate copy of the whole
    /// tensor.
    pub(super) fn append<T: Float>(&self, values: &mut Vec<T>) -> Result<(), Flaw> {
        let bytes = self.mapped.bytes();
        let blocks = match self.kind {
            NumberType::Float(dtype) => return append(bytes, dtype, values),
            NumberType::Blocks(blocks) => blocks,
        };
        for (i, bytes) in bytes.chunks(PART / blocks.numbers() * blocks.bytes()).enumerate() {
            let restored = blocks.restore(bytes);
            append(bytemuck::cast_slice(&restored), DType::F32, values)
                .map_err(|flaw| flaw.after(i * PART))?;
        }
        Ok(())
    }
}
