//! Safetensors files. Their tensors stay in the mapped file until they are taken.

use std::path::Path;

use burn::tensor::{BoolStore, DType, Shape, TensorData};
use burn_store::bridge;
use safetensors::{Dtype, SafeTensors};

use crate::{
    checkpoint::{ByteFloat, Mapped, Stored, Weights},
    error::{Error, Result, unreadable},
    gguf::{NumberType, map},
};

const FORMAT: &str = "safetensors";

/// Lists the tensors of a file.
///
/// # Errors
/// Fails for a file that is not valid, and for a tensor of a type that cannot be read.
pub(super) fn open(file: &Path, weights: &mut Weights) -> Result<()> {
    let malformed = |why| Error::Malformed { path: file.into(), format: FORMAT, why };
    let map = map(file, FORMAT)?;
    let (header, metadata) =
        SafeTensors::read_metadata(&map).map_err(|error| malformed(unreadable(&error)))?;
    /// Bytes of the header's length, which precede the header.
    const LENGTH: usize = 8;
    let data = LENGTH + header;
    for (name, info) in metadata.tensors() {
        let Some((dtype, byte_float)) = types(info.dtype) else {
            let why = format!("has type {}, which cannot be read", info.dtype);
            return Err(Error::Tensor { path: file.into(), tensor: name, why });
        };
        let (start, end) = info.data_offsets;
        let mapped = Mapped { map: map.clone(), range: data + start..data + end };
        let (bytes, shape) = (mapped.clone(), Shape::from(info.shape.clone()));
        let read = {
            let shape = shape.clone();
            move || Ok(TensorData::from_bytes(bytes.shared(), shape.clone(), dtype))
        };
        let tensor = bridge::deferred(name.clone(), dtype, shape, None, read);
        weights.insert(name.clone(), tensor, None, file)?;
        if let Some(float) = byte_float {
            weights.holds(&name, float);
        } else if dtype.is_float() && dtype != DType::F64 {
            weights.lies_at(&name, Stored { mapped, kind: NumberType::Float(dtype) });
        }
    }
    Ok(())
}

/// Returns Burn's type of the numbers, and their own if Burn has none.
fn types(dtype: Dtype) -> Option<(DType, Option<ByteFloat>)> {
    let own = match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        Dtype::F8_E4M3 => return Some((DType::U8, Some(ByteFloat::E4m3))),
        Dtype::F8_E8M0 => return Some((DType::U8, Some(ByteFloat::E8m0))),
        _ => return None,
    };
    Some((own, None))
}
