//! The header of a GGUF file. Every length is checked against the file.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::{collections::HashMap, ops::Range, path::Path};

use super::{
    block::NumberType,
    value::{ARRAY, Array, STRING, Value, lossy},
};
use crate::error::{Error, Result};

/// One entry of the tensor directory, whose bytes lie inside the file.
#[derive(Clone, Debug)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    /// The outermost dimension first; the file has the reverse order.
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: NumberType,
    pub(crate) bytes: Range<usize>,
}

#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) metadata: HashMap<String, Value>,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// The deepest nesting of arrays. It keeps a hostile file from overflowing the stack.
const MAX_DEPTH: usize = 4;
const MAX_DIMS: usize = 4;

impl Header {
    /// Reads the header of `file`, whose name is `path`.
    pub(crate) fn read(file: &[u8], path: &Path) -> Result<Self> {
        let mut cursor = Cursor { file, at: 0, path, wide: true };
        if cursor.take(4, "magic")? != b"GGUF" {
            return Err(cursor.malformed("it does not start with the magic GGUF"));
        }
        match cursor.u32("version")? {
            1 => cursor.wide = false,
            2 | 3 => {}
            version => {
                return Err(cursor.malformed(format!("version {version} is not 1, 2 or 3")));
            }
        }
        let n_tensors = cursor.count("tensor count", 24)?;
        let n_values = cursor.count("metadata count", 13)?;

        let mut metadata = HashMap::new();
        for i in 0..n_values {
            let key = cursor.string(&format!("metadata key {i}"))?;
            let kind = cursor.u32(&key)?;
            let value = cursor.value(kind, &key)?;
            metadata.insert(key, value);
        }
        let mut raw = Vec::new();
        for i in 0..n_tensors {
            raw.push(cursor.tensor(i)?);
        }

        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(&Value::Unsigned(n)) if n > 0 && n.is_multiple_of(8) && n <= 1 << 20 => n as usize,
            Some(other) => {
                let rule = "must be a multiple of 8, at most 1048576";
                return Err(Error::config(path, "general.alignment", other.to_string(), rule));
            }
        };
        let data = cursor.at.next_multiple_of(alignment);
        let tensors = raw
            .into_iter()
            .map(|tensor| tensor.place(data, file.len(), path))
            .collect::<Result<Vec<_>>>()?;
        apart(&tensors, path)?;
        Ok(Self { metadata, tensors })
    }
}

/// Rejects tensors that share bytes. No writer makes them, and one of the two would be wrong.
fn apart(tensors: &[TensorInfo], path: &Path) -> Result<()> {
    let mut in_order: Vec<_> = tensors.iter().filter(|tensor| !tensor.bytes.is_empty()).collect();
    in_order.sort_by_key(|tensor| tensor.bytes.start);
    match in_order.windows(2).find(|pair| pair[1].bytes.start < pair[0].bytes.end) {
        None => Ok(()),
        Some(pair) => {
            let [first, second] = [0, 1].map(|i| {
                let TensorInfo { name, bytes, .. } = pair[i];
                format!("{name} at bytes {} to {}", bytes.start, bytes.end)
            });
            let why = format!(
                "tensors {first} and {second} overlap, and each must have its own bytes; convert \
                 the model again"
            );
            Err(Error::Malformed { path: path.into(), format: "GGUF", why })
        }
    }
}

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
    path: &'a Path,
    /// Lengths are 64 bits from version 2 on.
    wide: bool,
}

