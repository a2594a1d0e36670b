//! Golden files of numbers.

use std::{fs, path::PathBuf};

use half::f16;
use safetensors::{Dtype, SafeTensors};

use super::Host;

/// One file of numbers in a folder of the golden files, or of the folder `KV_GOLDEN`.
pub(crate) struct File {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

fn folder(name: &str) -> PathBuf {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    PathBuf::from(std::env::var_os("KV_GOLDEN").unwrap_or(default.into())).join(name)
}

impl File {
    pub(crate) fn read(in_folder: &str, name: &str) -> Self {
        let path = folder(in_folder).join(name);
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { name: name.to_string(), bytes }
    }

    /// Reads all files with tensors in a folder.
    pub(crate) fn all(in_folder: &str) -> Vec<Self> {
        let path = folder(in_folder);
        let entries = fs::read_dir(&path);
        let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name.ends_with(".safetensors")).collect();
        names.sort();
        assert!(!names.is_empty(), "no files in {}", path.display());
        names.iter().map(|name| Self::read(in_folder, name)).collect()
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }

    /// Returns the names of all tensors, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.tensors().names().into_iter().map(str::to_string).collect();
        names.sort();
        names
    }

    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.tensors().tensor(tensor).is_ok()
    }

    fn bytes<const N: usize>(&self, tensor: &str) -> Vec<[u8; N]> {
        let tensors = self.tensors();
        let view = tensors.tensor(tensor);
        let view = view.unwrap_or_else(|error| panic!("{}: {tensor}: {error}", self.name));
        assert_eq!(view.dtype().bitsize(), 8 * N, "{}: {tensor}: type", self.name);
        view.data().as_chunks::<N>().0.to_vec()
    }

    pub(crate) fn f32s(&self, tensor: &str) -> Vec<f32> {
        self.bytes(tensor).into_iter().map(f32::from_le_bytes).collect()
    }

    pub(crate) fn halves(&self, tensor: &str) -> Vec<f16> {
        self.bytes(tensor).into_iter().map(f16::from_le_bytes).collect()
    }

    pub(crate) fn codes(&self, tensor: &str) -> Vec<u8> {
        self.bytes(tensor).into_iter().map(|[byte]| byte).collect()
    }

    pub(crate) fn input(&self) -> Host {
        let shape = self.tensors().tensor("input").unwrap().shape().try_into().unwrap();
        Host { data: self.f32s("input"), shape }
    }

    /// Returns the stored form of the scales: f16 bits, or bytes.
    pub(crate) fn parameters(&self, tensor: &str) -> Vec<u16> {
        match self.tensors().tensor(tensor).unwrap().dtype() {
            Dtype::F16 => self.halves(tensor).into_iter().map(f16::to_bits).collect(),
            _ => self.codes(tensor).into_iter().map(u16::from).collect(),
        }
    }
}
