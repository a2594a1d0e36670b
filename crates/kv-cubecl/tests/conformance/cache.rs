//! The life of a cache: capacity, reset, clones, parts.

use burn::tensor::{DType, Tensor};
use kv_cubecl::{CacheParts, Error, KvCache, On, Side, Target, streaming_attention};

use crate::common::{CLOSE, Host, Rng, Setup, attend, close, equal_bits, snapshot, stamp};

stamp!(
    capacity_is_reached_and_not_passed,
    capacity_below_the_window,
    reset_then_reused,
    a_clone_diverges_alone,
    parts_round_trip,
    parts_that_do_not_fit,
    stored_prefix_continues,
    values_beyond_f16_saturate,
);

const NAMES: [&str; 3] = ["k2v2-g16-r16", "k4v2-g16-r32-s3-after", "float"];

fn texts() -> impl Iterator<Item = Setup> {
    NAMES
        .into_iter()
        .enumerate()
        .map(|(seed, name)| Setup::new(name, [1, 4, 2, 75, 64], 30 + seed as u64))
}

fn capacity_is_reached_and_not_passed<T: Target>(on: &On<T>) {
    for text in texts() {
        let expected = text.reference().output;
        for sizes in [vec![1; 75], vec![75], vec![70, 5]] {
            // The capacity is the text's length exactly.
            let mut cache = text.cache(on);
            let output = attend(&mut cache, &text, &sizes, on);
            close(format!("{text:?}"), &output, &expected, CLOSE);
            assert_eq!((cache.len(), cache.capacity(), cache.is_empty()), (75, 75, false));

            let before = snapshot(&cache);
            for added in [1, 2, 40] {
                let full = Error::CapacityExceeded { len: 75, added, capacity: 75 };
                let [q, k, v] = text.tokens(0..added).on(on);
                let (q, k, v) = (&q, &k, &v);
                let again = || [q.clone(), k.clone(), v.clone()];
                let [q, k, v] = again();
                assert_eq!(cache.attend(q, k, v).unwrap_err(), full);
                let [q, k, v] = again();
                assert_eq!(cache.peek(q, k, v).unwrap_err(), full);
                let [_, k, v] = again();
                assert_eq!(cache.append(k, v).unwrap_err(), full);
                assert!(snapshot(&cache) == before, "{text:?}: a refused call wrote");
            }
        }
        // A chunk that would fit in part is refused as a whole.
        let mut cache = text.cache(on);
        attend(&mut cache, &text, &[70], on);
        let before = snapshot(&cache);
        let [q, k, v] = text.tokens(0..6).on(on);
        let error = cache.attend(q, k, v).unwrap_err();
        assert_eq!(error, Error::CapacityExceeded { len: 70, added: 6, capacity: 75 });
        assert!(snapshot(&cache) == before, "{text:?}: a refused call wrote");
        let output = attend(&mut cache, &text.tokens(70..75), &[5], on);
        let tail: Vec<f64> =
            expected.chunks(75 * 64).flat_map(|x| &x[70 * 64..]).copied().collect();
        close(format!("{text:?}: after a refusal"), &output, &tail, CLOSE);
    }
}

/// A capacity below the residual length, of one token, and below the sinks.
fn capacity_below_the_window<T: Target>(on: &On<T>) {
    for name in
        ["k2v2-g32-r64", "k2v2-g32-r64-after", "k2v2-g32-r64-s5", "k4v16-g32-r32-s200-after"]
    {
        for tokens in [1, 5, 6, 31] {
            let text = Setup::new(name, [1, 2, 1, tokens, 64], 31);
            let mut cache = text.cache(on);
            let output = attend(&mut cache, &text, &vec![1; tokens], on);
            close(format!("{text:?}"), &output, &text.reference().output, CLOSE);
            assert!(Side::BOTH.iter().all(|&side| cache.packed(side).is_none()));
        }
    }
}

fn reset_then_reused<T: Target>(on: &On<T>) {
    for text in texts() {
        let second = Setup::with(text.config, [1, 4, 2, 75, 64], 99);
        let sizes = [20, 1, 1, 30, 1, 22];
        let mut fresh = second.cache(on);
        let expected = attend(&mut fresh, &second, &sizes, on);

        let mut reused = text.cache(on);
        let memory = reused.memory_bytes();
        attend(&mut reused, &text, &[75], on);
        reused.reset();
        assert!(reused.is_empty());
        assert!(Side::BOTH.iter().all(|&side| reused.packed(side).is_none()));
        let got = attend(&mut reused, &second, &sizes, on);
        equal_bits(format!("{text:?}"), &got.data, &expected.data);
        assert_eq!(reused.memory_bytes(), memory);
    }
}

fn a_clone_diverges_alone<T: Target>(on: &On<T>) {
    for text in texts() {
        let other = Setup::with(text.config, [1, 4, 2, 75, 64], 98);
        for prefix in [10, 33, 60] {
            let mut cache = text.cache(on);
            attend(&mut cache, &text, &[prefix], on);
            let before = snapshot(&cache);
            let mut branch = cache.clone();
            // Single tokens and a chunk, past a flush.
            attend(&mut branch, &other, &[1, 1, 10], on);
            assert!(snapshot(&cache) == before, "{text:?}: the clone wrote into its origin");
            let mut twin = cache.clone();
            let branched = snapshot(&branch);
            let output = attend(&mut cache, &text.tokens(prefix..75), &[1, 74 - prefix], on);
            assert!(snapshot(&branch) == branched, "{text:?}: the origin wrote into its clone");
            let expected = text.reference().output;
            let tail: Vec<f64> =
                expected.chunks(75 * 64).flat_map(|x| &x[prefix * 64..]).copied().collect();
            close(format!("{text:?} from {prefix}"), &output, &tail, CLOSE);
            // A branch computes what a cache does that took the same way from the start.
            let mixed = attend(&mut twin, &other, &[1, 1, 10], on);
            let mut again = text.cache(on);
            attend(&mut again, &text, &[prefix], on);
            let expected = attend(&mut again, &other, &[1, 1, 10], on);
            equal_bits(format!("{text:?} branch"), &mixed.data, &expected.data);
        }
    }
}

