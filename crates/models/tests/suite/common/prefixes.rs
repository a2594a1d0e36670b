//! Serves prompts from a prefix cache, and without one.

use burn::tensor::Device;
use kv_models::{LanguageModel, ModelCache, ModelCacheConfig, PrefixCache};

use super::{
    device,
    saved::{bits, config, pass},
};

/// The capacity of all caches.
pub(crate) const ROOM: usize = 160;

/// A model, a cache and a size of blocks, which are the chunks of prefill.
pub(crate) struct Served<'a> {
    pub(crate) model: &'a LanguageModel,
    pub(crate) own: ModelCacheConfig,
    pub(crate) block: usize,
    pub(crate) on: Device,
}

impl<'a> Served<'a> {
    pub(crate) fn new(model: &'a LanguageModel, cache: &str, block: usize) -> Self {
        Self { model, own: config(cache, ROOM).into(), block, on: device() }
    }

    pub(crate) fn cache(&self) -> ModelCache {
        self.model.new_cache(self.own.clone(), 1, &self.on).unwrap()
    }

    pub(crate) fn store(&self, max_bytes: usize) -> PrefixCache {
        PrefixCache::new(&self.cache(), self.block, max_bytes).unwrap()
    }

    /// Appends the rest of `prompt` in chunks of a block, and then `reply` one token at a time.
    /// Returns the logits of each call. `at` is called at the end of every chunk.
    pub(crate) fn append(
        &self,
        cache: &mut ModelCache,
        prompt: &[u32],
        reply: &[u32],
        mut at: impl FnMut(&ModelCache),
    ) -> Vec<Vec<u32>> {
        let mut calls = vec![];
        while cache.len() < prompt.len() {
            let start = cache.len();
            let end = prompt.len().min(start + self.block);
            calls.push(bits(&pass(self.model, cache, &prompt[start..end], &self.on)));
            at(cache);
        }
        calls.extend(reply.iter().map(|id| bits(&pass(self.model, cache, &[*id], &self.on))));
        calls
    }

    /// Returns the logits of each call without a prefix cache.
    pub(crate) fn fresh(&self, prompt: &[u32], reply: &[u32]) -> Vec<Vec<u32>> {
        self.append(&mut self.cache(), prompt, reply, |_| ())
    }

    /// Serves a prompt as a server does, and returns the length of the restored prefix and the
    /// logits of each call.
    pub(crate) fn serve(
        &self,
        store: &mut PrefixCache,
        salt: &str,
        prompt: &[u32],
        reply: &[u32],
    ) -> (usize, Vec<Vec<u32>>) {
        let mut cache = self.cache();
        let hit = store.restore(salt, prompt, &mut cache).unwrap();
        assert_eq!(cache.len(), hit);
        let marks = store.marks(salt, prompt);
        assert!(marks.is_sorted_by(|a, b| a < b), "{marks:?}");
        let valid =
            |mark: &usize| *mark > hit && *mark < prompt.len() && mark.is_multiple_of(self.block);
        assert!(marks.iter().all(valid), "{marks:?} after {hit} of {}", prompt.len());
        let calls = self.append(&mut cache, prompt, reply, |cache| {
            if marks.contains(&cache.len()) {
                store.insert(salt, &prompt[..cache.len()], cache).unwrap();
            }
        });
        (hit, calls)
    }

    /// Fills a store with a prefix of whole blocks.
    pub(crate) fn insert(&self, store: &mut PrefixCache, salt: &str, prefix: &[u32]) {
        let mut cache = self.cache();
        self.append(&mut cache, prefix, &[], |_| ());
        store.insert(salt, prefix, &cache).unwrap();
    }

    /// Returns the length of the stored prefix of a prompt.
    pub(crate) fn hit(&self, store: &mut PrefixCache, salt: &str, prompt: &[u32]) -> usize {
        store.restore(salt, prompt, &mut self.cache()).unwrap()
    }
}
