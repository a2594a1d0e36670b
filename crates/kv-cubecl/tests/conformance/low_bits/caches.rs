//! Caches with tiles, with ranges that clip, and with Lloyd-Max codes.

use burn::tensor::{DType, Int, Tensor};
use kv_cubecl::{
    KvCache, On, Side, Target,
    reference::{self, attend_row},
    streaming_attention,
};

use super::{check_codes, codes, transformed};
use crate::common::{
    CLOSE, Host, Rng, Setup, attend, close, equal_bits, sampled, snapshot, stamp, wide,
};

stamp!(
    caches_in_parts,
    tokens_of_three_bits,
    partitions_store_the_same,
    positions_on_the_device,
    ragged_caches,
    truncated_tiles,
    keys_are_transformed_once,
);

const CACHES: [&str; 14] = [
    "kvn2vvn2-t64-r64-s4",
    "kvn3vvn3-t64-r64-after",
    "kvn4vvn4-t64-r128-gflush-s1",
    "kvn2v2-g32-t64-r64-hadv-s2",
    "k3vvn2-g32-t64-r64-gflush",
    "kvn3v16-t64-i4-r64-f16",
    "kint8vvn4-t64-r64-hadk",
    "kvn2vvn2-t64-r64-w100-s3-after",
    "k2v3-g32-r64-s1-clip-gflush",
    "kvn2vvn3-t64-r93-gflush-s2",
    "k3vvn2-g32-t64-r81-gflush-after",
    "ktq3vtq2-s2",
    "ktq4vtq3-r16-after-f16",
    // Two scales share a word, so what is read back begins at an even token: with this window at
    // the first one that the last token sees.
    "ktq2vtq4-r32-w61",
];

fn text(name: &str, seed: usize) -> Setup {
    Setup::new(name, [2, 4, 2, 301, 64], seed as u64)
}

/// Every cache in calls of all sizes: codes agree with the oracle, up to rounding edges, and the
/// last token attends to what is stored.
fn caches_in_parts<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(CACHES.into_iter().enumerate()) {
        let text = text(name, seed);
        let mut cache = text.cache(on);
        let sizes = [70, 1, 1, 120, 1, 3, 40, 62, 1, 1, 1];
        let output = attend(&mut cache, &text, &sizes, on);
        check_stored(name, &text, &cache);
        check_last(name, &text, &cache, &output);
        let [q, k, v] = text.on(on);
        let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
        // The same codes but for rounding edges, which move single weights.
        close(format!("{name}: in parallel"), &parallel, &output.f64(), 2e-2);
        let parts = cache.clone().into_parts();
        let again = KvCache::from_parts(&text.config, text.shape(), parts).unwrap();
        assert!(snapshot(&again) == snapshot(&cache), "{name}: parts");
    }
}

/// Keys that are packed by token keep their high bits in words between the words of low bits. One
/// kernel reads them for a single token, another for a chunk.
fn tokens_of_three_bits<T: Target>(on: &On<T>) {
    // With this window, what the last token sees begins at an even token: see `CACHES`.
    let cases = [("ktq3vtq3-r16-s1", 64), ("ktq3v16-r16", 256), ("ktq3vtq3-r16-w41", 256)];
    for (seed, (name, head_dim)) in cases.into_iter().enumerate() {
        let text = Setup::new(name, [1, 4, 2, 71, head_dim], 40 + seed as u64);
        for sizes in [vec![40, 30, 1], vec![51, 20]] {
            let mut cache = text.cache(on);
            let output = attend(&mut cache, &text, &sizes, on);
            check_stored(name, &text, &cache);
            check_last(&format!("{name} in {sizes:?}"), &text, &cache, &output);
        }
    }
}

fn side_of(text: &Setup, side: Side) -> &Host {
    match side {
        Side::Keys => &text.key,
        Side::Values => &text.value,
    }
}

