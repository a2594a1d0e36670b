//! Random prompts with shared prefixes, against a plain map of prefixes and against new caches.

use std::collections::{BTreeMap, BTreeSet};

use kv_models::{PrefixStats, load};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::common::{
    device,
    prefixes::{ROOM, Served},
    saved::text,
    tiny,
};

/// A salt and a prefix.
type Key = (String, Vec<u32>);

#[derive(Clone, Debug)]
struct Entry {
    /// Bytes of the piece and the tokens.
    block_bytes: usize,
    /// Bytes of the tail, if it is stored.
    tail: Option<usize>,
    last_use: usize,
    last_end: usize,
}

/// The rules of the store, on a map of all prefixes.
struct Oracle {
    block: usize,
    max_bytes: usize,
    /// The bytes of pieces and tokens, and of the tail, of a prefix of each number of blocks.
    sizes: Vec<[usize; 2]>,
    map: BTreeMap<Key, Entry>,
    clock: usize,
    counts: PrefixStats,
}

fn key(salt: &str, prefix: &[u32]) -> Key {
    (salt.into(), prefix.into())
}

impl Oracle {
    fn new(served: &Served<'_>, max_bytes: usize) -> Self {
        let ids = text(ROOM, 77);
        let bytes = |lens: &[usize]| {
            let mut store = served.store(usize::MAX);
            for &len in lens {
                served.insert(&mut store, "", &ids[..len * served.block]);
            }
            store.stats().bytes
        };
        let n = (ROOM - 1) / served.block;
        let whole = bytes(&[n + 1]);
        let size = |i: usize| match i {
            0 => [0, 0],
            _ => {
                let tail = bytes(&[n + 1, i]) - whole;
                [bytes(&[i]) - tail, tail]
            }
        };
        let sizes = (0..=n).map(size).collect();
        let (map, clock, counts) = Default::default();
        Self { block: served.block, max_bytes, sizes, map, clock, counts }
    }

    /// Returns the bytes of block `i`, counted from 1.
    fn block_bytes(&self, i: usize) -> usize {
        self.sizes[i][0] - self.sizes[i - 1][0]
    }

    fn bytes(&self) -> usize {
        let entries = self.map.values().map(|entry| entry.block_bytes + entry.tail.unwrap_or(0));
        let salts: BTreeSet<&str> = self.map.keys().map(|(salt, _)| salt.as_str()).collect();
        entries.sum::<usize>() + salts.into_iter().map(str::len).sum::<usize>()
    }

    /// Returns the bytes that the first prefix of a salt adds for it.
    fn new_salt_bytes(&self, salt: &str) -> usize {
        let is_stored = self.map.keys().any(|(other, _)| other == salt);
        if is_stored { 0 } else { salt.len() }
    }

    fn stats(&self) -> PrefixStats {
        let mut stats = self.counts;
        (stats.blocks, stats.bytes) = (self.map.len(), self.bytes());
        stats
    }

    /// Returns the blocks of all stored prefixes of a prompt.
    fn common(&self, salt: &str, prompt: &[u32]) -> usize {
        let n = prompt.len() / self.block;
        (0..n)
            .take_while(|i| self.map.contains_key(&key(salt, &prompt[..(i + 1) * self.block])))
            .count()
    }

    fn hit(&self, salt: &str, prompt: &[u32]) -> usize {
        let most = prompt.len().saturating_sub(1) / self.block;
        let restorable = |i: &usize| {
            let entry = self.map.get(&key(salt, &prompt[..i * self.block]));
            entry.is_some_and(|entry| entry.tail.is_some())
        };
        (1..=most).rev().find(restorable).unwrap_or(0) * self.block
    }

    fn touch(&mut self, salt: &str, prefix: &[u32]) {
        self.clock += 1;
        for end in (self.block..=prefix.len()).step_by(self.block) {
            if let Some(entry) = self.map.get_mut(&key(salt, &prefix[..end])) {
                entry.last_use = self.clock;
                if end == prefix.len() {
                    entry.last_end = self.clock;
                }
            }
        }
    }

