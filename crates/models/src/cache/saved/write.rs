//! Writes a cache to a file.

use std::{collections::BTreeMap, fs, io, path::Path};

use burn::tensor::{DType, TensorData};
use safetensors::Dtype;

use super::{
    super::{
        ModelCache,
        layer::Part,
        prompt::{Checkpoint, PromptCache},
    },
    CHECKSUMS, KEY, SavedAs, TOKENS,
    header::{Header, Layer, Maker, RopeMark, VERSION},
};
use crate::{
    error::{Error, Result},
    files::failed,
    model::LanguageModel,
    save::file::{TensorFile, TensorId},
};

impl ModelCache {
    /// Saves the cache; [`SavedCache`](super::SavedCache) resumes from the file. `model` filled the
    /// cache, `name` is its name in messages, and `tokens` are the tokens of each sequence.
    ///
    /// The file has a capacity of the saved tokens. It is written beside `path` and moved there
    /// when it is complete.
    ///
    /// # Errors
    /// Fails for another number of tokens than in the cache, for a `model` with other layers, and
    /// for system errors. A file that was at `path` is then unchanged.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        model: &LanguageModel,
        name: &str,
        tokens: &[impl AsRef<[u32]>],
    ) -> Result<()> {
        let named = SavedAs { model: name, ..SavedAs::default() };
        let header = self.header(model, Maker::new(model, name)?, &named, &[])?;
        self.write(path.as_ref(), &header, tokens, &[])
    }

    /// Writes a file with this header, tokens and checkpoints.
    pub(super) fn write(
        &self,
        path: &Path,
        header: &Header,
        tokens: &[impl AsRef<[u32]>],
        checkpoints: &[Checkpoint],
    ) -> Result<()> {
        let given: Vec<usize> = tokens.iter().map(|tokens| tokens.as_ref().len()).collect();
        if given != self.lens() {
            let rule = format!("the sequences of the cache hold {:?}", self.lens());
            return Err(Error::argument("tokens", format!("{given:?}"), rule));
        }
        // Serialization cannot fail, because all map keys are strings.
        let header = serde_json::to_string(header).unwrap_or_default();
        let tokens: Vec<u32> = tokens.iter().flat_map(|tokens| tokens.as_ref()).copied().collect();
        let mut listed = self.listed(tokens.len())?;
        let n_whole = listed.len();
        let mut kept_data = vec![];
        for (i, checkpoint) in checkpoints.iter().enumerate() {
            for (n, (layer, data)) in self.layers.iter().zip(&checkpoint.layers).enumerate() {
                let kept = layer.plan().with_capacity(checkpoint.len).kept()?;
                listed.extend(kept.into_iter().map(|Part { name, dtype, shape }| {
                    (super::checkpoint_name(i, n, name), dtype_of(dtype), shape)
                }));
                kept_data.extend(data);
            }
        }

        // A link stays, and its target is replaced.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        let mut file = CheckedFile::create(&target, path, header, &listed)?;
        let n = self.len().max(1);
        let mut place = 0;
        for layer in &self.layers {
            for data in layer.resized(n)?.into_data()? {
                file.put(place, &data)?;
                place += 1;
            }
        }
        file.put(n_whole - 1, &TensorData::new(tokens.clone(), [tokens.len()]))?;
        for (i, data) in kept_data.into_iter().enumerate() {
            file.put(n_whole + i, data)?;
        }
        file.finish(&target, path)
    }

    /// Returns the metadata of the file. `maker` describes `model`.
    pub(super) fn header(
        &self,
        model: &LanguageModel,
        maker: Maker,
        &SavedAs { model: name, cache, talk }: &SavedAs<'_>,
        checkpoints: &[Checkpoint],
    ) -> Result<Header> {
        let (spec, batch) = (model.spec(), self.batch());
        let owners: Vec<_> = spec.owners().map(|(_, layer)| layer).collect();
        let n_layers = (self.layers.len(), owners.len());
        let mut pairs = self.layers.iter().zip(owners.iter().copied());
        if n_layers.0 != n_layers.1 || !pairs.all(|(cache, layer)| cache.fits(layer, batch)) {
            let rule = "its layers differ from those of the cache";
            return Err(Error::argument("model", name, rule));
        }
        let n = self.len().max(1);
        let caches = self.layers.iter().map(|layer| layer.plan().config.with_capacity(n));
        let layers = owners.into_iter().zip(caches);
        Ok(Header {
            version: VERSION,
            model: maker,
            layers: layers.map(|(layer, cache)| Layer::new(layer, cache)).collect(),
            ropes: RopeMark::all(spec, self.room()),
            lens: self.lens().to_vec(),
            cache: cache.map(Into::into),
            talk: talk.to_vec(),
            checkpoints: checkpoints.iter().map(|checkpoint| checkpoint.len).collect(),
            salt: None,
            block_tokens: None,
        })
    }

    /// Lists the tensors of layers and tokens.
    fn listed(&self, n_tokens: usize) -> Result<Vec<Listed>> {
        let mut listed = vec![];
        for (i, layer) in self.layers.iter().enumerate() {
            let parts = layer.plan().with_capacity(self.len().max(1)).parts()?;
            listed.extend(
                parts.into_iter().map(|Part { name, dtype, shape }| {
                    (super::name(i, name), dtype_of(dtype), shape)
                }),
            );
        }
        listed.push((TOKENS.into(), Dtype::U32, vec![n_tokens]));
        Ok(listed)
    }
}

