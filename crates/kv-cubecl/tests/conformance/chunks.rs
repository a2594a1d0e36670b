//! How a text is cut into chunks changes nothing.

use burn::tensor::{DType, Tensor};
use kv_cubecl::{
    CacheFloat, KvCache, On, Side, Target,
    reference::{hadamard, quantize_side},
};

use crate::common::{
    CLOSE, Host, Rng, Setup, attend, check_properties, chunk_sizes, close, sampled, sampled_count,
    setups, skipped, snapshot, stamp,
};

stamp!(
    any_chunks_leave_the_same_cache,
    every_cut_in_two,
    appended_then_attended,
    a_window_as_long_as_the_residual,
    peek_any_chunk,
    many_rows_over_packed_history,
    many_rows_over_narrow_floats,
);

/// Checks all of a cache that has a meaning: codes and parameters, and the float rows of tokens
/// that are in float, but for tokens that a window hides.
#[track_caller]
pub(crate) fn check_contents(cache: &KvCache, text: &Setup, what: &str) {
    let text = text.tokens(0..cache.len());
    let counts = cache.quantized_counts();
    let sinks = text.config.sink_tokens;
    let sides = cache.layout().sides();
    let begin =
        text.config.sliding_window.map_or(0, |window| (text.len() + 1).saturating_sub(window));
    let floats = Host::of(cache.clone().into_parts().floats.cast(DType::F32));
    for (side, host) in [(Side::Keys, &text.key), (Side::Values, &text.value)] {
        let (packed, count) = (cache.packed(side), counts[side]);
        let host = &match text.config.uses_hadamard(side) {
            true => {
                let data = host.data.chunks(host.shape[3]).flat_map(hadamard).collect();
                Host { data, shape: host.shape }
            }
            false => host.clone(),
        };
        let what = format!("{text:?} {what}: {side}");
        // Whole groups of the tokens that the next token sees, including tokens that share a word
        // with them.
        let block_tokens = sides[side].spec.map_or(1, |spec| spec.block_tokens());
        let hidden = begin.saturating_sub(sinks) / block_tokens * block_tokens;
        assert!(packed.is_some() || count <= hidden, "{what}: nothing packed");
        if let Some(packed) = packed {
            let first = count - packed.shape()[2];
            assert!(first <= hidden, "{what}: from {first} on");
            let host = host.tokens(sinks + first..sinks + count);
            let expected = quantize_side(&host.data, host.shape, side, &text.config);
            assert!(packed.to_logical() == expected, "{what}: codes or parameters");
        }
        for token in (0..sinks.min(text.len())).chain((sinks + count).max(begin)..text.len()) {
            let (at, head_dim) = (sides[side].element(token), host.shape[3]);
            let slices = floats.data.chunks(cache.layout().float_elements());
            let got: Vec<f32> =
                slices.flat_map(|slice| &slice[at..at + head_dim]).copied().collect();
            let expected = host.tokens(token..token + 1).data;
            assert!(got == expected, "{what}: float row of token {token}");
        }
    }
}

/// Random cuts leave the same codes, parameters, counts and window, and give the same outputs.
fn any_chunks_leave_the_same_cache<T: Target>(on: &On<T>) {
    check_properties(sampled_count::<T>(24), setups(), |text| {
        let expected = text.reference();
        let mut rng = Rng::new(text.seed);
        for largest in [3, 40, text.len()] {
            let sizes = chunk_sizes(&mut rng, text.len(), largest);
            let what = format!("in chunks {sizes:?}");
            let mut cache = text.cache(on);
            let output = attend(&mut cache, &text, &sizes, on);
            close(format!("{text:?} {what}"), &output, &expected.output, CLOSE);
            assert_eq!(Some(&cache.quantized_counts()), expected.counts.last(), "{text:?} {what}");
            check_contents(&cache, &text, &what);
        }
    });
}

/// Cuts around every multiple of 16, where groups and windows end.
fn every_cut_in_two<T: Target>(on: &On<T>) {
    for name in sampled::<T, _>([
        "k2v2-g16-r16-s1",
        "k3v16-g32-r32-s1",
        "k4v2-g16-r32-after",
        "k16v2-g16-r16",
        "k2v16-g16-r16-s3-after",
    ]) {
        let text = Setup::new(name, [1, 2, 1, 70, 16], 20);
        let expected = text.reference().output;
        for cut in (1..70).filter(|cut| cut % 16 <= 4 || cut % 16 >= 14) {
            let mut cache = text.cache(on);
            let output = attend(&mut cache, &text, &[cut, 70 - cut], on);
            close(format!("{text:?} cut at {cut}"), &output, &expected, CLOSE);
            check_contents(&cache, &text, &format!("cut at {cut}"));
        }
    }
}

