//! [`PrefixCache`]: a store of prompt prefixes for many sequences.

mod pieces;
mod trie;

use std::{collections::BTreeSet, sync::Arc};

use burn::tensor::Device;

use self::{
    pieces::{Data, Layers, Places},
    trie::{Block, Id, Trie},
};
use super::{LayerCache, ModelCache};
use crate::{
    error::{Error, Result},
    nn::Rope,
};

/// The distances in blocks from the last boundary of a prompt at which [`PrefixCache::marks`] may
/// place further marks.
const DISTANCES: [usize; 4] = [1, 4, 16, 64];

/// A store of prompt prefixes in the host's memory, for a server with many prompts. Prompts with
/// the same first blocks share their memory.
///
/// A block is a fixed number of tokens. Its piece is what a cache appended for these tokens: packed
/// codes, and floats that are never quantized. What a cache overwrites as it grows is in the tail
/// of a prefix: recent tokens in float, sliding windows, recurrent states. A prefix can be restored
/// only where a tail is stored. Caches of float or of a format without a residual have empty tails,
/// so they can be restored after every block.
///
/// A restored cache continues bit for bit as one that is prefilled in the same chunks. Therefore
/// prefill in chunks that end at multiples of the block and at [`marks`](Self::marks), with and
/// without a restored prefix:
///
/// ```no_run
/// # fn main() -> kv_models::Result<()> {
/// # use kv_models::{PrefixCache, kv_cubecl::KvCacheConfig};
/// # let device = burn::tensor::Device::default();
/// # let model = kv_models::load("model.gguf", &device)?.model;
/// let mut cache = model.new_cache("k4v4".parse::<KvCacheConfig>()?, 1, &device)?;
/// let mut store = PrefixCache::new(&cache, 512, 4 << 30)?;
/// # let prompt = [1; 5000];
/// let mut start = store.restore("tenant", &prompt, &mut cache)?;
/// let marks = store.marks("tenant", &prompt);
/// while start < prompt.len() {
///     let end = prompt.len().min(start + 512);
///     let ids = kv_models::ids_to_tensor(&prompt[start..end], [1, end - start], &device);
///     model.hidden_step(ids, &mut cache)?;
///     if marks.contains(&end) {
///         store.insert("tenant", &prompt[..end], &cache)?;
///     }
///     start = end;
/// }
/// # Ok(())
/// # }
/// ```
///
/// All caches must be filled by the same model, which is not checked, and have the layers and
/// formats of the cache that the store was made for, which is. A salt separates prompts that must
/// not share anything, such as those of two tenants or adapters.
#[derive(Clone, Debug)]
pub struct PrefixCache {
    layers: Layers,
    /// As in [`ModelCache`].
    places: Arc<[usize]>,
    capacity: usize,
    max_positions: usize,
    /// The device of the cache that the store was made for.
    device: Device,
    /// The numbers that the rope of stored keys depends on.
    ropes: Vec<Vec<f32>>,
    block_tokens: usize,
    max_bytes: usize,
    trie: Trie,
    counts: PrefixStats,
}

/// The contents and the use of a [`PrefixCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Stored blocks.
    pub blocks: usize,
    /// Bytes of stored pieces, tails, tokens and salts.
    pub bytes: usize,
    /// Calls of [`PrefixCache::restore`].
    pub lookups: usize,
    /// Lookups that restored a prefix.
    pub hits: usize,
    /// Tokens of all restored prefixes.
    pub hit_tokens: usize,
    /// Tokens of the prompts of all lookups.
    pub prompt_tokens: usize,
    /// Blocks that were removed for others.
    pub evicted_blocks: usize,
    /// Tails that were removed for others, with their blocks or alone.
    pub evicted_tails: usize,
}

/// A stored prompt that is not the prefix of another.
#[derive(Debug)]
pub(super) struct Stored<'a> {
    pub(super) salt: &'a str,
    pub(super) tokens: Vec<u32>,
    /// The lengths of its shorter prefixes that have a tail, ascending. A prefix of several prompts
    /// is listed once.
    pub(super) tails: Vec<usize>,
}

