//! Sequences cut back, and drafts of speculative decoding.

use kv_cubecl::{
    CacheFloat, CacheShape, Error, KvCache, KvCacheConfig, On, QuantizedCounts, Side, Target,
    layout::CacheLayout,
};

use crate::common::{CLOSE, Host, Rng, Setup, attend, close, equal_bits, skipped, snapshot, stamp};

stamp!(
    any_length_with_the_same_quantized_keys,
    the_same_tokens_get_the_same_codes,
    a_truncated_sequence_goes_on_another_way,
    quantized_keys_do_not_come_back,
    what_is_cut_back_exactly_never_was_longer,
    lengths_to_cut_back_to_exactly,
    drafted_tokens_that_are_not_kept_never_were_there,
);

const NAMES: [&str; 15] = [
    "float",
    "k2v2-g16-r16",
    "k2v2-g16-r16-gflush",
    "k4v2-g16-r32-s3-after",
    "k16v4-g16-r16-s20",
    "k16v4-g8-r8-after",
    "k8v16-g16-r16",
    "k4v8-g16-r32-hadv",
    "k2v4-g16-r32-s3-after-gflush-hadv",
    "kint8vint8",
    "kint8vint8-r21-s3-after",
    "kint8v4-g16-r32-s2",
    "k2vint8-g16-r16-after",
    "ke4m3bvmxfp4-r9",
    "ke2m1bve4m3-s2",
];

fn counts(text: &Setup, len: usize) -> QuantizedCounts {
    CacheLayout::new(&text.config, text.shape()).unwrap().schedule().counts(len)
}

/// Lengths to which truncation is possible, from the rule itself.
fn any_length_with_the_same_quantized_keys<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [1, 2, 1, 90, 64], 600 + seed as u64);
        for now in (0..=90).rev().step_by(if T::NAME == "flex" { 1 } else { 11 }) {
            let mut cache = text.cache(on);
            if now > 0 {
                attend(&mut cache, &text.tokens(0..now), &[now], on);
            }
            let shortest = cache.shortest(0).unwrap();
            for len in 0..=now {
                // Keys that are quantized one by one are given back.
                let same = counts(&text, len).keys == counts(&text, now).keys;
                let in_groups = text.config.keys.is_grouped();
                let allowed = same || !in_groups && text.config.keys.is_quantized();
                assert_eq!(len >= shortest, allowed, "{name}: from {now} to {len}");
                if allowed && len % 7 == 0 {
                    let mut shorter = cache.clone();
                    shorter.truncate(0, len).unwrap();
                    assert_eq!(shorter.lens(), [len]);
                    assert_eq!(shorter.quantized_counts(), counts(&text, len));
                }
            }
        }
    }
}

/// Truncated anywhere and given the same tokens again, a cache has the codes it had, also those of
/// values that were in between restored to the window.
fn the_same_tokens_get_the_same_codes<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(620);
    let rounds = if T::NAME == "flex" { 40 } else { 4 };
    let mut requantized = 0;
    for (seed, name) in NAMES.into_iter().chain(["k2v4-g16-r32-f16"]).enumerate() {
        let text = Setup::new(name, [2, 2, 1, 90, 64], 630 + seed as u64);
        let narrow = text.config.float != CacheFloat::F32;
        if !on.supports_dtype(text.config.float.dtype()) {
            skipped(&format!("the device cannot store {name}"));
            continue;
        }
        for round in 0..rounds {
            let now = 1 + rng.below(90);
            let mut cache = text.cache(on);
            attend(&mut cache, &text.tokens(0..now), &[now], on);
            let untouched = cache.clone();
            let before = snapshot(&untouched);
            let shortest = cache.shortest(1).unwrap();
            let len = shortest + rng.below(now + 1 - shortest);
            cache.truncate(1, len).unwrap();
            assert_eq!(cache.lens(), [now, len]);
            let (then, at) = (counts(&text, len).values, counts(&text, now).values);
            requantized += at.min(len.saturating_sub(text.config.sink_tokens)).saturating_sub(then);

            if len < now {
                let [_, k, v] = text.tokens(len..now).on(on);
                cache.append_ragged(k, v, &[0, now - len]).unwrap();
            }
            let what = format!("{name} round {round}: {now} to {len} and back");
            for side in Side::BOTH {
                let packed = |cache: &KvCache| cache.packed(side);
                // A power of two may be the next one where the largest number of a block was
                // rounded to half of what its scale allows: other codes for the same numbers.
                if text.config.spec(side, 64).is_some_and(|spec| spec.format.parameter_bits() == 8)
                {
                    let numbers = |cache| packed(cache).map(|p| Host::of(p.dequantize()).data);
                    assert!(numbers(&cache) == numbers(&untouched), "{what}: {side}");
                    continue;
                }
                let logical = |cache: &KvCache| packed(cache).map(|p| p.to_logical());
                let (mut got, want) = (logical(&cache), logical(&untouched));
                if let (Some(got), Some(want), true) = (&mut got, &want, narrow) {
                    // What was restored was rounded, which may move a scale by its last bit.
                    for (got, want) in got.scale.iter_mut().zip(&want.scale) {
                        assert!(got.to_bits().abs_diff(want.to_bits()) <= 1, "{what}: {side}");
                        *got = *want;
                    }
                }
                assert!(got == want, "{what}: {side}");
            }
            assert!(snapshot(&untouched) == before, "{what}: a clone was written");
            let first = [&cache, &untouched].map(|c| snapshot(&c.select(&[0]).unwrap()));
            assert!(first[0] == first[1], "{what}: the other sequence");
        }
    }
    assert!(
        requantized > 10 * rounds,
        "{requantized} values were restored: too few to say anything"
    );
}

