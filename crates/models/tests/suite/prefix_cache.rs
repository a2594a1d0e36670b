//! A restored prefix continues bit for bit as a cache that is prefilled in the same chunks.

use std::{collections::BTreeSet, path::Path};

use kv_models::{
    LanguageModel, LayerSpec, ModelCache, ModelCacheConfig, PrefixCache,
    kv_cubecl::KvCacheConfig,
    llama::{Config, Llama},
    load,
};

use crate::{
    common::{
        TINY, assert_contains, deepseek, device,
        prefixes::{ROOM, Served},
        saved::{config, pass, text},
        small, tiny,
    },
    prompt_cache,
};

const REPLY: [u32; 3] = [9, 8, 7];

/// Returns caches of every format, with and without residual, with sinks, sliding windows, both
/// flush orders, and floats of 16 bits.
fn caches() -> Vec<String> {
    let more = [
        "k3v3-g32-r32",
        "k4v4-g8-r16-bf16",
        "k2v2-g16-r32-hadv",
        "k4v4-g16-r16-s4",
        "kvn2vvn2-t16-r16",
        "kint8vint8",
        "kint8vint8-s3",
        "ke4m3ve4m3-s1",
        "kint8v4-g8-r0",
        "ke2m1bv16-s2",
        "k16vint8",
    ];
    let mut caches = prompt_cache::caches();
    caches.extend(more.map(String::from));
    caches
}

fn fits(model: &LanguageModel, cache: &str) -> bool {
    let Ok(config) = cache.parse::<KvCacheConfig>() else { return false };
    ModelCacheConfig::from(config.with_capacity(ROOM)).validate(model).is_ok()
}

/// Checks prompts that share some tokens, in blocks of 16 tokens and of 5, which share words of
/// parameters and groups of keys.
fn check(model: &LanguageModel, name: &str, cache: &str) {
    let (ids, other) = (text(90, 1), text(90, 2));
    for block in [16, 5] {
        let what = format!("{name} {cache}, blocks of {block}");
        let served = Served::new(model, cache, block);
        let mut store = served.store(usize::MAX);
        let shared = 3 * block + 2;
        let prompts =
            [ids[..87].to_vec(), [&ids[..shared], &other[..30]].concat(), ids[..shared + 9].into()];
        for (i, prompt) in prompts.iter().enumerate() {
            let fresh = served.fresh(prompt, &REPLY);
            for again in 0..2 {
                let (hit, calls) = served.serve(&mut store, "", prompt, &REPLY);
                let what = format!("{what}: prompt {i} after {hit} tokens");
                assert!(calls == fresh[hit / block..], "{what}: other logits");
                match (i, again) {
                    (0, 0) => assert_eq!(hit, 0, "{what}"),
                    // Every prompt is restored at its last block, and the third where it left the
                    // first, as the second did.
                    (_, 1) => assert_eq!(hit, (prompt.len() - 1) / block * block, "{what}"),
                    (2, 0) => assert!(hit >= 3 * block, "{what}"),
                    _ => {}
                }
            }
        }
    }
}

fn check_all(name: &str, folder: &Path, least: usize) {
    let model = load(folder, &device()).unwrap().model;
    let caches: Vec<_> = caches().into_iter().filter(|cache| fits(&model, cache)).collect();
    assert!(caches.len() >= least, "{name} fits only {caches:?}");
    for cache in caches {
        check(&model, name, &cache);
    }
}

/// Makes a test over all caches out of each tiny model.
macro_rules! models {
    ($($test:ident: $name:literal, $least:literal;)+) => {
        $(
            #[test]
            fn $test() {
                check_all($name, &tiny($name), $least);
            }
        )+
    };
}