    fn restore(&mut self, salt: &str, prompt: &[u32]) -> usize {
        let hit = self.hit(salt, prompt);
        if hit > 0 {
            self.counts.hits += 1;
            self.touch(salt, &prompt[..hit]);
        }
        self.counts.lookups += 1;
        self.counts.hit_tokens += hit;
        self.counts.prompt_tokens += prompt.len();
        hit
    }

    fn is_leaf(&self, (salt, prefix): &Key) -> bool {
        let longer = |(other, longer): &&Key| {
            other == salt && longer.len() > prefix.len() && longer.starts_with(prefix)
        };
        !self.map.keys().any(|key| longer(&key))
    }

    fn insert(&mut self, salt: &str, prefix: &[u32]) {
        let n = prefix.len() / self.block;
        let held = self.common(salt, prefix);
        let block = self.block;
        let of = |i: usize| key(salt, &prefix[..i * block]);
        let own: usize = (1..=held).map(|i| self.map[&of(i)].block_bytes).sum();
        let added = |i: usize| self.sizes[i][0] - self.sizes[held][0] + self.sizes[i][1];
        let complete = held == n && self.map[&of(n)].tail.is_some();
        let best = (held..=n).rev().find(|&i| {
            let restorable = i == n || self.sizes[i][1] == 0;
            let bytes = salt.len() + own + added(i);
            i > 0 && (i > held || i == n) && restorable && bytes <= self.max_bytes
        });
        if let Some(best) = best.filter(|_| !complete) {
            let added = added(best);
            while self.bytes() + self.new_salt_bytes(salt) + added > self.max_bytes {
                let is_kept = |key: &Key| key.0 == salt && prefix.starts_with(&key.1);
                let (leaves, others): (Vec<_>, Vec<_>) =
                    self.map.iter().partition(|(key, _)| self.is_leaf(key) && !is_kept(key));
                let leaves = leaves.into_iter().map(|(key, entry)| (entry.last_use, key, true));
                let tails = others.into_iter().filter(|(_, entry)| entry.tail > Some(0));
                let tails = tails.map(|(key, entry)| (entry.last_end, key, false));
                let (_, oldest, is_leaf) = leaves.chain(tails).min().unwrap();
                let oldest = oldest.clone();
                match is_leaf {
                    true => self.remove(oldest, salt, prefix),
                    false => {
                        self.map.get_mut(&oldest).unwrap().tail = None;
                        self.counts.evicted_tails += 1;
                    }
                }
            }
            for i in held + 1..=best {
                let tail = (i == n || self.sizes[i][1] == 0).then_some(self.sizes[i][1]);
                let block_bytes = self.block_bytes(i);
                let entry = Entry { block_bytes, tail, last_use: 0, last_end: 0 };
                self.map.insert(of(i), entry);
            }
            if best == n {
                self.map.get_mut(&of(n)).unwrap().tail = Some(self.sizes[n][1]);
            }
        }
        self.touch(salt, &prefix[..self.common(salt, prefix) * self.block]);
    }

    /// Removes a prefix, and those before it that serve no purpose any more.
    fn remove(&mut self, (salt, mut prefix): Key, kept_salt: &str, kept: &[u32]) {
        loop {
            let removed = self.map.remove(&key(&salt, &prefix)).unwrap();
            self.counts.evicted_tails += usize::from(removed.tail.is_some());
            self.counts.evicted_blocks += 1;
            prefix.truncate(prefix.len() - self.block);
            let before = key(&salt, &prefix);
            let keeps = salt == kept_salt && kept.starts_with(&prefix);
            let useless = self.map.get(&before).is_some_and(|entry| entry.tail.is_none());
            if !useless || keeps || !self.is_leaf(&before) {
                return;
            }
        }
    }
}

