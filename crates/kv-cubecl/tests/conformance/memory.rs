//! Reported bytes are the bytes allocated.

use burn::tensor::{DType, Tensor, kind::Basic};
use kv_cubecl::{CacheShape, KvCache, KvCacheConfig, On, Target, layout::CacheLayout};

use crate::common::{Setup, attend, skipped, stamp};

stamp!(
    reported_bytes_are_those_of_the_tensors,
    the_first_sinks_are_read_in_float,
    two_bits_save_what_they_promise
);

fn bytes<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> usize {
    tensor.dims().iter().product::<usize>() * tensor.dtype().size()
}

fn reported_bytes_are_those_of_the_tensors<T: Target>(on: &On<T>) {
    let names = ["k2v2", "k4v4-g64-r64-s4-after", "k16v2", "k8v16-g16-r16", "float", "k2v2-f16"];
    for name in names {
        if name.ends_with("f16") && !on.supports_dtype(DType::F16) {
            skipped("the device has no f16");
            continue;
        }
        let text = Setup::new(name, [2, 2, 2, 300, 64], 50);
        let mut cache = text.cache(on);
        let empty = cache.memory_bytes();
        attend(&mut cache, &text, &[299, 1], on);
        assert_eq!(cache.memory_bytes(), empty, "{name}: it changed as the cache filled");
        let parts = cache.into_parts();
        assert_eq!(empty.keys, bytes(&parts.keys), "{name}: keys");
        assert_eq!(empty.values, bytes(&parts.values), "{name}: values");
        assert_eq!(empty.floats, bytes(&parts.floats), "{name}: floats");
        assert_eq!(empty.total(), empty.keys + empty.values + empty.floats);
    }
}

/// A cache with fewer tokens than sinks reads float rows only.
fn the_first_sinks_are_read_in_float<T: Target>(_: &On<T>) {
    for len in 0..4 {
        let bytes = |name: &str| {
            let config: KvCacheConfig = name.parse().unwrap();
            CacheLayout::new(&config, shape()).unwrap().bytes_read(len)
        };
        assert_eq!(bytes("k2v2-s4"), bytes("float"), "{len} tokens");
        assert_eq!(bytes("float"), len * 2 * 2 * 64 * 4, "{len} tokens");
    }
}

fn shape() -> CacheShape {
    CacheShape::new(1, 2, 64)
}

fn two_bits_save_what_they_promise<T: Target>(on: &On<T>) {
    if !on.supports_dtype(DType::F16) {
        return skipped("the device has no f16");
    }
    let allocated = |name: &str| {
        let config: KvCacheConfig = name.parse().unwrap();
        KvCache::new(&config.with_capacity(4096), shape(), on).unwrap().memory_bytes().total()
    };
    let (quantized, float) = (allocated("k2v2-f16"), allocated("float-f16"));
    // Quantized: two bits and f16 parameters for 3968 of the 4096 tokens, f16 for the window.
    let elements = 2 * 4096 * 2 * 64;
    assert!(float < elements * 2 + 1024, "float-f16 allocates {float} bytes");
    let ratio = float as f64 / quantized as f64;
    assert!(ratio >= 4.5, "float-f16 {float} bytes is only {ratio:.2} times k2v2-f16 {quantized}");
}

/// A window of 512 tokens at a capacity of 32768 takes what 512 tokens take.
#[test]
fn windows_take_the_memory_of_their_tokens() {
    for name in ["float", "k4v4", "k2v2-s4-gflush", "k8v16-r64-after", "k16v4"] {
        let config: KvCacheConfig = name.parse().unwrap();
        let bytes = |config: KvCacheConfig| {
            CacheLayout::new(&config, shape()).unwrap().memory_bytes().total()
        };
        let all = bytes(config.with_capacity(512 + config.sink_tokens));
        let windowed = bytes(config.with_sliding_window(Some(512)).with_capacity(32_768));
        // The blocks of keys that are quantized together begin anywhere in a window, so that it may
        // hold one more.
        let extra = windowed as f64 / all as f64;
        assert!((1.0..1.04).contains(&extra), "{name}: {windowed} bytes, not {all}");
    }
}

/// Needs no device: bits per element of the packed parts, parameters included, with groups of 32.
#[test]
fn packed_words_are_codes_and_parameters() {
    for (name, bits) in [("k2v2", 3.0), ("k4v4", 5.0), ("k8v8", 9.0)] {
        let config: KvCacheConfig = name.parse().unwrap();
        let layout = CacheLayout::new(&config.with_capacity(4096), shape()).unwrap();
        // Keys flush whole windows, so that none is in float at full capacity; the last 128 values
        // are.
        let (keys, values) = (2.0 * 64.0 * 4096.0, 2.0 * 64.0 * 3968.0);
        let words = layout.sides().map(|side| side.words(layout.slices()));
        assert_eq!(words.keys as f64 * 32.0, keys * bits, "{name}: keys");
        assert_eq!(words.values as f64 * 32.0, values * bits, "{name}: values");
    }
}
