//! Slots of a batch: sequences are removed, admitted and forked.

use kv_cubecl::{CacheShape, Error, KvCache, KvCacheConfig, On, Side, Target};

use crate::{
    batch::{batch_of, sequence},
    common::{CLOSE, Host, Setup, attend, close, equal_bits, snapshot, stamp},
    ragged::poison,
};

stamp!(a_slot_is_used_again, a_fork_goes_on_alone, slots_that_cannot_be);

const NAMES: [&str; 6] = [
    "float",
    "k2v2-g16-r16-gflush",
    "k4v4-g16-r32-s3-after",
    "k16v4-g16-r16-s20",
    "k4v4-g16-hadv",
    "kint8ve4m3",
];

/// Attends to tokens `start..end` of each text, all at once, and compares each with the oracle.
#[track_caller]
fn go_on<T: Target>(cache: &mut KvCache, texts: &[(&Setup, usize)], tokens: usize, on: &On<T>) {
    let parts: Vec<Setup> =
        texts.iter().map(|(text, start)| text.tokens(*start..start + tokens)).collect();
    let [q, k, v] = batch_of(&parts).on(on);
    let output = Host::of(cache.attend(q, k, v).unwrap().output);
    let len = output.data.len() / texts.len();
    for (i, (text, start)) in texts.iter().enumerate() {
        let end = start + tokens;
        let whole = text.tokens(0..end).reference().output;
        let rows: Vec<f64> =
            whole.chunks(end * 64).flat_map(|head| &head[start * 64..]).copied().collect();
        let data = output.data[i * len..(i + 1) * len].to_vec();
        close(format!("{text:?}: {i}"), &Host { data, shape: parts[i].query.shape }, &rows, CLOSE);
    }
}

fn a_slot_is_used_again<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [3, 4, 2, 60, 64], 500 + seed as u64);
        let texts: Vec<Setup> = (0..3).map(|i| sequence(&text, i)).collect();
        let new = Setup::with(text.config, [1, 4, 2, 60, 64], 520 + seed as u64);
        let mut cache = text.cache(on);
        attend(&mut cache, &text.tokens(0..30), &[30], on);
        let others = snapshot(&cache.select(&[0, 2]).unwrap());
        cache.remove(1).unwrap();
        assert_eq!((cache.lens(), cache.len()), (&[30, 0, 30][..], 30));
        let clone = cache.clone();

        // A prompt that was read alone takes the place, and nothing of what was there is left.
        let mut alone = new.cache(on);
        attend(&mut alone, &new.tokens(0..21), &[21], on);
        let mut cache = poison(&cache, 1);
        cache.admit(1, &alone).unwrap();
        assert!(snapshot(&cache.select(&[1]).unwrap()) == snapshot(&alone), "{name}");
        assert!(snapshot(&cache.select(&[0, 2]).unwrap()) == others, "{name}: neighbors");
        assert_eq!(alone.lens(), [21]);
        go_on(&mut cache, &[(&texts[0], 30), (&new, 21), (&texts[2], 30)], 1, on);
        go_on(&mut cache, &[(&texts[0], 31), (&new, 22), (&texts[2], 31)], 12, on);

        // Or the new text starts in the slot itself.
        let mut cache = poison(&clone, 1);
        assert!(Side::BOTH.iter().all(|&side| cache.packed(side).is_none()));
        go_on(&mut cache, &[(&texts[0], 30), (&new, 0), (&texts[2], 30)], 1, on);
        go_on(&mut cache, &[(&texts[0], 31), (&new, 1), (&texts[2], 31)], 12, on);
        // What was cloned before saw nothing of this.
        assert!(snapshot(&clone.select(&[0, 2]).unwrap()) == others, "{name}: the clone");
    }
}

