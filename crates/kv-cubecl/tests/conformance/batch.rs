//! The sequences of a batch: chosen, reordered, repeated, and with lengths of their own.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{Error, KvCache, KvCacheConfig, On, Target};

use crate::common::{CLOSE, Host, Setup, attend, close, equal_bits, snapshot, stamp};

stamp!(
    sequences_are_selected_and_reordered,
    sequences_of_different_lengths,
    a_full_sequence_lets_the_others_go_on,
    what_has_no_meaning_is_refused,
);

const NAMES: [&str; 5] =
    ["float", "k2v2-g16-r16-gflush", "k4v4-g16-r32-s3-after", "k16v4-g16-r16-s20", "k8v16-g16-r16"];

/// One sequence of `text`, alone.
pub(crate) fn sequence(text: &Setup, index: usize) -> Setup {
    let pick = |host: &Host| {
        let [batch, heads, tokens, head_dim] = host.shape;
        let len = host.data.len() / batch;
        let data = host.data[index * len..][..len].to_vec();
        Host { data, shape: [1, heads, tokens, head_dim] }
    };
    let (query, key, value) = (pick(&text.query), pick(&text.key), pick(&text.value));
    Setup { query, key, value, ..text.clone() }
}

/// Texts one below the other.
pub(crate) fn batch_of(texts: &[Setup]) -> Setup {
    let join = |side: fn(&Setup) -> &Host| {
        let [_, heads, tokens, head_dim] = side(&texts[0]).shape;
        let data = texts.iter().flat_map(|text| side(text).data.clone()).collect();
        Host { data, shape: [texts.len(), heads, tokens, head_dim] }
    };
    let (query, key, value) = (join(|t| &t.query), join(|t| &t.key), join(|t| &t.value));
    Setup { query, key, value, ..texts[0].clone() }
}

fn sequences_are_selected_and_reordered<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [3, 4, 2, 75, 64], 300 + seed as u64);
        for chosen in [&[2usize, 0, 2, 1][..], &[1], &[0, 1, 2]] {
            let mut cache = text.cache(on);
            attend(&mut cache, &text.tokens(0..45), &[45], on);
            let before = snapshot(&cache);
            let mut beams = cache.select(chosen).unwrap();
            let texts: Vec<Setup> = chosen.iter().map(|&index| sequence(&text, index)).collect();
            let selected = batch_of(&texts);
            let mut expected = selected.cache(on);
            attend(&mut expected, &selected.tokens(0..45), &[45], on);
            assert!(snapshot(&beams) == snapshot(&expected), "{text:?} {chosen:?}: contents");
            let sizes = [1, 1, 20, 1, 7];
            let got = attend(&mut beams, &selected.tokens(45..75), &sizes, on);
            let want = attend(&mut expected, &selected.tokens(45..75), &sizes, on);
            equal_bits(format!("{text:?} {chosen:?}"), &got.data, &want.data);
            assert!(snapshot(&cache) == before, "{text:?} {chosen:?}: the whole was written");
        }
    }
}

