//! Checksums that identify a model.

use std::path::Path;

use burn::tensor::TensorData;

use crate::{
    checkpoint::Export,
    error::{Error, Result},
    model::LanguageModel,
};

/// Computes a checksum of the names and shapes of all weights, of all vectors, of some rows of
/// every matrix, and of the mode of DeepSeek-V4. It distinguishes models that were trained
/// differently, without reading all weights. The same weights in another type, or packed, have
/// another checksum.
pub(super) fn of_weights(model: &LanguageModel) -> Result<String> {
    let mut crc = crc32fast::Hasher::new();
    // The same weights fill a cache with other numbers. Models without rounding have the checksum
    // of earlier versions.
    let fields = model.decoder().config_json(Path::new("config")).unwrap_or_default();
    let mode = fields.get("inference_mode").filter(|mode| *mode != "transformers");
    if let Some(mode) = mode {
        crc.update(mode.to_string().as_bytes());
    }
    for Export { name, values } in model.decoder().export().into_tensors() {
        crc.update(format!("{name} {:?}", values.shape()).as_bytes());
        let samples = values.samples().map_err(|why| {
            Error::argument("model", &name, format!("cannot be read from the device: {why}"))
        })?;
        samples.iter().for_each(|data: &TensorData| crc.update(data.as_bytes()));
    }
    Ok(hexadecimal(crc.finalize()))
}

/// Computes a checksum of numbers.
pub(super) fn of_numbers(numbers: &[f32]) -> String {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    hexadecimal(crc32fast::hash(&bytes))
}

fn hexadecimal(crc: u32) -> String {
    format!("{crc:08x}")
}