/// After the truncation the cache is what a cache is that had the restored values from the start.
fn a_truncated_sequence_goes_on_another_way<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [1, 4, 2, 70, 64], 650 + seed as u64);
        let other = Setup::with(text.config, [1, 4, 2, 70, 64], 670 + seed as u64);
        let mut cache = text.cache(on);
        attend(&mut cache, &text.tokens(0..60), &[60], on);
        let len = cache.shortest(0).unwrap().max(41);
        let packed = Side::BOTH.map(|side| cache.packed(side));
        cache.truncate(0, len).unwrap();

        // The text that the cache now holds.
        let mut mixed = Setup {
            query: Host::cat(&[text.query.tokens(0..len), other.query.tokens(len..70)]),
            key: Host::cat(&[text.key.tokens(0..len), other.key.tokens(len..70)]),
            value: Host::cat(&[text.value.tokens(0..len), other.value.tokens(len..70)]),
            ..text.clone()
        };
        for (side, packed) in Side::BOTH.into_iter().zip(packed) {
            // Keys in groups of tokens are as they were.
            let in_groups = side == Side::Keys && text.config.keys.is_grouped();
            let Some(rows) = packed.filter(|_| !in_groups).map(|packed| packed.dequantize()) else {
                continue;
            };
            let rows = match side == Side::Values && text.config.uses_hadamard_values() {
                true => kv_cubecl::hadamard(rows).unwrap(),
                false => rows,
            };
            let (rows, sinks) = (Host::of(rows), text.config.sink_tokens);
            let restored = counts(&text, len)[side]..counts(&text, 60)[side];
            for index in restored.filter(|&index| sinks + index < len) {
                for head in 0..2 {
                    let from = (head * rows.shape[2] + index) * 64;
                    let to = (head * 70 + sinks + index) * 64;
                    let mixed = match side {
                        Side::Keys => &mut mixed.key,
                        Side::Values => &mut mixed.value,
                    };
                    mixed.data[to..to + 64].copy_from_slice(&rows.data[from..from + 64]);
                }
            }
        }
        let whole = mixed.reference().output;
        let rows: Vec<f64> =
            whole.chunks(70 * 64).flat_map(|head| &head[len * 64..]).copied().collect();
        let sizes = [&[1, 1, 3][..], &[65 - len]].concat();
        let output = attend(&mut cache, &mixed.tokens(len..70), &sizes, on);
        close(format!("{name}: back from 60 to {len}"), &output, &rows, CLOSE);
    }
}