/// Compares codes whose parameters follow from sums with the oracle's. Other tests compare other
/// codes.
fn check_stored(name: &str, text: &Setup, cache: &KvCache) {
    let (config, counts) = (&text.config, cache.quantized_counts());
    for side in Side::BOTH {
        let Some(packed) = cache.packed(side) else { continue };
        let n = packed.shape()[2];
        let last = config.sink_tokens + counts[side];
        let rows = side_of(text, side).tokens(last - n..last);
        let stored = rows.data.iter().map(|&x| config.float.round(x)).collect();
        let mut rows = Host { data: stored, shape: rows.shape };
        if config.uses_hadamard(side) {
            // The cache transforms before it rounds.
            let rounded = transformed(&side_of(text, side).tokens(last - n..last)).data;
            rows.data = rounded.into_iter().map(|x| config.float.round(x)).collect();
        }
        let spec = packed.spec();
        if !config.format(side).needs_hadamard() {
            continue;
        }
        let expected = reference::quantize_side(&rows.data, rows.shape, side, config);
        let expected = codes(&expected, spec, rows.shape);
        let got = codes(&packed.to_logical(), spec, rows.shape);
        check_codes(&format!("{name}: {side}"), &got, &expected, false);
    }
}

/// Compares the output of the last token with attention in f64 over what the cache restores.
fn check_last(name: &str, text: &Setup, cache: &KvCache, output: &Host) {
    let (config, counts, len) = (&text.config, cache.quantized_counts(), text.len());
    let [batch, heads, _, head_dim] = text.query.shape;
    let kv_heads = text.key.shape[1];
    let begin = config.sliding_window.map_or(0, |window| len - window);
    let rows = Side::BOTH.map(|side| {
        let mut rows = side_of(text, side).clone();
        rows.data.iter_mut().for_each(|x| *x = config.float.round(*x));
        if let Some(packed) = cache.packed(side) {
            let mut restored = Host::of(packed.dequantize());
            if config.uses_hadamard(side) {
                restored = transformed(&restored);
            }
            let (n, last) = (restored.shape[2], config.sink_tokens + counts[side]);
            for slice in 0..batch * kv_heads {
                let to = (slice * len + last - n) * head_dim;
                let from = slice * n * head_dim;
                rows.data[to..to + n * head_dim]
                    .copy_from_slice(&restored.data[from..from + n * head_dim]);
            }
        }
        rows
    });
    let mut expected = Vec::new();
    for head in 0..batch * heads {
        let slice = head / heads * kv_heads + head % heads / (heads / kv_heads);
        let seen = (0..len).filter(|&t| t < config.sink_tokens || t >= begin);
        let [keys, values] = [0, 1].map(|side: usize| -> Vec<Vec<f64>> {
            let row = |t: usize| wide(&rows[side].data[(slice * len + t) * head_dim..][..head_dim]);
            seen.clone().map(row).collect()
        });
        let [keys, values] =
            [&keys, &values].map(|x| x.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let query = wide(&text.query.data[(head * len + len - 1) * head_dim..][..head_dim]);
        expected.extend(attend_row(&query, &keys, &values));
    }
    let last = output.tokens(len - 1..len);
    // A float cache in f16 rounds rows after the transform, the comparison before it.
    let tolerance = if name.contains("f16") { 2e-3 } else { CLOSE };
    close(format!("{name}: last token"), &last, &expected, tolerance);
}

/// On one device, codes are the same bit for bit in every partition into calls.
fn partitions_store_the_same<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(91);
    for (seed, name) in sampled::<T, _>(CACHES.into_iter().enumerate()) {
        let text = text(name, 20 + seed);
        let mut whole = text.cache(on);
        attend(&mut whole, &text, &[301], on);
        for _ in 0..2 {
            let (mut sizes, mut left) = (vec![], 301);
            while left > 0 {
                let most = [1, 5, 90][rng.below(3)];
                sizes.push((1 + rng.below(most)).min(left));
                left -= sizes[sizes.len() - 1];
            }
            let mut cache = text.cache(on);
            attend(&mut cache, &text, &sizes, on);
            for side in Side::BOTH {
                let logical = |cache: &KvCache| cache.packed(side).map(|it| it.to_logical());
                assert!(
                    logical(&cache) == logical(&whole),
                    "{name}: {side} differ in calls of {sizes:?}"
                );
            }
        }
    }
}

/// Single tokens with positions on the device store the same, bit for bit.
fn positions_on_the_device<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(CACHES.into_iter().enumerate()).into_iter().step_by(2) {
        let text = text(name, 50 + seed).tokens(0..150);
        let mut expected = text.cache(on);
        let wanted = attend(&mut expected, &text, &[1; 150], on);
        let mut cache = text.cache(on);
        let mut outputs = vec![];
        for t in 0..150 {
            let [q, k, v] = text.tokens(t..t + 1).on(on);
            let at = Tensor::<1, Int>::from_data([t as i32], (&**on, DType::I32));
            outputs.push(Host::of(cache.attend_at(q, k, v, &at).unwrap().output));
        }
        cache.advance(150).unwrap();
        assert!(snapshot(&cache) == snapshot(&expected), "{name}: codes differ");
        close(name, &Host::cat(&outputs), &wanted.f64(), CLOSE);
    }
}

