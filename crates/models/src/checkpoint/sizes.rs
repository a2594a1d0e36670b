//! Sizes of a checkpoint's tensors, before any is taken.

use burn::tensor::DType;
use kv_weights::{PackedLayout, WeightFormat};

use super::{entry::Entry, observer::WeightBytes, weights::Weights};
use crate::{dtype::WeightDtype, exports::Names};

struct InMemory {
    kind: String,
    bytes: usize,
    packed: bool,
}

impl Weights {
    /// Returns the sizes in memory of all tensors of a family with these names.
    pub(super) fn sizes(&self, names: &Names) -> WeightBytes {
        let mut sizes = WeightBytes::default();
        let has_head = self.tensors.contains_key(names.head);
        let may_pack = self.packed.is_none()
            && self.dtype == DType::F32
            && kv_weights::check_device("", &self.device).is_ok();
        let mut all_packed = 0;
        for (name, entry) in &self.tensors {
            if (names.harmless)(name) {
                continue;
            }
            let InMemory { kind, bytes, packed } =
                self.in_memory(names, name, entry, self.packed.is_some());
            *sizes.by_type.entry(kind).or_default() += bytes;
            sizes.in_files += entry.in_file();
            if may_pack {
                all_packed += self.in_memory(names, name, entry, true).bytes;
            }
            let shape = entry.tensor.shape.to_vec();
            let unsplit = if packed {
                bytes / shape[..shape.len() - 1].iter().product::<usize>().max(1)
            } else {
                bytes
            };
            if unsplit > sizes.largest.1 {
                sizes.largest = (entry.name.clone(), unsplit);
            }
            if name == if has_head { names.head } else { names.embedding } {
                sizes.head = (bytes, self.int4_head(entry));
            }
            let other_table = names.tables.contains(&name.as_str());
            if name == names.embedding || other_table {
                // A tied head reads the whole embedding.
                let row = bytes / shape.first().copied().unwrap_or(1).max(1);
                sizes.looked_up.0 += if has_head || other_table { bytes } else { 0 };
                sizes.looked_up.1 += row;
            }
            let of_vocabulary = name == names.head || name == names.embedding || other_table;
            if let [.., rows, columns] = shape[..]
                && !of_vocabulary
            {
                // Some files store the transpose.
                sizes.widest = sizes.widest.max(rows.max(columns));
            }
        }
        sizes.packed = may_pack.then_some(all_packed).filter(|&bytes| bytes < sizes.total());
        sizes
    }

    /// Returns whether the rows of a tensor stay packed if packed weights are requested.
    fn stays_packed(&self, name: &str, entry: &Entry) -> bool {
        // Experts of floats that are stored transposed are restored, and so are biases of experts.
        let restored =
            entry.tensor.shape.num_dims() > 2 && !self.is_gguf() || name.ends_with("bias");
        if self.names.is_some_and(|names| names.restores(name)) || self.restores_heads(name) {
            return false;
        }
        entry.packed_format().is_some() && (entry.blocks.is_some() || !restored)
    }

    /// Returns the planned layout of a tensor; `None` if it is not quantized.
    fn planned_layout(&self, names: &Names, name: &str, entry: &Entry) -> Option<PackedLayout> {
        let format: WeightFormat = self.planned?;
        // Tables of positions and routers are not quantized.
        let [rows, columns] = entry.tensor.shape.to_vec()[..] else { return None };
        let quantized =
            name.starts_with(names.layers) || name == names.embedding || name == names.head;
        let layout = |shape| PackedLayout::new(format, shape).ok();
        // Some families store the transpose.
        let layout = layout([rows, columns]).or_else(|| layout([columns, rows]));
        layout.filter(|_| quantized && !name.contains(".router.") && !names.restores(name))
    }

    /// Returns the size of a tensor, with or without packed weights.
    fn in_memory(&self, names: &Names, name: &str, entry: &Entry, packed: bool) -> InMemory {
        let planned = || self.planned_layout(names, name, entry).filter(|_| packed);
        if let Some(layout) = self.head_layout(name, entry).or_else(planned) {
            let kind = layout.format().name().to_string();
            return InMemory { kind, bytes: layout.bytes(), packed: true };
        }
        let shape = &entry.tensor.shape;
        let numbers = shape.num_elements();
        if let Some((kind, _)) =
            entry.packed_type().filter(|_| packed && self.stays_packed(name, entry))
        {
            return InMemory { kind, bytes: entry.in_file(), packed: true };
        }
        // MXFP4 tensors have two codes to a byte.
        let numbers = match entry.tensor.dtype {
            DType::U8 if packed => {
                return InMemory { kind: "MXFP4".into(), bytes: numbers, packed: false };
            }
            DType::U8 if name.ends_with("_scales") => 0,
            DType::U8 => 2 * numbers,
            _ => numbers,
        };
        let kind = WeightDtype::of(self.dtype).map_or_else(String::new, |kind| kind.to_string());
        InMemory { kind, bytes: numbers * self.dtype.size(), packed: false }
    }
}
