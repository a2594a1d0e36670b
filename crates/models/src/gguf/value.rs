//! The values of a GGUF file's metadata.

use std::{borrow::Cow, collections::HashMap, fmt, iter, ops::Range, path::Path};

use crate::error::{Error, Result};

/// A metadata value. All numbers are widened to 64 bits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// The form of a value in errors.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(n) => n.fmt(f),
            Self::Signed(n) => n.fmt(f),
            Self::Float(x) => x.fmt(f),
            Self::Bool(flag) => flag.fmt(f),
            Self::String(text) => write!(f, "{text:?}"),
            Self::Array(array) => write!(f, "an array of {} values", array.len),
        }
    }
}

impl Value {
    /// Returns an integer of either type that is at least 0.
    pub(super) fn integer(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(n) => Some(n),
            Self::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }

    /// Returns the error of a value that is not of the `expected` type.
    pub(super) fn wrong(&self, path: &Path, key: impl Into<String>, expected: &str) -> Error {
        let found = match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
        };
        Error::config(path, key, self, format!("must be {expected}, not {found}"))
    }
}

/// Returns the string of a full key, if the file has the key.
///
/// # Errors
/// Returns [`Error::Config`] if the value is not a string.
pub(crate) fn text<'a>(
    metadata: &'a HashMap<String, Value>,
    key: &str,
    path: &Path,
) -> Result<Option<&'a str>> {
    match metadata.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(other.wrong(path, key, "a string")),
    }
}

/// GGUF's numbers of types that are not numbers.
const BOOL: u32 = 7;
pub(super) const STRING: u32 = 8;
pub(super) const ARRAY: u32 = 9;

/// The location of an array in the file. Items are read on demand, because a file may have large
/// arrays that nobody needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    /// GGUF's number of the items' type.
    pub(super) kind: u32,
    pub(super) len: usize,
    pub(super) bytes: Range<usize>,
    /// `true` if the lengths of strings have 64 bits.
    pub(super) wide: bool,
}

impl Array {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the items of an array of any integer type; `file` is the file of the array.
    pub(crate) fn integers(&self, file: &[u8]) -> Option<Vec<i64>> {
        match self.kind {
            0 => Some(self.numbers(file, |[byte]| i64::from(byte))),
            1 => Some(self.numbers(file, |bytes| i64::from(i8::from_le_bytes(bytes)))),
            2 => Some(self.numbers(file, |bytes| i64::from(u16::from_le_bytes(bytes)))),
            3 => Some(self.numbers(file, |bytes| i64::from(i16::from_le_bytes(bytes)))),
            4 => Some(self.numbers(file, |bytes| i64::from(u32::from_le_bytes(bytes)))),
            5 => Some(self.numbers(file, |bytes| i64::from(i32::from_le_bytes(bytes)))),
            10 => Some(self.numbers(file, |bytes| u64::from_le_bytes(bytes).cast_signed())),
            11 => Some(self.numbers(file, i64::from_le_bytes)),
            _ => None,
        }
    }

    /// Returns the items of an array of booleans.
    pub(crate) fn booleans(&self, file: &[u8]) -> Option<Vec<bool>> {
        (self.kind == BOOL).then(|| self.numbers(file, |[byte]| byte != 0))
    }

    /// Returns the items of an array of either float type.
    pub(crate) fn floats(&self, file: &[u8]) -> Option<Vec<f64>> {
        match self.kind {
            6 => Some(self.numbers(file, |bytes| f64::from(f32::from_le_bytes(bytes)))),
            12 => Some(self.numbers(file, f64::from_le_bytes)),
            _ => None,
        }
    }

    fn numbers<const N: usize, T>(&self, file: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
        file[self.bytes.clone()].as_chunks().0.iter().map(|bytes| number(*bytes)).collect()
    }

    pub(crate) fn strings(&self, file: &[u8]) -> Option<Strings> {
        // An empty array may have any type.
        if self.kind != STRING && self.len > 0 {
            return None;
        }
        let (wide, mut rest) = (self.wide, &file[self.bytes.clone()]);
        let mut strings = Strings::default();
        for _ in 0..self.len {
            // The lengths were checked with the header.
            let n;
            (n, rest) = if wide {
                let (n, rest) = rest.split_first_chunk()?;
                (u64::from_le_bytes(*n) as usize, rest)
            } else {
                let (n, rest) = rest.split_first_chunk()?;
                (u32::from_le_bytes(*n) as usize, rest)
            };
            let (text, after) = rest.split_at_checked(n)?;
            strings.push(&lossy(text));
            rest = after;
        }
        Some(strings)
    }
}

/// Replaces invalid UTF-8, which some published vocabularies contain.
pub(super) fn lossy(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// Concatenated strings. A vocabulary has hundreds of thousands of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Strings {
    text: String,
    ends: Vec<usize>,
}

impl Strings {
    fn push(&mut self, text: &str) {
        self.text += text;
        self.ends.push(self.text.len());
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.text[start..end])
    }
}
