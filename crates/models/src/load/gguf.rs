//! GGUF files. They are memory-mapped and have configuration, vocabulary and weights in one or
//! several parts.

use std::{collections::HashMap, panic, path::Path, sync::Arc, thread};

use burn::tensor::{DType, Device, Shape, TensorData};
use burn_store::{bridge, burn_pack::Tensor as PackTensor};
use memmap2::Mmap;

use super::{Format, LoadOptions, Loaded, file_stem};
use crate::{
    checkpoint::{BlockSource, Blocks, Mapped, Stored, Watcher, Weights},
    error::{Error, Result},
    fields::required,
    files::Part,
    gguf::{self, GgufFile, Metadata, NumberType, TensorInfo, Value},
    model::LanguageModel,
    registry,
    tokenizer::Tokenizer,
};

/// Reads a GGUF file, or all parts of its model.
pub(super) fn load(
    path: &Path,
    device: &Device,
    options: LoadOptions,
    watcher: Watcher,
) -> Result<Loaded> {
    let mut files = gguf::open(path)?;
    let GgufFile { path: first, header, map } = &mut files[0];
    let of_tokenizer = |key: &String, _: &mut Value| key.starts_with("tokenizer.");
    let vocabulary: HashMap<_, _> = header.metadata.extract_if(of_tokenizer).collect();
    let (first, map) = (first.clone(), map.clone());
    // A large vocabulary takes as long to read as a gigabyte of weights, so another thread reads
    // it.
    let (tokenizer, model) = thread::scope(|scope| {
        let tokenizer =
            scope.spawn(move || Tokenizer::from_gguf_metadata(vocabulary, &map, &first));
        let model = read_model(path, &files, device, options, watcher);
        (tokenizer.join().unwrap_or_else(|panic| panic::resume_unwind(panic)), model)
    });
    let (model, notes) = model?;
    let GgufFile { path: first, header, .. } = &files[0];
    let name = gguf::text(&header.metadata, "general.name", first)?;
    let name = match name.filter(|name| !name.is_empty()) {
        Some(name) => name.to_string(),
        None => Part::parse(path).map_or_else(|| file_stem(path), |part| part.stem),
    };
    Ok(Loaded { model, tokenizer, cache: None, name, format: Format::Gguf, notes })
}

/// Reads the model, and returns its notes.
fn read_model(
    path: &Path,
    files: &[GgufFile],
    device: &Device,
    options: LoadOptions,
    watcher: Watcher,
) -> Result<(LanguageModel, Vec<String>)> {
    let GgufFile { path: first, header, map } = &files[0];
    let key = "general.architecture";
    let arch = required(first, key, gguf::text(&header.metadata, key, first)?)?;
    let metadata = Metadata::new(header, arch, first, map);
    let has_experts = metadata.optional_size("expert_count")?.is_some_and(|n| n > 0);
    let (family, names) = registry::by_architecture(arch, has_experts).map_err(|known| {
        let why = format!("{} has it; {known} are supported", first.display());
        Error::unsupported(format!("GGUF architecture {arch}"), why)
    })?;
    let mut weights = Weights::new(path, Some(names), device);
    weights.watcher = watcher;
    for GgufFile { path, map, header } in files {
        for info in &header.tensors {
            let (name, tensor) = (names.to_hugging_face(&info.name), deferred(map, info));
            let mapped = Mapped { map: map.clone(), range: info.bytes.clone() };
            weights.insert(name.clone(), tensor, blocks(&mapped, info), path)?;
            weights.lies_at(&name, Stored { mapped, kind: info.kind });
        }
    }
    options.apply(&mut weights)?;
    let model = family.import_gguf(&metadata, &mut weights)?;
    let model = model.with_packed(weights.kept());
    Ok((model, std::mem::take(weights.notes())))
}

/// Returns the blocks of a tensor, if it has any.
fn blocks(mapped: &Mapped, info: &TensorInfo) -> Option<Blocks> {
    let NumberType::Blocks(blocks) = info.kind else { return None };
    let source = BlockSource::Mapped(mapped.clone());
    Some(Blocks { name: blocks.name().to_string(), format: blocks.packed(), source })
}

/// Returns a tensor whose bytes are read and dequantized when it is taken.
fn deferred(map: &Arc<Mmap>, info: &TensorInfo) -> PackTensor {
    let shape = Shape::from(info.shape.clone());
    let dtype = match info.kind {
        NumberType::Float(dtype) => dtype,
        NumberType::Blocks(_) => DType::F32,
    };
    let (map, info) = (map.clone(), info.clone());
    bridge::deferred(info.name.clone(), dtype, shape.clone(), None, move || {
        let bytes = &map[info.bytes.clone()];
        Ok(match info.kind {
            NumberType::Float(dtype) => {
                TensorData::from_bytes_vec(bytes.to_vec(), shape.clone(), dtype)
            }
            NumberType::Blocks(blocks) => TensorData::new(blocks.restore(bytes), shape.clone()),
        })
    })
}
