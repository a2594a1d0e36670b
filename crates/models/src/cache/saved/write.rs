//! Writes a cache to a file.

use std::{collections::BTreeMap, fs, io, path::Path};

use burn::tensor::{DType, TensorData};
use kv_cubecl::{CacheParts, layout::CacheLayout};
use safetensors::Dtype;

use super::{
    super::{
        ModelCache,
        prompt::{Checkpoint, kept},
    },
    CHECKSUMS, KEY, SavedAs, TOKENS,
    header::{Header, Layer, Maker, RopeMark, VERSION},
};
use crate::{Error, LanguageModel, Result, files::failed, save::file::TensorFile};

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
        self.write(path.as_ref(), model, &named, tokens, &[])
    }

    /// Runs [`save`](Self::save) with names, a conversation and checkpoints.
    pub(in crate::cache) fn write(
        &self,
        path: &Path,
        model: &LanguageModel,
        named: &SavedAs<'_>,
        tokens: &[impl AsRef<[u32]>],
        checkpoints: &[Checkpoint],
    ) -> Result<()> {
        let &SavedAs { model: name, cache, talk } = named;
        let given: Vec<usize> = tokens.iter().map(|tokens| tokens.as_ref().len()).collect();
        if given != self.lens() {
            let rule = format!("the sequences of the cache hold {:?}", self.lens());
            return Err(Error::argument("tokens", format!("{given:?}"), rule));
        }
        let (spec, batch) = (model.spec(), self.batch());
        let shapes = spec.layers.iter().map(|layer| layer.cache_shape(batch));
        if !self.layers.iter().map(|layer| layer.layout().shape()).eq(shapes) {
            let rule = "its layers differ from those of the cache";
            return Err(Error::argument("model", name, rule));
        }
        let n = self.len().max(1);
        let caches = self.layers.iter().map(|layer| layer.layout().config().with_capacity(n));
        let layers = spec.layers.iter().zip(caches);
        let header = Header {
            version: VERSION,
            model: Maker::new(model, name)?,
            layers: layers.map(|(layer, cache)| Layer::new(layer, cache)).collect(),
            ropes: RopeMark::all(spec, self.room()),
            lens: given,
            cache: cache.map(Into::into),
            talk: talk.to_vec(),
            checkpoints: checkpoints.iter().map(|checkpoint| checkpoint.len).collect(),
        };
        // Serialization cannot fail, because all map keys are strings.
        let header = serde_json::to_string(&header).unwrap_or_default();

        let tokens: Vec<u32> = tokens.iter().flat_map(|tokens| tokens.as_ref()).copied().collect();
        let mut listed = vec![];
        for (i, layer) in self.layers.iter().enumerate() {
            let config = layer.layout().config().with_capacity(n);
            let layout = CacheLayout::new(&config, layer.layout().shape())?;
            let words = layout.sides().map(|side| side.words(layout.slices()));
            let float = dtype_of(config.float.dtype());
            listed.extend([
                (super::name(i, "keys"), Dtype::U32, vec![words.keys]),
                (super::name(i, "values"), Dtype::U32, vec![words.values]),
                (super::name(i, "floats"), float, layout.float_shape().to_vec()),
            ]);
        }
        listed.push((TOKENS.into(), Dtype::U32, vec![tokens.len()]));
        let n_whole = listed.len();
        let mut kept_data = vec![];
        for (i, checkpoint) in checkpoints.iter().enumerate() {
            for (n, (layer, data)) in self.layers.iter().zip(&checkpoint.layers).enumerate() {
                for (part, data) in kept(layer.layout().config()).iter().zip(data) {
                    let dtype = dtype_of(data.dtype());
                    listed.push((super::checkpoint_name(i, n, part), dtype, data.shape().to_vec()));
                    kept_data.push(data);
                }
            }
        }

        // A link stays, and its target is replaced.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        if fs::metadata(&target).is_ok_and(|found| !found.is_file()) {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file");
            return Err(failed(path)(error));
        }
        let mut file = TensorFile::new(&target, path).with_metadata(KEY, header);
        let list = |(name, dtype, shape): &(String, Dtype, Vec<usize>)| {
            file.add(name.clone(), *dtype, shape.clone())
        };
        let places: Vec<_> = listed.iter().map(list).collect();
        let of_sums = file.add(CHECKSUMS.into(), Dtype::U32, vec![listed.len() + 1]);
        let mut file = file.begin()?;
        let mut sums = BTreeMap::new();
        let mut put = |i: usize, data: &TensorData| {
            let bytes = data.as_bytes();
            sums.insert(&*listed[i].0, crc32fast::hash(bytes));
            file.write(places[i], 0, bytes)
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let CacheParts { keys, values, floats, .. } = layer.resized(n)?.into_parts();
            let parts = [keys.try_into_data(), values.try_into_data(), floats.try_into_data()];
            for (part, data) in parts.into_iter().enumerate() {
                let data = data.map_err(|error| {
                    Error::argument("cache", error.to_string(), "must be readable")
                })?;
                put(3 * i + part, &data)?;
            }
        }
        put(n_whole - 1, &TensorData::new(tokens.clone(), [tokens.len()]))?;
        for (i, data) in kept_data.into_iter().enumerate() {
            put(n_whole + i, data)?;
        }
        let of_header = crc32fast::hash(file.header());
        let sums: Vec<u32> = [of_header].into_iter().chain(sums.into_values()).collect();
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        file.write(of_sums, 0, &bytes)?;
        let file = file.finish()?;
        file.as_file().sync_all().map_err(failed(path))?;
        file.persist(&target).map_err(|error| failed(path)(error.error))?;
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
