//! Matrices of 8-bit and 4-bit floats with scales, as DeepSeek publishes them.
//!
//! For a matrix `NAME.weight` of `[rows, columns]` and blocks of `[r, c]` numbers, which
//! `weight_block_size` of `config.json` gives:
//!
//! | tensor | type | shape | content |
//! |---|---|---|---|
//! | `NAME.weight` | F8_E4M3 | `[rows, columns]` | numbers |
//! | `NAME.scale` | F8_E8M0, F32, BF16 or F16 | `[ceil(rows / r), ceil(columns / c)]` | factors |
//!
//! `NAME.weight_scale_inv` is another name of the scales. In spite of it, they are factors, not
//! divisors. Numbers are restored to the type of the model when they are taken.
//!
//! Experts may be MXFP4, with two codes to a byte, the first in its lower half:
//!
//! | tensor | type | shape | content |
//! |---|---|---|---|
//! | `NAME.weight` | I8 or U8 | `[rows, columns / 2]` | codes |
//! | `NAME.scale` | F8_E8M0 | `[rows, columns / 32]` | exponents |
//!
//! They are restored as well, unless packed weights are requested.

use burn::tensor::{DType, Shape, TensorData};
use burn_store::{bridge, burn_pack::Error as PackError};
use kv_weights::{PackedLayout, WeightFormat};

use super::{
    byte_float::ByteFloat,
    entry::{BlockSource, Blocks, Entry},
    quantized::Quantized,
    weights::Weights,
};
use crate::{error::Result, float::append, mxfp4::BLOCK};

/// A matrix of 8-bit floats in blocks.
#[derive(Debug)]
struct Scaled {
    codes: Entry,
    /// Numbers of a block along rows and columns.
    block: [usize; 2],
    /// The factors of the blocks, row by row.
    factors: Vec<f32>,
}

impl Weights {
    /// Joins matrices of 8-bit and 4-bit floats with their scales. `block` is the shape of a block
    /// of 8-bit floats; `None` for a checkpoint whose configuration has none. Call it after all
    /// tensors have been added.
    ///
    /// # Errors
    /// Fails if scales are missing or contradict the matrix in type or shape, and for 8-bit floats
    /// without `block`.
    pub(crate) fn join_scaled(&mut self, block: Option<[usize; 2]>) -> Result<()> {
        for name in self.tensors.keys().cloned().collect::<Vec<_>>() {
            let Some(entry) = self.tensors.get(&name) else { continue };
            let joined = match (entry.byte_float, entry.tensor.dtype, block) {
                (Some(ByteFloat::E4m3), _, None) => {
                    let why = "has type F8_E4M3, but config.json has no quantization_config with \
                               quant_method fp8, which gives the size of blocks";
                    return Err(entry.flawed(why.into()));
                }
                (Some(ByteFloat::E4m3), _, Some(block)) => self.scaled(&name, block)?.into_entry(),
                (None, DType::I8 | DType::U8, Some(_)) if name.ends_with(WEIGHT) => {
                    self.scaled_mxfp4(&name)?.into_entry(DType::BF16)
                }
                _ => continue,
            };
            self.add(name, joined)?;
        }
        Ok(())
    }

    /// Takes a matrix and its scales.
    fn with_scales(&mut self, name: &str) -> Result<[Entry; 2]> {
        let module = name.strip_suffix(WEIGHT).unwrap_or(name);
        let names = [".scale", ".weight_scale_inv"].map(|suffix| format!("{module}{suffix}"));
        let scales = names.iter().find_map(|name| self.tensors.remove(name));
        let codes = self.tensors.remove(name).ok_or_else(|| self.missing(name))?;
        match scales {
            Some(scales) => Ok([codes, scales]),
            None => {
                let [scale, inverse] = names;
                let why = format!(
                    "has type {}, but its scales {scale} or {inverse} are missing; download the \
                     folder again",
                    codes.type_name()
                );
                Err(codes.flawed(why))
            }
        }
    }