impl PrefixCache {
    /// Creates an empty store for caches like `like`, with blocks of `block_tokens` tokens. It
    /// holds at most `max_bytes` bytes of pieces, tails, tokens and salts.
    ///
    /// # Errors
    /// Fails for blocks without tokens, for a cache without layers, and for blocks that are larger
    /// than the context of `like`.
    pub fn new(like: &ModelCache, block_tokens: usize, max_bytes: usize) -> Result<Self> {
        if block_tokens == 0 {
            return Err(Error::argument("block_tokens", 0, "must be at least 1"));
        }
        let Some(layer) = like.layers.first() else {
            return Err(Error::argument("cache", "no layers", "must have at least one"));
        };
        if block_tokens > like.room() {
            let rule = format!("the cache has room for {} tokens", like.room());
            return Err(Error::argument("block_tokens", block_tokens, rule));
        }
        let plan = |layer: &LayerCache| layer.plan().with_batch(1).with_capacity(block_tokens);
        let layers = Layers::new(like.layers.iter().map(plan));
        layers.places(block_tokens)?;
        Ok(Self {
            layers,
            places: like.places.clone(),
            capacity: like.capacity,
            max_positions: like.max_positions,
            device: layer.device(),
            ropes: ropes(like),
            block_tokens,
            max_bytes,
            trie: Trie::new(block_tokens),
            counts: PrefixStats::default(),
        })
    }

    /// Returns the number of tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Returns the contents, and the counts since the store was created.
    pub fn stats(&self) -> PrefixStats {
        PrefixStats { blocks: self.trie.blocks(), bytes: self.trie.bytes(), ..self.counts }
    }

    /// Removes all prefixes. The counts of lookups stay.
    pub fn clear(&mut self) {
        self.trie = Trie::new(self.block_tokens);
    }

    /// Returns the lengths of `prompt` at which [`insert`](Self::insert) pays off while it is
    /// prefilled, ascending. All are multiples of the block, longer than the stored prefix, and
    /// shorter than the prompt.
    ///
    /// They are the last such multiple; the end of the blocks that `prompt` has in common with a
    /// stored prompt, so that the next prompt can be restored there; and some distances before the
    /// last, while tails take no more bytes than the blocks of the prompt.
    pub fn marks(&self, salt: &str, prompt: &[u32]) -> Vec<usize> {
        let (path, hit) = self.longest(salt, prompt, usize::MAX);
        let (block, hit) = (self.block_tokens, hit * self.block_tokens);
        let last = prompt.len().saturating_sub(1) / block * block;
        if last <= hit {
            return vec![];
        }
        let mut marks = vec![last];
        let common = path.len() * block;
        if common > hit {
            marks.push(common);
        }
        // A length that no layer can have gets no mark.
        let mut room = self.layers.places(last).map_or(0, |places| places.block_bytes());
        for distance in DISTANCES {
            let mark = last.saturating_sub(distance * block);
            let bytes = match mark > hit {
                true => self.layers.places(mark).map_or(0, |places| places.tail_bytes()),
                false => 0,
            };
            // A prefix without a tail is stored by the last mark.
            if bytes == 0 || bytes > room {
                break;
            }
            room -= bytes;
            marks.push(mark);
        }
        marks.sort_unstable();
        marks.dedup();
        marks
    }

    /// Stores the prefix `tokens`, whole blocks that `cache` holds. Stored prompts and tails that
    /// were not used for the longest time are removed for it. If it does not fit into the store,
    /// its first blocks are stored, if they can be restored without its tail, or nothing.
    ///
    /// # Errors
    /// Fails for a cache that holds other than one sequence of `tokens`, or is unlike the one that
    /// the store was made for; for tokens that are not whole blocks; and for a cache that cannot be
    /// read from its device. Nothing is then changed.
    pub fn insert(&mut self, salt: &str, tokens: &[u32], cache: &ModelCache) -> Result<()> {
        self.check(cache)?;
        self.check_ropes(&ropes(cache))?;
        self.put(salt, tokens, &cache.layers)
    }