models! {
    prefixes_of_gpt2: "gpt2-tiny", 40;
    prefixes_of_llama: "llama-tiny", 40;
    prefixes_of_mistral: "mistral-swa-tiny", 30;
    prefixes_of_gemma3: "gemma3-tiny", 40;
    prefixes_of_gemma4: "gemma4-tiny", 40;
    prefixes_of_gpt_oss: "gpt-oss-tiny", 40;
    prefixes_of_qwen3_5: "qwen3_5-tiny", 40;
    prefixes_of_deepseek_v3: "deepseek_v3-tiny", 20;
}

#[test]
fn prefixes_of_deepseek_v4() {
    check_all("deepseek-v4-tiny", &deepseek::tiny(), 8);
}

/// The other models, with a few caches.
#[test]
fn prefixes_of_all_models() {
    let on = device();
    for name in TINY {
        let model = load(tiny(name), &on).unwrap().model;
        for cache in ["float", "k4v4-g8-r16", "k2v2-g16-r16-gflush", "kint8vint8-r9-s3-after"] {
            if fits(&model, cache) {
                check(&model, name, cache);
            }
        }
    }
}

/// Heads whose codes and parameters end within a word of four, or whose parameters of one token do
/// not fill a word.
#[test]
fn prefixes_of_odd_heads() {
    let on = device();
    for head_dim in [8, 12, 20, 24, 40, 96] {
        let attention = LayerSpec::new(4, 2, head_dim);
        let config = Config { attention, rotary_dim: head_dim, ..small() };
        let model: LanguageModel = Llama::init(config, &on).into();
        let caches: Vec<_> = caches().into_iter().filter(|cache| fits(&model, cache)).collect();
        assert!(caches.len() >= 4, "{head_dim} channels fit only {caches:?}");
        for cache in caches {
            check(&model, &format!("{head_dim} channels"), &cache);
        }
    }
}

/// A prefix is restored after every block of a cache that loses nothing.
#[test]
fn caches_that_lose_nothing_hit_at_every_block() {
    let model = &load(tiny("llama-tiny"), &device()).unwrap().model;
    let ids = text(100, 3);
    for (cache, found) in [
        ("float", 48),
        ("kint8vint8", 48),
        // A parameter word has two tokens.
        ("kint8vint8-s2", 48),
        ("kint8vint8-s3", 0),
        // At the end of a group, no key is in float.
        ("k4v16-g16-r16", 48),
        ("k4v16-g16-r32", 32),
        ("k4v4-g16-r16", 0),
        ("float-w24", 0),
    ] {
        let served = Served::new(model, cache, 16);
        let mut store = served.store(usize::MAX);
        served.insert(&mut store, "", &ids[..96]);
        assert_eq!(served.hit(&mut store, "", &ids), 96);
        let mut prompt = ids.clone();
        prompt[50] += 1;
        assert_eq!(served.hit(&mut store, "", &prompt), found, "{cache}");
        let marks = store.marks("", &prompt);
        match found {
            48 => assert_eq!(marks, [96], "{cache}"),
            _ => assert!(marks.contains(&48) && marks.ends_with(&[96]), "{cache}: {marks:?}"),
        }
    }
}

/// The second prompt with a shared beginning stores its end, and the third one uses it.
#[test]
fn marks_follow_the_prompts() {
    let model = &load(tiny("llama-tiny"), &device()).unwrap().model;
    let served = Served::new(model, "k4v4-g16-r16", 8);
    let mut store = served.store(usize::MAX);
    let (ids, other) = (text(150, 4), text(150, 5));
    // A tail has 16 values in float and keys since the last group: as much as some blocks.
    let marks = store.marks("", &ids[..150]);
    assert!(marks.ends_with(&[144]) && marks.contains(&136), "{marks:?}");
    for n in [0, 1, 8] {
        assert_eq!(store.marks("", &ids[..n]), [0; 0]);
    }
    assert_eq!(store.marks("", &ids[..9]), [8]);
    served.serve(&mut store, "", &ids, &[]);
    assert_eq!(store.marks("", &ids), [0; 0], "it is stored");
    let prompt = [&ids[..45], &other[..40]].concat();
    let marks = store.marks("", &prompt);
    assert!(marks.contains(&40) && marks.ends_with(&[80]), "{marks:?}");
    assert!(served.serve(&mut store, "", &prompt, &[]).0 < 40);
    let prompt = [&ids[..43], &other[50..90]].concat();
    assert!(!store.marks("other", &prompt).contains(&40));
    assert_eq!(served.serve(&mut store, "", &prompt, &[]).0, 40);
}

