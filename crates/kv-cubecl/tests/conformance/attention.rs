//! Attention through a cache and in parallel, compared with the oracle's in f64 over the same
//! codes.

use kv_cubecl::{
    CacheFloat, Error, KvCache, KvCacheConfig, On, Side, Target, reference::attend_row,
    streaming_attention,
};

use crate::common::{
    CLOSE, Host, Rng, Setup, attend, check_properties, close, sampled, sampled_count, setups,
    skipped, stamp, wide,
};

stamp!(
    lengths_around_the_window,
    query_groups,
    head_dims,
    sinks,
    bits_of_keys_and_values_apart,
    narrow_floats,
    any_configuration,
    last_step_over_the_dequantized_cache,
    a_long_text,
    more_splits_than_are_merged_at_once,
    strided_inputs,
    training_and_serving_agree,
    the_capacity_is_not_read_in_parallel,
);

/// Compares a text with the oracle, token by token and in parallel: outputs and, after every step,
/// counts.
#[track_caller]
pub(crate) fn check<T: Target>(on: &On<T>, text: &Setup) {
    let expected = text.reference();
    let mut cache = text.cache(on);
    let mut outputs = Vec::new();
    for (t, &counts) in expected.counts.iter().enumerate() {
        outputs.push(attend(&mut cache, &text.tokens(t..t + 1), &[1], on));
        assert_eq!(cache.len(), t + 1, "{text:?}: len");
        assert_eq!(cache.quantized_counts(), counts, "{text:?}: counts after token {t}");
    }
    let output = Host::cat(&outputs);
    close(format!("{text:?}: token by token"), &output, &expected.output, CLOSE);

    let [q, k, v] = text.on(on);
    let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
    assert_eq!(parallel.shape, text.query.shape);
    close(format!("{text:?}: in parallel"), &parallel, &expected.output, CLOSE);
}

fn lengths_around_the_window<T: Target>(on: &On<T>) {
    for name in ["k4v2-g16-r32", "k4v2-g16-r32-after"] {
        // One token; around one window of R tokens and around two; primes.
        for tokens in [1, 2, 3, 13, 31, 32, 33, 61, 63, 64, 65, 97] {
            check(on, &Setup::new(name, [1, 2, 1, tokens, 64], tokens as u64));
        }
    }
}

fn query_groups<T: Target>(on: &On<T>) {
    for per_kv in 1..=8 {
        let n_kv_heads = 1 + per_kv % 2;
        let sizes = [2, n_kv_heads * per_kv, n_kv_heads, 41, 64];
        check(on, &Setup::new("k2v4-g16-r16", sizes, per_kv as u64));
    }
}

fn head_dims<T: Target>(on: &On<T>) {
    for (head_dim, group, bits) in [
        (16, 16, "k4v2"),
        // Groups narrower than some CPUs' vectors, and groups whose size is no power of two.
        (64, 8, "k4v8"),
        (96, 24, "k4v4"),
        (64, 64, "k8v8"),
        (80, 16, "k2v2"),
        (80, 16, "k4v4"),
        (96, 32, "k2v4"),
        (128, 64, "k2v2"),
        (128, 32, "k4v4"),
        (256, 32, "k2v2"),
        (256, 64, "k4v8"),
    ] {
        let name = format!("{bits}-g{group}-r{group}");
        check(on, &Setup::new(&name, [1, 2, 2, group + 9, head_dim], head_dim as u64));
    }
}

fn sinks<T: Target>(on: &On<T>) {
    // The text is shorter than the sinks, ends with them, or goes on.
    for (sinks, tokens) in [(1, 1), (1, 40), (4, 3), (4, 4), (4, 5), (4, 53), (19, 70), (200, 40)] {
        for flush in ["before", "after"] {
            let name = format!("k2v2-g16-r16-s{sinks}-{flush}");
            check(on, &Setup::new(&name, [1, 4, 2, tokens, 64], tokens as u64));
        }
    }
}

fn bits_of_keys_and_values_apart<T: Target>(on: &On<T>) {
    for key_bits in [2, 3, 4, 8, 16] {
        for value_bits in sampled::<T, _>([2, 3, 4, 8, 16]) {
            for rest in ["", "-s1-after"] {
                let name = format!("k{key_bits}v{value_bits}-g32-r32{rest}");
                check(on, &Setup::new(&name, [1, 2, 1, 67, 64], 9));
            }
        }
    }
}

