//! Checksums that tell one model from another.

use burn::tensor::TensorData;

use crate::{Error, LanguageModel, Result, checkpoint::Export};

/// A checksum of the names and shapes of all weights, of all vectors and of some rows of every matrix: enough to tell
/// models that were trained apart, without reading all of a model. Weights that are kept in another type, or packed,
/// are others.
pub(super) fn of_weights(model: &LanguageModel) -> Result<String> {
    let mut crc = crc32fast::Hasher::new();
    for Export { name, values } in model.decoder().export().into_tensors() {
        crc.update(format!("{name} {:?}", values.shape()).as_bytes());
        let samples = values.samples().map_err(|why| {
            Error::argument("model", &name, format!("cannot be read from the device: {why}"))
        })?;
        samples.iter().for_each(|data: &TensorData| crc.update(data.as_bytes()));
    }
    Ok(hexadecimal(crc.finalize()))
}

/// A checksum of numbers.
pub(super) fn of_numbers(numbers: &[f32]) -> String {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    hexadecimal(crc32fast::hash(&bytes))
}

fn hexadecimal(crc: u32) -> String {
    format!("{crc:08x}")
}