#[test]
fn salts_share_nothing() {
    let model = &load(tiny("llama-tiny"), &device()).unwrap().model;
    let served = Served::new(model, "kint8vint8", 8);
    let mut store = served.store(usize::MAX);
    let ids = text(50, 6);
    served.insert(&mut store, "a", &ids[..48]);
    let one = store.stats();
    assert_eq!((served.hit(&mut store, "b", &ids), served.hit(&mut store, "a", &ids)), (0, 48));
    served.insert(&mut store, "b", &ids[..16]);
    assert_eq!(served.hit(&mut store, "b", &ids), 16);
    let stats = store.stats();
    assert_eq!((one.blocks, stats.blocks), (6, 8));
    // A salt takes one byte.
    assert_eq!(stats.bytes, (one.bytes - 1) / 6 * 8 + 2);
    assert_eq!((stats.lookups, stats.hits, stats.hit_tokens, stats.prompt_tokens), (3, 2, 64, 150));
    store.clear();
    let stats = store.stats();
    assert_eq!((stats.blocks, stats.bytes, stats.hits), (0, 0, 2));
    assert_eq!(served.hit(&mut store, "a", &ids), 0);
}

/// Salts of a thousand bytes take memory from the blocks.
#[test]
fn salts_count_as_bytes() {
    let model = &load(tiny("llama-tiny"), &device()).unwrap().model;
    let served = Served::new(model, "kint8vint8", 8);
    let (ids, other) = (text(17, 8), text(17, 9));
    let mut store = served.store(usize::MAX);
    served.insert(&mut store, "", &ids[..8]);
    let block = store.stats().bytes;
    let holds = |store: &PrefixCache| (store.stats().blocks, store.stats().bytes);
    let salt = |i: usize| format!("{i:01000}");
    let mut store = served.store(3 * (block + 1000));
    for i in 0..10 {
        served.insert(&mut store, &salt(i), &ids[..8]);
        let n = (i + 1).min(3);
        assert_eq!(holds(&store), (n, n * (block + 1000)));
    }
    let hits = [9, 8, 7, 6].map(|i| served.hit(&mut store, &salt(i), &ids));
    assert_eq!(hits, [8, 8, 8, 0]);
    // The next block of a stored salt takes the place of the oldest prompt.
    served.insert(&mut store, &salt(9), &ids[..16]);
    assert_eq!(holds(&store), (3, 3 * block + 2000));
    // The only prompt of a salt makes room for the next one.
    let mut store = served.store(block + 1000);
    for prompt in [&ids, &other] {
        served.insert(&mut store, &salt(1), &prompt[..8]);
        assert_eq!(holds(&store), (1, block + 1000));
        assert_eq!(served.hit(&mut store, &salt(1), prompt), 8);
    }
    let mut store = served.store(block + 999);
    served.insert(&mut store, &salt(1), &ids[..8]);
    assert_eq!(holds(&store), (0, 0));
}

