//! Each sequence of a batch grows by its own number of tokens.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{Attention, Error, KvCache, On, Side, Target};

use crate::{
    batch::{batch_of, sequence},
    common::{CLOSE, Host, Setup, attend, close, snapshot, stamp},
};

stamp!(
    each_sequence_grows_by_its_own_tokens,
    a_position_below_zero_takes_no_part,
    a_full_sequence_stops_all,
    wrong_numbers_of_tokens,
);

const NAMES: [&str; 8] = [
    "float",
    "k2v2-g16-r16-gflush",
    "k4v4-g16-r32-s3-after",
    "k16v4-g16-r16-s20",
    "k8v16-g16-r16",
    "k4v2-g16-r16-hadv",
    "kint8vint8-hadk",
    "ke4m3bvmxfp4-s3-after",
];

/// Tokens of each sequence, round by round: none, a token, some, long chunks, all the same.
pub(crate) const ROUNDS: [[usize; 4]; 9] = [
    [3, 0, 12, 1],
    [1, 1, 0, 1],
    [0, 9, 1, 30],
    [2, 2, 2, 2],
    [0, 0, 0, 0],
    [1, 1, 1, 1],
    [20, 0, 0, 8],
    [0, 8, 25, 0],
    [11, 11, 11, 3],
];

/// The tokens from `starts` on, `tokens` of each text, padded with NaN to one length.
pub(crate) fn padded(texts: &[Setup], starts: &[usize], tokens: &[usize]) -> Setup {
    let m = tokens.iter().copied().max().unwrap_or(0).max(1);
    let parts = texts.iter().zip(starts).zip(tokens).map(|((text, &start), &n)| {
        let part = text.tokens(start..start + n);
        let pad = |host: &Host| {
            let [batch, heads, n, head_dim] = host.shape;
            let rest = Host::from_fn([batch, heads, m - n, head_dim], || f32::NAN);
            Host::cat(&[host.clone(), rest])
        };
        Setup { query: pad(&part.query), key: pad(&part.key), value: pad(&part.value), ..part }
    });
    batch_of(&parts.collect::<Vec<_>>())
}

/// Checks that row `row` of every head of a sequence takes no part from `n` on, and returns the
/// others.
pub(crate) fn rows_of(attention: &Attention, sequence: usize, n: usize) -> Host {
    let output = Host::of(attention.output.clone().narrow(0, sequence, 1));
    let rest = output.tokens(n..output.shape[2]);
    assert!(rest.data.iter().all(|&x| x == 0.0), "padding of sequence {sequence}: {rest:?}");
    let lse: Vec<f32> =
        attention.lse.clone().narrow(0, sequence, 1).into_data().iter::<f32>().collect();
    for head in lse.chunks(output.shape[2]) {
        assert!(head[..n].iter().all(|x| x.is_finite()), "lse of sequence {sequence}: {head:?}");
        let rest = &head[n..];
        assert!(rest.iter().all(|&x| x == f32::NEG_INFINITY), "sequence {sequence}: {head:?}");
    }
    output.tokens(0..n)
}

fn each_sequence_grows_by_its_own_tokens<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let texts: Vec<Setup> = (0..4)
            .map(|i| Setup::new(name, [1, 4, 2, 60, 64], 400 + 10 * seed as u64 + i))
            .collect();
        let whole: Vec<Vec<f64>> = texts.iter().map(|text| text.reference().output).collect();
        let mut cache = batch_of(&texts).cache(on);
        let mut appended = cache.clone();
        let mut lens = [0; 4];
        for (round, tokens) in ROUNDS.iter().enumerate() {
            let chunk = padded(&texts, &lens, tokens);
            let [q, k, v] = chunk.on(on);
            appended.append_ragged(k.clone(), v.clone(), tokens).unwrap();
            let attention = cache.attend_ragged(q, k, v, tokens).unwrap();
            for (i, &n) in tokens.iter().enumerate() {
                let got = rows_of(&attention, i, n);
                let expected: Vec<f64> = whole[i]
                    .chunks(60 * 64)
                    .flat_map(|head| &head[lens[i] * 64..(lens[i] + n) * 64])
                    .copied()
                    .collect();
                close(format!("{name} round {round} sequence {i}"), &got, &expected, CLOSE);
                lens[i] += n;
            }
            assert_eq!((cache.lens(), appended.lens()), (&lens[..], &lens[..]), "{name}");
        }
        for (i, text) in texts.iter().enumerate() {
            let mut alone = text.cache(on);
            attend(&mut alone, &text.tokens(0..lens[i]), &[lens[i]], on);
            for cache in [&cache, &appended] {
                let part = cache.select(&[i]).unwrap();
                for side in Side::BOTH {
                    let [got, want] =
                        [&part, &alone].map(|c| c.packed(side).map(|p| p.to_logical()));
                    assert!(got == want, "{name}: {side} of sequence {i}");
                }
            }
        }
    }
}

fn positions<T: Target>(positions: &[i32], on: &On<T>) -> Tensor<1, Int> {
    let positions = TensorData::new(positions.to_vec(), [positions.len()]);
    Tensor::from_data(positions, (&**on, DType::I32))
}

