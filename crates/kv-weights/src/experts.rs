//! Matrices of a mixture of experts.

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};

use crate::{
    Activations, PackedLayout, PackedMatrix, Result, WeightFormat, backends::check_bytes,
    error::invalid,
};

/// Alignment of experts in bytes, so that every device can bind one: the maximum that WebGPU allows
/// a device to require.
const ALIGNMENT: usize = 256;

/// Packed matrices of one format and shape in one buffer, for
/// [`project_picked`](crate::project_picked), which selects them by number.
#[derive(Clone, Debug)]
pub struct PackedExperts {
    words: Tensor<1, Int>,
    layout: PackedLayout,
    /// Bytes from the start of one expert to the start of the next.
    stride: usize,
    n: usize,
}

impl PackedExperts {
    /// Creates experts from their rows of blocks, each a matrix of `shape`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for no experts, for rows that are not whole blocks
    /// and for a wrong number of bytes. [`Error::Unsupported`](crate::Error::Unsupported) if the
    /// experts exceed the device's largest buffer.
    pub fn from_bytes(
        experts: &[impl AsRef<[u8]>],
        format: WeightFormat,
        shape: [usize; 2],
        device: &Device,
    ) -> Result<Self> {
        let (layout, n) = (PackedLayout::new(format, shape)?, experts.len());
        if n == 0 {
            return Err(invalid("experts", n, "must be at least 1"));
        }
        let stride = layout.bytes().next_multiple_of(ALIGNMENT);
        let [rows, columns] = shape;
        let what = || format!("{n} experts [{rows}, {columns}] of {format}");
        check_bytes(what, n.saturating_mul(stride), device)?;
        let mut words = vec![0u32; n * stride / size_of::<u32>()];
        let room = bytemuck::cast_slice_mut::<u32, u8>(&mut words).chunks_exact_mut(stride);
        for (to, bytes) in room.zip(experts) {
            let bytes = bytes.as_ref();
            if bytes.len() != layout.bytes() {
                let rule = format!("must be {} for each of {}", layout.bytes(), what());
                return Err(invalid("bytes", bytes.len(), rule));
            }
            to[..bytes.len()].copy_from_slice(bytes);
        }
        let data = TensorData::from_bytes(Bytes::from_elems(words), [n * stride / 4], DType::U32);
        let device = device.clone().without_autodiff();
        let create = |data| Tensor::from_data(data, (&device, DType::U32));
        Ok(Self { words: device.memory_persistent_allocations(data, create), layout, stride, n })
    }

    /// Takes the rows of a matrix as `n` experts of equally many rows, without copying them. The
    /// matrix of one [`expert`](Self::expert) may then be a copy.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the rows cannot be divided into `n` parts of
    /// whole words.
    pub fn from_rows(matrix: &PackedMatrix, n: usize) -> Result<Self> {
        let (all, [rows, columns]) = (matrix.layout(), matrix.dims());
        let stride = all.bytes().checked_div(n).unwrap_or(0);
        if !rows.is_multiple_of(n) || !stride.is_multiple_of(size_of::<u32>()) {
            let rule = format!("must be divided into {n} parts of whole words");
            return Err(invalid("rows", rows, rule));
        }
        let layout = PackedLayout::new(all.format(), [rows / n, columns])?;
        Ok(Self { words: matrix.words().clone(), layout, stride, n })
    }

    /// Returns the number of experts.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Returns `false`, since there is always an expert.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Returns format and shape of each expert.
    pub fn layout(&self) -> PackedLayout {
        self.layout
    }

    /// Returns the blocks of all experts as little-endian u32 words, with [`stride`](Self::stride)
    /// words from one expert to the next.
    pub fn words(&self) -> &Tensor<1, Int> {
        &self.words
    }

    /// Returns the number of words from the start of one expert to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride / size_of::<u32>()
    }

    /// Returns the device of the blocks, without autodiff, since they are constants.
    pub fn device(&self) -> Device {
        self.words.device()
    }

    /// Returns the matrix of one expert, which shares the memory.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there is no expert of this number.
    pub fn expert(&self, number: usize) -> Result<PackedMatrix> {
        if number >= self.n {
            let rule = format!("must be below {}, the number of experts", self.n);
            return Err(invalid("expert", number, rule));
        }
        let stride = self.stride();
        let words = self.words.clone().narrow(0, number * stride, stride);
        Ok(PackedMatrix::of_padded(words, self.layout))
    }
}

/// The layout of experts in their buffer and of the activations that they are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct ExpertSelection {
    /// Words from the start of one expert to the start of the next.
    pub stride: usize,
    /// Number of picks that share a row of activations.
    pub shared: usize,
    /// Precision of the activations.
    pub activations: Activations,
}
