//! GGUF files: memory-mapped, with configuration, vocabulary and weights in one or in several parts.

mod config;
mod header;
mod names;
mod split;

use std::{borrow::Cow, collections::HashMap, ops::Range, path::Path, sync::Arc};

use burn::tensor::{DType, Device, Shape, TensorData};
use burn_store::{
    bridge,
    burn_pack::{Error as PackError, Tensor as PackTensor},
};
use candle_core::{CpuStorage, quantized::GgmlDType};
use memmap2::Mmap;

use self::{config::Metadata, header::TensorInfo, split::GgufFile};
use super::{Format, Loaded, Weights, file_stem, parts::Part};
use crate::{
    Error, LanguageModel, Result, Tokenizer, gpt2::Gpt2, llama::Llama, nn::AttentionShape,
};

pub(crate) use header::Value;

/// Reads a GGUF file, or all parts of the model of which it is one.
pub(super) fn load(path: &Path, device: &Device) -> Result<Loaded> {
    let files = split::open(path)?;
    let GgufFile { path: first, header, .. } = &files[0];

    let arch = match header.metadata.get("general.architecture") {
        Some(Value::String(arch)) => arch.as_str(),
        _ => {
            let rule = "the file needs it";
            return Err(Error::config(first, "general.architecture", "missing", rule));
        }
    };
    if !["gpt2", "llama", "phi3", "qwen2"].contains(&arch) {
        let why = format!("{} has it; gpt2, llama, phi3 and qwen2 are computed", first.display());
        return Err(Error::unsupported(format!("GGUF architecture {arch}"), why));
    }

    let mut weights = Weights::of_gguf(path, names::speller(arch));
    for GgufFile { path, map, header } in &files {
        for info in &header.tensors {
            let name = names::to_hugging_face(arch, &info.name);
            weights.insert(name, deferred(map, info, None), path)?;
        }
    }

    let metadata = Metadata { header, arch, path: first };
    let mut notes = vec![];
    let model = if arch == "gpt2" {
        let config = metadata.gpt2(&weights)?;
        LanguageModel::Gpt2(Gpt2::import(config, &mut weights, device)?)
    } else {
        let config = metadata.llama(&mut weights, &mut notes)?;
        if arch == "llama" {
            unpermute(&files, &config.attention, &mut weights);
        }
        LanguageModel::Llama(Llama::import(config, &mut weights, device)?)
    };
    let name = match header.metadata.get("general.name") {
        Some(Value::String(name)) if !name.is_empty() => name.clone(),
        _ => Part::parse(path).map_or_else(|| file_stem(path), |part| part.stem),
    };
    let tokenizer = Tokenizer::from_gguf_metadata(&header.metadata, first);
    Ok(Loaded { model, tokenizer, cache: None, name, format: Format::Gguf, notes })
}

/// Reads the metadata alone, those of the first part if the file is one of several.
pub(crate) fn metadata(path: &Path) -> Result<HashMap<String, Value>> {
    Ok(split::open(path)?.swap_remove(0).header.metadata)
}

/// A tensor whose bytes are read and dequantized when it is taken.
///
/// With `rows_per_head`, llama.cpp's reordering of query and key rows is undone.
fn deferred(map: &Arc<Mmap>, info: &TensorInfo, rows_per_head: Option<usize>) -> PackTensor {
    let shape = Shape::from(info.shape.clone());
    let dtype = match info.dtype {
        GgmlDType::F16 => DType::F16,
        GgmlDType::BF16 => DType::BF16,
        _ => DType::F32,
    };
    let (map, info) = (map.clone(), info.clone());
    bridge::deferred(info.name.clone(), dtype, shape.clone(), None, move || {
        let Range { start, end } = info.bytes;
        let bytes = match rows_per_head {
            Some(rows) => Cow::Owned(split_halves(&map[start..end], info.shape[0], rows)),
            None => Cow::Borrowed(&map[start..end]),
        };
        match info.dtype {
            GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 => {
                Ok(TensorData::from_bytes_vec(bytes.into_owned(), shape.clone(), dtype))
            }
            blocks => {
                let n = info.shape.iter().product();
                match blocks.from_data(bytes).dequantize(n) {
                    Ok(CpuStorage::F32(values)) => Ok(TensorData::new(values, shape.clone())),
                    Ok(_) => Err(PackError::ValidationError("dequantized to another type".into())),
                    Err(error) => Err(PackError::ValidationError(error.to_string())),
                }
            }
        }
    })
}

/// Queries and keys of architecture `llama` are stored for interleaved rotation, pairs of channels
/// side by side; this crate rotates halves, so their rows are put back in the order they were
/// trained in.
fn unpermute(files: &[GgufFile], attention: &AttentionShape, weights: &mut Weights) {
    let AttentionShape { n_heads, n_kv_heads, head_dim } = *attention;
    for GgufFile { map, header, .. } in files {
        for info in &header.tensors {
            let rows = match info.name.split('.').nth(2) {
                Some("attn_q") => n_heads * head_dim,
                Some("attn_k") => n_kv_heads * head_dim,
                _ => continue,
            };
            // A tensor of a wrong shape is left as it is; the importer reports it.
            if info.shape[0] == rows {
                let name = names::to_hugging_face("llama", &info.name);
                weights.replace(&name, deferred(map, info, Some(head_dim)));
            }
        }
    }
}

/// Puts rows 0, 2, 4, .. of each head first, then rows 1, 3, 5, ..
fn split_halves(bytes: &[u8], rows: usize, rows_per_head: usize) -> Vec<u8> {
    let row_bytes = bytes.len() / rows;
    let half = rows_per_head / 2;
    let mut out = Vec::with_capacity(bytes.len());
    for head in bytes.chunks_exact(rows_per_head * row_bytes) {
        for odd in 0..2 {
            for i in 0..half {
                let row = 2 * i + odd;
                out.extend_from_slice(&head[row * row_bytes..(row + 1) * row_bytes]);
            }
        }
    }
    out
}
