//! Counters of codes and scales, of rows whose codes are known.

use kv_cubecl::{CacheShape, Counters, KvCache, KvCacheConfig, On, Sides, Target};

use crate::common::{Host, Setup, attend, stamp};

stamp!(
    signed_codes_are_counted,
    blocks_are_counted,
    levels_are_counted,
    groups_of_tokens_are_counted,
    decode_restores_nothing_and_what_chunks_restore_is_counted,
    a_truncated_cache_is_counted
);

const CHANNELS: usize = 64;

fn counted<T: Target>(on: &On<T>, name: &str, rows: &[[f32; CHANNELS]]) -> [Option<Counters>; 2] {
    let config: KvCacheConfig = name.parse().unwrap();
    let config = config.with_capacity(rows.len() + 1);
    let mut cache = KvCache::new(&config, CacheShape::new(1, 1, CHANNELS), on).unwrap();
    assert_eq!(cache.counters().into_array(), [None; 2], "of an empty cache");
    let host = Host { data: rows.as_flattened().to_vec(), shape: [1, 1, rows.len(), CHANNELS] };
    cache.append(host.on(on), host.on(on)).unwrap();
    cache.counters().into_array()
}

/// A row of zeros but for its first channels.
fn row(first: &[f32]) -> [f32; CHANNELS] {
    let mut row = [0.0; CHANNELS];
    row[..first.len()].copy_from_slice(first);
    row
}

fn signed_codes_are_counted<T: Target>(on: &On<T>) {
    // Of one number, which is not 0, all codes are 127 or -127.
    let (five, minus) = ([5.0; CHANNELS], [-2.5; CHANNELS]);
    let varied = [row(&[127.0, -127.0, 126.0, 3.0]), row(&[-1.0, 254.0])];
    let rows = [row(&[]), varied[0], five, varied[1], minus];
    let [keys, values] = counted(on, "k16vint8", &rows);
    assert_eq!(keys, None, "keys are in float");
    let got = values.unwrap();
    assert_eq!((got.codes, got.extreme), (5 * CHANNELS, 3), "{got:?}");
    assert_eq!((got.groups, got.constant), (5, 3), "{got:?}");
    assert_eq!((got.scale_min, got.scale_mean, got.scale_max), (1.0, 1.5, 2.0), "{got:?}");

    let rows = [row(&[448.0, -448.0, 416.0]), row(&[]), minus, row(&[896.0, 448.0]), five];
    let [keys, _] = counted(on, "ke4m3v16", &rows);
    let got = keys.unwrap();
    assert_eq!((got.extreme, got.groups, got.constant), (3, 5, 3), "{got:?}");
    assert_eq!((got.scale_min, got.scale_mean, got.scale_max), (1.0, 1.5, 2.0), "{got:?}");
}

/// Levels are counted from the lowest, and none is 0.
fn levels_are_counted<T: Target>(on: &On<T>) {
    // Transformed: half of the numbers -1.2 and half 0.75; all 1; half 1 and half -1. The highest
    // levels of 2 bits are for numbers beyond 0.98 root mean squares.
    let rows = [row(&[-1.8, -7.8]), row(&[8.0]), row(&[0.0, 8.0])];
    let [keys, _] = counted(on, "ktq2v16", &rows);
    let got = keys.unwrap();
    assert_eq!((got.extreme, got.groups, got.constant), (32 + CHANNELS, 3, 1), "{got:?}");
}

fn blocks_are_counted<T: Target>(on: &On<T>) {
    let mut rows = [row(&[]), row(&[12.0, -6.0, 13.0]), [5.0; CHANNELS], [-0.0; CHANNELS]];
    // Scales are 2^(floor(log2 amax) - 2): 6 and more saturate with a scale of 1, and 8 is 4 with
    // one of 2.
    rows[0][32..35].copy_from_slice(&[6.0, -7.5, 1.0]);
    rows[1][40] = 8.0;
    // One block of a number other than 0, two blocks of 0 and -0 in either order, and one of 2 and
    // -2, whose codes differ only in the sign.
    rows[2][32..].fill(-2.0);
    rows[2][50] = 2.0;
    rows[3][1..20].fill(0.0);
    rows[3][32..40].fill(0.0);
    let [_, values] = counted(on, "k16vmxfp4", &rows);
    let got = values.unwrap();
    assert_eq!((got.codes, got.groups, got.constant), (4 * CHANNELS, 8, 4), "{got:?}");
    assert_eq!(got.extreme, 2 + 2, "{got:?}");
    // 2^(floor(log2 2) - 2) of the block of 2 and -2.
    assert_eq!((got.scale_min, got.scale_max), (0.5, 2.0), "{got:?}");
    assert!((got.scale_mean - 5.5 / 4.0).abs() < 1e-9, "{got:?}");
}

