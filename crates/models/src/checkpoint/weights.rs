//! Named tensors of a checkpoint, which are read one at a time.

use std::{
    collections::{BTreeMap, btree_map},
    path::{Path, PathBuf},
};

use burn::{
    module::Param,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use burn_store::burn_pack::Tensor as PackTensor;

use kv_weights::{Activations, WeightFormat};

use super::{
    byte_float::ByteFloat,
    entry::{Blocks, Entry, split_pairs},
    kept::{Head, Kept},
    mapped::Stored,
    observer::{Planned, Watcher},
};
use crate::{
    cache_config::ModelCacheConfig,
    error::{Error, Result},
    exports::Names,
    float::{Float, append, with_float},
    gguf::GgufNames,
    nn::Matrix,
    spec::ModelSpec,
};

/// Tensors that have not been read yet, under their Hugging Face names.
///
/// A tensor is checked for presence, shape, type and finite values when it is taken. It is then
/// rounded to the model's type and moved to the device, so that host memory holds at most one
/// tensor beside the model.
#[derive(Debug)]
pub struct Weights {
    pub(super) path: PathBuf,
    pub(super) tensors: BTreeMap<String, Entry>,
    pub(super) device: Device,
    pub(super) dtype: DType,
    /// The names in a GGUF file, for messages.
    pub(super) gguf: Option<&'static GgufNames>,
    /// The names of the imported family, set by [`begin`](Self::begin).
    pub(super) names: Option<&'static Names>,
    /// The family's prefix of names in the file, for messages.
    prefix: &'static str,
    /// `true` if names in the file are [`Names::aliases`], for messages.
    aliased: bool,
    pub(super) notes: Vec<String>,
    /// The precision of activations with packed weights; `None` if all weights are restored.
    pub(super) packed: Option<Activations>,
    pub(super) kept: Kept,
    /// The format in which a head of floats is packed.
    pub(super) head: Option<Head>,
    /// The planned format of matrices; it replaces the stored one in sizes.
    pub(crate) planned: Option<WeightFormat>,
    /// The most bytes of a buffer of packed weights, if less than the device allows.
    pub(crate) largest_buffer: Option<u64>,
    pub(crate) watcher: Watcher,
    pub(crate) cache: Option<ModelCacheConfig>,
    /// The description of a checkpoint that does not exist.
    pub(super) outline: Option<Outline>,
}

/// A description of a checkpoint that does not exist.
#[derive(Clone, Debug)]
pub(crate) struct Outline {
    pub(crate) stored: DType,
    /// `true` if its experts are MXFP4 blocks.
    pub(crate) mxfp4: bool,
    /// Names and sizes of the model, once they are known.
    pub(super) model: Option<(&'static Names, ModelSpec)>,
}

impl Outline {
    pub(crate) fn new(stored: DType, mxfp4: bool) -> Self {
        Self { stored, mxfp4, model: None }
    }
}

impl Weights {
    /// Creates an empty checkpoint whose tensors will be on `device`. Messages call it `path`.
    /// `gguf` are the names in a GGUF file.
    pub(crate) fn new(path: &Path, gguf: Option<&'static GgufNames>, device: &Device) -> Self {
        Self {
            path: path.into(),
            tensors: BTreeMap::new(),
            device: device.clone(),
            dtype: DType::F32,
            gguf,
            names: None,
            prefix: "",
            aliased: false,
            notes: vec![],
            packed: None,
            kept: Kept::default(),
            head: None,
            planned: None,
            largest_buffer: None,
            watcher: Watcher::default(),
            cache: None,
            outline: None,
        }
    }

    /// Returns the device of the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns notes for users about how the model is computed, one line each.
    pub fn notes(&mut self) -> &mut Vec<String> {
        &mut self.notes
    }

    /// Adds a tensor of `file` under the name that importers use. The tensor is restored from
    /// `blocks`.
    ///
    /// # Errors
    /// Fails if the name exists already, because the two tensors are ambiguous.
    pub(crate) fn insert(
        &mut self,
        name: String,
        tensor: PackTensor,
        blocks: Option<Blocks>,
        file: &Path,
    ) -> Result<()> {
        self.add(name, Entry::new(tensor, file.into(), blocks))
    }

    /// Sets the type of the numbers of the tensor `name`, which Burn lacks.
    pub(crate) fn holds(&mut self, name: &str, float: ByteFloat) {
        if let Some(entry) = self.tensors.get_mut(name) {
            entry.byte_float = Some(float);
        }
    }

    /// Sets the location of the tensor `name` in a mapped file.
    pub(crate) fn lies_at(&mut self, name: &str, stored: Stored) {
        if let Some(entry) = self.tensors.get_mut(name) {
            entry.stored = Some(stored);
        }
    }

    pub(super) fn add(&mut self, name: String, entry: Entry) -> Result<()> {
        match self.tensors.entry(name) {
            btree_map::Entry::Vacant(place) => {
                place.insert(entry);
                Ok(())
            }
            btree_map::Entry::Occupied(other) => {
                let Entry { name, path, .. } = other.get();
                let why = format!("occurs twice, in {} as {name}", path.display());
                Err(Error::Tensor { path: entry.path, tensor: entry.name, why })
            }
        }
    }

    /// Starts the import of a family's model. Removes the prefix from names that have it, and with
    /// `tied_head` removes a head that repeats the embedding. Then passes the sizes of the model of
    /// `spec` to the [`LoadObserver`](crate::LoadObserver).
    ///
    /// # Errors
    /// Fails if no tensor has a name of the family, if a tensor exists both with and without the
    /// prefix, or if the observer rejects the model.
    pub fn begin(
        &mut self,
        names: &'static Names,
        spec: &ModelSpec,
        tied_head: bool,
    ) -> Result<()> {
        if self.is_outline() {
            self.names = Some(names);
            self.begin_outline(names, spec);
            return Ok(());
        }
        self.named(names)?;
        self.forget_shared(names, spec);
        if tied_head {
            self.forget_copy(names.head, names.embedding)?;
        }
        self.find_head(names)?;
        let weights = self.sizes(names);
        self.watcher.begin(&Planned::new(spec, &weights, self.cache.as_ref()))
    }

    /// Does what [`begin`](Self::begin) does with names, for a model that is not a decoder.
    ///
    /// # Errors
    /// Fails as [`begin`](Self::begin) does for names.
    pub fn named(&mut self, names: &'static Names) -> Result<()> {
        let Names { family, prefix, layers, embedding, .. } = *names;
        self.names = Some(names);
        let has = |prefix: &str| self.tensors.keys().any(|name| name.starts_with(prefix));
        let prefixes = names.text_prefix.into_iter().chain([prefix]);
        self.prefix = prefixes.into_iter().find(|prefix| has(prefix)).unwrap_or("");
        for (name, entry) in std::mem::take(&mut self.tensors) {
            let stripped = names.without_prefix(&name);
            let own = replaced(stripped, names.aliases.iter().copied());
            self.aliased |= own.is_some();
            self.add(own.unwrap_or_else(|| stripped.into()), entry)?;
        }
        self.forget_unused(names);
        let first_layer = format!("{layers}0.");
        let known = |name: &String| name == embedding || name.starts_with(&first_layer);
        if !self.tensors.keys().any(known) {
            let found = self.tensors.values().next();
            return Err(Error::Foreign {
                path: self.path.clone(),
                n_tensors: self.tensors.len(),
                family: family.into(),
                expected: self.spell(embedding),
                found: found.map_or("none".into(), |entry| entry.name.clone()),
            });
        }
        Ok(())
    }

    /// Removes `copy` if it equals `original`.
    fn forget_copy(&mut self, copy: &str, original: &str) -> Result<()> {
        let (Some(a), Some(b)) = (self.tensors.get(copy), self.tensors.get(original)) else {
            return Ok(());
        };
        let alike = a.tensor.shape == b.tensor.shape && a.tensor.dtype == b.tensor.dtype;
        let same = match (&a.stored, &b.stored) {
            (Some(a), Some(b)) => a.kind == b.kind && a.mapped.bytes() == b.mapped.bytes(),
            _ => alike && a.bytes()?[..] == b.bytes()?[..],
        };
        if alike && same {
            if let Some(stored) = &a.stored {
                stored.mapped.give_back();
            }
            self.tensors.remove(copy);
        }
        Ok(())
    }

    /// Ends an import.
    ///
    /// # Errors
    /// Fails if tensors are left over that the model does not use, because without them it would
    /// not compute what was trained. Tensors that follow from the configuration are allowed.
    pub fn finish(&mut self) -> Result<()> {
        let Some(names) = self.names else { return Ok(()) };
        if self.is_outline() {
            return self.finish_outline();
        }
        let left = self.tensors.iter().filter(|(name, _)| !(names.harmless)(name));
        let tensors: Vec<_> = left.map(|(_, entry)| entry.name.clone()).collect();
        if tensors.is_empty() {
            return Ok(());
        }
        Err(Error::Leftover { path: self.path.clone(), family: names.family.into(), tensors })
    }

    /// Returns whether the tensor exists and has not been taken.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the first dimension of a tensor as stored. A GGUF file may give the size of the
    /// vocabulary only in this way.
    ///
    /// # Errors
    /// Returns [`Error::MissingTensor`] if the tensor does not exist.
    pub fn rows(&self, name: &str) -> Result<usize> {
        let rows = |entry: &Entry| entry.tensor.shape.first().copied();
        self.tensors.get(name).and_then(rows).ok_or_else(|| self.missing(name))
    }

    /// Marks a tensor of `rows` rows as stored for interleaved rope, with the two halves of a head
    /// of `head_dim` rows alternating. When it is taken, rows 0, 2, 4, .. of each head come first,
    /// then rows 1, 3, 5, .. A tensor that is missing or has another shape is unchanged; the
    /// importer reports it.
    pub fn interleaved(&mut self, name: &str, rows: usize, head_dim: usize) {
        if let Some(entry) = self.tensors.get_mut(name)
            && entry.tensor.shape.first() == Some(&rows)
        {
            entry.interleaved = Some(head_dim);
        }
    }

    /// Returns the name in the file for a name that importers use.
    fn spell(&self, name: &str) -> String {
        if let Some(names) = self.gguf {
            return names.to_gguf(name);
        }
        let aliases = self.names.filter(|_| self.aliased).map_or(&[][..], |names| names.aliases);
        let aliases = aliases.iter().map(|(file, own)| (*own, *file));
        replaced(name, aliases).unwrap_or_else(|| name.into())
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        let is_head = self.names.is_some_and(|names| name == names.head);
        let prefix = if is_head { "" } else { self.prefix };
        let tensor = format!("{prefix}{}", self.spell(name));
        Error::MissingTensor { path: self.path.clone(), tensor }
    }

    /// Takes matrices of `[rows, columns]` and stacks their rows.
    pub(super) fn matrix(&mut self, parts: &[(String, usize)], columns: usize) -> Result<Matrix> {
        if self.is_outline() {
            return Ok(self.list_joined::<2>(parts, &[columns])?.into());
        }
        if let [(name, rows)] = parts
            && let Some(format) = self.quantized_head(name)
        {
            return self.take_head(name, format, [*rows, columns]);
        }
        if let Some(matrix) = self.take_packed(parts, columns)? {
            return Ok(matrix);
        }
        parts.iter().for_each(|(name, _)| self.count_restored(name));
        let data = self.join(parts, &[columns])?;
        Ok(self.param(data).into())
    }

    pub(super) fn vector(&mut self, parts: &[(String, usize)]) -> Result<Param<Tensor<1>>> {
        if self.is_outline() {
            return self.list_joined(parts, &[]);
        }
        let data = self.join(parts, &[])?;
        Ok(self.param(data))
    }

    /// Takes tensors with these numbers of rows and joins them; `row` is the shape of a row.
    pub(super) fn join(&mut self, parts: &[(String, usize)], row: &[usize]) -> Result<TensorData> {
        let shape = |rows: usize| [&[rows], row].concat();
        with_float!(
            self.dtype,
            T => {
                let mut values = Vec::<T>::new();
                for (name, rows) in parts {
                    self.read(name, &shape(*rows), &mut values)?;
                }
                Ok(TensorData::new(values, shape(parts.iter().map(|(_, rows)| rows).sum())))
            },
            else unreachable!("set_dtype takes floats")
        )
    }

    /// Returns a parameter in the type of `data`, not in the default type of the device.
    pub(super) fn param<const D: usize>(&self, data: TensorData) -> Param<Tensor<D>> {
        let (device, dtype) = (&self.device, data.dtype());
        let create = |data| Tensor::from_data(data, (device, dtype));
        Param::from_tensor(device.memory_persistent_allocations(data, create))
    }

    /// Takes a table of whole numbers from 0 up to, but not including, `end`, such as a table of
    /// experts. It is not a parameter.
    ///
    /// # Errors
    /// Fails for a tensor that is missing, has another shape, a type other than i64 and i32, or
    /// other numbers.
    pub fn indices(&mut self, name: &str, shape: [usize; 2], end: usize) -> Result<Tensor<2, Int>> {
        let to_device = |numbers: Vec<i32>, device: &Device| {
            Tensor::from_data(TensorData::new(numbers, shape), (device, DType::I32))
        };
        if self.is_outline() {
            self.list(name, &shape, DType::I64)?;
            return Ok(Tensor::zeros(shape, (&self.device, DType::I32)));
        }
        let entry = self.take(name, &shape)?;
        let (bytes, dtype) = (entry.bytes()?, entry.tensor.dtype);
        let numbers: Vec<i64> = match dtype {
            DType::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            DType::I32 => {
                bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect()
            }
            other => return Err(entry.flawed(format!("has type {other:?}, but must be I64"))),
        };
        let within = |number: &i64| usize::try_from(*number).is_ok_and(|number| number < end);
        if let Some((index, number)) = numbers.iter().enumerate().find(|(_, n)| !within(n)) {
            let why = format!("holds {number} at element {index}, but must be in 0..{end}");
            return Err(entry.flawed(why));
        }
        self.watcher.read(entry.in_file());
        Ok(to_device(numbers.into_iter().map(|number| number as i32).collect(), &self.device))
    }

    /// Takes a matrix by its full name, which need not end in `.weight`.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn table(&mut self, name: &str, [rows, columns]: [usize; 2]) -> Result<Matrix> {
        self.matrix(&[(name.into(), rows)], columns)
    }

    /// Takes a vector to the host in f32, whatever the type of the model.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        self.read(name, &[len], &mut values)?;
        Ok(values)
    }

    /// Removes a tensor from the list, and checks its shape.
    pub(super) fn take(&mut self, name: &str, expected: &[usize]) -> Result<Entry> {
        let entry = self.tensors.remove(name).ok_or_else(|| self.missing(name))?;
        let actual = entry.tensor.shape.to_vec();
        if actual != expected {
            let Entry { name: tensor, path, .. } = entry;
            return Err(Error::Shape { path, tensor, actual, expected: expected.to_vec() });
        }
        Ok(entry)
    }

    /// Takes one tensor and appends its values to `values`.
    pub(super) fn read<T: Float>(
        &mut self,
        name: &str,
        expected: &[usize],
        values: &mut Vec<T>,
    ) -> Result<()> {
        if self.is_outline() {
            self.list_floats(name, expected)?;
            values.resize(values.len() + expected.iter().product::<usize>(), T::round(0.0));
            return Ok(());
        }
        let entry = self.take(name, expected)?;
        let start = values.len();
        values.reserve_exact(expected.iter().product());
        let appended = match &entry.stored {
            Some(stored) => {
                let appended = stored.append(values);
                stored.mapped.give_back();
                appended
            }
            None => append(&entry.bytes()?, entry.tensor.dtype, values),
        };
        appended.map_err(|flaw| flaw.of(&entry.path, &entry.name))?;
        if let Some(head_dim) = entry.interleaved {
            entry.check_pairs(expected[0], head_dim)?;
            split_pairs(&mut values[start..], expected[0], head_dim);
        }
        self.watcher.read(entry.in_file());
        Ok(())
    }
}

/// Replaces the end of a name by the first pair that has it; `None` if no pair has it.
fn replaced<'a>(name: &str, mut pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    pairs.find_map(|(from, to)| name.strip_suffix(from).map(|start| format!("{start}{to}")))
}