/// Prompts that were not used for the longest time make room for others.
#[test]
fn the_oldest_leaves_are_evicted() {
    let model = &load(tiny("llama-tiny"), &device()).unwrap().model;
    let served = Served::new(model, "kint8vint8", 8);
    let mut store = served.store(usize::MAX);
    let prompts: Vec<_> = (0..4).map(|seed| [text(8, 99), text(25, seed)].concat()).collect();
    served.insert(&mut store, "", &prompts[0][..8]);
    let block = store.stats().bytes;
    // One shared block, and three blocks of each of two prompts.
    let mut store = served.store(7 * block + block / 2);
    for prompt in &prompts[..2] {
        served.insert(&mut store, "", &prompt[..32]);
    }
    assert_eq!(store.stats().blocks, 7);
    assert_eq!(served.hit(&mut store, "", &prompts[0]), 32, "prompt 1 is the oldest now");
    served.insert(&mut store, "", &prompts[2][..16]);
    assert_eq!((store.stats().blocks, store.stats().evicted_blocks), (7, 1));
    let hits = |store: &mut PrefixCache| {
        prompts.iter().map(|ids| served.hit(store, "", ids)).collect::<Vec<_>>()
    };
    assert_eq!(hits(&mut store), [32, 24, 16, 8]);
    // The newest prompt is larger than the store. Its first blocks stay.
    let long = text(150, 50);
    served.insert(&mut store, "", &long[..144]);
    assert_eq!(served.hit(&mut store, "", &long), 56);
    assert_eq!(hits(&mut store), [0; 4]);
    assert_eq!(store.stats().bytes, 7 * block);
    // A prefix with a tail fits as a whole or not at all.
    let served = Served::new(model, "k4v4-g16-r16", 8);
    let mut store = served.store(usize::MAX);
    served.insert(&mut store, "", &long[..32]);
    let bytes = store.stats().bytes;
    for (room, blocks) in [(bytes, 4), (bytes - 1, 0), (0, 0)] {
        let mut store = served.store(room);
        served.insert(&mut store, "", &long[..32]);
        assert_eq!(store.stats().blocks, blocks);
        assert_eq!(store.stats().bytes, if blocks > 0 { bytes } else { 0 });
        assert_eq!(served.hit(&mut store, "", &long), 8 * blocks);
    }
    // An interior prefix without a tail is removed with its last child.
    let mut store = served.store(bytes);
    served.insert(&mut store, "", &long[..32]);
    served.insert(&mut store, "", &prompts[0][..8]);
    assert_eq!((store.stats().blocks, store.stats().evicted_blocks), (1, 4));
}

/// A conversation that grows beyond the store loses the tails of its first turns, not the last one.
#[test]
fn a_long_conversation_stays_stored() {
    let on = device();
    for name in ["llama-tiny", "qwen3_5-tiny"] {
        let model = &load(tiny(name), &on).unwrap().model;
        let served = Served::new(model, "k4v4-g16-r16", 8);
        let ids = text(150, 60);
        let mut whole = served.store(usize::MAX);
        served.insert(&mut whole, "", &ids[..144]);
        let max_bytes = whole.stats().bytes;
        let mut store = served.store(max_bytes);
        // Tails of all these lengths are equally large.
        for len in (16..=144).step_by(16) {
            served.insert(&mut store, "", &ids[..len]);
            assert_eq!(served.hit(&mut store, "", &ids), len, "{name}");
            assert!(store.stats().bytes <= max_bytes);
        }
        let stats = store.stats();
        assert_eq!((stats.blocks, stats.evicted_blocks), (18, 0));
        assert_eq!((stats.bytes, stats.evicted_tails), (max_bytes, 8));
    }
}

