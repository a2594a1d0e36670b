//! A head that is quantized when it is loaded.

use burn::tensor::{Bytes, DType};
use kv_weights::{Activations, GroupSize, PackedLayout, Quantize, Range, WeightFormat, quantize};

use super::{entry::Entry, kept::Head, weights::Weights};
use crate::{
    error::{Error, Result},
    exports::Names,
    float::append,
    nn::Matrix,
};

/// Numbers that are read and quantized at a time, in whole rows.
const AT_A_TIME: usize = 1 << 22;

/// Returns whether a tensor has floats that can be quantized.
fn is_float(entry: &Entry) -> bool {
    matches!(entry.tensor.dtype, DType::F32 | DType::F16 | DType::BF16)
}

impl Weights {
    /// Sets the format in which the head is packed. [`find_head`](Self::find_head) refuses a head
    /// that is not stored as floats.
    ///
    /// # Errors
    /// Fails for a model that does not compute in f32, a device that does not multiply packed
    /// weights, and a format that cannot be created.
    pub(crate) fn set_head(&mut self, head: Option<WeightFormat>) -> Result<()> {
        if let Some(format) = head {
            kv_weights::check_device("a packed head", &self.device)?;
            if self.dtype != DType::F32 {
                let rule = "needs dtype f32, in which packed weights are multiplied";
                return Err(Error::argument("head", format, rule));
            }
            // Nothing is quantized, but a format that is only read is refused.
            let (numbers, shape) = (vec![0.0; format.block_numbers()], [1, format.block_numbers()]);
            quantize(&numbers, shape, format, Quantize::default())?;
        }
        self.head = head.map(|format| Head { format, tensor: None });
        Ok(())
    }

    /// Returns the format to quantize the tensor `name` to.
    pub(super) fn quantized_head(&self, name: &str) -> Option<WeightFormat> {
        let Head { format, tensor } = self.head?;
        (tensor == Some(name)).then_some(format)
    }

    /// Returns the layout of the head as it will be packed; `None` for other tensors.
    pub(super) fn head_layout(&self, name: &str, entry: &Entry) -> Option<PackedLayout> {
        let [rows, columns] = entry.tensor.shape.to_vec()[..] else { return None };
        PackedLayout::new(self.quantized_head(name)?, [rows, columns]).ok()
    }

    /// Finds the tensor that gives the logits, which is the embedding if there is no other, and
    /// checks that it is stored as floats and has rows of whole groups.
    ///
    /// # Errors
    /// Fails with one line that names the tensor.
    pub(super) fn find_head(&mut self, names: &Names) -> Result<()> {
        let Some(head) = &mut self.head else { return Ok(()) };
        let is_apart = self.tensors.contains_key(names.head);
        let (name, format) = (if is_apart { names.head } else { names.embedding }, head.format);
        head.tensor = Some(name);
        let Some(entry) = self.tensors.get(name) else { return Ok(()) };
        let stored = match &entry.blocks {
            Some(blocks) => Some(blocks.name.clone()),
            None if !is_float(entry) => Some(format!("{:?}", entry.tensor.dtype)),
            None => None,
        };
        let why = match stored {
            Some(stored) => Some(format!(
                "is stored as {stored} already, so the head cannot become {format}; leave out \
                 --head"
            )),
            None => {
                let columns = entry.tensor.shape.last().copied().unwrap_or(0);
                let group = format.block_numbers();
                (!columns.is_multiple_of(group)).then(|| {
                    format!("has {columns} columns, which groups of {group} do not divide")
                })
            }
        };
        why.map_or(Ok(()), |why| Err(entry.flawed(why)))
    }

    /// Returns the bytes of a head that is stored as floats in int4; `None` if it cannot be
    /// quantized, or already is.
    pub(super) fn int4_head(&self, entry: &Entry) -> Option<usize> {
        let [rows, columns] = entry.tensor.shape.to_vec()[..] else { return None };
        let is_new = self.head.is_none() && entry.blocks.is_none() && is_float(entry);
        let fits = is_new && self.dtype == DType::F32;
        kv_weights::check_device("", &self.device).ok().filter(|()| fits)?;
        let layout = PackedLayout::new(WeightFormat::Int4(GroupSize::G32), [rows, columns]);
        layout.ok().map(|layout| layout.bytes())
    }

    /// Takes the tensor `name` and quantizes it, some rows at a time. The head and its tied
    /// embedding are one matrix, so both are quantized.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does, and for a weight that needs a scale beyond f16.
    pub(super) fn take_head(
        &mut self,
        name: &str,
        format: WeightFormat,
        [rows, columns]: [usize; 2],
    ) -> Result<Matrix> {
        let entry = self.take(name, &[rows, columns])?;
        let (dtype, number) = (entry.tensor.dtype, entry.tensor.dtype.size());
        let file = entry.stored.as_ref().map(|stored| &stored.mapped);
        let copied;
        let bytes = match file {
            Some(mapped) => mapped.bytes(),
            None => {
                copied = entry.bytes()?;
                &copied[..]
            }
        };
        // The range of least error, because logits decide every token.
        let options = Quantize::default().with_range(Range::LeastError);
        let at_a_time = (AT_A_TIME / columns).max(1) * columns * number;
        let mut blocks = vec![];
        for (i, part) in bytes.chunks(at_a_time).enumerate() {
            let mut values: Vec<f32> = vec![];
            append(part, dtype, &mut values)
                .map_err(|flaw| flaw.after(i * at_a_time / number).of(&entry.path, &entry.name))?;
            let shape = [values.len() / columns, columns];
            blocks.extend(
                quantize(&values, shape, format, options)
                    .map_err(|error| entry.flawed(error.to_string()))?,
            );
        }
        if let Some(mapped) = file {
            mapped.give_back();
        }
        self.watcher.read(entry.in_file());
        let bytes = Bytes::from_bytes_vec(blocks);
        let parts = self.pack_bytes(bytes, format, [rows, columns])?;
        Matrix::packed(parts, self.packed.unwrap_or(Activations::Exact))
    }
}