fn quantized_keys_do_not_come_back<T: Target>(on: &On<T>) {
    for (name, now, shortest) in [
        ("k2v2-g16-r32", 70, 64),
        ("k2v2-g16-r32-after", 70, 65),
        ("k2v2-g16-r32-s3", 70, 67),
        ("k2v2-g16-r32-gflush", 70, 64),
        ("k4v16-g16-r16-s5-after-gflush", 70, 70),
        ("k2v2-g16-r32", 31, 0),
        ("k16v2-g16-r16", 70, 0),
        ("float", 70, 0),
        // A window that has hidden tokens has overwritten them.
        ("float-s2-w9", 11, 0),
        ("float-s2-w9", 12, 12),
        ("float-s2-w9", 70, 70),
        ("k8v4-g16-r16-w16", 16, 16),
        ("k16v4-g16-r16-w32-after", 70, 70),
    ] {
        let text = Setup::new(name, [1, 2, 1, 80, 64], 690);
        let mut cache = text.cache(on);
        attend(&mut cache, &text.tokens(0..now), &[now], on);
        assert_eq!(cache.shortest(0).unwrap(), shortest, "{name}");
        let before = snapshot(&cache);
        if let Some(len) = shortest.checked_sub(1) {
            let error = cache.truncate(0, len).unwrap_err();
            assert!(matches!(error, Error::InvalidConfig { field: "len", .. }), "{error:?}");
            let message = format!("len {len}: must be at least {shortest} for sequence 0 of {now}");
            assert!(error.to_string().starts_with(&message), "{error}");
            let by_window = len > 0 && counts(&text, len).keys == counts(&text, now).keys;
            assert_eq!(error.to_string().contains("its window has left"), by_window, "{error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        assert!(snapshot(&cache) == before, "{name}: a refused call wrote");
        cache.truncate(0, now).unwrap();
        assert!(snapshot(&cache) == before, "{name}: nothing was taken back");
        cache.truncate(0, shortest).unwrap();
        assert_eq!(cache.lens(), [shortest]);
    }
    // Truncated to nothing, a slot is free.
    let config: KvCacheConfig = "k16v2-g16-r16".parse().unwrap();
    let shape = CacheShape::new(1, 1, 64);
    let mut cache = KvCache::new(&config.with_capacity(40), shape, on).unwrap();
    let text = Setup::with(config, [1, 1, 1, 40, 64], 691);
    let expected = attend(&mut cache.clone(), &text, &[30, 10], on);
    attend(&mut cache, &Setup::with(config, [1, 1, 1, 40, 64], 692), &[40], on);
    cache.truncate(0, 0).unwrap();
    let output = attend(&mut cache, &text, &[30, 10], on);
    equal_bits("from the start", &output.data, &expected.data);
}

/// After the cut, the cache goes on with another text as one that was given nothing else, bit for
/// bit.
fn what_is_cut_back_exactly_never_was_longer<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(700);
    let rounds = if T::NAME == "flex" { 30 } else { 3 };
    let more =
        ["k4v16-g16-r16-s3", "float-w20", "k4v4-g16-r16-w40", "kint8vint8-w24", "k4v4-g16-r64"];
    let mut shortened = 0;
    for (seed, name) in NAMES.into_iter().chain(more).enumerate() {
        let sizes = [1, 2, 1, 100, 64];
        let text = Setup::new(name, sizes, 710 + seed as u64);
        let other = Setup::with(text.config, sizes, 740 + seed as u64);
        for round in 0..rounds {
            let now = 1 + rng.below(99);
            let len = rng.below(now + 1);
            let mut cut = text.cache(on);
            attend(&mut cut, &text.tokens(0..now), &[now], on);
            let before = cut.clone();
            let exact = cut.cut_back(0, len).unwrap();
            assert!(exact <= len, "{name}: {exact} of {len}");
            assert_eq!((before.exact(0, len).unwrap(), cut.lens()), (exact, &[exact][..]));
            assert_eq!(before.lens(), [now], "{name}: a clone was cut");
            let mut fresh = text.cache(on);
            if exact > 0 {
                attend(&mut fresh, &text.tokens(0..exact), &[exact], on);
                shortened += usize::from(exact < now);
            }
            let n = 100 - exact;
            let first = n.min(2);
            let sizes: Vec<usize> =
                [1, first - 1, n - first].into_iter().filter(|&n| n > 0).collect();
            let rest = other.tokens(exact..100);
            let [got, want] = [cut, fresh].map(|mut cache| attend(&mut cache, &rest, &sizes, on));
            let what = format!("{name} round {round}: back from {now} to {exact}");
            equal_bits(what, &got.data, &want.data);
        }
    }
    assert!(shortened > 3 * rounds, "{shortened} caches were cut back: too few to say anything");
}

fn lengths_to_cut_back_to_exactly<T: Target>(on: &On<T>) {
    for (name, now, len, exact) in [
        ("float", 70, 33, 33),
        ("kint8vint8", 70, 33, 33),
        ("kint8v16", 70, 33, 33),
        // The values of the last 16 tokens were in float; none of them remains.
        ("k4v4-g16-r16", 70, 33, 0),
        ("k16v4-g16-r16-s3", 70, 33, 3),
        ("k4v4-g16-r16", 70, 70, 70),
        ("k4v4-g16-r16", 70, 0, 0),
        ("k4v4-g16-r16", 15, 9, 9),
        // The end of the last block of keys.
        ("k4v16-g16-r16", 70, 33, 32),
        ("k4v16-g16-r16", 70, 66, 66),
        ("k4v16-g16-r16", 70, 32, 32),
        ("k4v16-g16-r16-s3", 70, 33, 19),
        // There is always a token in float.
        ("k4v16-g16-r16-after", 70, 33, 0),
        ("k4v16-g8-r16-gflush", 70, 33, 0),
        ("float-w9", 70, 33, 0),
        ("float-w9-s2", 70, 33, 2),
        ("float-w40", 39, 33, 33),
    ] {
        let text = Setup::new(name, [1, 2, 1, 80, 64], 790);
        let mut cache = text.cache(on);
        attend(&mut cache, &text.tokens(0..now), &[now], on);
        assert_eq!(cache.exact(0, len).unwrap(), exact, "{name}: from {now} to {len}");
        let anywhere = cache.layout().schedule().is_exact_anywhere();
        assert!(!anywhere || exact == len, "{name}");
        assert_eq!(anywhere, ["float", "kint8vint8", "kint8v16"].contains(&name), "{name}");
        for (sequence, len) in [(1, 0), (0, now + 1)] {
            let error = cache.cut_back(sequence, len).unwrap_err();
            assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
            assert_eq!(cache.lens(), [now]);
        }
    }
}

/// The cache goes on as one that was given only the tokens that are kept, bit for bit.
fn drafted_tokens_that_are_not_kept_never_were_there<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(800);
    let rounds = if T::NAME == "flex" { 20 } else { 2 };
    let more = ["float-w20", "k4v4-g16-r16-w40", "kint8vint8-w24", "k4v4-g16-r64", "float-f16"];
    for (seed, name) in NAMES.into_iter().chain(more).enumerate() {
        let sizes = [2, 2, 1, 120, 64];
        let text = Setup::new(name, sizes, 810 + seed as u64);
        let other = Setup::with(text.config, sizes, 840 + seed as u64);
        for round in 0..rounds {
            let now = 1 + rng.below(60);
            let mut fresh = text.cache(on);
            attend(&mut fresh, &text.tokens(0..now), &[now], on);
            let mut drafting = fresh.clone();
            let n = 1 + rng.below(24);
            let kept = rng.below(n + 1);
            let [query, key, value] = text.tokens(now..now + n).on(on);
            let (_, drafted) = drafting.draft(query, key, value, &[n; 2]).unwrap();
            drafting.keep(drafted, &[kept; 2]).unwrap();
            if kept > 0 {
                attend(&mut fresh, &text.tokens(now..now + kept), &[kept], on);
            }
            assert_eq!(drafting.lens(), fresh.lens());
            let rest = other.tokens(now + kept..120);
            let sizes = [1, 2, 118 - now - kept - 1];
            let [got, want] =
                [drafting, fresh].map(|mut cache| attend(&mut cache, &rest, &sizes, on));
            let what = format!("{name} round {round}: {kept} of {n} after {now}");
            equal_bits(what, &got.data, &want.data);
        }
    }
    // What does not fit is refused, and nothing is written.
    let text = Setup::new("k4v4-g16-r16", [1, 2, 1, 30, 64], 890);
    let mut cache = KvCache::new(&text.config.with_capacity(20), text.shape(), on).unwrap();
    attend(&mut cache, &text.tokens(0..15), &[15], on);
    let before = snapshot(&cache);
    let [query, key, value] = text.tokens(15..21).on(on);
    let error = cache.draft(query, key, value, &[6]).map(drop).unwrap_err();
    assert_eq!(error, Error::SequenceFull { sequence: 0, len: 15, added: 6, capacity: 20 });
    assert!(snapshot(&cache) == before);
    let [query, key, value] = text.tokens(15..18).on(on);
    let (_, drafted) = cache.draft(query, key, value, &[3]).unwrap();
    assert!(matches!(cache.keep(drafted, &[1, 2]), Err(Error::Shape { op: "keep", .. })));
}