/// Caches of texts read alone go on together, through a window and more, as each would alone.
fn sequences_of_different_lengths<T: Target>(on: &On<T>) {
    let prefixes = [1usize, 17, 40];
    const STEPS: usize = 35;
    for (seed, name) in NAMES.into_iter().enumerate() {
        let texts: Vec<Setup> = (0..prefixes.len())
            .map(|i| {
                let text = Setup::new(name, [1, 4, 2, 75, 64], 320 + 10 * seed as u64 + i as u64);
                Setup { config: text.config.with_capacity(80), ..text }
            })
            .collect();
        let alone: Vec<KvCache> = texts
            .iter()
            .zip(prefixes)
            .map(|(text, prefix)| {
                let mut cache = text.cache(on);
                attend(&mut cache, &text.tokens(0..prefix), &[prefix], on);
                cache
            })
            .collect();
        let mut joined = KvCache::join(&alone).unwrap();
        assert_eq!((joined.lens(), joined.len()), (&prefixes[..], 40));
        // The host knows the lengths of `joined`; only the device knows the lengths of `stepped`.
        let mut stepped = joined.clone();
        for step in 0..STEPS {
            let now: Vec<Setup> = texts
                .iter()
                .zip(prefixes)
                .map(|(text, prefix)| text.tokens(prefix + step..prefix + step + 1))
                .collect();
            let [q, k, v] = batch_of(&now).on(on);
            let positions: Vec<i32> = prefixes.map(|prefix| (prefix + step) as i32).into();
            let positions = TensorData::new(positions, [prefixes.len()]);
            let positions = Tensor::<1, Int>::from_data(positions, (&**on, DType::I32));
            let at = stepped.attend_at(q.clone(), k.clone(), v.clone(), &positions).unwrap();
            let output = Host::of(joined.attend(q, k, v).unwrap().output);
            equal_bits(format!("{name} step {step}"), &Host::of(at.output).data, &output.data);
            let len = output.data.len() / prefixes.len();
            for (i, (text, prefix)) in texts.iter().zip(prefixes).enumerate() {
                let whole = text.tokens(0..prefix + step + 1).reference().output;
                let rows = whole.chunks(whole.len() / text.query.shape[1]);
                let last: Vec<f64> =
                    rows.flat_map(|head| &head[head.len() - 64..]).copied().collect();
                let got = Host {
                    data: output.data[i * len..][..len].to_vec(),
                    shape: now[i].query.shape,
                };
                close(format!("{name} sequence {i} step {step}"), &got, &last, CLOSE);
            }
        }
        stepped.advance(STEPS).unwrap();
        assert!(snapshot(&stepped) == snapshot(&joined), "{name}: lengths known to the device");
        for (i, mut cache) in alone.into_iter().enumerate() {
            let (text, prefix) = (&texts[i], prefixes[i]);
            attend(&mut cache, &text.tokens(prefix..prefix + STEPS), &[1; STEPS], on);
            let part = joined.select(&[i]).unwrap();
            assert!(snapshot(&part) == snapshot(&cache), "{name}: contents of sequence {i}");
        }
    }
}

fn a_full_sequence_lets_the_others_go_on<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 2, 1, 40, 64], 360);
    let short = sequence(&text, 0);
    let mut part = short.cache(on);
    attend(&mut part, &short.tokens(0..30), &[30], on);
    let full = sequence(&text, 1);
    let mut whole = full.cache(on);
    attend(&mut whole, &full, &[40], on);
    let mut joined = KvCache::join(&[part, whole]).unwrap();
    let [q, k, v] = text.tokens(30..31).on(on);
    let error = joined.attend(q.clone(), k.clone(), v.clone()).unwrap_err();
    assert_eq!(error, Error::CapacityExceeded { len: 40, added: 1, capacity: 40 });
    // Past the capacity a sequence is read and not written.
    let positions = TensorData::new(vec![30i32, 40], [2]);
    let positions = Tensor::<1, Int>::from_data(positions, (&**on, DType::I32));
    let before = snapshot(&joined.select(&[1]).unwrap());
    let output = Host::of(joined.attend_at(q, k, v, &positions).unwrap().output);
    let expected = short.tokens(0..31).reference().output;
    let rows = expected.chunks(31 * 64).flat_map(|head| &head[30 * 64..]);
    let first = Host { data: output.data[..2 * 64].to_vec(), shape: [1, 2, 1, 64] };
    close("the short one", &first, &rows.copied().collect::<Vec<_>>(), CLOSE);
    assert!(snapshot(&joined.select(&[1]).unwrap()) == before, "a full sequence was written");
}

fn what_has_no_meaning_is_refused<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 2, 1, 40, 64], 361);
    let cache = text.cache(on);
    let message = |result: kv_cubecl::Result<KvCache>| result.unwrap_err().to_string();
    assert_eq!(message(cache.select(&[0, 2])), "sequence 2: must be below batch 2");
    assert_eq!(message(cache.select(&[])), "batch 0: must be at least 1");
    assert!(message(KvCache::join(&[])).contains("no caches"));
    let config: KvCacheConfig = "k4v4-g16-r16".parse().unwrap();
    let other = KvCache::new(&config.with_capacity(40), text.shape(), on).unwrap();
    let error = message(KvCache::join(&[cache.clone(), other]));
    let expected = "join: configuration of cache 1 is not supported: must be that of cache 0";
    assert_eq!(error, expected);

    let one = sequence(&text, 0);
    let mut short = one.cache(on);
    attend(&mut short, &one.tokens(0..3), &[3], on);
    let joined = KvCache::join(&[short, one.cache(on)]).unwrap();
    let before = snapshot(&joined);
    let [q, k, v] = text.tokens(0..2).on(on);
    let error = joined.peek(q, k, v).unwrap_err().to_string();
    assert!(error.starts_with("peek at sequences of [3, 0] tokens is not supported"), "{error}");
    assert!(snapshot(&joined) == before, "a refused call wrote");
}
