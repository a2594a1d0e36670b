//! Caches of a few tokens, channels and heads, where one word, row or slice is all there is.

use kv_cubecl::{Flush, KvCacheConfig, On, Target};
use proptest::prelude::*;

use crate::{
    attention, chunks,
    common::{CLOSE, Rng, Setup, attend, check_properties, chunk_sizes, close, stamp, windows},
    step,
};

stamp!(the_smallest_caches, any_small_cache);

/// Compares every way to attend through a cache with the oracle: token by token, in parallel, with
/// the length on the device, and in chunks.
#[track_caller]
fn check<T: Target>(on: &On<T>, text: &Setup) {
    attention::check(on, text);
    step::check(on, text, text.len() / 2);
    let expected = text.reference();
    let mut rng = Rng::new(text.seed);
    for largest in [4, text.len()] {
        let sizes = chunk_sizes(&mut rng, text.len(), largest);
        let mut cache = text.cache(on);
        let output = attend(&mut cache, text, &sizes, on);
        close(format!("{text:?} in chunks {sizes:?}"), &output, &expected.output, CLOSE);
        chunks::check_contents(&cache, text, &format!("in chunks {sizes:?}"));
    }
}

/// Caches with one quantized value, with one group of keys, and with fewer packed words than the
/// least that is allocated.
fn the_smallest_caches<T: Target>(on: &On<T>) {
    for (name, capacity, head_dim) in [
        ("k2v2-g16-r16", 17, 16),
        ("k8v8-g4-r4", 5, 4),
        ("k8v16-g4-r4", 4, 1),
        ("k16v8-g4-r1", 2, 4),
        ("k4v4-g8-r8-s1-after", 11, 8),
        ("float-g1-r1", 1, 1),
    ] {
        check(on, &Setup::new(name, [1, 1, 1, capacity, head_dim], 400));
    }
}

/// Any valid configuration with small numbers, in every other case with a sliding window. Most have
/// one slice, and a text that ends where something leaves the residual.
fn small_setups() -> impl Strategy<Value = Setup> {
    let bits = || prop::sample::select(vec![2usize, 4, 8, 16]);
    let few = || prop::sample::select(vec![1usize, 1, 1, 2]);
    let counts = (few(), few(), few(), 1..=6usize);
    let heads = (few(), few(), 1..=3usize);
    let order = (any::<bool>(), any::<bool>(), any::<bool>(), any::<prop::sample::Index>());
    let rest = (0..=3usize, 0..=2usize, order, 0..=4usize, any::<u32>());
    (bits(), bits(), counts, heads, rest).prop_map(
        |(k, v, (words, residuals, groups, any), (batch, n_kv_heads, per_kv), rest)| {
            let (sinks, spare, (after, by_group, windowed, window), beyond, seed) = rest;
            // A group fills one or two whole words of the side with fewer bits.
            let codes = [k, v].map(|bits| if bits == 16 { 1 } else { 32 / bits });
            let group = words * codes[0].max(codes[1]);
            let residual = if k == 16 { any } else { group * groups };
            let head_dim = if v == 16 { any } else { group * groups };
            let config: KvCacheConfig = format!("k{k}v{v}").parse().unwrap();
            let config = config
                .with_group_size(group)
                .with_residual_length(residual)
                .with_sink_tokens(sinks)
                .with_flush(Flush::new(after, by_group && k < 16));
            let windows = windows(&config, head_dim);
            let config = match windowed && !windows.is_empty() {
                true => config.with_sliding_window(Some(*window.get(&windows))),
                false => config,
            };
            let tokens = (sinks + residuals * residual + beyond).saturating_sub(2).max(1);
            let sizes = [batch, n_kv_heads * per_kv, n_kv_heads, tokens, head_dim];
            let text = Setup::with(config, sizes, seed.into());
            Setup { config: text.config.with_capacity(tokens + spare), ..text }
        },
    )
}

fn any_small_cache<T: Target>(on: &On<T>) {
    // Few on a GPU, where each case compiles a set of kernels.
    let cases = if T::NAME == "flex" { 500 } else { 4 };
    check_properties(cases, small_setups(), |text| check(on, &text));
}
