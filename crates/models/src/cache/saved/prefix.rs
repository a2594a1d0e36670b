//! Saves prefix caches to folders.
//!
//! Each prompt that is not the prefix of another has a file `prefix-NNNNNN.safetensors`, in the
//! order of last use. It is a saved cache with the salt of the prompt and the number of tokens of a
//! block. Its checkpoints are the tails of shorter prefixes.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use burn::tensor::Device;
use safetensors::SafeTensors;

use super::{
    super::{
        prefix::{PrefixCache, Stored},
        prompt::Checkpoint,
    },
    FORMAT, Header, KEY, Maker, SavedAs, SavedCache,
};
use crate::{
    cache_config::ModelCacheConfig,
    error::{Error, Result},
    files::failed,
    gguf::map,
    model::LanguageModel,
};

const START: &str = "prefix-";
const END: &str = ".safetensors";
/// The digits of the number in a name.
const DIGITS: usize = 6;

impl PrefixCache {
    /// Saves all prefixes to files in the folder `dir`, which is created if it is missing.
    /// [`load`](Self::load) reads them. `model` filled the caches; `named` is for messages.
    ///
    /// Each file is written beside its place and moved there when it is complete. Then files that
    /// an earlier store of the same model and formats has written are removed, whatever its blocks
    /// were. Other files are never changed.
    ///
    /// # Errors
    /// Fails for a `model` with other layers, and for system errors. Every file is then complete,
    /// but files of earlier saves may remain.
    pub fn save(
        &self,
        dir: impl AsRef<Path>,
        model: &LanguageModel,
        named: &SavedAs<'_>,
    ) -> Result<()> {
        let dir = dir.as_ref();
        let named = SavedAs { talk: &[], ..*named };
        let maker = Maker::new(model, named.model)?;
        let own = self.empty()?.header(model, maker.clone(), &named, &[])?;
        fs::create_dir_all(dir).map_err(failed(dir))?;
        let (mut number, mut written) = (0, BTreeSet::new());
        for Stored { salt, tokens, tails } in self.stored() {
            let checkpoint = |&len: &usize| Checkpoint::of(&self.cache(salt, &tokens[..len])?);
            let checkpoints = tails.iter().map(checkpoint).collect::<Result<Vec<_>>>()?;
            let cache = self.cache(salt, &tokens)?;
            let header = cache.header(model, maker.clone(), &named, &checkpoints)?;
            let block_tokens = Some(self.block_tokens());
            let header = Header { salt: Some(salt.into()), block_tokens, ..header };
            let free = |number: &u64| {
                let path = dir.join(file_name(*number));
                fs::symlink_metadata(&path).is_err() || is_of(&path, &own)
            };
            number = (number..).find(free).unwrap_or(number);
            cache.write(&dir.join(file_name(number)), &header, &[&tokens], &checkpoints)?;
            written.insert(number);
            number += 1;
        }
        for (number, path) in numbered(dir).map_err(failed(dir))? {
            if !written.contains(&number) && is_of(&path, &own) {
                fs::remove_file(&path).map_err(failed(&path))?;
            }
        }
        Ok(())
    }

    /// Adds the prefixes that [`save`](Self::save) wrote to the folder `dir`, for `model` and
    /// caches of `config`. Returns a line for each file that was skipped because it is damaged or
    /// belongs to another model, other formats or other blocks, and for a file of an earlier
    /// version that does not name its blocks. A folder that does not exist has no prefixes.
    pub fn load(
        &mut self,
        dir: impl AsRef<Path>,
        model: &LanguageModel,
        config: impl Into<ModelCacheConfig>,
        device: &Device,
    ) -> Vec<String> {
        let (dir, config) = (dir.as_ref(), config.into());
        let files = match numbered(dir) {
            Ok(files) if files.is_empty() => return vec![],
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return vec![],
            Err(source) => return vec![Error::Io { path: dir.into(), source }.to_string()],
        };
        let maker = config.validate(model).and_then(|()| {
            let room = config.capacity.min(model.spec().max_positions);
            let ropes: Vec<_> = model.spec().ropes.iter().map(|rope| rope.numbers(room)).collect();
            self.check_ropes(&ropes)?;
            Maker::new(model, "")
        });
        let maker = match maker {
            Ok(maker) => maker,
            Err(error) => return vec![format!("{}: {error}", dir.display())],
        };
        let mut notes = vec![];
        let device = device.clone().without_autodiff();
        for (_, path) in files {
            if let Err(error) = self.load_file(&path, model, &maker, &config, &device) {
                let (error, path) = (error.to_string(), path.display().to_string());
                let named = error.contains(&path);
                notes.push(if named { error } else { format!("{path}: {error}") });
            }
        }
        notes
    }

