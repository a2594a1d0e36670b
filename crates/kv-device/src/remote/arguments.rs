//! Arguments that are not tensors, as the scalars of an operation.

use burn::backend::ir::ScalarIr;
use serde::{Serialize, de::DeserializeOwned};

use super::malformed::Malformed;

/// An argument of an operation that is not a tensor.
///
/// A server must not trust what it reads. A type whose values follow rules checks them here, or
/// when it is deserialized.
pub trait Argument: Serialize + DeserializeOwned {
    /// Checks the rules of the type.
    ///
    /// # Errors
    /// The rule that is broken.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

impl Argument for bool {}
impl Argument for u8 {}
impl Argument for usize {}
impl Argument for f64 {}
impl Argument for [usize; 4] {}

/// Appends `value` to `bytes` with the names of its fields, because some types skip fields.
pub(super) fn append(bytes: &mut Vec<u8>, value: &impl Serialize) {
    let mut serializer = rmp_serde::Serializer::new(bytes).with_struct_map();
    // Writing to memory does not fail, and arguments are plain data.
    value.serialize(&mut serializer).expect("an argument of an operation is serializable");
}

/// Reads the value at the start of `bytes`, and moves `bytes` behind it.
pub(super) fn take<T: Argument>(bytes: &mut &[u8]) -> Result<T, Malformed> {
    let value: T = rmp_serde::from_read(bytes).map_err(Malformed::new)?;
    value.check().map_err(Malformed::new)?;
    Ok(value)
}

/// Packs bytes into scalars: their number, then eight in each.
pub(super) fn to_scalars(bytes: &[u8]) -> Vec<ScalarIr> {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    core::iter::once(bytes.len() as u64).chain(words).map(ScalarIr::UInt).collect()
}

/// Unpacks what [`to_scalars`] packed.
pub(super) fn from_scalars(scalars: &[ScalarIr]) -> Result<Vec<u8>, Malformed> {
    let words: Option<Vec<u64>> = scalars
        .iter()
        .map(|scalar| match scalar {
            ScalarIr::UInt(word) => Some(*word),
            _ => None,
        })
        .collect();
    let words = words.ok_or_else(|| Malformed::new("a scalar is not an unsigned integer"))?;
    let Some((&len, words)) = words.split_first() else {
        return Err(Malformed::new("the number of argument bytes is missing"));
    };
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    match usize::try_from(len) {
        Ok(len) if len.div_ceil(8) == words.len() => {
            bytes.truncate(len);
            Ok(bytes)
        }
        _ => Err(Malformed::new(format!("{len} argument bytes do not fill {} words", words.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        append(&mut bytes, &usize::MAX);
        append(&mut bytes, &[1usize, 2, 3, 4]);
        append(&mut bytes, &1e-6f64);
        append(&mut bytes, &true);
        let read = from_scalars(&to_scalars(&bytes)).unwrap();
        let mut rest = &*read;
        assert_eq!(take::<usize>(&mut rest).unwrap(), usize::MAX);
        assert_eq!(take::<[usize; 4]>(&mut rest).unwrap(), [1, 2, 3, 4]);
        assert_eq!(take::<f64>(&mut rest).unwrap().to_bits(), 1e-6f64.to_bits());
        assert!(take::<bool>(&mut rest).unwrap());
        assert!(rest.is_empty());
        assert!(take::<bool>(&mut rest).is_err());
    }

    #[test]
    fn damaged_arguments_are_refused() {
        for (scalars, why) in [
            (vec![], "missing"),
            (vec![ScalarIr::UInt(9), ScalarIr::UInt(0)], "do not fill"),
            (vec![ScalarIr::UInt(u64::MAX)], "do not fill"),
            (vec![ScalarIr::UInt(1), ScalarIr::Float(1.0)], "unsigned"),
        ] {
            let error = from_scalars(&scalars).unwrap_err().to_string();
            assert!(error.contains(why), "{scalars:?}: {error}");
        }
    }
}
