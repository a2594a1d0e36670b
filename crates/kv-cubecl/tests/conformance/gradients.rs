//! Gradients, compared with finite differences where the function is smooth, and with the
//! definition of the straight-through estimator where it is not. Few head sizes, because a software
//! driver takes seconds to compile the kernels of each.

use burn::tensor::{DType, Device, Tensor};
use kv_cubecl::{
    AttentionOptions, Error, FakeQuantOptions, Granularity, KvCache, KvFormat, KvMemory, On,
    SteGradient, Target, fake_quantize,
    reference::{self, RowOptions, causal_attention, stream_gradients, stream_gradients_with},
    streaming_attention, streaming_attention_with,
};

use crate::common::{CLOSE, Host, Rng, Setup, close, equal_bits, skipped, slopes, stamp_autodiff};

stamp_autodiff!(
    fake_quantize_is_the_identity,
    float_attention_by_finite_differences,
    straight_through_in_every_configuration,
    keys_and_values_of_different_width,
    narrow_inputs,
    windows_bounds_and_sinks,
    sinks_by_finite_differences,
    straight_through_over_several_windows,
    strided_inputs,
    one_input_at_a_time,
    small_gradients_survive_an_f16_cache,
    the_forward_pass_is_the_same,
    caches_refuse_gradients,
);

/// Gradients of `sum(streaming_attention(..) * weight)`.
fn gradients(on: &Device, text: &Setup, weight: &Host) -> [Host; 3] {
    gradients_with(on, text, weight, FakeQuantOptions::default())
}

pub(crate) fn gradients_with(
    on: &Device,
    text: &Setup,
    weight: &Host,
    options: FakeQuantOptions,
) -> [Host; 3] {
    let [q, k, v] = text.on(on).map(Tensor::require_grad);
    let inputs = (q.clone(), k.clone(), v.clone());
    let output = streaming_attention_with(
        inputs.0,
        inputs.1,
        inputs.2,
        &text.config,
        options,
        AttentionOptions::default(),
    );
    let grads = (output.unwrap().output * weight.on(on)).sum().backward();
    [q, k, v].map(|x| Host::of(x.grad(&grads).expect("a gradient")))
}

pub(crate) fn weight(text: &Setup) -> Host {
    Host::normal(&mut Rng::new(text.seed + 1000), text.output_shape())
}

/// Gradients of query, key and value by the definition of the straight-through estimator; see
/// [`stream_gradients`].
pub(crate) fn expected_gradients(
    text: &Setup,
    weight: &Host,
    gradient: SteGradient,
) -> [Vec<f64>; 3] {
    let expected = stream_gradients(
        (&text.query.data, text.query.shape),
        (&text.key.data, text.key.shape),
        &text.value.data,
        &weight.f64(),
        &text.config,
        gradient,
    );
    [expected.query, expected.key, expected.value]
}

#[track_caller]
fn check<T: Target>(on: &On<T>, text: &Setup, tolerance: f64) {
    check_with(on, text, SteGradient::Identity, tolerance);
}

#[track_caller]
pub(crate) fn check_with<T: Target>(
    on: &On<T>,
    text: &Setup,
    gradient: SteGradient,
    tolerance: f64,
) {
    let weight = weight(text);
    let expected = expected_gradients(text, &weight, gradient);
    let options = FakeQuantOptions { gradient, ..FakeQuantOptions::default() };
    let got = gradients_with(on, text, &weight, options);
    for ((got, expected), side) in got.iter().zip(expected).zip(["query", "key", "value"]) {
        close(format!("{text:?}: {side}"), got, &expected, tolerance);
    }
}

fn fake_quantize_is_the_identity<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(80);
    for (granularity, bits) in [
        (Granularity::PerChannel, KvFormat::Affine2),
        (Granularity::PerChannel, KvFormat::Affine3),
        (Granularity::PerChannel, KvFormat::Affine8),
        (Granularity::PerToken, KvFormat::Affine2),
        (Granularity::PerToken, KvFormat::Affine3),
        (Granularity::PerToken, KvFormat::Affine4),
    ] {
        // The input has constant groups and one that saturates.
        let mut host = Host::normal(&mut rng, [2, 2, 64, 64]);
        host.data[..64 * 64].fill(0.5);
        host.data[64 * 64] = 1e6;
        let weight = Host::normal(&mut rng, host.shape);
        let input = host.on(on).require_grad();
        let output = fake_quantize(input.clone(), granularity, bits, 32).unwrap();
        let expected =
            reference::fake_quantize(&host.data, host.shape, granularity, bits.n_bits(), 32);
        equal_bits("forward", &Host::of(output.clone()).data, &expected);
        let grads = (output * weight.on(on)).sum().backward();
        equal_bits("gradient", &Host::of(input.grad(&grads).unwrap()).data, &weight.data);
    }
}

