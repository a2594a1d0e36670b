//! Saves the cache of a tiny model in a file.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor};
use kv_models::{
    LanguageModel, ModelCache, SavedCache, ids_to_tensor, kv_cubecl::KvCacheConfig, load,
};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use super::{assert_contains, device, tiny};

pub(crate) fn text(n: usize, seed: u64) -> Vec<u32> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(0..250)).collect()
}

pub(crate) fn pass(
    model: &LanguageModel,
    cache: &mut ModelCache,
    ids: &[u32],
    on: &Device,
) -> Vec<f32> {
    let ids: Tensor<2, _> = ids_to_tensor(ids, [1, ids.len()], on);
    model.step(ids, cache).unwrap().into_data().convert::<f32>().try_into_vec().unwrap()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

pub(crate) fn config(name: &str, capacity: usize) -> KvCacheConfig {
    name.parse::<KvCacheConfig>().unwrap().with_capacity(capacity)
}

/// A saved cache of 30 tokens, with its model and text.
pub(crate) struct Saved {
    pub(crate) scratch: tempfile::TempDir,
    pub(crate) model: LanguageModel,
    pub(crate) text: Vec<u32>,
    pub(crate) config: KvCacheConfig,
}

impl Saved {
    pub(crate) fn new(model: &str) -> Self {
        let (on, scratch) = (device(), tempfile::tempdir().unwrap());
        let model = load(tiny(model), &on).unwrap().model;
        let (text, config) = (text(30, 6), config("k4v2-g16-r16-s3", 48));
        let mut cache = model.new_cache(config, 1, &on).unwrap();
        pass(&model, &mut cache, &text, &on);
        let saved = Self { scratch, model, text, config };
        cache.save(saved.path(), &saved.model, "the-maker", &[&saved.text]).unwrap();
        saved
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.scratch.path().join("prefix.safetensors")
    }

    /// Returns the message of a failed restore.
    #[track_caller]
    pub(crate) fn refused(&self, model: &LanguageModel, config: KvCacheConfig, parts: &[&str]) {
        let saved = SavedCache::open(self.path()).unwrap();
        let restored = saved.restore(model, config, &device()).map(drop);
        let error = restored.expect_err(parts[0]).to_string();
        assert!(!error.contains('\n'), "{error}");
        assert_contains(&error, &["prefix.safetensors"]);
        assert_contains(&error, parts);
    }
}
