//! GGUF files: their header, memory map and names of tensors.

mod header;
mod metadata;
mod names;
mod split;

use std::{collections::HashMap, path::Path};

pub(crate) use header::{BlockType, TensorInfo, Value};
pub use metadata::Metadata;
pub use names::GgufNames;
pub(crate) use split::{GgufFile, map, open};

use crate::Result;

/// Reads the metadata alone, those of the first part if the file is one of several.
pub(crate) fn metadata(path: &Path) -> Result<HashMap<String, Value>> {
    Ok(open(path)?.swap_remove(0).header.metadata)
}