fn parts_round_trip<T: Target>(on: &On<T>) {
    for text in texts() {
        for prefix in [1, 40, 75] {
            let mut cache = text.cache(on);
            attend(&mut cache, &text, &[prefix], on);
            let before = snapshot(&cache);
            let (memory, counts) = (cache.memory_bytes(), cache.quantized_counts());
            let parts = cache.into_parts();
            assert_eq!(parts.lens, [prefix].repeat(text.shape().batch));
            let cache = KvCache::from_parts(&text.config, text.shape(), parts).unwrap();
            assert!(snapshot(&cache) == before, "{text:?}");
            assert_eq!((cache.memory_bytes(), cache.quantized_counts()), (memory, counts));
        }
    }
}

fn parts_that_do_not_fit<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [1, 4, 2, 75, 64], 33);
    let parts = || text.cache(on).into_parts();
    let build = |parts| KvCache::from_parts(&text.config, text.shape(), parts).map(|_| ());
    let smaller = text.config.with_capacity(50);
    let other = KvCache::new(&smaller, text.shape(), on).unwrap().into_parts();

    let refused = |parts: CacheParts, tensor: &str| match build(parts) {
        Err(Error::Shape { op: "from_parts", tensor: named, .. }) => assert_eq!(named, tensor),
        result => panic!("{tensor}: {result:?}"),
    };
    refused(CacheParts { keys: other.keys.clone(), ..parts() }, "keys");
    refused(CacheParts { values: other.values.clone(), ..parts() }, "values");
    let narrow = parts().floats.narrow(2, 0, 3);
    refused(CacheParts { floats: narrow, ..parts() }, "floats");
    refused(CacheParts { lens: vec![1, 1], ..parts() }, "lens");
    let beyond = build(CacheParts { lens: vec![76], ..parts() }).unwrap_err();
    assert!(matches!(beyond, Error::CapacityExceeded { capacity: 75, .. }), "{beyond}");
    if on.supports_dtype(DType::F16) {
        let half = parts().floats.cast(DType::F16);
        refused(CacheParts { floats: half, ..parts() }, "floats");
    }
    #[cfg(feature = "autodiff")]
    {
        let recording = Tensor::zeros(parts().floats.dims(), &(**on).clone().autodiff());
        let error = build(CacheParts { floats: recording, ..parts() }).unwrap_err();
        assert!(error.to_string().contains("from_parts: floats"), "{error}");
    }
    #[cfg(feature = "flex")]
    if T::NAME != kv_cubecl::Flex::NAME {
        let flex = On::<kv_cubecl::Flex>::open().unwrap();
        let elsewhere = parts().keys.to_device(&flex);
        let error = build(CacheParts { keys: elsewhere, ..parts() }).unwrap_err();
        assert!(error.to_string().contains("from_parts: keys"), "{error}");
    }
    assert!(build(CacheParts { lens: vec![75], ..parts() }).is_ok());
}

/// A prefix that was copied to the host and back to the device continues as the original does.
fn stored_prefix_continues<T: Target>(on: &On<T>) {
    use burn::tensor::{DType, Int, Tensor};
    let mut rng = Rng::new(34);
    for text in texts() {
        let prefix = 20 + rng.below(40);
        let mut cache = text.cache(on);
        attend(&mut cache, &text, &[prefix], on);
        let stored = cache.clone().into_parts();
        let words = |tensor: Tensor<1, Int>| {
            Tensor::<1, Int>::from_data(tensor.into_data(), (&**on, DType::U32))
        };
        let parts = CacheParts {
            keys: words(stored.keys),
            values: words(stored.values),
            floats: Tensor::from_data(stored.floats.into_data(), &**on),
            lens: stored.lens,
        };
        let mut restored = KvCache::from_parts(&text.config, text.shape(), parts).unwrap();
        let rest = text.tokens(prefix..75);
        let sizes = [1, 3, 71 - prefix];
        let expected: Host = attend(&mut cache, &rest, &sizes, on);
        let got = attend(&mut restored, &rest, &sizes, on);
        equal_bits(format!("{text:?} from {prefix}"), &got.data, &expected.data);
    }
}

/// A value beyond the range of f16 is stored in an f16 cache as the largest finite f16, never as
/// infinity, in streaming and in parallel.
fn values_beyond_f16_saturate<T: Target>(on: &On<T>) {
    if !on.supports_dtype(DType::F16) {
        return crate::common::skipped("the device has no f16");
    }
    let text = Setup::new("float-f16", [1, 1, 1, 3, 16], 39);
    let [q, k, _] = text.on(on);
    let huge = Tensor::<4>::full([1, 1, 3, 16], 1e6, &**on);
    let mut cache = text.cache(on);
    for t in 0..3 {
        let at = |x: &Tensor<4>| x.clone().narrow(2, t, 1);
        let output = cache.attend(at(&q), at(&k), at(&huge)).unwrap().output;
        // Weights sum to 1 within f32 rounding.
        assert!(((output / 65504.0 - 1.0).abs().max().into_scalar::<f32>()) < 1e-5);
    }
    let parallel = streaming_attention(q, k, huge, &text.config).unwrap().output;
    assert!(((parallel / 65504.0 - 1.0).abs().max().into_scalar::<f32>()) < 1e-5);
}
