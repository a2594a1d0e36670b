//! GGUF files: headers, memory maps and names of tensors.

mod block;
mod header;
mod metadata;
mod names;
mod split;
mod value;

use std::{collections::HashMap, path::Path, sync::Arc};

use memmap2::Mmap;

pub(crate) use block::NumberType;
pub(crate) use header::TensorInfo;
pub use metadata::Metadata;
pub use names::GgufNames;
pub(crate) use split::{GgufFile, map, open};
pub(crate) use value::{Array, Strings, Value, text};

use crate::error::Result;

/// Reads only the metadata, for several files that of the first part. Arrays stay in the mapped
/// file.
pub(crate) fn metadata(path: &Path) -> Result<(Arc<Mmap>, HashMap<String, Value>)> {
    let first = open(path)?.swap_remove(0);
    Ok((first.map, first.header.metadata))
}