impl<'a> Cursor<'a> {
    fn malformed(&self, why: impl Into<String>) -> Error {
        Error::Malformed { path: self.path.into(), format: "GGUF", why: why.into() }
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let rest = &self.file[self.at..];
        let Some(bytes) = rest.get(..n) else {
            return Err(self.malformed(format!(
                "truncated at byte {}: {what} needs {n} bytes, {} are left",
                self.at,
                rest.len()
            )));
        };
        self.at += n;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N, what)?);
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn length(&mut self, what: &str) -> Result<u64> {
        if self.wide { self.u64(what) } else { self.u32(what).map(u64::from) }
    }

    /// Reads a number of entries of at least `min_bytes` each, for which the rest of the file must
    /// have space.
    fn count(&mut self, what: &str, min_bytes: usize) -> Result<usize> {
        let count = self.length(what)?;
        let left = self.file.len() - self.at;
        let fits = (left / if self.wide { min_bytes } else { 1 }) as u64;
        if count > fits {
            return Err(self.malformed(format!(
                "{what} {count} does not fit into the {left} bytes left in the file"
            )));
        }
        Ok(count as usize)
    }

    fn string(&mut self, what: &str) -> Result<String> {
        self.text(what).map(|bytes| lossy(bytes).into_owned())
    }

    fn text(&mut self, what: &str) -> Result<&'a [u8]> {
        let n = self.count(what, 1)?;
        self.take(n, what)
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.array::<1>(key)?[0])),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.array(key)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(key)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.array(key)?))),
            4 => Value::Unsigned(u64::from(self.u32(key)?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.array(key)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            7 => Value::Bool(self.array::<1>(key)?[0] != 0),
            STRING => Value::String(self.string(key)?),
            ARRAY => Value::Array(self.skip_array(key, 0)?),
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(self.unknown(other, key)),
        })
    }

    fn unknown(&self, kind: u32, key: &str) -> Error {
        self.malformed(format!("{key} has unknown value type {kind}"))
    }

    /// Skips an array and returns its location.
    fn skip_array(&mut self, key: &str, depth: usize) -> Result<Array> {
        if depth == MAX_DEPTH {
            return Err(self.malformed(format!("{key} nests arrays more than {MAX_DEPTH} deep")));
        }
        let kind = self.u32(key)?;
        let item_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            ARRAY => 12,
            _ => 8,
        };
        let len = self.count(key, item_bytes)?;
        let start = self.at;
        match kind {
            STRING => {
                for _ in 0..len {
                    self.text(key)?;
                }
            }
            ARRAY => {
                for _ in 0..len {
                    self.skip_array(key, depth + 1)?;
                }
            }
            0..=7 | 10..=12 => {
                self.take(len.saturating_mul(item_bytes), key)?;
            }
            _ if len > 0 => return Err(self.unknown(kind, key)),
            _ => {}
        }
        Ok(Array { kind, len, bytes: start..self.at, wide: self.wide })
    }

    fn tensor(&mut self, i: usize) -> Result<RawTensor> {
        let name = self.string(&format!("name of tensor {i}"))?;
        let n_dims = self.u32(&name)? as usize;
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(
                self.malformed(format!("tensor {name} has {n_dims} dimensions, not 1 to 4"))
            );
        }
        let mut dims = (0..n_dims).map(|_| self.length(&name)).collect::<Result<Vec<_>>>()?;
        dims.reverse();
        let kind = self.u32(&name)?;
        let offset = self.u64(&name)?;
        Ok(RawTensor { name, dims, kind, offset })
    }
}

struct RawTensor {
    name: String,
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl RawTensor {
    /// Locates the tensor's bytes, which must lie inside the file.
    fn place(self, data: usize, file_len: usize, path: &Path) -> Result<TensorInfo> {
        let Self { name, dims, kind, offset } = self;
        let Some(kind) = NumberType::of(kind) else {
            let why = format!("tensor {name} of {} has it", path.display());
            return Err(Error::unsupported(format!("GGML type {}", ggml_name(kind)), why));
        };
        let row = dims.last().copied().unwrap_or(0);
        if !row.is_multiple_of(kind.block_numbers() as u64) {
            let why = format!("rows of {row} are not whole blocks of {}", kind.block_numbers());
            return Err(Error::Tensor { path: path.into(), tensor: name, why });
        }
        if !offset.is_multiple_of(8) {
            let why = format!("offset {offset} is not a multiple of 8");
            return Err(Error::Tensor { path: path.into(), tensor: name, why });
        }
        let n_bytes = dims
            .iter()
            .try_fold(1u64, |n, dim| n.checked_mul(*dim))
            .map(|n| n / kind.block_numbers() as u64)
            .and_then(|n| n.checked_mul(kind.block_bytes() as u64));
        let start = offset.checked_add(data as u64);
        let end = start.zip(n_bytes).and_then(|(start, n)| start.checked_add(n));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_len as u64 => Ok(TensorInfo {
                shape: dims.iter().map(|&dim| dim as usize).collect(),
                name,
                kind,
                bytes: start as usize..end as usize,
            }),
            _ => Err(Error::Malformed {
                path: path.into(),
                format: "GGUF",
                why: format!(
                    "truncated: tensor {name} of shape {dims:?} at offset {offset} ends past the \
                     file's {file_len} bytes"
                ),
            }),
        }
    }
}

fn ggml_name(kind: u32) -> String {
    let name = match kind {
        9 => "Q8_1",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24..=28 => "of integers or f64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        _ => "unknown",
    };
    format!("{kind} ({name})")
}
