use std::path::Path;

use super::{
    header::Header,
    value::{Value, text},
};
use crate::{
    error::{Error, Result},
    fields::required,
};

/// The largest size, 2^40.
const LARGEST: u64 = 1 << 40;

/// The metadata of a GGUF file. Callers omit the prefix of keys, which is the name of the
/// architecture.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    header: &'a Header,
    arch: &'a str,
    path: &'a Path,
    /// The file, for arrays, which are read on demand.
    file: &'a [u8],
}

impl<'a> Metadata<'a> {
    pub(crate) fn new(header: &'a Header, arch: &'a str, path: &'a Path, file: &'a [u8]) -> Self {
        Self { header, arch, path, file }
    }

    /// Returns the architecture, such as `llama`.
    pub fn arch(&self) -> &str {
        self.arch
    }

    /// Returns the path of the file, for messages.
    pub fn path(&self) -> &Path {
        self.path
    }

    /// Returns the full key as in the file.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(&self.key(key))
    }

    /// Returns a size, if the file has the key.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not an unsigned integer up to 2^40.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.integer() {
            Some(n) if n <= LARGEST => Ok(Some(n as usize)),
            Some(_) => {
                let rule = format!("must be at most {LARGEST}");
                Err(Error::config(self.path, self.key(key), value, rule))
            }
            None => Err(self.wrong(key, value, "an unsigned integer")),
        }
    }

    /// Returns a required size.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is missing or not an unsigned integer up to 2^40.
    pub fn size(&self, key: &str) -> Result<usize> {
        required(self.path, &self.key(key), self.optional_size(key)?)
    }

    /// Returns a list of yes and no of this length.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is missing or something else.
    pub(crate) fn flags(&self, key: &str, len: usize) -> Result<Vec<bool>> {
        let wrong = |value: String| {
            let rule = format!("must be an array of {len} booleans");
            Error::config(self.path, self.key(key), value, rule)
        };
        match self.get(key) {
            Some(value @ Value::Array(array)) => {
                let flags = array.booleans(self.file).filter(|flags| flags.len() == len);
                flags.ok_or_else(|| wrong(value.to_string()))
            }
            other => Err(wrong(other.map_or("missing".into(), ToString::to_string))),
        }
    }

    /// Returns a float, if the file has the key.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a float.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Float(x)) => Ok(Some(x)),
            Some(other) => Err(self.wrong(key, other, "a float")),
        }
    }

    /// Returns a truth value, if the file has the key.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a bool.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong(key, other, "a bool")),
        }
    }

    /// Returns a string, if the file has the key.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a string.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        text(&self.header.metadata, &self.key(key), self.path)
    }

    /// Checks that a size that the file may have is `expected`, which `why` explains.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if it is another number.
    pub(crate) fn agrees(&self, key: &str, expected: usize, why: &str) -> Result<()> {
        match self.optional_size(key)?.filter(|found| *found != expected) {
            None => Ok(()),
            Some(found) => {
                let rule = format!("must be {expected}, {why}; convert the model again");
                Err(Error::config(self.path, self.key(key), found, rule))
            }
        }
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        value.wrong(self.path, self.key(key), expected)
    }
}
