//! A safetensors file whose tensors are written in any order, some rows at a time.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    path::Path,
};

use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::{
    error::{Error, Result},
    files::{failed, staged::stage},
};

/// A tensor of a [`TensorFile`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorId(usize);

#[derive(Debug)]
struct Listed {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// The offset of its first byte in the file.
    start: u64,
}

impl Listed {
    fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }
}

/// A safetensors file. All tensors are [added](Self::add) first, and then [written](Self::write).
#[derive(Debug)]
pub(crate) struct TensorFile<'a> {
    at: &'a Path,
    path: &'a Path,
    tensors: Vec<Listed>,
    metadata: BTreeMap<&'static str, String>,
    /// The header, once the file has been created.
    header: Vec<u8>,
    file: Option<NamedTempFile>,
}

impl<'a> TensorFile<'a> {
    /// Prepares a file at `at` that messages call `path`.
    pub(crate) fn new(at: &'a Path, path: &'a Path) -> Self {
        let metadata = BTreeMap::from([("format", "pt".into())]);
        Self { at, path, tensors: vec![], metadata, header: vec![], file: None }
    }

    #[must_use]
    pub(crate) fn with_metadata(mut self, key: &'static str, value: String) -> Self {
        self.metadata.insert(key, value);
        self
    }

    pub(crate) fn add(&mut self, name: String, dtype: Dtype, shape: Vec<usize>) -> TensorId {
        self.tensors.push(Listed { name, dtype, shape, start: 0 });
        TensorId(self.tensors.len() - 1)
    }

    pub(crate) fn begin(mut self) -> Result<Self> {
        // Wide types come first, so that each tensor begins at a multiple of its type's size.
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_by_key(|&i| core::cmp::Reverse(self.tensors[i].dtype.bitsize()));
        let (mut offset, mut header) = (0, BTreeMap::<&str, Value>::new());
        for &i in &order {
            self.tensors[i].start = offset;
            offset += self.tensors[i].bytes();
        }
        for tensor in &self.tensors {
            let Listed { name, dtype, shape, start } = tensor;
            let range = [*start, start + tensor.bytes()];
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": range});
            if header.insert(name, entry).is_some() {
                let why = "occurs twice".into();
                return Err(Error::Tensor { path: self.path.into(), tensor: name.clone(), why });
            }
        }
        header.insert("__metadata__", json!(self.metadata));
        let mut header = serde_json::to_vec(&header).unwrap_or_default();
        header.resize(header.len().next_multiple_of(8), b' ');
        let data = 8 + header.len() as u64;
        for tensor in &mut self.tensors {
            tensor.start += data;
        }
        let mut file = stage(self.at).map_err(failed(self.path))?;
        let written = file
            .write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| file.write_all(&header))
            .and_then(|()| reserve(file.as_file(), data + offset));
        written.map_err(failed(self.path))?;
        self.file = Some(file);
        self.header = header;
        Ok(self)
    }

    /// Returns the header without its length.
    pub(crate) fn header(&self) -> &[u8] {
        &self.header
    }

    /// Writes bytes of a tensor, beginning with byte `from`.
    pub(crate) fn write(&mut self, TensorId(i): TensorId, from: usize, bytes: &[u8]) -> Result<()> {
        let start = self.tensors[i].start + from as u64;
        let file = self.file.as_mut().expect("begin has made it");
        file.seek(SeekFrom::Start(start))
            .and_then(|_| file.write_all(bytes))
            .map_err(failed(self.path))
    }

    pub(crate) fn finish(self) -> Result<NamedTempFile> {
        Ok(self.file.expect("begin has made it"))
    }
}

/// Sets the length of the file. If the system can reserve the space, a full disk is found before
/// hours of work.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::{
            fs::{FallocateFlags, fallocate},
            io::Errno,
        };
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            result => return result.map_err(io::Error::from),
        }
    }
    file.set_len(bytes)
}