/// Compared with central differences of plain f64 attention, whose own error with step 1e-4 is
/// about 1e-8.
fn float_attention_by_finite_differences<T: Target>(on: &On<T>) {
    for (sizes, value_dim) in
        [([1, 2, 1, 9, 16], 16), ([2, 2, 2, 5, 16], 16), ([1, 2, 1, 7, 8], 20)]
    {
        let text = Setup::new("float", sizes, 81).with_value_dim(value_dim);
        let weight = weight(&text);
        let (w, shapes) = (weight.f64(), (text.query.shape, text.key.shape));
        let inputs = [text.query.f64(), text.key.f64(), text.value.f64()];
        let loss = |[q, k, v]: &[Vec<f64>; 3]| -> f64 {
            let output = causal_attention((q, shapes.0), (k, shapes.1), v);
            output.iter().zip(&w).map(|(output, w)| output * w).sum()
        };
        let got = gradients(on, &text, &weight);
        for (which, got) in got.iter().enumerate() {
            let expected = slopes(&inputs, which, 1e-4, loss);
            let name = ["query", "key", "value"][which];
            close(format!("{text:?}: {name}"), got, &expected, CLOSE);
        }
    }
}

fn straight_through_in_every_configuration<T: Target>(on: &On<T>) {
    let names = [
        "k2v2-g16-r16",
        "k2v2-g16-r16-after",
        "k4v4-g16-r32-s4",
        "k8v2-g32-r32-s1-after",
        "k16v2-g16-r16",
        "k2v16-g16-r16",
        "k2v2-g16-r16-s200",
        "k2v2-g16-r32-s3-gflush",
        "k4v2-g16-r16-s2-hadv",
        "k3v3-g32-r32-s1",
        "kint8vint8",
        "ke4m3ve5m2-s2-after",
        "kmxfp4ve4m3b-r9-hadk",
        "float",
    ];
    for (seed, name) in names.into_iter().enumerate() {
        for sizes in [[1, 2, 2, 53, 64], [2, 6, 2, 35, 64]] {
            check(on, &Setup::new(name, sizes, seed as u64), CLOSE);
        }
    }
}

/// Sinks, a bound and windows together and apart, against their definition. As the bound and the
/// sinks are not affected by quantization, what holds for one cache holds for all.
fn windows_bounds_and_sinks<T: Target>(on: &On<T>) {
    let logits = [0.3, -2.0, 1.5, 4.0];
    let cases = [
        ("float-w20", None, false),
        ("k2v2-g16-r16-s2-w21", None, false),
        ("k4v2-g16-r32-w40-after", Some(1.5), false),
        ("float", Some(0.7), true),
        ("k2v2-g16-r16", None, true),
        ("k2v2-g16-r16-s3-w30-gflush-hadv", Some(3.0), true),
    ];
    for (seed, (name, softcap, with_sinks)) in cases.into_iter().enumerate() {
        let text = Setup::new(name, [2, 4, 2, 77, 64], 70 + seed as u64);
        let weight = weight(&text);
        let sink = |head: usize| with_sinks.then(|| f64::from(logits[head] as f32));
        let expected = stream_gradients_with(
            (&text.query.data, text.query.shape),
            (&text.key.data, text.key.shape),
            &text.value.data,
            &weight.f64(),
            &text.config,
            SteGradient::ScaleMin,
            &|head| RowOptions { softcap: softcap.map(f64::from), sink: sink(head), scale: None },
        );
        let sinks = Tensor::<1>::from_floats(logits, on).require_grad();
        let [q, k, v] = text.on(on).map(Tensor::require_grad);
        let mut options = AttentionOptions::default();
        options.softcap = softcap;
        let gradient = SteGradient::ScaleMin;
        let fake_quant = FakeQuantOptions { gradient, ..FakeQuantOptions::default() };
        let memory = KvMemory::Parallel { config: text.config, fake_quant, options };
        let logits = with_sinks.then(|| sinks.clone());
        let output = memory.attend_with_sinks(q.clone(), k.clone(), v.clone(), logits).unwrap();
        let grads = (output.output * weight.on(on)).sum().backward();
        let sides = [(q, expected.query), (k, expected.key), (v, expected.value)];
        for ((input, expected), side) in sides.into_iter().zip(["query", "key", "value"]) {
            close(
                format!("{text:?}: {side}"),
                &Host::of(input.grad(&grads).unwrap()),
                &expected,
                CLOSE,
            );
        }
        if with_sinks {
            let got = Host::of(sinks.grad(&grads).unwrap().reshape([1, 1, 1, 4]));
            close(format!("{text:?}: sinks"), &got, &expected.sinks, CLOSE);
        }
    }
}

