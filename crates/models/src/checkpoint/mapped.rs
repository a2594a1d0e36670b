//! Ranges of memory-mapped files.

use std::{ops::Range, sync::Arc};

use burn::tensor::{AllocationProperty, Bytes, DType};
use memmap2::Mmap;

use crate::{
    float::{Flaw, Float, append},
    gguf::NumberType,
};

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

    /// This range and the next as one, if they are neighbors in one file.
    pub(super) fn then(&self, next: &Self) -> Option<Self> {
        let neighbors = Arc::ptr_eq(&self.map, &next.map) && self.range.end == next.range.start;
        neighbors.then(|| Self { map: self.map.clone(), range: self.range.start..next.range.end })
    }

    /// Gives the memory of whole pages of the range back to the system, once their bytes have been copied: the system
    /// would not take it before memory is short, and until then a program looks as if it had two copies. They are read
    /// from the file again if they are looked at again.
    pub(super) fn give_back(&self) {
        #[cfg(unix)]
        {
            /// A multiple of the size of a page on every system there is.
            const PAGE: usize = 1 << 16;
            let start = self.range.start.next_multiple_of(PAGE);
            let end = self.range.end / PAGE * PAGE;
            if start < end {
                self.map_pages_one_by_one();
                // SAFETY: the pages are those of a file that is mapped to be read, so that what they hold afterwards is
                // what they held before.
                let given = unsafe {
                    let advice = memmap2::UncheckedAdvice::DontNeed;
                    self.map.unchecked_advise_range(advice, start, end - start)
                };
                // Without it the program only takes more memory.
                let _ = given;
            }
        }
    }
}

#[cfg(unix)]
impl Mapped {
    /// Asks for small pages around the range. Linux keeps large files in pages of 2 MB, and where these are mapped whole,
    /// giving a part back is to give all back, which is mapped again with the first byte of it that is read.
    fn map_pages_one_by_one(&self) {
        #[cfg(target_os = "linux")]
        {
            /// Bytes of a huge page; where they are larger, files are not kept in them.
            const HUGE: usize = 2 << 20;
            let base = self.map.as_ptr().addr() % HUGE;
            let start = ((base + self.range.start) / HUGE * HUGE).saturating_sub(base);
            let end = (base + self.range.end).next_multiple_of(HUGE) - base;
            let end = end.min(self.map.len());
            // Without it the program only takes more memory.
            let _ = self.map.advise_range(memmap2::Advice::NoHugePage, start, end - start);
        }
    }
}

/// A tensor where it lies in a file, and what its bytes are.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) mapped: Mapped,
    pub(crate) kind: NumberType,
}

/// Numbers of blocks that are restored at a time; whole blocks of every type.
const PART: usize = 1 << 18;

impl Stored {
    /// Appends all numbers to `values`, in its type, without another copy of them.
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
