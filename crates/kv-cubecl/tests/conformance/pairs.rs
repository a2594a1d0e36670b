//! Attention over every format of keys with every format of values.

use std::collections::HashMap;

use kv_cubecl::{Error, KvCacheConfig, KvFormat, On, Target, streaming_attention};

use crate::{
    chunks::check_contents,
    common::{CLOSE, Host, SAMPLED, Setup, attend, close, sampling, snapshot, stamp},
};

stamp!(every_pair_of_formats);

const WINDOWS: [&str; 10] = [
    "",
    "-r0",
    "-r16",
    "-r32",
    "-r5",
    "-s3",
    "-r16-s3-w24",
    "-r0-w20",
    "-r5-hadk-hadv",
    "-r16-hadk",
];

/// Returns all formats whose codes are exactly the oracle's. The parameters of the others follow
/// from sums in f32, and tiles are longer than the texts here; `low_bits` tests them.
fn formats() -> Vec<KvFormat> {
    KvFormat::ALL.iter().copied().filter(|format| !format.needs_hadamard()).collect()
}

/// Every format of keys with every format of values, windows of all kinds and both orders:
/// attention and what is stored are the oracle's, or the configuration is refused with its rule.
///
/// Where cases are sampled, a pair is run in one window and order.
fn every_pair_of_formats<T: Target>(on: &On<T>) {
    let seed = sampling::<T>();
    let formats = formats();
    let (mut ran, mut refused) = (0, HashMap::<String, usize>::new());
    for (i, &keys) in formats.iter().enumerate() {
        for (j, &values) in formats.iter().enumerate() {
            // Latin squares: every format is in some pair, as keys and as values.
            if seed.is_some_and(|seed| !(i + j + seed).is_multiple_of(SAMPLED)) {
                continue;
            }
            let mut valid = valid_setups(keys, values, i * 1000 + j * 100, &mut refused);
            if seed.is_some() && !valid.is_empty() {
                valid = vec![valid.swap_remove((5 * i + 3 * j) % valid.len())];
            }
            ran += valid.len();
            valid.iter().for_each(|text| check_in_parts(on, text));
        }
    }
    #[allow(clippy::print_stdout, reason = "both counts are to be seen")]
    {
        println!(
            "{}: {ran} caches ran, {} were refused:",
            T::NAME,
            refused.values().sum::<usize>()
        );
        refused.iter().for_each(|(rule, count)| println!("  {count}: {rule}"));
    }
    let pairs = formats.len().pow(2);
    assert!(ran >= if seed.is_none() { pairs } else { pairs / SAMPLED });
}

/// A text for each window and order in which the two formats may be one cache; rules that refuse
/// others are counted.
fn valid_setups(
    keys: KvFormat,
    values: KvFormat,
    seed: usize,
    refused: &mut HashMap<String, usize>,
) -> Vec<Setup> {
    let group = match (keys, values) {
        // 16 codes of 3 bits do not fill whole words.
        (KvFormat::Affine3, _) | (_, KvFormat::Affine3) => "-g32",
        _ if keys.is_grouped() || values.is_grouped() => "-g16",
        _ => "",
    };
    let ways = WINDOWS.iter().flat_map(|window| ["before", "after"].map(|order| (window, order)));
    let mut valid = Vec::new();
    for (k, (window, order)) in ways.enumerate() {
        let name = format!("k{keys}v{values}{group}{window}-{order}");
        let config: KvCacheConfig = name.parse().unwrap();
        match config.validate(64) {
            // Of KIVI's default window a text would have to be longer.
            Ok(()) if window.is_empty() && config.residual_length > 16 => {}
            Ok(()) => valid.push(Setup::with(config, [1, 2, 1, 37, 64], (seed + k) as u64)),
            Err(error) => {
                assert!(matches!(error, Error::InvalidConfig { .. }), "{name}: {error}");
                *refused.entry(error.to_string()).or_default() += 1;
            }
        }
    }
    valid
}

/// A chunk, steps, a chunk of few and of many rows, and all at once; then a token too many, which
/// changes nothing.
fn check_in_parts<T: Target>(on: &On<T>, text: &Setup) {
    let expected = text.reference();
    let mut cache = text.cache(on);
    let output = attend(&mut cache, text, &[14, 1, 1, 3, 1, 15, 1, 1], on);
    close(format!("{text:?}"), &output, &expected.output, CLOSE);
    assert_eq!(Some(&cache.quantized_counts()), expected.counts.last(), "{text:?}");
    if text.config.sliding_window.is_none() {
        check_contents(&cache, text, "in parts");
    }
    // The capacity is the text's length.
    let before = snapshot(&cache);
    let [q, k, v] = text.tokens(0..1).on(on);
    let full = Error::CapacityExceeded { len: text.len(), added: 1, capacity: text.len() };
    assert_eq!(cache.attend(q, k.clone(), v.clone()).unwrap_err(), full, "{text:?}");
    assert_eq!(cache.append(k, v).unwrap_err(), full, "{text:?}");
    assert!(snapshot(&cache) == before, "{text:?}: a refused call wrote");
    let [q, k, v] = text.on(on);
    let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
    close(format!("{text:?}: in parallel"), &parallel, &expected.output, CLOSE);
}