    /// Stores a prefix whose layers fit.
    pub(super) fn put(&mut self, salt: &str, tokens: &[u32], layers: &[LayerCache]) -> Result<()> {
        let (block, n) = (self.block_tokens, tokens.len() / self.block_tokens);
        if n == 0 || n * block != tokens.len() {
            let rule = format!("must be a multiple of the {block} tokens of a block");
            return Err(Error::argument("tokens", tokens.len(), rule));
        }
        if let Some(layer) = layers.iter().find(|layer| layer.len() != tokens.len()) {
            let rule = format!("the cache holds {}", layer.len());
            return Err(Error::argument("tokens", tokens.len(), rule));
        }
        let mut path = self.trie.path(salt, tokens);
        let held = path.len();
        // The places at the end of the last stored block, and of each new one.
        let first = held.max(1);
        let ends = (first..=n).map(|i| self.layers.places(i * block));
        let ends = ends.collect::<Result<Vec<Places>>>()?;
        let has_tail = path.last().is_some_and(|&id| held == n && self.trie.tail(id).is_some());
        let fitting = self.fitting(salt, &path, n, &ends);
        let Some((n_stored, added)) = fitting.filter(|_| !has_tail) else {
            self.trie.touch(&path);
            return Ok(());
        };
        let whole = &ends[n - first];
        let read = |layer: &LayerCache| layer.resized(tokens.len())?.into_data();
        let data = Data(layers.iter().map(read).collect::<Result<_>>()?);
        whole.check(&data)?;
        let tail = |i: usize| match ends[i - first].tail_bytes() {
            0 => Some([].into()),
            _ => (i == n).then(|| whole.tail(&data)),
        };
        let new = |i: usize| {
            let before = (i > 1).then(|| &ends[i - first - 1]);
            Block { piece: whole.block(&data, before, &ends[i - first]), tail: tail(i) }
        };
        let blocks: Vec<Block> = (held + 1..=n_stored).map(new).collect();
        let own = if held == n { tail(n) } else { None };

        // The salt is removed with its last prompt, and then stored again.
        while self.trie.bytes() + self.trie.new_salt_bytes(salt) + added > self.max_bytes {
            let Some(evicted) = self.trie.evict(&path) else { break };
            self.counts.evicted_blocks += evicted.blocks;
            self.counts.evicted_tails += evicted.tails;
        }
        if let Some((&id, tail)) = path.last().zip(own) {
            self.trie.set_tail(id, Some(tail));
        }
        path = self.trie.extend(salt, path, tokens, blocks);
        self.trie.touch(&path);
        Ok(())
    }

    /// Returns how many of `n` blocks are to be stored so that they can be restored and fit into
    /// the store beside the stored ones, `path`, and the bytes that they add; `None` for no new
    /// block. `ends` has the places at the ends of the last of `path` and of the new blocks. The
    /// bytes of the salt fit too, but are not in the result.
    fn fitting(
        &self,
        salt: &str,
        path: &[Id],
        n: usize,
        ends: &[Places],
    ) -> Option<(usize, usize)> {
        let (held, first) = (path.len(), path.len().max(1));
        // Tails of shorter prefixes can be removed.
        let stored: usize = path.iter().map(|&id| self.trie.block_bytes(id)).sum();
        let before = if held == 0 { 0 } else { ends[0].block_bytes() };
        let fits = |&i: &usize| {
            let end = &ends[i - first];
            if i < n && (end.tail_bytes() > 0 || i == held) {
                return None;
            }
            let added = end.block_bytes() - before
                + (i - held) * size_of::<u32>() * self.block_tokens
                + end.tail_bytes();
            (salt.len() + stored + added <= self.max_bytes).then_some((i, added))
        };
        (first..=n).rev().find_map(|i| fits(&i))
    }

    /// Fills an empty cache of one sequence with the longest stored prefix of `prompt` and returns
    /// its number of tokens, 0 if there is none. At least the last token of `prompt` is left to
    /// compute. The cache may have any capacity; a longer prefix is not restored.
    ///
    /// # Errors
    /// Fails for a cache that holds tokens or several sequences, or is unlike the one that the
    /// store was made for, and for a prefix that does not fit on its device. Nothing is then
    /// changed.
    pub fn restore(&mut self, salt: &str, prompt: &[u32], cache: &mut ModelCache) -> Result<usize> {
        self.check(cache)?;
        self.check_ropes(&ropes(cache))?;
        if !cache.is_empty() {
            let held = format!("{} tokens", cache.len());
            return Err(Error::argument("cache", held, "must be empty to restore a prefix"));
        }
        let (mut path, hit) = self.longest(salt, prompt, cache.room());
        path.truncate(hit);
        if hit > 0 {
            let device = cache.layers[0].device();
            let layers = self.layers_of(&path, &device)?;
            let layers = layers.into_iter().zip(&cache.layers).map(|(layer, own)| {
                let capacity = own.plan().config.capacity();
                layer.resized(capacity)
            });
            cache.layers = layers.collect::<Result<_>>()?;
            self.counts.hits += 1;
            self.trie.touch(&path);
        }
        let tokens = hit * self.block_tokens;
        self.counts.lookups += 1;
        self.counts.hit_tokens += tokens;
        self.counts.prompt_tokens += prompt.len();
        Ok(tokens)
    }