/// Compared with central differences of attention in f64, row by row.
fn sinks_by_finite_differences<T: Target>(on: &On<T>) {
    let text = Setup::new("float-w5", [1, 2, 1, 9, 16], 82);
    let (weight, logits, cap) = (weight(&text), [0.5f64, -1.0], 2.0);
    let [query, key, value] = [text.query.f64(), text.key.f64(), text.value.f64()];
    let inputs = [query, key, value, logits.to_vec()];
    let loss = |[query, key, value, logits]: &[Vec<f64>; 4]| -> f64 {
        let mut loss = 0.0;
        for (row, (query, weight)) in query.chunks(16).zip(weight.f64().chunks(16)).enumerate() {
            let (head, t) = (row / 9, row % 9);
            let rows = |x: &'_ [f64]| -> Vec<Vec<f64>> {
                x.chunks(16)
                    .skip((t + 1).saturating_sub(5))
                    .take(5.min(t + 1))
                    .map(<[f64]>::to_vec)
                    .collect()
            };
            let (keys, values) = (rows(key), rows(value));
            let [keys, values] =
                [&keys, &values].map(|x| x.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let options = RowOptions { softcap: Some(cap), sink: Some(logits[head]), scale: None };
            let output = reference::attend_row_with(query, &keys, &values, options).output;
            loss += output.iter().zip(weight).map(|(output, weight)| output * weight).sum::<f64>();
        }
        loss
    };
    let sinks = Tensor::<1>::from_floats(logits.map(|x| x as f32), on).require_grad();
    let [q, k, v] = text.on(on).map(Tensor::require_grad);
    let options = AttentionOptions::default().with_softcap(cap as f32);
    let fake_quant = FakeQuantOptions::default();
    let memory = KvMemory::Parallel { config: text.config, fake_quant, options };
    let output = memory.attend_with_sinks(q.clone(), k.clone(), v.clone(), Some(sinks.clone()));
    let grads = (output.unwrap().output * weight.on(on)).sum().backward();
    let got = [q, k, v].map(|x| Host::of(x.grad(&grads).unwrap()));
    let sinks = Host::of(sinks.grad(&grads).unwrap().reshape([1, 1, 1, 2]));
    for (which, got) in got.iter().chain([&sinks]).enumerate() {
        let expected = slopes(&inputs, which, 1e-4, loss);
        close(format!("{text:?}: input {which}"), got, &expected, CLOSE);
    }
}

fn keys_and_values_of_different_width<T: Target>(on: &On<T>) {
    for (seed, (key_dim, value_dim)) in [(96, 64), (32, 80)].into_iter().enumerate() {
        for name in ["k2v2-g16-r16", "k4v4-g16-r32-s4-after", "float"] {
            let text = Setup::new(name, [2, 4, 2, 53, key_dim], 90 + seed as u64);
            check(on, &text.with_value_dim(value_dim), CLOSE);
        }
    }
}

/// The gradients of narrow inputs are those of the same numbers in f32, rounded to their type.
fn narrow_inputs<T: Target>(on: &On<T>) {
    let text = Setup::new("k4v4-g16-r16", [1, 4, 2, 40, 64], 96);
    let weight = weight(&text).on(on);
    for dtype in [DType::F16, DType::BF16] {
        if !on.supports_dtype(dtype) {
            skipped(&format!("the device has no {dtype:?}"));
            continue;
        }
        let gradients = |inputs: [Tensor<4>; 3]| {
            let leaves = inputs.map(Tensor::require_grad);
            let [q, k, v] = leaves.clone();
            let output = streaming_attention(q, k, v, &text.config).unwrap().output;
            let grads = (output.cast(DType::F32) * weight.clone()).sum().backward();
            leaves.map(|leaf| leaf.grad(&grads).unwrap())
        };
        let narrow = gradients(text.on(on).map(|x| x.cast(dtype)));
        let wide = gradients(text.on(on).map(|x| x.cast(dtype).cast(DType::F32)));
        // The gradient of the output passes through the narrow type once, that of an input as well:
        // each rounds to half a unit in the last of 8 (bf16) or 11 bits.
        let tolerance = if dtype == DType::F16 { 2e-3 } else { 2e-2 };
        for (narrow, wide) in narrow.into_iter().zip(wide) {
            assert_eq!(narrow.dtype(), dtype);
            let (narrow, wide) = (Host::of(narrow.cast(DType::F32)), Host::of(wide));
            close(format!("{dtype:?}"), &narrow, &wide.f64(), tolerance);
        }
    }
}