/// KIVI's keys: groups of tokens of one channel; one group is constant.
fn groups_of_tokens_are_counted<T: Target>(on: &On<T>) {
    let rows: Vec<_> = (0..33)
        .map(|token| {
            let mut row = [(token % 16) as f32; CHANNELS];
            row[9] = 3.0;
            // Every other group of 16 tokens has steps of 2 in this channel.
            row[10] *= if token / 16 % 2 == 1 { 2.0 } else { 1.0 };
            row
        })
        .collect();
    let [keys, _] = counted(on, "k4v16-g16-r16", &rows);
    let got = keys.unwrap();
    assert_eq!((got.codes, got.groups), (32 * CHANNELS, 2 * CHANNELS), "{got:?}");
    assert_eq!((got.extreme, got.constant), (2 * 2 * (CHANNELS - 1), 2), "{got:?}");
    assert_eq!((got.scale_min, got.scale_max), (1.0, 2.0), "{got:?}");
    let mean = (2.0 * (CHANNELS - 1) as f64 + 1.0) / (2.0 * (CHANNELS - 1) as f64);
    assert!((got.scale_mean - mean).abs() < 1e-9, "{got:?}");

    // Codes of 3 bits, 0 to 7 in turn: each group of 32 has 4 of each.
    let rows: Vec<_> = (0..65).map(|token| [(token % 8) as f32; CHANNELS]).collect();
    let [keys, _] = counted(on, "k3v16-g32-r32", &rows);
    let got = keys.unwrap();
    assert_eq!((got.codes, got.groups), (64 * CHANNELS, 2 * CHANNELS), "{got:?}");
    assert_eq!((got.extreme, got.constant), (2 * 8 * CHANNELS, 0), "{got:?}");
    assert_eq!((got.scale_min, got.scale_max), (1.0, 1.0), "{got:?}");
}

/// The prompt, tokens one by one, and a chunk of 20 behind 40 tokens. By then 32 keys and 24 values
/// are quantized; the chunk makes that 48 and 44, so that its rows see keys from 32 on and values
/// from 24 on change. Its rows share the tokens before 16, the last group of keys that is whole
/// before 24: keys 16 to 31 and values 16 to 23 are gathered. On the CPU, shorter chunks are steps.
fn decode_restores_nothing_and_what_chunks_restore_is_counted<T: Target>(on: &On<T>) {
    let text = Setup::new("k4v4-g16-r16", [1, 2, 1, 60, CHANNELS], 81);
    let mut cache = text.cache(on);
    attend(&mut cache, &text.tokens(0..20), &[20], on);
    assert_eq!(cache.restored_bytes(), None, "nobody counts");
    cache.count_restored();
    attend(&mut cache, &text.tokens(20..40), &[1; 20], on);
    assert_eq!(cache.restored_bytes(), Some(Sides { keys: 0, values: 0 }));
    let shared = cache.clone();
    attend(&mut cache, &text.tokens(40..60), &[20], on);
    let row = CHANNELS * size_of::<f32>();
    let expected = Some(Sides { keys: 16 * row, values: 8 * row });
    assert_eq!(cache.restored_bytes(), expected);
    assert_eq!(shared.restored_bytes(), expected, "clones count together");
    cache.count_restored();
    assert_eq!(cache.restored_bytes(), Some(Sides { keys: 0, values: 0 }), "from now on");
}

/// With a residual of 8, the first 12 of 20 tokens are quantized, and the first 8 of 16: truncation
/// makes four values floats again.
fn a_truncated_cache_is_counted<T: Target>(on: &On<T>) {
    let text = Setup::new("k16vint8-r8", [1, 2, 1, 20, CHANNELS], 82);
    let mut cache = text.cache(on);
    cache.count_restored();
    attend(&mut cache, &text.tokens(0..20), &[20], on);
    assert_eq!(cache.restored_bytes(), Some(Sides { keys: 0, values: 0 }));
    cache.truncate(0, 16).unwrap();
    let values = 4 * CHANNELS * size_of::<f32>();
    assert_eq!(cache.restored_bytes(), Some(Sides { keys: 0, values }));
}
