//! Bad calls: each returns an error that names the argument, and writes nothing.

use burn::tensor::{DType, Tensor};
use kv_cubecl::{
    CacheShape, Error, Granularity, KvCache, KvCacheConfig, KvFormat, On, Target, ensure_finite,
    fake_quantize, quantize, streaming_attention,
};

use crate::common::{Host, Rng, Setup, snapshot, stamp};

stamp!(
    shapes_of_a_cache_call,
    shapes_of_streaming_attention,
    shapes_of_the_quantizer,
    other_float_types,
    invalid_configurations,
    values_that_are_not_finite,
    a_device_of_another_target,
);

fn tensor<T: Target>(on: &On<T>, shape: [usize; 4]) -> Tensor<4> {
    Host::normal(&mut Rng::new(70), shape).on(on)
}

/// Asserts that `result` is an [`Error::Shape`] whose message names `op`, `tensor` and the shape.
#[track_caller]
fn shape_error<R: core::fmt::Debug>(result: kv_cubecl::Result<R>, op: &str, tensor: &str) {
    let error = result.unwrap_err();
    let Error::Shape { op: named_op, tensor: named, shape, .. } = &error else {
        panic!("{op} {tensor}: {error:?}")
    };
    assert_eq!((*named_op, *named), (op, tensor), "{error}");
    assert!(error.to_string().starts_with(&format!("{op}: {tensor} has shape {shape:?}: ")));
}