    fn load_file(
        &mut self,
        path: &Path,
        model: &LanguageModel,
        maker: &Maker,
        config: &ModelCacheConfig,
        device: &Device,
    ) -> Result<()> {
        let file = SavedCache::open(path)?;
        let wrong =
            |field: &str, value: String, rule: String| Err(Error::config(path, field, value, rule));
        let Some(salt) = &file.header.salt else {
            return wrong("salt", "missing".into(), "must be in a file of a prefix cache".into());
        };
        let block = self.block_tokens();
        // A cache that was filled in other chunks may have other bits.
        match file.header.block_tokens {
            Some(saved) if saved == block => {}
            Some(saved) => {
                let rule = format!("{block} is requested; use the same --prefill-chunk");
                return wrong("block_tokens", saved.to_string(), rule);
            }
            None => {
                let rule = "must be in a file of a prefix cache; the next save replaces the file";
                return wrong("block_tokens", "missing".into(), rule.into());
            }
        }
        let [tokens] = &file.tokens[..] else {
            return wrong("sequences", file.tokens.len().to_string(), "must be 1".into());
        };
        if tokens.is_empty() || !tokens.len().is_multiple_of(block) {
            let rule = format!("must be a multiple of the {block} tokens of a block");
            return wrong("tokens", tokens.len().to_string(), rule);
        }
        let mut cache = self.cache_of(file.layers(model, maker, config, device)?);
        self.check(&cache)?;
        let checkpoints = file.checkpoints(&cache.layers)?;
        self.put(salt, tokens, &cache.layers)?;
        for checkpoint in checkpoints.iter().rev().filter(|it| it.len.is_multiple_of(block)) {
            checkpoint.restore(&mut cache)?;
            self.put(salt, &tokens[..checkpoint.len], &cache.layers)?;
        }
        Ok(())
    }
}

fn file_name(number: u64) -> String {
    format!("{START}{number:0DIGITS$}{END}")
}

/// Returns the files of a folder with the names of a prefix cache, and their numbers, ascending.
fn numbered(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut files = vec![];
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = name.strip_prefix(START).and_then(|name| name.strip_suffix(END));
        let number = number.and_then(|number| number.parse::<u64>().ok());
        files.extend(number.filter(|number| file_name(*number) == name).map(|it| (it, path)));
    }
    files.sort_unstable();
    Ok(files)
}

/// Returns whether a file is of a prefix cache for the same model and formats as `own`. It does not
/// read the tensors.
fn is_of(path: &Path, own: &Header) -> bool {
    let header = || {
        let map = map(path, FORMAT).ok()?;
        let (_, metadata) = SafeTensors::read_metadata(&map).ok()?;
        let text = metadata.metadata().as_ref()?.get(KEY)?.clone();
        serde_json::from_str::<Header>(&text).ok()
    };
    header().is_some_and(|found| {
        let pairs = || found.layers.iter().zip(&own.layers);
        found.salt.is_some()
            && found.model.other_sizes(&own.model).is_none()
            && found.model.other_weights(&own.model).is_none()
            && found.ropes == own.ropes
            && found.layers.len() == own.layers.len()
            && pairs().all(|(found, own)| found.difference(own).is_none())
    })
}