/// Each sequence of a batch stores what it stores alone.
fn ragged_caches<T: Target>(on: &On<T>) {
    for (seed, name) in ["kvn2vvn2-t64-r64-s4", "k3vvn2-g32-t64-r64-gflush"].into_iter().enumerate()
    {
        let texts =
            [0, 1].map(|i| Setup::new(name, [1, 4, 2, 200, 64], (60 + 2 * seed + i) as u64));
        let mut alone = texts.clone().map(|text| text.cache(on));
        let mut joined = KvCache::join(&texts.clone().map(|text| text.cache(on))).unwrap();
        let mut starts = [0, 0];
        for counts in [[5, 90], [70, 1], [1, 0], [60, 40], [30, 50]] {
            let most = counts[0].max(counts[1]);
            let mut inputs: [Vec<Tensor<4>>; 3] = Default::default();
            for (i, text) in texts.iter().enumerate() {
                if counts[i] > 0 {
                    let part = text.tokens(starts[i]..starts[i] + counts[i]);
                    attend(&mut alone[i], &part, &[counts[i]], on);
                }
                // What is past a sequence's tokens is not read.
                let padded = text.tokens(starts[i]..starts[i] + most).on(on);
                inputs.iter_mut().zip(padded).for_each(|(all, one)| all.push(one));
                starts[i] += counts[i];
            }
            let [q, k, v] = inputs.map(|parts| Tensor::cat(parts, 0));
            joined.attend_ragged(q, k, v, &counts).unwrap();
        }
        for (i, alone) in alone.iter().enumerate() {
            let own = joined.select(&[i]).unwrap();
            for side in Side::BOTH {
                let logical = |cache: &KvCache| cache.packed(side).map(|it| it.to_logical());
                assert!(logical(&own) == logical(alone), "{name}: {side} of sequence {i}");
            }
        }
    }
}

/// A cache that is cut back to the end of a tile is the cache that never was longer.
fn truncated_tiles<T: Target>(on: &On<T>) {
    for (seed, name) in ["kvn2vvn3-t64-r64-s4", "k16vvn2-t64-r64"].into_iter().enumerate() {
        let text = Setup::new(name, [1, 4, 2, 200, 64], 70 + seed as u64);
        let mut cache = text.cache(on);
        attend(&mut cache, &text, &[190], on);
        let last = text.config.sink_tokens + 128;
        assert_eq!(cache.shortest(0).unwrap(), last, "{name}");
        let error = cache.clone().truncate(0, last - 1).unwrap_err().to_string();
        assert!(error.contains(&last.to_string()), "{error}");
        // Within the second tile, its first token is lost.
        let first = text.config.sink_tokens + 64;
        assert_eq!(cache.clone().cut_back(0, first + 30).unwrap(), first, "{name}");
        let len = last + 30;
        assert_eq!(cache.cut_back(0, len).unwrap(), len, "{name}");
        let mut fresh = text.cache(on);
        attend(&mut fresh, &text, &[len], on);
        let rest = text.tokens(len..200);
        let [got, expected] =
            [&mut cache, &mut fresh].map(|cache| attend(cache, &rest, &[1, 200 - len - 1], on));
        equal_bits(name, &got.data, &expected.data);
    }
}

/// Restored tiles, transformed once, are near the raw keys. Two transforms cancel, so a test of
/// packed against packed keys does not find a transform too many.
fn keys_are_transformed_once<T: Target>(on: &On<T>) {
    let text = text("kvn4vvn4-t64-r64", 40);
    let mut cache = text.cache(on);
    attend(&mut cache, &text, &[301], on);
    for side in Side::BOTH {
        let packed = cache.packed(side).unwrap();
        let rows = side_of(&text, side).tokens(0..packed.shape()[2]);
        let restored = Host::of(packed.dequantize());
        let error = |restored: &Host| {
            let squares: f64 =
                restored.data.iter().zip(&rows.data).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            squares / rows.f64().iter().map(|x| x * x).sum::<f64>()
        };
        let (once, never) = (error(&transformed(&restored)), error(&restored));
        assert!(once < 0.02 && never > 0.5, "{side}: {once} after one transform, {never} without");
    }
}