fn a_fork_goes_on_alone<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [1, 4, 2, 60, 64], 540 + seed as u64);
        let other = Setup::with(text.config, [1, 4, 2, 60, 64], 560 + seed as u64);
        let mut alone = text.cache(on);
        attend(&mut alone, &text.tokens(0..30), &[30], on);
        let shape = CacheShape::new(3, 2, 64);
        let mut cache = poison(&KvCache::new(&text.config, shape, on).unwrap(), 2);
        cache.admit(0, &alone).unwrap();
        cache.fork(0, 2).unwrap();
        assert_eq!(cache.lens(), [30, 0, 30]);
        assert!(snapshot(&cache.select(&[2]).unwrap()) == snapshot(&alone), "{name}");

        // One goes on with its text, the other with another, as a clone of it alone would.
        let before = snapshot(&alone);
        let (mut left, mut right) = (alone.clone(), alone.clone());
        let ways = [text.tokens(30..50), text.tokens(30..50), other.tokens(30..50)];
        let [q, k, v] = batch_of(&ways).on(on);
        let output = Host::of(cache.attend_ragged(q, k, v, &[20, 0, 20]).unwrap().output);
        let expected = [
            attend(&mut left, &ways[0], &[20], on),
            Host::from_fn(ways[1].query.shape, || 0.0),
            attend(&mut right, &ways[2], &[20], on),
        ];
        let expected: Vec<f32> = expected.into_iter().flat_map(|host| host.data).collect();
        equal_bits(name, &output.data, &expected);
        assert!(snapshot(&cache.select(&[0]).unwrap()) == snapshot(&left), "{name}: from");
        assert!(snapshot(&cache.select(&[2]).unwrap()) == snapshot(&right), "{name}: to");
        assert!(snapshot(&alone) == before, "{name}: what was admitted was written");
    }
}

fn slots_that_cannot_be<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 2, 1, 40, 64], 580);
    let mut cache = text.cache(on);
    attend(&mut cache, &text.tokens(0..20), &[20], on);
    cache.remove(1).unwrap();
    let one = sequence(&text, 0);
    let empty = one.cache(on);
    let mut alone = empty.clone();
    attend(&mut alone, &one.tokens(0..5), &[5], on);
    let before = snapshot(&cache);
    let assert_refused = |result: kv_cubecl::Result<()>, message: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
        assert_eq!(error.to_string(), message);
    };
    let held = "sequence 0: its slot is not free, it holds 20 tokens";
    let free = "sequence 1: holds no token, its slot is free";
    assert_refused(cache.remove(1), free);
    assert_refused(cache.remove(2), "sequence 2: must be below batch 2");
    assert_refused(cache.admit(0, &alone), held);
    assert_refused(cache.admit(2, &alone), "sequence 2: must be below batch 2");
    assert_refused(cache.admit(1, &empty), "sequence 0: holds no token, its slot is free");
    let both = text.cache(on);
    assert_refused(
        cache.admit(1, &both),
        "batch 2: a cache that is admitted must be of 1 sequence",
    );
    assert_refused(cache.fork(0, 0), "to 0: its slot is not free, it holds 20 tokens");
    assert_refused(cache.fork(0, 2), "to 2: must be below batch 2");
    assert_refused(cache.fork(1, 1), free);
    assert_refused(cache.fork(7, 1), "sequence 7: must be below batch 2");
    assert_refused(cache.truncate(2, 0), "sequence 2: must be below batch 2");
    assert_refused(cache.truncate(0, 21), "len 21: must be at most the 20 tokens of sequence 0");

    let config: KvCacheConfig = "k4v4-g16-r16".parse().unwrap();
    let shape = CacheShape::new(1, 1, 64);
    let other = KvCache::new(&config.with_capacity(40), shape, on).unwrap();
    let error = cache.admit(1, &other).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let expected = "admit: configuration of the cache that is admitted is not supported";
    assert!(error.to_string().starts_with(expected), "{error}");
    assert!(snapshot(&cache) == before, "a refused call wrote");
    cache.admit(1, &alone).unwrap();
    assert_eq!(cache.lens(), [20, 5]);
}
