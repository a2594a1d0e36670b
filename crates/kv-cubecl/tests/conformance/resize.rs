//! The same tokens in caches of other capacities.

use kv_cubecl::{Error, KvCache, On, Target};

use crate::common::{Rng, Setup, attend, chunk_sizes, equal_bits, skipped, stamp};

stamp!(
    goes_on_as_a_cache_of_that_capacity,
    a_batch_of_different_lengths_keeps_them,
    fewer_tokens_than_there_are_is_refused,
);

const NAMES: [&str; 14] = [
    "float",
    "float-f16",
    "float-w20",
    "float-w33-s3",
    "kint8vint8",
    "k16ve4m3-r8",
    "k2v2-g16-r16",
    "k4v2-g16-r32-s3-after",
    "k16v4-g16-r16-s20-gflush",
    "k8v16-g16-r16",
    "k4v8-g16-r32-hadv",
    "k4v4-g16-r16-w40",
    "k4v8-g8-r16-w21-s5-gflush",
    "k8v8-g16-r16-w17-after",
];

fn served<T: Target>(on: &On<T>, text: &Setup) -> bool {
    let dtype = text.config.float.dtype();
    let served = on.supports_dtype(dtype);
    if !served {
        skipped(&format!("the device cannot store {}", text.config));
    }
    served
}

fn with_capacity(text: &Setup, capacity: usize) -> Setup {
    Setup { config: text.config.with_capacity(capacity), ..text.clone() }
}

/// Stored for its own tokens alone, between any two capacities.
fn goes_on_as_a_cache_of_that_capacity<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(700);
    let rounds = if T::NAME == "flex" { 60 } else { 3 };
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [2, 2, 1, 90, 64], 710 + seed as u64);
        if !served(on, &text) {
            continue;
        }
        for _ in 0..rounds {
            let len = 1 + rng.below(89);
            let [from, to] = [(); 2].map(|()| len + rng.below(120 - len));
            let to = to.max(len + 1);
            let at = format!("{name}: {len} tokens, capacity {from} to {to}");
            let sizes = chunk_sizes(rng, len, 20);
            let filled = |capacity| {
                let text = with_capacity(&text, capacity);
                let mut cache = text.cache(on);
                attend(&mut cache, &text, &sizes, on);
                cache
            };
            let smallest = filled(from).resized(len).unwrap();
            assert_eq!((smallest.capacity(), smallest.len()), (len, len), "{at}");
            let mut resized = smallest.resized(to).unwrap();
            let mut expected = filled(to);
            assert_eq!(resized.layout(), expected.layout(), "{at}");
            assert_eq!(resized.memory_bytes(), expected.memory_bytes(), "{at}");
            let rest = to.min(90) - len;
            if rest > 0 {
                let sizes = chunk_sizes(rng, rest, 6);
                let rest = text.tokens(len..len + rest);
                let got = attend(&mut resized, &rest, &sizes, on);
                let want = attend(&mut expected, &rest, &sizes, on);
                equal_bits(at, &got.data, &want.data);
            }
        }
    }
}

fn a_batch_of_different_lengths_keeps_them<T: Target>(on: &On<T>) {
    for (seed, name) in
        ["float", "k4v2-g16-r32-s3-after", "k4v8-g8-r16-w21-s5-gflush"].into_iter().enumerate()
    {
        let text = Setup::new(name, [1, 2, 1, 90, 64], 730 + seed as u64);
        let alone = |capacity, len: usize| {
            let text = with_capacity(&text, capacity);
            let mut cache = text.cache(on);
            attend(&mut cache, &text.tokens(0..len), &[len], on);
            cache
        };
        let joined = |capacity| KvCache::join(&[alone(capacity, 7), alone(capacity, 60)]).unwrap();
        let mut resized = joined(64).resized(60).unwrap().resized(100).unwrap();
        let mut expected = joined(100);
        assert_eq!(resized.lens(), [7, 60]);
        let next = Setup::with(text.config, [2, 2, 1, 9, 64], 740);
        let sizes = [1, 2, 6];
        let [got, want] =
            [&mut resized, &mut expected].map(|cache| attend(cache, &next, &sizes, on));
        equal_bits(name, &got.data, &want.data);
    }
}

fn fewer_tokens_than_there_are_is_refused<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [1, 2, 1, 40, 64], 750);
    let mut cache = text.cache(on);
    attend(&mut cache, &text.tokens(0..30), &[30], on);
    let error = cache.resized(29).unwrap_err();
    assert_eq!(error, Error::CapacityExceeded { len: 0, added: 30, capacity: 29 });
    let error = cache.resized(usize::MAX).unwrap_err().to_string();
    assert!(error.starts_with("capacity "), "{error}");
    assert_eq!(cache.resized(40).unwrap().memory_bytes(), cache.memory_bytes());
}