/// Overwrites all memory of a sequence with NaN, in float rows and as the parameters of groups.
pub(crate) fn poison(cache: &KvCache, sequence: usize) -> KvCache {
    let layout = *cache.layout();
    let (config, shape) = (layout.config(), layout.shape());
    let mut parts = cache.clone().into_parts();
    let words = |words: Tensor<1, Int>, side: Side| {
        let n = layout.sides()[side].slice_words() * shape.n_kv_heads;
        if n == 0 {
            return words;
        }
        let nan = TensorData::new(vec![0x7e00_7e00u32; n], [n]);
        let nan = Tensor::from_data(nan, (&words.device(), DType::U32));
        words.slice_assign(sequence * n..(sequence + 1) * n, nan)
    };
    parts.keys = words(parts.keys, Side::Keys);
    parts.values = words(parts.values, Side::Values);
    let [_, heads, rows, width] = parts.floats.dims();
    let nan = Tensor::full(
        [1, heads, rows, width],
        f32::NAN,
        (&parts.floats.device(), parts.floats.dtype()),
    );
    let at = [sequence..sequence + 1, 0..heads, 0..rows, 0..width];
    parts.floats = parts.floats.slice_assign(at, nan);
    KvCache::from_parts(config, shape, parts).unwrap()
}

fn a_position_below_zero_takes_no_part<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [3, 4, 2, 40, 64], 460 + seed as u64);
        let mut cache = text.cache(on);
        attend(&mut cache, &text.tokens(0..25), &[25], on);
        // Neither the memory of the middle one nor its token is looked at.
        let mut cache = poison(&cache, 1);
        let before = snapshot(&cache.select(&[1]).unwrap());
        let mut next = text.tokens(25..26);
        for host in [&mut next.query, &mut next.key, &mut next.value] {
            let n = host.data.len() / 3;
            host.data[n..2 * n].fill(f32::NAN);
        }
        for absent in [-1, i32::MIN] {
            let mut cache = cache.clone();
            let [q, k, v] = next.on(on);
            let at = positions(&[25, absent, 25], on);
            let attention = cache.attend_at(q, k, v, &at).unwrap();
            rows_of(&attention, 1, 0);
            assert!(snapshot(&cache.select(&[1]).unwrap()) == before, "{name}: was written");
            for i in [0, 2] {
                let one = sequence(&text, i).tokens(0..26);
                let whole = one.reference().output;
                let rows = whole.chunks(26 * 64).flat_map(|head| &head[25 * 64..]);
                let got = rows_of(&attention, i, 1);
                close(format!("{name} {i}"), &got, &rows.copied().collect::<Vec<_>>(), CLOSE);
            }
        }
        // A position for all.
        let [q, k, v] = next.on(on);
        let whole = snapshot(&cache);
        let attention = cache.attend_at(q, k, v, &positions(&[-1], on)).unwrap();
        (0..3).for_each(|i| assert!(rows_of(&attention, i, 0).data.is_empty()));
        assert!(snapshot(&cache) == whole, "{name}: was written");
    }
}

fn a_full_sequence_stops_all<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [3, 2, 1, 40, 64], 470);
    let mut cache = text.cache(on);
    let [q, k, v] = text.on(on);
    cache.attend_ragged(q.clone(), k.clone(), v.clone(), &[10, 38, 20]).unwrap();
    let before = snapshot(&cache);
    for tokens in [[1, 3, 1], [0, 3, 0], [30, 38, 20], [31, 0, 40]] {
        let (sequence, len) = if tokens[1] > 0 { (1, 38) } else { (0, 10) };
        let full = Error::SequenceFull { sequence, len, added: tokens[sequence], capacity: 40 };
        let [q, k, v] = [&q, &k, &v].map(Tensor::clone);
        assert_eq!(cache.append_ragged(k.clone(), v.clone(), &tokens).unwrap_err(), full);
        let error = cache.attend_ragged(q, k, v, &tokens).unwrap_err();
        assert_eq!(error, full);
        let message = format!(
            "append: {} tokens do not fit: sequence {sequence} holds {len} of capacity 40",
            tokens[sequence]
        );
        assert_eq!(error.to_string(), message);
    }
    assert!(snapshot(&cache) == before, "a refused call wrote");
    let [q, k, v] = text.tokens(0..2).on(on);
    cache.attend_ragged(q, k, v, &[0, 2, 0]).unwrap();
    assert_eq!(cache.lens(), [10, 40, 20]);
}

fn wrong_numbers_of_tokens<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 2, 1, 40, 64], 471);
    let mut cache = text.cache(on);
    let before = snapshot(&cache);
    let mut refused = |tokens: &[usize], message: &str| {
        let [q, k, v] = text.tokens(0..3).on(on);
        let error = cache.append_ragged(k.clone(), v.clone(), tokens).unwrap_err();
        assert!(error.to_string().ends_with(message), "{error}");
        let error = cache.attend_ragged(q, k, v, tokens).unwrap_err().to_string();
        assert!(error.ends_with(message), "{error}");
        assert!(!error.contains('\n'), "{error}");
    };
    let rule = "tokens has shape [1]: must be one number for each sequence of batch 2";
    refused(&[1], rule);
    refused(&[1, 4], "tokens 4 of sequence 1: must be at most the 3 of key");
    assert!(snapshot(&cache) == before, "a refused call wrote");
}
