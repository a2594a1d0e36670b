//! Frames that do not fit, and the memory of a ring.

use burn::tensor::Tensor;
use kv_cubecl::{FrameCache, FrameConfig, Frames, On, Target};

use super::{Case, HEAD_DIM, config, on};
use crate::common::{Host, Rng, equal_bits, stamp};

stamp!(what_does_not_fit_changes_nothing, memory_is_that_of_the_ring);

/// Errors name the tensor and the rule, and leave the cache as it was.
fn what_does_not_fit_changes_nothing<T: Target>(device: &On<T>) {
    let case = Case::new(config(("k4v4-g8-r8", 8, 3, 0)), [1, 2, 1]);
    let mut cache = case.cache(device);
    let mut rng = Rng::new(7);
    let tensor = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &**device);
    let message = |error: kv_cubecl::Error| error.to_string();
    let [query, key, value] = on(&case.random(&mut rng), device);
    let empty = cache.overwrite(query.clone(), key.clone(), value.clone()).unwrap_err();
    assert!(message(empty).contains("overwrite of a cache of 0 frames"));
    for _ in 0..4 {
        let [query, key, value] = on(&case.random(&mut rng), device);
        cache.update(query, key, value).unwrap();
    }
    let before = Host::of(cache.peek(query.clone(), key.clone(), value.clone()).unwrap().output);
    let d = HEAD_DIM;
    for (shapes, wanted) in [
        (
            [[1, 2, 9, d], [1, 1, 8, d], [1, 1, 8, d]],
            "query has shape [1, 2, 9, 16]: must be one frame",
        ),
        ([[1, 2, 16, d], [1, 1, 16, d], [1, 1, 16, d]], "must be one frame of 8 tokens"),
        ([[1, 2, 8, d], [1, 2, 8, d], [1, 2, 8, d]], "the cache holds batch 1, n_kv_heads 1"),
        ([[2, 2, 8, d], [2, 1, 8, d], [2, 1, 8, d]], "the cache holds batch 1, n_kv_heads 1"),
        ([[1, 2, 8, d], [1, 1, 8, d], [1, 1, 8, 32]], "value has shape [1, 1, 8, 32]: the cache"),
    ] {
        let qkv = || shapes.map(tensor);
        let [q, k, v] = qkv();
        assert!(message(cache.peek(q, k, v).unwrap_err()).contains(wanted), "{wanted}");
        let [q, k, v] = qkv();
        assert!(message(cache.update(q, k, v).unwrap_err()).contains(wanted), "{wanted}");
        let [q, k, v] = qkv();
        assert!(message(cache.overwrite(q, k, v).unwrap_err()).contains(wanted), "{wanted}");
        assert_eq!(cache.written(), Frames(4));
    }
    let after = Host::of(cache.peek(query, key, value).unwrap().output);
    equal_bits("after errors", &after.data, &before.data);
}

/// A ring takes what its frames take, whatever has passed through it: the frames that a frame sees
/// and one more.
fn memory_is_that_of_the_ring<T: Target>(device: &On<T>) {
    let case = Case::new(config(("float", 8, 5, 1)), [1, 2, 2]);
    let mut cache = case.cache(device);
    let bytes = cache.memory_bytes();
    // Keys and values of 5 frames and a sink, 2 heads; nothing of a format without a window is in
    // float, but for sinks.
    assert_eq!(bytes.floats, 2 * 6 * 8 * 2 * HEAD_DIM * 4);
    let int8 = FrameConfig::new("kint8vint8".parse().unwrap(), 8, Frames(5));
    let int8 = FrameCache::new(&int8, case.shape, device).unwrap().memory_bytes();
    // A code for each number, and a scale of two bytes for each row, for each head in whole vectors
    // of words.
    let head = (5 * 8 * (HEAD_DIM + 2usize)).next_multiple_of(16);
    assert_eq!((int8.keys, int8.values), (2 * head, 2 * head));
    assert!(int8.floats <= 2 * HEAD_DIM * 4, "{} bytes in float", int8.floats);
    let mut rng = Rng::new(8);
    for frames in 0..13 {
        // Of the frames before, 4 and the sink at most.
        let seen = 5.min(frames);
        assert_eq!(cache.seen(), Frames(seen as u64));
        assert_eq!(cache.bytes_read(), 2 * seen * 8 * 2 * HEAD_DIM * 4, "{frames} frames");
        let [query, key, value] = on(&case.random(&mut rng), device);
        cache.update(query, key, value).unwrap();
        assert_eq!(cache.memory_bytes(), bytes);
    }
}