/// Keys and values are rounded to the cache's float type as they enter, and so they are in the
/// oracle. Nothing else is, so what is left are the errors of f32; a cache that did not round would
/// be off by 1e-4 and more.
fn narrow_floats<T: Target>(on: &On<T>) {
    for name in ["k2v2-g16-r16", "k4v2-g32-r32-s4-after", "k16v4-g16-r32", "float"] {
        for &float in CacheFloat::ALL {
            let text = Setup::new(name, [1, 4, 2, 71, 64], 10);
            let text = Setup { config: text.config.with_float(float), ..text };
            match KvCache::new(&text.config, text.shape(), on) {
                Ok(_) => check(on, &text),
                Err(error @ Error::Unsupported { .. }) => {
                    assert!(!on.supports_dtype(float.dtype()), "{error}");
                    skipped(&error.to_string());
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn any_configuration<T: Target>(on: &On<T>) {
    check_properties(sampled_count::<T>(16), setups(), |text| check(on, &text));
}

/// Tests attention apart from the quantizer: compared with f64 attention over what the cache itself
/// restores.
fn last_step_over_the_dequantized_cache<T: Target>(on: &On<T>) {
    for name in
        ["k2v2-g32-r64", "k4v8-g16-r32-after", "k16v2-g32-r32", "k8v16-g64-r64", "k3v3-g64-r64"]
    {
        let text = Setup::new(name, [2, 6, 2, 150, 64], 11);
        let mut cache = text.cache(on);
        let output = attend(&mut cache, &text, &[150 - 1, 1], on).tokens(149..150);
        let seen = |packed: Option<kv_cubecl::Packed>, float: &Host| match packed {
            Some(packed) => {
                let packed = Host::of(packed.dequantize());
                let start = packed.shape[2];
                Host::cat(&[packed, float.tokens(start..150)])
            }
            None => float.clone(),
        };
        let keys = seen(cache.packed(Side::Keys), &text.key);
        let values = seen(cache.packed(Side::Values), &text.value);
        assert_eq!(keys.shape, text.key.shape);
        let mut expected = Vec::new();
        for (head, row) in text.query.tokens(149..150).f64().chunks(64).enumerate() {
            let lane = |x: &Host| x.f64()[head / 3 * 150 * 64..][..150 * 64].to_vec();
            let (keys, values) = (lane(&keys), lane(&values));
            let keys: Vec<&[f64]> = keys.chunks(64).collect();
            let values: Vec<&[f64]> = values.chunks(64).collect();
            expected.extend(kv_cubecl::reference::attend_row(row, &keys, &values));
        }
        close(format!("{text:?}"), &output, &expected, CLOSE);
    }
}

/// Long enough for several splits and tiles; only the last rows are attended to.
fn a_long_text<T: Target>(on: &On<T>) {
    for name in ["k2v2-s4", "k4v4-g64-r64-after", "float"] {
        let text = Setup::new(name, [1, 2, 1, 1301, 64], 12);
        let run = text.reference();
        let tail: Vec<f64> =
            run.output.chunks(1301 * 64).flat_map(|x| &x[1290 * 64..]).copied().collect();
        let mut cache = text.cache(on);
        let [_, k, v] = text.tokens(0..1290).on(on);
        cache.append(k, v).unwrap();
        let output = attend(&mut cache, &text.tokens(1290..1301), &[1; 11], on);
        close(format!("{text:?}: after an append"), &output, &tail, CLOSE);
        assert_eq!(cache.quantized_counts(), run.counts[1300]);
        let [q, k, v] = text.on(on);
        let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
        close(format!("{text:?}: in parallel"), &parallel, &run.output, CLOSE);
    }
}

/// The merge reads this many splits in several parts. Later keys are larger, so each part raises
/// the largest score.
fn more_splits_than_are_merged_at_once<T: Target>(on: &On<T>) {
    const TOKENS: usize = 9001;
    let mut text = Setup::new("float", [1, 2, 1, TOKENS, 16], 13);
    for (t, key) in text.key.data.chunks_mut(16).enumerate() {
        key.iter_mut().for_each(|x| *x *= 1.0 + t as f32 / 2000.0);
    }
    let mut cache = text.cache(on);
    let [_, k, v] = text.tokens(0..TOKENS - 1).on(on);
    cache.append(k, v).unwrap();
    let output = attend(&mut cache, &text.tokens(TOKENS - 1..TOKENS), &[1], on);
    let [keys, values] = [&text.key, &text.value].map(|side| wide(&side.data));
    let [keys, values] = [&keys, &values].map(|side| side.chunks(16).collect::<Vec<_>>());
    let queries = text.query.data.chunks(16 * TOKENS).map(|head| wide(&head[16 * (TOKENS - 1)..]));
    let expected: Vec<f64> = queries.flat_map(|query| attend_row(&query, &keys, &values)).collect();
    close("many splits", &output, &expected, CLOSE);
}

/// The parallel form of training agrees with the cache token by token: groups of 16, 32 and 64,
/// residuals of 32 and 128, both flush orders, different bits for keys and values, several query
/// heads per kv head. The two are compared directly, not through the oracle; on a GPU, exponentials
/// and the order of sums differ more than on the CPU.
fn training_and_serving_agree<T: Target>(on: &On<T>) {
    let tolerance = if T::NAME == "flex" { 1e-5 } else { 1e-4 };
    for (seed, (window, bits)) in [
        ("g16-r32", "k4v2"),
        ("g32-r32", "k2v4"),
        ("g16-r128", "k8v2"),
        ("g32-r128", "k2v8"),
        ("g64-r128", "k4v2"),
    ]
    .into_iter()
    .enumerate()
    {
        for flush in ["before", "after"] {
            let config: KvCacheConfig = format!("{bits}-{window}-{flush}").parse().unwrap();
            // Two flushes of keys, and a length that is no multiple of a group.
            let tokens = 2 * config.residual_length + 13;
            let text = Setup::with(config, [1, 4, 2, tokens, 64], seed as u64);
            let mut cache = text.cache(on);
            let streamed = attend(&mut cache, &text, &vec![1; tokens], on);
            let counts = cache.quantized_counts();
            assert!(counts.keys == 2 * config.residual_length && counts.values > 0, "{counts:?}");
            let [q, k, v] = text.on(on);
            let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
            close(format!("{text:?}"), &streamed, &parallel.f64(), tolerance);
        }
    }
}

/// A projection may leave its output as `[batch, tokens, heads, head_dim]`, or as a part of a wider
/// buffer.
fn strided_inputs<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 4, 2, 50, 64], 13);
    let expected = text.reference().output;
    let mut rng = Rng::new(13);
    let [q, k, v] = text.on(on).map(|tensor| {
        // The same numbers with heads inside tokens, in the middle of a larger buffer.
        let [batch, heads, tokens, head_dim] = tensor.dims();
        let rest = Host::normal(&mut rng, [batch, tokens, heads, head_dim]).on(on);
        let inner = burn::tensor::Tensor::cat(vec![rest.clone(), tensor.swap_dims(1, 2), rest], 3);
        inner.narrow(3, head_dim, head_dim).swap_dims(1, 2)
    });
    let parallel =
        streaming_attention(q.clone(), k.clone(), v.clone(), &text.config).unwrap().output;
    close("in parallel", &Host::of(parallel), &expected, CLOSE);
    for sizes in [vec![1; 50], vec![20, 1, 29], vec![50]] {
        let mut cache = text.cache(on);
        let (mut outputs, mut start) = (Vec::new(), 0);
        for &size in &sizes {
            let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(2, start, size));
            outputs.push(Host::of(cache.attend(q, k, v).unwrap().output));
            start += size;
        }
        close(format!("in chunks {sizes:?}"), &Host::cat(&outputs), &expected, CLOSE);
    }
}

/// Without a cache no token is stored, so that any capacity will do.
fn the_capacity_is_not_read_in_parallel<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16-s1", [1, 2, 1, 40, 64], 16);
    let [q, k, v] = text.on(on);
    for capacity in [0, 1, 39, usize::MAX] {
        let config = text.config.with_capacity(capacity);
        let parallel =
            streaming_attention(q.clone(), k.clone(), v.clone(), &config).unwrap().output;
        let what = format!("capacity {capacity}");
        close(what, &Host::of(parallel), &text.reference().output, CLOSE);
    }
}