    fn scaled(&mut self, name: &str, block: [usize; 2]) -> Result<Scaled> {
        let [codes, scales] = self.with_scales(name)?;
        let [rows, columns] = codes.shape()?;
        let expected = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let other = format!("{rows} x {columns} numbers in blocks of {} x {}", block[0], block[1]);
        scales.check_shape(&expected, &other)?;
        let factors = scales.factors()?;
        Ok(Scaled { codes, block, factors })
    }

    fn scaled_mxfp4(&mut self, name: &str) -> Result<Quantized> {
        let [codes, scales] = self.with_scales(name)?;
        let [rows, bytes] = codes.shape()?;
        if scales.byte_float != Some(ByteFloat::E8m0) {
            let own = scales.type_name();
            let why = format!("has type {own}, but scales of 4-bit floats must be F8_E8M0");
            return Err(scales.flawed(why));
        }
        let layout = PackedLayout::new(WeightFormat::Mxfp4, [rows, 2 * bytes])
            .map_err(|error| codes.flawed(error.to_string()))?;
        scales.check_shape(&[rows, 2 * bytes / BLOCK], &format!("{rows} x {bytes} bytes"))?;
        Ok(Quantized { layout, codes, scales, zeros: None })
    }
}

const WEIGHT: &str = ".weight";

impl Entry {
    /// Returns the name of the type of numbers, for messages.
    fn type_name(&self) -> String {
        self.byte_float.map_or_else(|| format!("{:?}", self.tensor.dtype), |own| own.name().into())
    }

    /// Returns the numbers as factors, which must be finite and not negative.
    fn factors(&self) -> Result<Vec<f32>> {
        let bytes = self.bytes()?;
        let mut factors = vec![];
        match self.byte_float {
            Some(float) => factors.extend(bytes.iter().map(|code| float.value(*code))),
            None => append(&bytes, self.tensor.dtype, &mut factors)
                .map_err(|flaw| flaw.of(&self.path, &self.name))?,
        }
        let fits = |factor: &f32| factor.is_finite() && *factor >= 0.0;
        match factors.iter().enumerate().find(|(_, factor)| !fits(factor)) {
            None => Ok(factors),
            Some((i, factor)) => {
                let rule = "scales must be finite and not negative";
                let why = format!("holds {factor} at element {i}; {rule}");
                Err(self.flawed(why))
            }
        }
    }
}

impl Scaled {
    /// Returns an entry that restores the matrix when it is taken. With powers of two as factors,
    /// numbers are exact in bf16, which is the type of the entry. Otherwise it is f32.
    fn into_entry(self) -> Entry {
        let exact = self.factors.iter().all(|factor| factor.to_bits() << 9 == 0);
        let dtype = if exact { DType::BF16 } else { DType::F32 };
        let (name, path) = (self.codes.name.clone(), self.codes.path.clone());
        let shape = self.codes.tensor.shape.clone();
        let blocks = Blocks {
            name: "FP8".into(),
            format: None,
            source: BlockSource::Apart(self.codes.in_file() + self.factors.len()),
        };
        let dims: Shape = shape.clone();
        let restore = move || {
            let values =
                self.restore().map_err(|error| PackError::ValidationError(error.to_string()))?;
            Ok(TensorData::new(values, dims.clone()).convert_dtype(dtype))
        };
        let tensor = bridge::deferred(name, dtype, shape, None, restore);
        Entry::new(tensor, path, Some(blocks))
    }

    fn restore(&self) -> Result<Vec<f32>> {
        let codes = self.codes.bytes()?;
        let values: [f32; 256] = core::array::from_fn(|code| ByteFloat::E4m3.value(code as u8));
        let [_, columns] = self.codes.shape()?;
        let [rows_of_block, columns_of_block] = self.block;
        let per_row = columns.div_ceil(columns_of_block);
        let mut restored = Vec::with_capacity(codes.len());
        for (i, row) in codes.chunks_exact(columns.max(1)).enumerate() {
            let factors = &self.factors[i / rows_of_block * per_row..][..per_row];
            for (codes, factor) in row.chunks(columns_of_block).zip(factors) {
                restored.extend(codes.iter().map(|code| values[usize::from(*code)] * factor));
            }
        }
        Ok(restored)
    }
}