/// Appending without attending leaves the same cache as attending does.
fn appended_then_attended<T: Target>(on: &On<T>) {
    for (seed, name) in ["k2v2-g16-r32", "k4v4-g32-r32-s4-after", "float"].into_iter().enumerate() {
        let text = Setup::new(name, [2, 4, 2, 101, 64], seed as u64);
        let run = text.reference().output;
        let expected: Vec<f64> =
            run.chunks(101 * 64).flat_map(|x| &x[77 * 64..]).copied().collect();
        let mut rng = Rng::new(seed as u64);
        for largest in [1, 20, 77] {
            let mut cache = text.cache(on);
            let mut start = 0;
            for size in chunk_sizes(&mut rng, 77, largest) {
                let [_, k, v] = text.tokens(start..start + size).on(on);
                cache.append(k, v).unwrap();
                start += size;
            }
            check_contents(&cache, &text, "appended");
            let output = attend(&mut cache, &text.tokens(77..101), &[1, 1, 7, 15], on);
            close(format!("{text:?}"), &output, &expected, CLOSE);
        }
    }
}

/// The first token that a chunk sees is then in float and not the first of a group, and its group
/// is quantized within the chunk. Cuts around the ends of groups, with `peek`, `attend_ragged` and
/// `attend` after them.
fn a_window_as_long_as_the_residual<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>([
        "k4v4-g8-r16-w16-after",
        "k2v2-g16-r16-w16-after-gflush",
        "k4v4-g8-r16-s3-w16-after-gflush",
        "k16v4-g8-r16-w16-after",
        "k4v16-g8-r16-s1-w16-after",
        "k4v4-g8-r16-w17-after",
        "k4v4-g8-r16-w16",
    ])
    .into_iter()
    .enumerate()
    {
        let text = Setup::new(name, [1, 2, 1, 70, 16], 30 + seed as u64);
        let run = text.reference().output;
        let expected = |rows: core::ops::Range<usize>| -> Vec<f64> {
            run.chunks(70 * 16).flat_map(|x| &x[rows.start * 16..rows.end * 16]).copied().collect()
        };
        for cut in (1..58).filter(|cut| [0, 1, 3, 4, 7].contains(&(cut % 8))) {
            let mut cache = text.cache(on);
            attend(&mut cache, &text, &[cut], on);
            let what = format!("{text:?} from {cut}");
            let [q, k, v] = text.tokens(cut..cut + 12).on(on);
            let peeked = Host::of(cache.peek(q.clone(), k.clone(), v.clone()).unwrap().output);
            close(format!("{what}: peek"), &peeked, &expected(cut..cut + 12), CLOSE);
            let mut ragged = KvCache::join(&[cache.clone(), text.cache(on)]).unwrap();
            let both = |x: Tensor<4>| Tensor::cat(vec![x.clone(), x], 0);
            let attention = ragged.attend_ragged(both(q), both(k), both(v), &[12, 0]).unwrap();
            let output = Host::of(attention.output.narrow(0, 0, 1));
            close(format!("{what}: ragged"), &output, &expected(cut..cut + 12), CLOSE);
            let output = attend(&mut cache, &text.tokens(cut..70), &[70 - cut], on);
            close(format!("{what}: attend"), &output, &expected(cut..70), CLOSE);
        }
    }
}

/// From any length, for any number of tokens, `peek` returns what `attend` then returns.
fn peek_any_chunk<T: Target>(on: &On<T>) {
    check_properties(sampled_count::<T>(16), setups(), |text| {
        let mut rng = Rng::new(text.seed);
        let start = rng.below(text.len());
        let end = start + 1 + rng.below(text.len() - start);
        let mut cache = text.cache(on);
        if start > 0 {
            attend(&mut cache, &text, &[start], on);
        }
        let before = snapshot(&cache);
        let [q, k, v] = text.tokens(start..end).on(on);
        let peeked = Host::of(cache.peek(q, k, v).unwrap().output);
        assert!(snapshot(&cache) == before, "{text:?}: peek wrote");
        let attended = attend(&mut cache, &text.tokens(start..end), &[end - start], on);
        close(format!("{text:?} peek {start}..{end}"), &peeked, &attended.f64(), CLOSE);
    });
}