fn straight_through_over_several_windows<T: Target>(on: &On<T>) {
    for (name, head_dim) in [("k2v2-g32-r64", 64), ("k4v2-g16-r32-s4-after", 16)] {
        check(on, &Setup::new(name, [1, 3, 1, 211, head_dim], 82), CLOSE);
    }
}

fn strided_inputs<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 4, 2, 40, 64], 83);
    let weight = weight(&text);
    let expected = gradients(on, &text, &weight);
    let leaves = text.on(on).map(|x| x.swap_dims(1, 2).mul_scalar(1.0).require_grad());
    let [q, k, v] = leaves.clone().map(|x| x.swap_dims(1, 2));
    let output = streaming_attention(q, k, v, &text.config).unwrap().output;
    // The gradient of the output is strided as well.
    let grads = (output.swap_dims(1, 2) * weight.on(on).swap_dims(1, 2)).sum().backward();
    for (leaf, expected) in leaves.iter().zip(expected) {
        let got = Host::of(leaf.grad(&grads).unwrap().swap_dims(1, 2));
        close(format!("{text:?}"), &got, &expected.f64(), CLOSE);
    }
}

fn one_input_at_a_time<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [1, 2, 1, 40, 64], 84);
    let weight = weight(&text);
    for gradient in [SteGradient::Identity, SteGradient::ScaleMin] {
        let options = FakeQuantOptions { gradient, ..FakeQuantOptions::default() };
        let expected = gradients_with(on, &text, &weight, options);
        for (which, expected) in expected.iter().enumerate() {
            let mut inputs = text.on(on);
            inputs[which] = inputs[which].clone().require_grad();
            let leaf = inputs[which].clone();
            let [q, k, v] = inputs;
            let output = streaming_attention_with(
                q,
                k,
                v,
                &text.config,
                options,
                AttentionOptions::default(),
            )
            .unwrap()
            .output;
            let grads = (output * weight.on(on)).sum().backward();
            close(which, &Host::of(leaf.grad(&grads).unwrap()), &expected.f64(), CLOSE);
        }
    }
}

/// Storing in f16 rounds the forward pass only: the straight-through gradient stays in f32. In f16,
/// whose smallest number is 6e-8, the gradient of a mean loss over a long text would vanish.
fn small_gradients_survive_an_f16_cache<T: Target>(on: &On<T>) {
    if !on.supports_dtype(DType::F16) {
        return skipped("the device has no f16");
    }
    for name in ["k2v2-g16-r16-f16", "float-f16"] {
        let text = Setup::new(name, [1, 2, 1, 40, 64], 85);
        check(on, &text, CLOSE);
        let weight = weight(&text);
        let small = Host { data: weight.data.iter().map(|x| x * 1e-7).collect(), ..weight.clone() };
        let (large, small) = (gradients(on, &text, &weight), gradients(on, &text, &small));
        for (large, small) in large.iter().zip(small) {
            let expected: Vec<f64> = large.f64().iter().map(|x| x * 1e-7).collect();
            close(format!("{text:?} scaled by 1e-7"), &small, &expected, CLOSE);
        }
    }
}

fn the_forward_pass_is_the_same<T: Target>(on: &On<T>) {
    let text = Setup::new("k4v2-g16-r16-s4", [1, 4, 2, 60, 64], 86);
    let plain = (**on).clone().without_autodiff();
    let [q, k, v] = text.on(&plain);
    let expected = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
    close("oracle", &expected, &text.reference().output, CLOSE);
    for tracked in [false, true] {
        let [q, k, v] = text.on(on).map(|x| if tracked { x.require_grad() } else { x });
        let got = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
        equal_bits(format!("tracked {tracked}"), &got.data, &expected.data);
    }
}

fn caches_refuse_gradients<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [1, 2, 1, 8, 64], 87);
    // `KvCache::new` takes an autodiff device as its inner device.
    let mut cache = KvCache::new(&text.config, text.shape(), on).unwrap();
    let plain = (**on).clone().without_autodiff();
    for which in 0..3 {
        let mut inputs = text.on(&plain);
        inputs[which] = text.on(on)[which].clone().require_grad();
        let [q, k, v] = inputs;
        let error = cache.attend(q, k, v).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let message = error.to_string();
        let name = ["query", "key", "value"][which];
        assert!(message.contains(name) && message.contains("gradients"), "{message}");
    }
    assert!(cache.is_empty());
    let [q, k, v] = text.on(&plain);
    cache.attend(q, k, v).unwrap();
    assert!(!T::hosts(&plain), "a device without autodiff is another target");
}
