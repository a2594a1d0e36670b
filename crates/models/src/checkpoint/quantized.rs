//! Quantized matrices of safetensors files: several tensors become one matrix of blocks.
//!
//! Integers follow the format `pack-quantized` of the `compressed-tensors` library
//! (<https://github.com/vllm-project/compressed-tensors>). For a matrix `NAME` of `[rows, columns]`
//! and codes of `bits`:
//!
//! | tensor | type | shape | content |
//! |---|---|---|---|
//! | `NAME_packed` | I32 | `[rows, columns * bits / 32]` | codes, the first in the low bits |
//! | `NAME_scale` | F16, BF16 or F32 | `[rows, groups]` | `scale * (code - zero)` |
//! | `NAME_zero_point` | I32 | `[ceil(rows * bits / 32), groups]` | zeros, packed along the rows |
//! | `NAME_shape` | I64 or I32 | `[2]` | rows and columns |
//!
//! Without `NAME_zero_point`, all zeros are 8 or 128.
//!
//! MXFP4 follows gpt-oss; `scaled.rs` reads DeepSeek's. `NAME_blocks` is U8 `[rows, columns / 32,
//! 16]` with two codes to a byte, the first in its lower half. `NAME_scales` is U8 `[rows, columns
//! / 32]` with exponents.

use std::sync::Arc;

use burn::tensor::{DType, Shape, TensorData};
use burn_store::{bridge, burn_pack::Error as PackError};
use half::f16;
use kv_weights::{GroupSize, PackedLayout, WeightFormat};

use super::{
    entry::{BlockSource, Blocks, Entry, Join},
    weights::Weights,
};
use crate::{
    error::{Error, Result},
    float::append,
    mxfp4::{self, BLOCK},
};

/// The `quant_method` and the `format` of integers.
pub(crate) const INTEGERS: &str = "compressed-tensors";
pub(crate) const INTEGER_FORMAT: &str = "pack-quantized";
/// The `quant_method` of MXFP4.
pub(crate) const MXFP4: &str = "mxfp4";
/// The `quant_method` of 8-bit floats in blocks.
pub(crate) const FP8: &str = "fp8";
/// Suffixes of the tensors of a quantized matrix.
pub(crate) const PACKED: &str = "_packed";
pub(crate) const SCALE: &str = "_scale";
pub(crate) const ZERO_POINT: &str = "_zero_point";
pub(crate) const SHAPE: &str = "_shape";
pub(crate) const BLOCKS: &str = "_blocks";
pub(crate) const SCALES: &str = "_scales";
const WEIGHT: &str = ".weight";

/// The tensors of a quantized matrix.
#[derive(Debug)]
pub(crate) struct Quantized {
    pub(super) layout: PackedLayout,
    pub(super) codes: Entry,
    pub(super) scales: Entry,
    pub(super) zeros: Option<Entry>,
}

impl Weights {
    /// Joins the tensors of quantized matrices. Call it after all tensors have been added.
    ///
    /// # Errors
    /// Fails if a tensor is missing or contradicts the others in type or shape.
    pub(crate) fn join_quantized(&mut self) -> Result<()> {
        let names: Vec<String> = self.tensors.keys().cloned().collect();
        for name in names {
            let joined = if let Some(matrix) = matrix_of(&name, PACKED) {
                Some((matrix.to_string(), self.integers(matrix)?))
            } else if let Some(matrix) = matrix_of(&name, BLOCKS) {
                Some((matrix.to_string(), self.mxfp4_matrix(matrix)?))
            } else {
                None
            };
            if let Some((matrix, quantized)) = joined {
                self.add(matrix, quantized.into_entry(DType::F32))?;
            }
        }
        Ok(())
    }

    /// Takes one of the tensors of `matrix`.
    fn part(&mut self, matrix: &str, suffix: &str) -> Result<Entry> {
        let name = format!("{matrix}{suffix}");
        let missing = || Error::MissingTensor { path: self.path.clone(), tensor: name.clone() };
        self.tensors.remove(&name).ok_or_else(missing)
    }