/// Appends all but the last `chunk` tokens of a text, then attends with those at once.
#[track_caller]
fn check_last_chunk<T: Target>(on: &On<T>, text: &Setup, chunk: usize) {
    let (start, end) = (text.len() - chunk, text.len());
    let head_dim = text.query.shape[3];
    let run = text.reference().output;
    let rows = run.chunks(end * head_dim).flat_map(|x| &x[start * head_dim..]);
    let expected: Vec<f64> = rows.copied().collect();
    let mut cache = text.cache(on);
    let [_, k, v] = text.tokens(0..start).on(on);
    cache.append(k, v).unwrap();
    let output = attend(&mut cache, &text.tokens(start..end), &[chunk], on);
    close(format!("{text:?}: {chunk} rows after {start}"), &output, &expected, CLOSE);
}

/// Enough query rows for several blocks of them, the last one incomplete; a history shorter than a
/// tile, of some tiles and a part of one, and long enough for several splits.
fn many_rows_over_packed_history<T: Target>(on: &On<T>) {
    for (name, heads, history, head_dim, chunk) in sampled::<T, _>([
        ("k2v2-g16-r16", [3, 1], 24, 64, 13),
        ("k3v3-g32-r32-s4", [3, 1], 333, 64, 13),
        ("k2v2-g16-r16-s5", [3, 1], 333, 64, 13),
        ("k2v2-g16-r16-s4", [6, 2], 1301, 64, 11),
        ("k4v4-g8-r16-after", [2, 1], 150, 40, 21),
        ("k4v2-g16-r32-s1", [4, 2], 203, 80, 19),
        ("k2v16-g16-r16-s3", [2, 1], 150, 80, 9),
        ("k2v16-g16-r48", [1, 1], 120, 68, 10),
        ("k16v8-g20-r20-s2", [2, 1], 150, 40, 9),
        ("k8v8-g4-r4", [1, 1], 90, 20, 17),
        ("k8v4-g32-r32", [3, 1], 171, 128, 7),
        ("k2v4-g64-r64", [2, 1], 200, 256, 6),
        ("kint8vint8", [3, 1], 333, 64, 13),
        ("kint8vint8-r7-s3-after", [2, 1], 150, 128, 9),
        ("kint8vint8", [2, 1], 90, 20, 17),
        ("k4vint8-g16-r16", [2, 1], 150, 80, 9),
        ("kint8v16-s2", [1, 1], 120, 96, 10),
        ("ke4m3ve5m2-s2-after", [3, 1], 301, 64, 9),
        ("ke4m3bve2m1b", [2, 1], 150, 96, 9),
        ("ke4m3b64ve4m3b64", [2, 1], 150, 192, 9),
        ("kmxfp4vmxfp4-r5", [6, 2], 201, 128, 11),
        ("float-s4", [3, 1], 301, 64, 9),
        ("float", [2, 1], 70, 30, 9),
        // Several splits of few rows, and more rows than the CPU computes at a time.
        ("float", [1, 1], 1100, 64, 5),
        ("float", [40, 1], 300, 32, 7),
    ]) {
        let [n_heads, n_kv_heads] = heads;
        let sizes = [1, n_heads, n_kv_heads, history + chunk, head_dim];
        check_last_chunk(on, &Setup::new(name, sizes, history as u64), chunk);
    }
}

/// Narrow rows as sinks, and as keys or values of all tokens. They are widened, so that the errors
/// are those of f32.
fn many_rows_over_narrow_floats<T: Target>(on: &On<T>) {
    for &float in CacheFloat::ALL {
        if !on.supports_dtype(float.dtype()) {
            skipped(&format!("the device has no {}", float.name()));
            continue;
        }
        for name in ["k2v2-g16-r16-s4", "k16v4-g16-r32", "k4v16-g16-r16", "float"] {
            let text = Setup::new(name, [1, 6, 2, 180, 64], 14);
            let config = text.config.with_float(float);
            check_last_chunk(on, &Setup { config, ..text }, 15);
        }
    }
}