type Misfit = ([usize; 4], [usize; 4], [usize; 4], &'static str);

const MISFITS: [Misfit; 6] = [
    ([1, 4, 3, 64], [1, 2, 3, 64], [1, 2, 4, 64], "value"),
    ([1, 4, 3, 64], [1, 2, 3, 64], [1, 1, 3, 64], "value"),
    ([2, 4, 3, 64], [1, 2, 3, 64], [1, 2, 3, 64], "query"),
    ([1, 4, 3, 32], [1, 2, 3, 64], [1, 2, 3, 64], "query"),
    ([1, 3, 3, 64], [1, 2, 3, 64], [1, 2, 3, 64], "query"),
    ([1, 4, 2, 64], [1, 2, 3, 64], [1, 2, 3, 64], "query"),
];

fn shapes_of_a_cache_call<T: Target>(on: &On<T>) {
    let config = KvCacheConfig::new(KvFormat::Affine2, KvFormat::Affine2).with_capacity(50);
    let shape = CacheShape::new(1, 2, 64);
    let mut cache = KvCache::new(&config, shape, on).unwrap();
    let kv = tensor(on, [1, 2, 5, 64]);
    cache.append(kv.clone(), kv.clone()).unwrap();
    let before = snapshot(&cache);
    for (q, k, v, blamed) in MISFITS {
        let [q, k, v] = [q, k, v].map(|shape| tensor(on, shape));
        shape_error(cache.peek(q.clone(), k.clone(), v.clone()), "peek", blamed);
        shape_error(cache.attend(q, k, v), "attend", blamed);
    }
    // Shapes that fit each other but not the cache.
    for shape in [[2, 2, 3, 64], [1, 4, 3, 64], [1, 2, 3, 32]] {
        let [q, k, v] = [0; 3].map(|_| tensor(on, shape));
        shape_error(cache.attend(q, k.clone(), v.clone()), "attend", "key");
        shape_error(cache.append(k, v), "append", "key");
    }
    shape_error(cache.append(kv.clone(), tensor(on, [1, 2, 4, 64])), "append", "value");
    shape_error(cache.append(kv.clone(), tensor(on, [1, 2, 5, 32])), "append", "value");
    assert!(snapshot(&cache) == before, "a refused call wrote");
    assert_eq!(cache.len(), 5);
}

fn shapes_of_streaming_attention<T: Target>(on: &On<T>) {
    let config = KvCacheConfig::new(KvFormat::Affine2, KvFormat::Affine2);
    for (q, k, v, blamed) in MISFITS {
        let [q, k, v] = [q, k, v].map(|shape| tensor(on, shape));
        shape_error(streaming_attention(q, k, v, &config), "streaming_attention", blamed);
    }
}

fn shapes_of_the_quantizer<T: Target>(on: &On<T>) {
    for (shape, granularity) in [
        ([1, 2, 40, 64], Granularity::PerChannel),
        ([1, 2, 64, 40], Granularity::PerToken),
        ([1, 2, 16, 64], Granularity::PerChannel),
    ] {
        let input = tensor(on, shape);
        let quantized = quantize(input.clone(), granularity, KvFormat::Affine2, 32);
        shape_error(quantized, "quantize", "input");
        let restored = fake_quantize(input, granularity, KvFormat::Affine2, 32);
        shape_error(restored, "fake_quantize", "input");
    }
    let input = tensor(on, [1, 2, 64, 64]);
    for (bits, group) in [
        (KvFormat::Float, 32),
        (KvFormat::Affine2, 24),
        (KvFormat::Affine2, 0),
        (KvFormat::Affine3, 16),
        (KvFormat::Affine8, 2),
    ] {
        let error = quantize(input.clone(), Granularity::PerToken, bits, group).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    }
}

fn other_float_types<T: Target>(on: &On<T>) {
    if !on.supports_dtype(DType::F16) {
        return crate::common::skipped("the device has no f16");
    }
    let text = Setup::new("k2v2", [1, 2, 1, 3, 64], 71);
    let [q, k, v] = text.on(on);
    let half = q.clone().cast(DType::F16);
    let error = streaming_attention(half.clone(), k.clone(), v.clone(), &text.config).unwrap_err();
    assert!(error.to_string().contains("key of type F32"), "{error}");
    let mut cache = text.cache(on);
    let error = cache.attend(half, k.clone(), v.clone()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let error = cache.attend(q, k, v.cast(DType::F16)).unwrap_err();
    assert!(error.to_string().contains("value"), "{error}");
    assert!(cache.is_empty());
    // The quantizer also takes f32 only, and must not misread another type.
    let input = tensor(on, [1, 1, 32, 64]).cast(DType::F16);
    let error = quantize(input.clone(), Granularity::PerToken, KvFormat::Affine2, 32).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let error = fake_quantize(input, Granularity::PerToken, KvFormat::Affine2, 32).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

fn invalid_configurations<T: Target>(on: &On<T>) {
    let config = KvCacheConfig::new(KvFormat::Affine2, KvFormat::Affine2).with_group_size(64);
    let config = config.with_capacity(50);
    let shape = CacheShape::new(1, 1, 80);
    let expected = config.validate(80).unwrap_err();
    assert_eq!(KvCache::new(&config, shape, on).unwrap_err(), expected);
    let [q, k, v] = [0; 3].map(|_| tensor(on, [1, 1, 3, 80]));
    assert_eq!(streaming_attention(q, k, v, &config).unwrap_err(), expected);
}

fn values_that_are_not_finite<T: Target>(on: &On<T>) {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut host = Host::normal(&mut Rng::new(72), [1, 1, 32, 64]);
        assert_eq!(ensure_finite("test", "input", &host.on(on)), Ok(()));
        host.data[777] = bad;
        let expected = Error::NonFinite { op: "test", tensor: "input" };
        assert_eq!(ensure_finite("test", "input", &host.on(on)), Err(expected));
        // Only debug builds refuse such values.
        let result = quantize(host.on(on), Granularity::PerToken, KvFormat::Affine2, 32);
        assert_eq!(result.is_err(), cfg!(debug_assertions));
    }
}

fn a_device_of_another_target<T: Target>(on: &On<T>) {
    assert!(On::<T>::new((**on).clone()).is_ok());
    assert!(T::hosts(on));
    #[cfg(feature = "flex")]
    if T::NAME != kv_cubecl::Flex::NAME {
        let error = On::<kv_cubecl::Flex>::new((**on).clone()).unwrap_err();
        assert!(matches!(error, Error::WrongTarget { target: "flex", .. }), "{error}");
        let flex = On::<kv_cubecl::Flex>::open().unwrap();
        assert!(matches!(On::<T>::new((*flex).clone()), Err(Error::WrongTarget { .. })));
        // Tensors on another device than the cache's.
        let text = Setup::new("k2v2", [1, 1, 1, 3, 64], 73);
        let mut cache = text.cache(on);
        let [q, k, v] = text.on(&flex);
        let error = cache.attend(q, k, v).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(cache.is_empty());
    }
    #[cfg(feature = "autodiff")]
    {
        let autodiff = (**on).clone().autodiff();
        assert!(matches!(On::<T>::new(autodiff), Err(Error::WrongTarget { .. })));
    }
}

/// Opens the device of every target; [`a_missing_device_is_an_error_and_no_more`] runs this and
/// looks at what it prints.
#[test]
#[ignore = "a_missing_device_is_an_error_and_no_more runs it"]
fn open_every_device() {
    fn open<T: Target>() {
        match On::<T>::open() {
            Ok(_) | Err(Error::NoDevice { .. }) => (),
            Err(error) => panic!("{error:?}"),
        }
    }
    #[cfg(feature = "flex")]
    open::<kv_cubecl::Flex>();
    #[cfg(feature = "wgpu")]
    open::<kv_cubecl::Wgpu>();
    #[cfg(feature = "cuda")]
    open::<kv_cubecl::Cuda>();
}

/// Without drivers, opening a device returns an error, and no thread panics.
#[test]
fn a_missing_device_is_an_error_and_no_more() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "errors::open_every_device", "--nocapture"])
        .env("VK_DRIVER_FILES", "/nonexistent")
        .env("VK_ICD_FILENAMES", "/nonexistent")
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].map(|x| String::from_utf8_lossy(&x).into_owned());
    assert!(output.status.success() && printed[0].contains("1 passed"), "{printed:?}");
    assert!(!printed[1].contains("panicked"), "{}", printed[1]);
}

/// A device whose backend lacks the operations of this crate is refused before anything is
/// dispatched to it.
#[cfg(feature = "foreign-device")]
#[allow(deprecated, reason = "a backend without the operations that needs no driver")]
#[test]
fn a_device_without_the_operations() {
    let device = burn::tensor::Device::ndarray();
    let refused = |error: Error| {
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains("kv-cubecl serves"), "{error}");
    };
    let config = KvCacheConfig::new(KvFormat::Affine2, KvFormat::Affine2).with_capacity(50);
    let shape = CacheShape::new(1, 2, 64);
    for device in [device.clone(), device.autodiff()] {
        let x = || Host::normal(&mut Rng::new(75), [1, 2, 32, 64]).on(&device);
        refused(KvCache::new(&config, shape, &device).unwrap_err());
        refused(streaming_attention(x(), x(), x(), &config).unwrap_err());
        refused(quantize(x(), Granularity::PerChannel, KvFormat::Affine2, 32).unwrap_err());
        refused(fake_quantize(x(), Granularity::PerToken, KvFormat::Affine2, 32).unwrap_err());
        let parts = kv_cubecl::CacheParts {
            keys: Tensor::zeros([4], &device),
            values: Tensor::zeros([4], &device),
            floats: x(),
            lens: vec![0],
        };
        refused(KvCache::from_parts(&config, shape, parts).unwrap_err());
    }
}