    fn integers(&mut self, matrix: &str) -> Result<Quantized> {
        let [codes, scales] = [self.part(matrix, PACKED)?, self.part(matrix, SCALE)?];
        let zeros = self.tensors.remove(&format!("{matrix}{ZERO_POINT}"));
        let [rows, words] = codes.shape()?;
        codes.check_type(&[DType::I32])?;
        let [rows, columns] = match self.tensors.remove(&format!("{matrix}{SHAPE}")) {
            Some(shape) => shape.numbers(rows)?,
            // Codes usually have 4 bits.
            None => [rows, 8 * words],
        };
        let Some(bits) =
            [4, 8].into_iter().find(|bits| columns > 0 && bits * columns == 32 * words)
        else {
            let why = format!(
                "has rows of {words} words, which are not {columns} codes of 4 or of 8 bits"
            );
            return Err(codes.flawed(why));
        };
        let [scale_rows, groups] = scales.shape()?;
        let size = columns.checked_div(groups).filter(|_| columns % groups.max(1) == 0);
        let sizes = [GroupSize::G32, GroupSize::G64, GroupSize::G128];
        let group = sizes.into_iter().find(|group| Some(group.numbers()) == size);
        let Some(group) = group.filter(|_| scale_rows == rows) else {
            let why = format!(
                "has shape [{scale_rows}, {groups}], but {rows} rows of {columns} numbers need \
                 scales for groups of 32, 64 or 128"
            );
            return Err(scales.flawed(why));
        };
        scales.check_type(&[DType::F16, DType::BF16, DType::F32])?;
        if let Some(zeros) = &zeros {
            zeros.check_type(&[DType::I32])?;
            zeros.check_shape(&[(rows * bits).div_ceil(32), groups], "scales")?;
        }
        let format = if bits == 4 { WeightFormat::Int4(group) } else { WeightFormat::Int8(group) };
        let layout = PackedLayout::new(format, [rows, columns])?;
        Ok(Quantized { layout, codes, scales, zeros })
    }

    fn mxfp4_matrix(&mut self, matrix: &str) -> Result<Quantized> {
        let [codes, scales] = [self.part(matrix, BLOCKS)?, self.part(matrix, SCALES)?];
        let [rows, blocks] = scales.shape()?;
        codes.check_type(&[DType::U8])?;
        scales.check_type(&[DType::U8])?;
        codes.check_shape(&[rows, blocks, BLOCK / 2], "scales")?;
        let layout = PackedLayout::new(WeightFormat::Mxfp4, [rows, blocks * BLOCK])
            .map_err(|error| codes.flawed(error.to_string()))?;
        Ok(Quantized { layout, codes, scales, zeros: None })
    }
}

/// Returns the name of the matrix that this tensor is a part of.
fn matrix_of<'a>(name: &'a str, suffix: &str) -> Option<&'a str> {
    name.strip_suffix(suffix).filter(|matrix| matrix.ends_with(WEIGHT))
}

impl Entry {
    pub(super) fn shape(&self) -> Result<[usize; 2]> {
        let shape = self.tensor.shape.to_vec();
        <[usize; 2]>::try_from(&shape[..])
            .map_err(|_| self.flawed(format!("has shape {shape:?}, which is not a matrix")))
    }

    /// Checks the shape; `other` is what it follows from.
    pub(super) fn check_shape(&self, expected: &[usize], other: &str) -> Result<()> {
        let shape = self.tensor.shape.to_vec();
        match shape == expected {
            true => Ok(()),
            false => {
                Err(self
                    .flawed(format!("has shape {shape:?}, but its {other} require {expected:?}")))
            }
        }
    }

    fn check_type(&self, known: &[DType]) -> Result<()> {
        let dtype = self.tensor.dtype;
        match known.contains(&dtype) {
            true => Ok(()),
            false => Err(self.flawed(format!("has type {dtype:?}, not one of {known:?}"))),
        }
    }

