//! Matrices of packed weights.

use burn::{
    module::{
        Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor,
    },
    tensor::{Bytes, DType, Device, Int, Tensor, TensorData},
};

use crate::{
    PackedLayout, Result, WeightFormat,
    backends::{check_bytes, largest_buffer},
    error::invalid,
};

/// A frozen matrix of packed weights, `[rows, columns]`.
///
/// Its blocks are one buffer on a device, in the order of the file. A clone shares the buffer. As a
/// field of a Burn module, the matrix moves between devices with the module, but it has no
/// parameters for optimizers and recorders.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    words: Tensor<1, Int>,
    layout: PackedLayout,
}

impl PackedMatrix {
    /// Creates a matrix from its rows of blocks.
    ///
    /// The CPU uses `bytes` in place, so memory-mapped files (`Bytes::from_shared`) are not copied.
    /// Bytes are copied only if their address or length is not a multiple of 4.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if rows are not whole blocks, or for a wrong
    /// number of bytes. [`Error::Unsupported`](crate::Error::Unsupported) if the blocks exceed the
    /// device's largest buffer.
    pub fn from_bytes(
        bytes: Bytes,
        format: WeightFormat,
        shape: [usize; 2],
        device: &Device,
    ) -> Result<Self> {
        let layout = PackedLayout::new(format, shape)?;
        if bytes.len() != layout.bytes() {
            let [rows, columns] = shape;
            let rule = format!(
                "must be {} for {rows} rows of {columns} numbers in {format}",
                layout.bytes()
            );
            return Err(invalid("bytes", bytes.len(), rule));
        }
        check_buffer(&layout, device)?;
        let word = size_of::<u32>();
        let whole = bytes.len().is_multiple_of(word) && bytes.as_ptr().addr().is_multiple_of(word);
        let bytes = if whole {
            bytes
        } else {
            let mut words = vec![0u32; layout.words()];
            bytemuck::cast_slice_mut::<u32, u8>(&mut words)[..bytes.len()].copy_from_slice(&bytes);
            Bytes::from_elems(words)
        };
        let data = TensorData::from_bytes(bytes, [layout.words()], DType::U32);
        // Blocks are constants, usable with any kind of autodiff.
        let device = device.clone().without_autodiff();
        let create = |data| Tensor::from_data(data, (&device, DType::U32));
        Ok(Self { words: device.memory_persistent_allocations(data, create), layout })
    }

    /// Creates the matrix as several matrices of adjacent rows if it exceeds the device's largest
    /// buffer or `most` bytes. Shared bytes, such as those of a mapped file, are not copied.
    ///
    /// # Errors
    /// The errors of [`from_bytes`](Self::from_bytes), and
    /// [`Error::Unsupported`](crate::Error::Unsupported) for rows that do not fit into a buffer.
    pub fn parts_from_bytes(
        bytes: Bytes,
        format: WeightFormat,
        shape: [usize; 2],
        most: Option<u64>,
        device: &Device,
    ) -> Result<Vec<Self>> {
        let layout = PackedLayout::new(format, shape)?;
        let most = most.unwrap_or(u64::MAX).min(largest_buffer(device).unwrap_or(u64::MAX));
        let layouts = layout.split(most)?;
        if layouts.len() == 1 || bytes.len() != layout.bytes() {
            return Ok(vec![Self::from_bytes(bytes, format, shape, device)?]);
        }
        let (bytes, mut start) = (bytes.shared(), 0);
        let mut parts = Vec::with_capacity(layouts.len());
        for layout in layouts {
            let end = start + layout.bytes();
            let part = bytes.view(start, end).map_err(|_| {
                invalid(
                    "bytes",
                    format!("{start}..{end}"),
                    "must be within the bytes of the matrix",
                )
            })?;
            parts.push(Self::from_bytes(part, format, layout.shape(), device)?);
            start = end;
        }
        Ok(parts)
    }

    /// Creates a matrix from blocks as [`words`](Self::words) returns them.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a wrong number or type of words, and the
    /// errors of [`from_bytes`](Self::from_bytes).
    pub fn from_words(words: Tensor<1, Int>, layout: PackedLayout) -> Result<Self> {
        let [n] = words.dims();
        if n != layout.words() || words.dtype() != DType::U32 {
            let rule = format!("must be {} of type U32", layout.words());
            return Err(invalid("words", format!("{n} of type {:?}", words.dtype()), rule));
        }
        check_buffer(&layout, &words.device())?;
        Ok(Self { words: words.without_autodiff(), layout })
    }

    /// Creates a matrix from the first words of `words`.
    pub(crate) fn of_padded(words: Tensor<1, Int>, layout: PackedLayout) -> Self {
        debug_assert!(words.dims()[0] >= layout.words());
        Self { words, layout }
    }

    /// Returns the blocks as little-endian u32 words. Bytes after the last row are ignored.
    pub fn words(&self) -> &Tensor<1, Int> {
        &self.words
    }

    /// Returns format and shape.
    pub fn layout(&self) -> PackedLayout {
        self.layout
    }

    /// Returns the format of the blocks.
    pub fn format(&self) -> WeightFormat {
        self.layout.format()
    }

    /// Returns rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        self.layout.shape()
    }

    /// Returns the device of the blocks, without autodiff, since they are constants.
    pub fn device(&self) -> Device {
        self.words.device()
    }
}

/// Checks that the blocks fit into a buffer of the device.
fn check_buffer(layout: &PackedLayout, device: &Device) -> Result<()> {
    let what = || {
        let [rows, columns] = layout.shape();
        format!("a matrix [{rows}, {columns}] of {}", layout.format())
    };
    check_bytes(what, 4 * layout.words(), device)
}

impl Module for PackedMatrix {
    fn collect_devices(&self, devices: Devices) -> Devices {
        Module::collect_devices(&self.words, devices)
    }

    fn fork(self, device: &Device) -> Self {
        Module::to_device(self, device)
    }

    fn to_device(self, device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        Self { words: self.words.to_device(&device), layout: self.layout }
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {}

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for PackedMatrix {
    fn content(&self, content: Content) -> Option<Content> {
        let [rows, columns] = self.dims();
        content.add_single(&format!("[{rows}, {columns}] {}", self.format())).optional()
    }
}

impl ModuleDisplay for PackedMatrix {
    fn format(&self, settings: DisplaySettings) -> String {
        let [rows, columns] = self.dims();
        let _ = settings;
        format!("PackedMatrix [{rows}, {columns}] {}", self.layout.format())
    }
}
