//! Named tensors of a checkpoint, read one at a time.

use std::{
    collections::{BTreeMap, btree_map},
    path::{Path, PathBuf},
};

use burn::{
    module::Param,
    tensor::{Bytes, DType, Device, Tensor, TensorData},
};
use burn_store::burn_pack::Tensor as PackTensor;
use half::{bf16, f16};

use crate::{Error, Result};

/// Tensors that have not been read yet, under their Hugging Face names.
///
/// Each is checked for presence, shape, type and finite values when taken, converted to f32, and
/// handed to the device, so that at most one of them is in host memory beside the model.
pub(crate) struct Weights {
    path: PathBuf,
    tensors: BTreeMap<String, Entry>,
    conv1d: bool,
    spell: fn(&str) -> String,
    /// The prefix that [`strip_prefix`](Self::strip_prefix) removed, for messages.
    prefix: &'static str,
}

struct Entry {
    tensor: PackTensor,
    /// The name in the file, for messages.
    name: String,
    path: PathBuf,
}

impl Entry {
    fn bytes(&self) -> Result<Bytes> {
        self.tensor.to_bytes().map_err(|error| Error::Tensor {
            path: self.path.clone(),
            tensor: self.name.clone(),
            why: error.to_string(),
        })
    }
}

impl Weights {
    /// No tensors yet; `path` is what messages call the checkpoint.
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.into(),
            tensors: BTreeMap::new(),
            conv1d: true,
            spell: str::to_string,
            prefix: "",
        }
    }

    /// [`new`](Self::new) for a GGUF file, in which GPT-2's projections are `[d_output, d_input]`;
    /// `spell` gives the file's name for a tensor.
    pub(crate) fn of_gguf(path: &Path, spell: fn(&str) -> String) -> Self {
        Self { conv1d: false, spell, ..Self::new(path) }
    }

    /// Adds a tensor of `file` under the name the importers know.
    ///
    /// # Errors
    ///
    /// A name that is there already: it is not known which of the two tensors is meant.
    pub(crate) fn insert(&mut self, name: String, tensor: PackTensor, file: &Path) -> Result<()> {
        let entry = Entry { name: tensor.name.clone(), tensor, path: file.into() };
        self.add(name, entry)
    }

    fn add(&mut self, name: String, entry: Entry) -> Result<()> {
        match self.tensors.entry(name) {
            btree_map::Entry::Vacant(place) => {
                place.insert(entry);
                Ok(())
            }
            btree_map::Entry::Occupied(other) => {
                let Entry { name, path, .. } = other.get();
                let why = format!("is there twice, in {} as {name}", path.display());
                Err(Error::Tensor { path: entry.path, tensor: entry.name, why })
            }
        }
    }

    /// Replaces the data of a tensor that was inserted before.
    pub(crate) fn replace(&mut self, name: &str, tensor: PackTensor) {
        if let Some(entry) = self.tensors.get_mut(name) {
            entry.tensor = tensor;
        }
    }

    /// Forgets `copy` where it holds the same numbers as `original`, which stays.
    pub(crate) fn forget_copy(&mut self, copy: &str, original: &str) -> Result<()> {
        let (Some(a), Some(b)) = (self.tensors.get(copy), self.tensors.get(original)) else {
            return Ok(());
        };
        let alike = a.tensor.shape == b.tensor.shape && a.tensor.dtype == b.tensor.dtype;
        if alike && a.bytes()?[..] == b.bytes()?[..] {
            self.tensors.remove(copy);
        }
        Ok(())
    }

    /// Ends an import: fails when tensors are left that the model has no place for, because without
    /// them it would not compute what was trained.
    ///
    /// `harmless` says which may be left because they follow from the configuration.
    pub(crate) fn finish(&self, family: &str, harmless: fn(&str) -> bool) -> Result<()> {
        let left = self.tensors.iter().filter(|(name, _)| !harmless(name));
        let tensors: Vec<_> = left.map(|(_, entry)| entry.name.clone()).collect();
        if tensors.is_empty() {
            return Ok(());
        }
        Err(Error::Leftover { path: self.path.clone(), family: family.into(), tensors })
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor as stored.
    pub(crate) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|entry| entry.tensor.shape.to_vec())
    }

    /// Drops a prefix that some exports of a family have and others lack.
    ///
    /// # Errors
    ///
    /// A tensor that is there both with the prefix and without it.
    pub(crate) fn strip_prefix(&mut self, prefix: &'static str) -> Result<()> {
        if self.tensors.keys().any(|name| name.starts_with(prefix)) {
            self.prefix = prefix;
        }
        for (name, entry) in std::mem::take(&mut self.tensors) {
            let stripped = name.strip_prefix(prefix).map(str::to_string);
            self.add(stripped.unwrap_or(name), entry)?;
        }
        Ok(())
    }

    /// Fails when the checkpoint has nothing in common with a family's names.
    pub(crate) fn check_family(&self, family: &str, expected: &str) -> Result<()> {
        let layers = if family == "GPT-2" { "h.0." } else { "layers.0." };
        if self.contains(expected) || self.tensors.keys().any(|name| name.starts_with(layers)) {
            return Ok(());
        }
        Err(Error::Foreign {
            path: self.path.clone(),
            n_tensors: self.tensors.len(),
            family: family.into(),
            expected: (self.spell)(expected),
            found: self.tensors.values().next().map_or("none".into(), |entry| entry.name.clone()),
        })
    }

    /// Takes matrices of `[rows, columns]` and stacks their rows.
    pub(crate) fn matrix(
        &mut self,
        parts: &[(String, usize)],
        columns: usize,
        device: &Device,
    ) -> Result<Param<Tensor<2>>> {
        let mut values = Vec::new();
        let mut n_rows = 0;
        for (name, rows) in parts {
            self.read(name, &[*rows, columns], &mut values)?;
            n_rows += rows;
        }
        Ok(Param::from_data(TensorData::new(values, [n_rows, columns]), device))
    }

    /// Takes vectors and joins them.
    pub(crate) fn vector(
        &mut self,
        parts: &[(String, usize)],
        device: &Device,
    ) -> Result<Param<Tensor<1>>> {
        let mut values = Vec::new();
        for (name, len) in parts {
            self.read(name, &[*len], &mut values)?;
        }
        let len = values.len();
        Ok(Param::from_data(TensorData::new(values, [len]), device))
    }

    /// Takes a vector to the host.
    pub(crate) fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        self.read(name, &[len], &mut values)?;
        Ok(values)
    }

    /// Takes a GPT-2 projection as `[d_output, d_input]`, transposing where the checkpoint needs it.
    pub(crate) fn conv1d(
        &mut self,
        name: &str,
        d_input: usize,
        d_output: usize,
        device: &Device,
    ) -> Result<Param<Tensor<2>>> {
        if !self.conv1d {
            return self.matrix(&[(name.to_string(), d_output)], d_input, device);
        }
        let mut stored = Vec::new();
        self.read(name, &[d_input, d_output], &mut stored)?;
        let mut values = vec![0.0; stored.len()];
        for (i, row) in stored.chunks_exact(d_output).enumerate() {
            for (o, value) in row.iter().enumerate() {
                values[o * d_input + i] = *value;
            }
        }
        Ok(Param::from_data(TensorData::new(values, [d_output, d_input]), device))
    }

    /// Takes one tensor, appending its values to `values` as f32.
    fn read(&mut self, name: &str, expected: &[usize], values: &mut Vec<f32>) -> Result<()> {
        let Some(entry) = self.tensors.remove(name) else {
            let prefix = if name.starts_with("lm_head") { "" } else { self.prefix };
            let tensor = format!("{prefix}{}", (self.spell)(name));
            return Err(Error::MissingTensor { path: self.path.clone(), tensor });
        };
        let actual = entry.tensor.shape.to_vec();
        if actual != expected {
            let Entry { name: tensor, path, .. } = entry;
            return Err(Error::Shape { path, tensor, actual, expected: expected.to_vec() });
        }
        let bytes = entry.bytes()?;
        let Entry { tensor: PackTensor { dtype, .. }, name, path } = entry;
        let start = values.len();
        values.reserve_exact(expected.iter().product());
        match dtype {
            DType::F32 => values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes(four(b)))),
            DType::F16 => {
                values.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes(two(b)).to_f32()));
            }
            DType::BF16 => {
                values.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(two(b)).to_f32()));
            }
            other => {
                let why = format!("type {other:?} is not one of f32, f16, bf16");
                return Err(Error::Tensor { path, tensor: name, why });
            }
        }
        match values[start..].iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(index) => {
                let value = values[start + index];
                Err(Error::NonFinite { path, tensor: name, value, index })
            }
        }
    }
}

fn four(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

fn two(bytes: &[u8]) -> [u8; 2] {
    [bytes[0], bytes[1]]
}