/// Serves random prompts that share beginnings from a store of `blocks` blocks.
fn random_prompts(name: &str, cache: &str, block: usize, blocks: usize, n: usize) {
    let model = &load(tiny(name), &device()).unwrap().model;
    let served = Served::new(model, cache, block);
    let oracle = Oracle::new(&served, 0);
    let max_bytes = oracle.sizes[1][0] * blocks + oracle.sizes[3][1] * blocks / 4;
    let mut oracle = Oracle { max_bytes, ..oracle };
    let mut store = served.store(max_bytes);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(block as u64);
    let mut fresh: BTreeMap<Vec<u32>, Vec<Vec<u32>>> = BTreeMap::new();
    let mut seen: Vec<Vec<u32>> = vec![];
    let salts = [String::new(), "b".repeat(300), "c".repeat(900)];
    for round in 0..n {
        let salt = match rng.random_range(0..5) {
            0 => &salts[if round % 4 == 0 { 2 } else { 1 }],
            _ => &salts[0],
        };
        // A recent prompt, its beginning with another end, or a longer prompt.
        let mut prompt = match seen.len() {
            0 => vec![],
            n => seen[n - 1 - rng.random_range(0..n.min(6))].clone(),
        };
        let kind = rng.random_range(0..8);
        match kind {
            0 => prompt.clear(),
            1..4 => prompt.truncate(rng.random_range(prompt.len() / 2..=prompt.len())),
            _ => {}
        }
        if kind < 6 || prompt.is_empty() {
            let n = (ROOM - 1).min(prompt.len() + rng.random_range(1..40));
            prompt.resize_with(n.max(prompt.len()), || rng.random_range(0..250));
        }
        seen.push(prompt.clone());

        let sizes = format!("{} tokens and {} bytes of salt", prompt.len(), salt.len());
        let what = format!("{name} {cache} round {round}: {sizes}");
        let mut held = served.cache();
        let hit = store.restore(salt, &prompt, &mut held).unwrap();
        assert_eq!(hit, oracle.restore(salt, &prompt), "{what}");
        let marks = store.marks(salt, &prompt);
        let last = (prompt.len() - 1) / block * block;
        assert_eq!(marks.contains(&last), last > hit, "{what}: {marks:?}");
        let common = oracle.common(salt, &prompt[..prompt.len() - 1]) * block;
        assert!(common <= hit || marks.contains(&common), "{what}: {marks:?}");
        let calls = served.append(&mut held, &prompt, &[], |cache| {
            if marks.contains(&cache.len()) {
                store.insert(salt, &prompt[..cache.len()], cache).unwrap();
                oracle.insert(salt, &prompt[..cache.len()]);
                assert_eq!(store.stats(), oracle.stats(), "{what}");
                assert!(store.stats().bytes <= max_bytes, "{what}");
            }
        });
        let fresh = fresh.entry(prompt.clone()).or_insert_with(|| served.fresh(&prompt, &[]));
        assert!(calls == fresh[hit / block..], "{what}: other logits after {hit}");
        assert_eq!(store.stats(), oracle.stats(), "{what}");
    }
    let PrefixStats { hits, evicted_blocks, hit_tokens, prompt_tokens, .. } = store.stats();
    assert!(hits > n / 4 && evicted_blocks > n / 4, "{:?}", store.stats());
    assert!(hit_tokens > prompt_tokens / 8, "{:?}", store.stats());
}

#[test]
fn random_prompts_of_llama() {
    random_prompts("llama-tiny", "k4v4-g8-r16", 8, 60, 250);
    random_prompts("llama-tiny", "kint8vint8-s3", 5, 60, 250);
}

#[test]
fn random_prompts_without_tails() {
    random_prompts("llama-tiny", "float", 16, 20, 250);
    random_prompts("qwen3-tiny", "kint8vint8", 8, 40, 250);
}

#[test]
fn random_prompts_of_sliding_windows() {
    random_prompts("gemma3-tiny", "k2v2-g16-r16-gflush", 16, 40, 150);
    random_prompts("mistral-swa-tiny", "float", 8, 60, 150);
}

#[test]
fn random_prompts_of_recurrent_layers() {
    random_prompts("qwen3_5-tiny", "k4v4-g16-r16", 16, 60, 150);
}
