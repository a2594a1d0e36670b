//! What the tensors of a checkpoint will take, before any is taken.

use burn::tensor::DType;

use super::{Names, Weights, entry::Entry};
use crate::{WeightDtype, load::WeightBytes};

impl Weights {
    /// What the tensors that are there take in memory, of a family with these names.
    pub(super) fn sizes(&self, names: &Names) -> WeightBytes {
        let mut sizes = WeightBytes::default();
        let has_head = self.tensors.contains_key(names.head);
        for (name, entry) in &self.tensors {
            if (names.harmless)(name) {
                continue;
            }
            let (kind, bytes) = self.in_memory(name, entry);
            *sizes.by_type.entry(kind).or_default() += bytes;
            sizes.in_files += entry.in_file();
            let shape = entry.tensor.shape.to_vec();
            let unsplit = if self.stays_packed(name, entry) {
                bytes / shape[..shape.len() - 1].iter().product::<usize>().max(1)
            } else {
                bytes
            };
            if unsplit > sizes.largest.1 {
                sizes.largest = (entry.name.clone(), unsplit);
            }
            if name == if has_head { names.head } else { names.embedding } {
                sizes.head = (bytes, shape.iter().product());
            }
            if name == names.embedding {
                // A head that is tied to it reads all of it.
                let row = bytes / shape.first().copied().unwrap_or(1).max(1);
                sizes.looked_up = (if has_head { bytes } else { 0 }, row);
            }
            let of_vocabulary = name == names.head || name == names.embedding;
            if let [.., rows, columns] = shape[..]
                && !of_vocabulary
            {
                // Some files have the transpose.
                sizes.widest = sizes.widest.max(rows.max(columns));
            }
        }
        sizes
    }

    /// Whether the rows of a tensor are multiplied as they are in the file.
    fn stays_packed(&self, name: &str, entry: &Entry) -> bool {
        // Of floats, experts that are stored transposed are restored, and so are the biases of experts.
        let restored =
            entry.tensor.shape.num_dims() > 2 && !self.is_gguf() || name.ends_with("bias");
        self.packed.is_some()
            && entry.packed_format().is_some()
            && (entry.blocks.is_some() || !restored)
    }

    /// The type that a tensor has in memory, and its bytes.
    fn in_memory(&self, name: &str, entry: &Entry) -> (String, usize) {
        let shape = &entry.tensor.shape;
        let numbers = shape.num_elements();
        if let Some((kind, _)) = entry.packed_type().filter(|_| self.stays_packed(name, entry)) {
            return (kind, entry.in_file());
        }
        // Codes and scales of MXFP4, two codes to a byte.
        let numbers = match entry.tensor.dtype {
            DType::U8 if self.packed.is_some() => return ("MXFP4".into(), numbers),
            DType::U8 if name.ends_with("_scales") => 0,
            DType::U8 => 2 * numbers,
            _ => numbers,
        };
        let kind = WeightDtype::of(self.dtype).map_or_else(String::new, |kind| kind.to_string());
        (kind, numbers * self.dtype.size())
    }
}