    /// Returns the stored blocks of a prompt of at most `room` tokens, except its last token, and
    /// how many of them can be restored.
    fn longest(&self, salt: &str, prompt: &[u32], room: usize) -> (Vec<Id>, usize) {
        let most = prompt.len().saturating_sub(1).min(room);
        let path = self.trie.path(salt, &prompt[..most]);
        let hit = path.iter().rposition(|&id| self.trie.tail(id).is_some());
        (path, hit.map_or(0, |at| at + 1))
    }

    /// Makes the caches of all layers, with a capacity of the tokens of a path.
    fn layers_of(&self, path: &[Id], device: &Device) -> Result<Vec<LayerCache>> {
        let block = self.block_tokens;
        let len = path.len() * block;
        let places = self.layers.places(len)?;
        let blocks = path
            .iter()
            .enumerate()
            .map(|(i, &id)| Ok((self.trie.piece(id), self.layers.places((i + 1) * block)?)));
        let tail = path.last().and_then(|&id| self.trie.tail(id)).unwrap_or_default();
        let Data(data) = places.join(blocks, tail)?;
        let pairs = places.plans().zip(data);
        pairs.map(|(plan, data)| plan.restore(vec![len], data, device)).collect()
    }

    /// Returns the stored prompts that are not the prefix of another, those that were not used for
    /// the longest time first.
    pub(super) fn stored(&self) -> Vec<Stored<'_>> {
        let mut listed = BTreeSet::new();
        let prompt = |(salt, tokens, path): (_, _, Vec<Id>)| {
            let mut tails = vec![];
            for (i, &id) in path.iter().enumerate().take(path.len() - 1) {
                let has_tail = self.trie.tail(id).is_some_and(|tail| !tail.is_empty());
                if has_tail && listed.insert(id) {
                    tails.push((i + 1) * self.block_tokens);
                }
            }
            Stored { salt, tokens, tails }
        };
        self.trie.leaves().into_iter().map(prompt).collect()
    }

    /// Makes an empty cache, without rope tables.
    pub(super) fn empty(&self) -> Result<ModelCache> {
        let layers = self.layers.plans().map(|plan| plan.allocate(&self.device));
        Ok(self.cache_of(layers.collect::<Result<_>>()?))
    }

    /// Makes a cache of a stored prefix, without rope tables.
    pub(super) fn cache(&self, salt: &str, tokens: &[u32]) -> Result<ModelCache> {
        let layers = self.layers_of(&self.trie.path(salt, tokens), &self.device)?;
        Ok(self.cache_of(layers))
    }

    /// Makes a cache of its layers, without rope tables.
    pub(super) fn cache_of(&self, layers: Vec<LayerCache>) -> ModelCache {
        ModelCache {
            layers,
            places: self.places.clone(),
            rope_tables: vec![],
            batch: 1,
            capacity: self.capacity,
            max_positions: self.max_positions,
        }
    }

    /// Checks that a cache has one sequence, and the layers and formats of the store.
    pub(crate) fn check(&self, cache: &ModelCache) -> Result<()> {
        if cache.batch != 1 {
            return Err(Error::argument("batch", cache.batch, "must be 1 for a prefix cache"));
        }
        let plans = self.layers.plans();
        if cache.layers.len() != plans.len() {
            let value = format!("{} layers", cache.layers.len());
            return Err(Error::argument("cache", value, format!("must be {}", plans.len())));
        }
        for (i, (own, layer)) in plans.zip(&cache.layers).enumerate() {
            if let Some((field, own, other)) = own.difference(&layer.plan()) {
                let value = format!("{field} {other} in layer {i}");
                let rule = format!("the prefix cache was made for {own}");
                return Err(Error::argument("cache", value, rule));
            }
        }
        Ok(())
    }

    /// Checks that ropes have the numbers of those of the stored keys.
    pub(super) fn check_ropes(&self, ropes: &[Vec<f32>]) -> Result<()> {
        if self.ropes == ropes {
            return Ok(());
        }
        let rule = "must have the rope of the prefix cache, which depends on the capacity";
        Err(Error::argument("cache", "another rope", rule))
    }
}

/// Returns the numbers that the rope of a cache's keys depends on.
fn ropes(cache: &ModelCache) -> Vec<Vec<f32>> {
    let numbers = |(rope, _): &(Rope, _)| rope.numbers(cache.room());
    cache.rope_tables.iter().map(numbers).collect()
}