    /// Reads a shape whose first number is `rows`.
    fn numbers(&self, rows: usize) -> Result<[usize; 2]> {
        self.check_type(&[DType::I64, DType::I32])?;
        let (bytes, size) = (self.bytes()?, self.tensor.dtype.size());
        let number = |bytes: &[u8]| {
            let mut whole = [0; 8];
            whole[..size].copy_from_slice(bytes);
            usize::try_from(u64::from_le_bytes(whole)).unwrap_or(usize::MAX)
        };
        match bytes.chunks_exact(size).map(number).collect::<Vec<_>>()[..] {
            [found, columns] if found == rows && columns > 0 && columns < u32::MAX as usize => {
                Ok([rows, columns])
            }
            ref found => Err(self.flawed(format!("is {found:?}, not a shape of {rows} rows"))),
        }
    }
}

impl Quantized {
    /// Returns an entry that has the blocks, and restores them to `dtype` when it is taken.
    pub(super) fn into_entry(self, dtype: DType) -> Entry {
        let layout = self.layout;
        let (rows, columns) = (layout.rows(), layout.columns());
        let (name, path) = (self.codes.name.clone(), self.codes.path.clone());
        let shape = Shape::from(vec![rows, columns]);
        let quantized = Arc::new(self);
        let blocks = Blocks {
            name: layout.format().to_string(),
            format: Some(layout.format()),
            source: BlockSource::Joined(quantized.clone()),
        };
        let restore = move || {
            let blocks =
                quantized.blocks().map_err(|e| PackError::ValidationError(e.to_string()))?;
            let restored = layout.format().restore(&blocks);
            Ok(TensorData::new(restored, [rows, columns]).convert_dtype(dtype))
        };
        let tensor = bridge::deferred(name, dtype, shape, None, restore);
        Entry::new(tensor, path, Some(blocks))
    }

    fn integer_blocks(&self, format: WeightFormat) -> Result<Vec<u8>> {
        let codes = self.codes.bytes()?;
        let zeros = self.zeros.as_ref().map(Entry::bytes).transpose()?;
        let scales = self.scales()?;
        let group = format.block_numbers();
        let groups = self.layout.columns() / group;
        let group_codes = codes.len() / scales.len();
        let bits = 8 * group_codes / group;
        let mut blocks = Vec::with_capacity(self.layout.bytes());
        for (i, codes) in codes.chunks_exact(group_codes).enumerate() {
            let (row, column) = (i / groups, i % groups);
            let zero = match &zeros {
                // A word has zeros of several rows.
                Some(zeros) => {
                    let byte = (row * bits / 32 * groups + column) * 4 + row * bits % 32 / 8;
                    if bits == 8 { zeros[byte] } else { zeros[byte] >> (4 * (row % 2)) & 15 }
                }
                None => 1 << (bits - 1),
            };
            blocks.extend(scales[i].to_le_bytes());
            blocks.extend(u16::from(zero).to_le_bytes());
            if bits == 8 {
                blocks.extend_from_slice(codes);
                continue;
            }
            for codes in codes.chunks_exact(16) {
                blocks.extend(mxfp4::halves(codes));
            }
        }
        Ok(blocks)
    }

    /// Returns the scales as f16, the type in blocks.
    fn scales(&self) -> Result<Vec<f16>> {
        let (entry, bytes) = (&self.scales, self.scales.bytes()?);
        let mut values: Vec<f32> = vec![];
        append(&bytes, entry.tensor.dtype, &mut values)
            .map_err(|flaw| flaw.of(&entry.path, &entry.name))?;
        let exact = |(i, value): (usize, &f32)| {
            let scale = f16::from_f32(*value);
            match scale.to_f32() == *value && *value >= 0.0 {
                true => Ok(scale),
                false => {
                    let why = format!(
                        "holds {value} at element {i}, scales must be f16 and not negative"
                    );
                    Err(entry.flawed(why))
                }
            }
        };
        values.iter().enumerate().map(exact).collect()
    }
}

impl Join for Quantized {
    fn n_bytes(&self) -> usize {
        self.layout.bytes()
    }

    fn blocks(&self) -> Result<Vec<u8>> {
        match self.layout.format() {
            WeightFormat::Mxfp4 => {
                let (codes, scales) = (self.codes.bytes()?, self.scales.bytes()?);
                let blocks = codes.chunks_exact(BLOCK / 2).zip(scales.iter());
                Ok(blocks.flat_map(|(codes, scale)| mxfp4::gguf_block(codes, *scale)).collect())
            }
            format => self.integer_blocks(format),
        }
    }
}