impl PromptCache {
    /// Saves the cache and its checkpoints; [`SavedCache`](super::SavedCache) resumes from the
    /// file.
    ///
    /// # Errors
    /// Fails as [`ModelCache::save`] does.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        model: &LanguageModel,
        named: &SavedAs<'_>,
    ) -> Result<()> {
        // A checkpoint at the end equals the cache.
        let n = self.checkpoints.partition_point(|checkpoint| checkpoint.len < self.tokens.len());
        let (maker, checkpoints) = (Maker::new(model, named.model)?, &self.checkpoints[..n]);
        let header = self.cache.header(model, maker, named, checkpoints)?;
        self.cache.write(path.as_ref(), &header, &[&self.tokens], checkpoints)
    }
}

/// The name, type and shape of a tensor in the file.
type Listed = (String, Dtype, Vec<usize>);

/// A file whose last tensor has the checksums of the others.
struct CheckedFile<'a> {
    file: TensorFile<'a>,
    listed: &'a [Listed],
    places: Vec<TensorId>,
    sums_place: TensorId,
    /// The checksums by tensor name.
    sums: BTreeMap<&'a str, u32>,
}

impl<'a> CheckedFile<'a> {
    fn create(
        target: &'a Path,
        path: &'a Path,
        header: String,
        listed: &'a [Listed],
    ) -> Result<Self> {
        if fs::metadata(target).is_ok_and(|found| !found.is_file()) {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file");
            return Err(failed(path)(error));
        }
        let mut file = TensorFile::new(target, path).with_metadata(KEY, header);
        let add = |(name, dtype, shape): &Listed| file.add(name.clone(), *dtype, shape.clone());
        let places = listed.iter().map(add).collect();
        let sums_place = file.add(CHECKSUMS.into(), Dtype::U32, vec![listed.len() + 1]);
        Ok(Self { file: file.begin()?, listed, places, sums_place, sums: BTreeMap::new() })
    }

    /// Writes tensor `i` of the list.
    fn put(&mut self, i: usize, data: &TensorData) -> Result<()> {
        let bytes = data.as_bytes();
        self.sums.insert(&*self.listed[i].0, crc32fast::hash(bytes));
        self.file.write(self.places[i], 0, bytes)
    }

    /// Writes the checksums and moves the file to `target`.
    fn finish(mut self, target: &Path, path: &Path) -> Result<()> {
        let header_sum = crc32fast::hash(self.file.header());
        let sums = [header_sum].into_iter().chain(self.sums.into_values());
        let bytes: Vec<u8> = sums.flat_map(u32::to_le_bytes).collect();
        self.file.write(self.sums_place, 0, &bytes)?;
        let file = self.file.finish()?;
        file.as_file().sync_all().map_err(failed(path))?;
        file.persist(target).map_err(|error| failed(path)(error.error))?;
        Ok(())
    }
}

/// Returns the name of a type in safetensors files.
fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::U32 => Dtype::U32,
        _ => Dtype::F32,
    }
}