/// A cache of another capacity is filled, with a prefix that fits.
#[test]
fn prefixes_fit_the_capacity() {
    let on = device();
    let model = &load(tiny("llama-tiny"), &on).unwrap().model;
    for cache in ["float", "k4v4-g16-r16", "kint8vint8-s3", "k4v2-g16-r16-s3-after"] {
        let served = Served::new(model, cache, 8);
        let mut store = served.store(usize::MAX);
        let ids = text(110, 7);
        served.serve(&mut store, "", &ids, &[]);
        served.insert(&mut store, "", &ids[..40]);
        let fresh = served.fresh(&ids, &REPLY);
        for (capacity, expected) in [(500, 104), (107, 104), (104, 104), (41, 40)] {
            let empty = model.new_cache(config(cache, capacity), 1, &on).unwrap();
            let mut held: ModelCache = empty;
            let hit = store.restore("", &ids, &mut held).unwrap();
            assert!(hit >= expected && hit <= capacity, "{cache}: {hit} of {capacity}");
            assert_eq!(held.remaining(), capacity - hit);
            if capacity > 110 {
                let calls = served.append(&mut held, &ids, &REPLY, |_| ());
                assert!(calls == fresh[hit / 8..], "{cache}: other logits");
            }
        }
    }
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let on = device();
    let load = |name| load(tiny(name), &on).unwrap().model;
    let (model, other) = (&load("llama-tiny"), load("qwen3-tiny"));
    let served = Served::new(model, "k4v4-g16-r16", 8);
    let ids = text(40, 8);
    let mut store = served.store(usize::MAX);
    served.serve(&mut store, "", &ids, &[]);
    let before = store.stats();

    let error = PrefixCache::new(&served.cache(), 0, 9).unwrap_err().to_string();
    assert_contains(&error, &["block_tokens = 0", "at least 1"]);
    let error = PrefixCache::new(&served.cache(), ROOM + 1, 9).unwrap_err().to_string();
    assert_contains(&error, &["block_tokens = 161", "160"]);
    // A store is made for the layers of a batch, too.
    let batch = model.new_cache(config("k4v4-g16-r16", ROOM), 3, &on).unwrap();
    let mut of_batch = PrefixCache::new(&batch, 8, usize::MAX).unwrap();
    served.serve(&mut of_batch, "", &ids, &[]);
    assert_eq!(of_batch.stats().bytes, before.bytes);

    let new = |cache| model.new_cache(config(cache, ROOM), 1, &on).unwrap();
    for (mut cache, parts) in [
        (batch, &["batch = 3", "must be 1"][..]),
        (new("k2v4-g16-r16"), &["k2v4", "k4v4", "layer 0"]),
        (new("float"), &["float", "k4v4"]),
        (other.new_cache(config("k4v4-g16-r16", ROOM), 1, &on).unwrap(), &["cache = "]),
    ] {
        let error = store.restore("", &ids, &mut cache).unwrap_err().to_string();
        assert_contains(&error, parts);
        assert!(cache.is_empty());
        let error = store.insert("", &ids[..8], &cache).unwrap_err().to_string();
        assert_contains(&error, parts);
    }
    let mut cache = served.cache();
    pass(model, &mut cache, &ids[..8], &on);
    let error = store.restore("", &ids, &mut cache).unwrap_err().to_string();
    assert_contains(&error, &["8 tokens", "must be empty"]);
    for (tokens, parts) in [
        (&ids[..16], &["tokens = 16", "holds 8"][..]),
        (&ids[..7], &["tokens = 7", "multiple of the 8"]),
        (&[], &["tokens = 0", "multiple of the 8"]),
    ] {
        let error = store.insert("", tokens, &cache).unwrap_err().to_string();
        assert_contains(&error, parts);
    }
    assert_eq!(store.stats(), before);
    store.insert("", &ids[..8], &cache).unwrap();
    assert_ne!(store.stats(), before);
}

/// Long contexts have other frequencies, so their keys are other keys.
#[test]
fn a_rope_that_depends_on_the_capacity_is_compared() {
    let on = device();
    let model = load(tiny("phi4-tiny"), &on).unwrap().model;
    let new = |capacity| model.new_cache(config("float", capacity), 1, &on).unwrap();
    let refused: BTreeSet<bool> = [60, 64, 100, 500]
        .into_iter()
        .map(|capacity| {
            let mut store = PrefixCache::new(&new(50), 8, usize::MAX).unwrap();
            match store.restore("", &[1, 2], &mut new(capacity)) {
                Ok(hit) => hit > 0,
                Err(error) => {
                    assert_contains(&error.to_string(), &["another rope"]);
                    true
                }
            }
        })
        .collect();
    assert_eq!(refused.len(), 2, "short contexts have the same rope, and long ones another");
}
