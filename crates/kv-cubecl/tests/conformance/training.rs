//! The options of training: the gradient through the quantizer's scale, and quantizing everything.

use burn::tensor::{Device, Tensor, TensorData, activation::softmax};
use kv_cubecl::{
    AttentionOptions, FakeQuantOptions, Granularity, GroupRange, KvCacheConfig, KvFormat, On, Side,
    SteGradient, Target, fake_quantize, fake_quantize_side, fake_quantize_with,
    reference::{self, causal_attention, fake_quantize_group_backward, stream_gradients},
    streaming_attention, streaming_attention_with,
};

use crate::{
    common::{CLOSE, Host, Rng, Setup, close, equal_bits, sampled, skipped, stamp_autodiff},
    gradients::{check_with, gradients_with, weight},
};

stamp_autodiff!(
    scale_gradient_of_one_tensor,
    scale_gradient_in_every_configuration,
    scale_gradient_of_constant_groups,
    scale_gradient_of_an_f16_cache,
    scale_gradient_of_low_bits,
    plain_tensor_operations_agree,
    checkpointing_changes_nothing,
    quantizing_everything,
);

const GRADIENTS: [SteGradient; 2] = [SteGradient::Identity, SteGradient::ScaleMin];

fn options(gradient: SteGradient) -> FakeQuantOptions {
    FakeQuantOptions { gradient, ..FakeQuantOptions::default() }
}

/// Compared with the oracle in f64. A code on the other side of a rounding edge moves the ends of
/// its range by a part of one gradient, so the tolerance is for the whole tensor.
fn scale_gradient_of_low_bits<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(95);
    let shape = [1, 2, 128, 64];
    let names = [
        "k2v2-g64-clip",
        "k3v3-c200",
        "k2v2-c0",
        "kvn2vvn2-t64",
        "kvn2vvn2-c0",
        "kvn3vvn3-c240",
        "kvn4vvn4-t64-clip",
        "ktq2vtq3",
        "ktq4vtq2",
    ];
    for name in sampled::<T, _>(names) {
        let config: KvCacheConfig = name.parse().unwrap();
        let host = Host::keys(&mut rng, shape);
        let weight = Host::normal(&mut rng, shape);
        for side in Side::BOTH {
            let expected = reference::fake_quantize_side_backward(
                &host.data,
                &weight.f64(),
                shape,
                side,
                &config,
            );
            let input = host.on(on).require_grad();
            let output = fake_quantize_side(input.clone(), side, &config, SteGradient::ScaleMin);
            let grads = (output.unwrap() * weight.on(on)).sum().backward();
            let got = Host::of(input.grad(&grads).unwrap());
            let squares = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            let differences: Vec<f64> =
                got.data.iter().zip(&expected).map(|(&got, x)| f64::from(got) - x).collect();
            let (error, moved): (f64, Vec<f64>) = (
                squares(&differences),
                expected.iter().zip(&weight.data).map(|(x, &w)| x - f64::from(w)).collect(),
            );
            assert!(
                error <= 0.01 * squares(&moved),
                "{name} {side}: error {error} of {} that the scale moves",
                squares(&moved)
            );
        }
    }
}

/// Largest difference over the largest magnitude.
fn distance(a: &Host, b: &Host) -> f32 {
    let largest = b.data.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let difference = a.data.iter().zip(&b.data).map(|(a, b)| (a - b).abs());
    difference.fold(0.0, f32::max) / largest
}

/// Compared with the oracle's formula group by group; special groups are constant, saturate, have
/// an f16 minimum that is off by more than half a step, or have ties for the extremes.
fn scale_gradient_of_one_tensor<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(90);
    for (granularity, bits) in [
        (Granularity::PerChannel, KvFormat::Affine2),
        (Granularity::PerChannel, KvFormat::Affine3),
        (Granularity::PerChannel, KvFormat::Affine4),
        (Granularity::PerChannel, KvFormat::Affine8),
        (Granularity::PerToken, KvFormat::Affine2),
        (Granularity::PerToken, KvFormat::Affine3),
        (Granularity::PerToken, KvFormat::Affine4),
        (Granularity::PerToken, KvFormat::Affine8),
    ] {
        let (shape, group_size) = ([2, 2, 64, 64], 32);
        // Token and channel of element `i` of special group `g`.
        let place = |g: usize, i: usize| match granularity {
            Granularity::PerChannel => i * 64 + g,
            Granularity::PerToken => g * 64 + i,
        };
        let mut host = Host::normal(&mut rng, shape);
        for i in 0..group_size {
            host.data[place(0, i)] = 0.5;
            host.data[place(2, i)] = 1000.0 + rng.uniform();
            host.data[place(3, i)] = (i % 5) as f32;
        }
        host.data[place(1, 7)] = 1e6;
        host.data[place(1, 9)] = 1e7;
        let weight = Host::normal(&mut rng, shape);

        let step = |i: usize| if granularity == Granularity::PerChannel { i * 64 } else { i };
        let firsts = (0..host.data.len()).filter(|index| match granularity {
            Granularity::PerChannel => index / 64 % group_size == 0,
            Granularity::PerToken => index % group_size == 0,
        });
        let mut expected = vec![0.0; host.data.len()];
        for first in firsts {
            let values: Vec<f32> = (0..group_size).map(|i| host.data[first + step(i)]).collect();
            let grads: Vec<f64> =
                (0..group_size).map(|i| f64::from(weight.data[first + step(i)])).collect();
            let through =
                fake_quantize_group_backward(&values, &grads, bits.n_bits(), GroupRange::MinMax);
            (0..group_size).for_each(|i| expected[first + step(i)] = through[i]);
        }

        let input = host.on(on).require_grad();
        let output =
            fake_quantize_with(input.clone(), granularity, bits, group_size, SteGradient::ScaleMin)
                .unwrap();
        let identity = fake_quantize(input.clone(), granularity, bits, group_size).unwrap();
        equal_bits("forward", &Host::of(output.clone()).data, &Host::of(identity).data);
        let grads = (output * weight.on(on)).sum().backward();
        let got = Host::of(input.grad(&grads).unwrap());
        close(format!("{granularity:?} {bits:?}"), &got, &expected, CLOSE);
        let unchanged: Vec<f32> = (0..group_size).map(|i| weight.data[place(0, i)]).collect();
        let constant: Vec<f32> = (0..group_size).map(|i| got.data[place(0, i)]).collect();
        equal_bits("a constant group", &constant, &unchanged);
        assert!(distance(&got, &weight) > 1e-3, "the scale passes something on");
    }
}

fn scale_gradient_in_every_configuration<T: Target>(on: &On<T>) {
    let names = [
        "k2v2-g16-r16",
        "k2v2-g16-r16-after",
        "k4v4-g16-r32-s4",
        "k8v2-g32-r32-s1-after",
        "k2v8-g32-r32-s3",
        "k16v2-g16-r16",
        "k2v16-g16-r16-s3-after",
        "k2v2-g16-r16-s200",
        "k4v2-g16-r32-s1-gflush-hadv",
        "float",
    ];
    for (seed, name) in names.into_iter().enumerate() {
        // The last group of keys is incomplete in all of them.
        for sizes in [[1, 2, 2, 53, 64], [2, 6, 2, 39, 64]] {
            check_with(on, &Setup::new(name, sizes, seed as u64), SteGradient::ScaleMin, CLOSE);
        }
    }
    let text = Setup::new("k2v2-g16-r16", [1, 2, 2, 53, 64], 0);
    let [identity, scale] =
        GRADIENTS.map(|x| gradients_with(on, &text, &weight(&text), options(x)));
    equal_bits("query", &scale[0].data, &identity[0].data);
    for side in 1..3 {
        assert!(distance(&scale[side], &identity[side]) > 1e-3, "the scale passes something on");
    }
    let [q, k, v] = text.on(on).map(Tensor::require_grad);
    let identity =
        streaming_attention(q.clone(), k.clone(), v.clone(), &text.config).unwrap().output;
    let options = options(SteGradient::ScaleMin);
    let scale =
        streaming_attention_with(q, k, v, &text.config, options, AttentionOptions::default())
            .unwrap()
            .output;
    equal_bits("forward", &Host::of(scale).data, &Host::of(identity).data);
}

/// Constant groups have scale 0; padding is an example.
fn scale_gradient_of_constant_groups<T: Target>(on: &On<T>) {
    let mut text = Setup::new("k2v2-g16-r16", [1, 2, 1, 53, 64], 91);
    for token in 0..53 {
        text.key.data[token * 64 + 3] = 0.5;
        text.key.data[token * 64 + 40] = 0.0;
    }
    text.key.data[..16 * 64].fill(0.0);
    text.value.data[..7 * 64].fill(0.0);
    text.value.data[9 * 64..9 * 64 + 16].fill(-1.25);
    check_with(on, &text, SteGradient::ScaleMin, CLOSE);
}

/// Keys and values are rounded to f16 before they are quantized, and so are the extremes of their
/// groups.
fn scale_gradient_of_an_f16_cache<T: Target>(on: &On<T>) {
    if !on.supports_dtype(burn::tensor::DType::F16) {
        return skipped("the device has no f16");
    }
    let text = Setup::new("k2v2-g16-r16-f16", [1, 2, 1, 40, 64], 92);
    check_with(on, &text, SteGradient::ScaleMin, CLOSE);
}

/// One side fake-quantized by plain tensor operations. For the identity gradient this is
/// `x + (x_hat - x).detach()`; for `ScaleMin`, scale and minimum have gradients too, and only
/// rounding (to f16 and to codes) is straight-through.
fn restored(
    x: Tensor<4>,
    host: &Host,
    granularity: Granularity,
    (bits, group_size): (KvFormat, usize),
    sinks: usize,
    gradient: SteGradient,
) -> Tensor<4> {
    let [batch, heads, tokens, head_dim] = x.dims();
    let after = tokens - sinks.min(tokens);
    let (len, shape, axis) = match granularity {
        Granularity::PerChannel => {
            let groups = after / group_size;
            (groups * group_size, [batch, heads, groups, group_size, head_dim], 3)
        }
        Granularity::PerToken => {
            (after, [batch, heads, after, head_dim / group_size, group_size], 4)
        }
    };
    if bits == KvFormat::Float || len == 0 {
        return x;
    }
    let n_bits = bits.n_bits();
    let part = host.tokens(sinks..sinks + len);
    let logical = reference::quantize(&part.data, part.shape, granularity, n_bits, group_size);
    let x_hat = reference::dequantize(&logical, part.shape, granularity, n_bits, group_size);
    let device = x.device();
    let constant = |data: Vec<f32>, shape: [usize; 5]| {
        Tensor::<5>::from_data(TensorData::new(data, shape), &device)
    };
    let straight = |x: Tensor<5>, value: Tensor<5>| x.clone() + (value - x.detach());
    let input = x.clone().narrow(2, sinks, len).reshape(shape);
    let x_hat = constant(x_hat, shape);
    let hat = match gradient {
        SteGradient::ScaleMin => {
            let mut one = shape;
            one[axis] = 1;
            let halves = |x: &[half::f16]| constant(x.iter().map(|x| x.to_f32()).collect(), one);
            let (scale, min) = (halves(&logical.scale), halves(&logical.min));
            let codes = ((x_hat - min.clone()) / scale.clone()).round();
            let n = (1u32 << n_bits) - 1;
            let (lowest, highest) = (input.clone().min_dim(axis), input.clone().max_dim(axis));
            let min = straight(lowest.clone(), min);
            let scale = straight((highest - lowest).div_scalar(n as f32), scale);
            let steps = (input - min.clone()) / scale.clone();
            straight(steps, codes) * scale + min
        }
        _ => straight(input, x_hat),
    };
    let hat = hat.reshape([batch, heads, len, head_dim]);
    let mut parts = vec![hat];
    if sinks > 0 {
        parts.insert(0, x.clone().narrow(2, 0, sinks));
    }
    if sinks + len < tokens {
        parts.push(x.narrow(2, sinks + len, tokens - sinks - len));
    }
    Tensor::cat(parts, 2)
}

/// Gradients of the same loss as [`gradients_with`], by plain matrix products, masks and a softmax.
fn composed(on: &Device, text: &Setup, weight: &Host, options: FakeQuantOptions) -> [Host; 3] {
    let config = text.config;
    let (window, sinks) = match options.quantize_everything {
        true => (0, 0),
        false => (config.residual_length, config.sink_tokens),
    };
    let leaves = text.on(on).map(Tensor::require_grad);
    let [q, k, v] = leaves.clone();
    let side = |x: &Tensor<4>, host, granularity, bits| {
        restored(x.clone(), host, granularity, (bits, config.group_size), sinks, options.gradient)
    };
    let k_hat = side(&k, &text.key, Granularity::PerChannel, config.keys);
    let v_hat = side(&v, &text.value, Granularity::PerToken, config.values);

    let [batch, n_heads, tokens, head_dim] = q.dims();
    let n_kv_heads = k.dims()[1];
    let per_kv = n_heads / n_kv_heads;
    let [k, k_hat, v, v_hat] = [k, k_hat, v, v_hat].map(|x| {
        x.reshape([batch, n_kv_heads, 1, tokens, head_dim])
            .repeat_dim(2, per_kv)
            .reshape([batch, n_heads, tokens, head_dim])
    });
    // 1 where `sees(t, j)` for row t and token j, else 0.
    let mask = |sees: &dyn Fn(usize, usize) -> bool| {
        let data = (0..tokens * tokens).map(|i| f32::from(sees(i / tokens, i % tokens))).collect();
        Host { data, shape: [1, 1, tokens, tokens] }.on(on)
    };
    // Number of tokens after the sinks that the last flush before the attention of row t has seen.
    let seen = |t: usize| match config.flush.is_after() {
        false => (t + 1).saturating_sub(sinks),
        true => t.saturating_sub(sinks),
    };
    let keys_hat = mask(&|t, j| window == 0 || j < sinks || j - sinks < seen(t) / window * window);
    let values_hat = mask(&|t, j| window == 0 || j < sinks || j - sinks + window < seen(t));
    let hidden = mask(&|t, j| j > t);
    let scores = q.clone().matmul(k.swap_dims(2, 3)) * (-keys_hat.clone() + 1.0)
        + q.matmul(k_hat.swap_dims(2, 3)) * keys_hat;
    let scores = scores / (head_dim as f32).sqrt() - hidden * 1e9;
    let p = softmax(scores, 3);
    let output =
        (p.clone() * (-values_hat.clone() + 1.0)).matmul(v) + (p * values_hat).matmul(v_hat);
    let grads = (output * weight.on(on)).sum().backward();
    leaves.map(|x| Host::of(x.grad(&grads).expect("a gradient")))
}

/// Both gradients, with and without quantizing everything, compared with attention composed of
/// Burn's tensor operations.
fn plain_tensor_operations_agree<T: Target>(on: &On<T>) {
    for (name, seed) in [("k2v2-g16-r16", 93), ("k4v2-g16-r32-s4-after", 94)] {
        let text = Setup::new(name, [2, 4, 2, 53, 64], seed);
        let weight = weight(&text);
        for gradient in GRADIENTS {
            for quantize_everything in [false, true] {
                let options = FakeQuantOptions { gradient, quantize_everything };
                let got = gradients_with(on, &text, &weight, options);
                let expected = composed(on, &text, &weight, options);
                for (which, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let name = ["query", "key", "value"][which];
                    let what = format!("{text:?} {options:?}: {name}");
                    close(what, got, &expected.f64(), CLOSE);
                }
            }
        }
    }
}

/// Gradient checkpointing recomputes the operations around attention, which must not change the
/// gradients.
fn checkpointing_changes_nothing<T: Target>(on: &On<T>) {
    let checkpointing = (**on).clone().gradient_checkpointing();
    assert_ne!(
        on.gradient_checkpointing_strategy(),
        checkpointing.gradient_checkpointing_strategy()
    );
    let text = Setup::new("k4v2-g16-r32-s4-after", [1, 4, 2, 75, 64], 95);
    for gradient in GRADIENTS {
        for quantize_everything in [false, true] {
            let options = FakeQuantOptions { gradient, quantize_everything };
            let gradients = |device: &Device| {
                let leaves = text.on(device).map(Tensor::require_grad);
                let [q, k, v] = leaves.clone();
                let (q, k, v) = (q.tanh() * 2.0, k.clone() * k.mul_scalar(0.5).cos(), v.exp());
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
                let output = output.clone() * output.tanh() * weight(&text).on(device);
                let grads = output.exp().log1p().sum().backward();
                leaves.map(|x| Host::of(x.grad(&grads).expect("a gradient")))
            };
            for (got, expected) in gradients(&checkpointing).iter().zip(gradients(on)) {
                match T::NAME {
                    "flex" => equal_bits(format!("{options:?}"), &got.data, &expected.data),
                    _ => close(format!("{options:?}"), got, &expected.f64(), CLOSE),
                }
            }
        }
    }
}

/// With `quantize_everything`, attention sees the restored form of every key and value, except keys
/// of an incomplete group.
fn quantizing_everything<T: Target>(on: &On<T>) {
    for name in ["k2v2-g16-r16-s4", "k4v2-g16-r32-after", "k16v2-g16-r16", "k2v16-g16-r16-s3-after"]
    {
        let text = Setup::new(name, [2, 4, 2, 53, 64], 96);
        let options = FakeQuantOptions { quantize_everything: true, ..Default::default() };
        let side = |host: &Host, granularity, bits: KvFormat, len| {
            let part = host.tokens(0..len);
            let data = match bits {
                KvFormat::Float => part.data,
                bits => {
                    let n_bits = bits.n_bits();
                    reference::fake_quantize(&part.data, part.shape, granularity, n_bits, 16)
                }
            };
            let hat = Host { data, shape: part.shape };
            if len < 53 { Host::cat(&[hat, host.tokens(len..53)]) } else { hat }
        };
        let (keys, values) = (text.config.keys, text.config.values);
        let key = side(&text.key, Granularity::PerChannel, keys, 48);
        let value = side(&text.value, Granularity::PerToken, values, 53);
        let (shape, kv_shape) = (text.query.shape, key.shape);
        let (q, k, v) = (text.query.f64(), key.f64(), value.f64());
        let expected = causal_attention((&q, shape), (&k, kv_shape), &v);
        let [q, k, v] = text.on(on);
        let exact =
            streaming_attention(q.clone(), k.clone(), v.clone(), &text.config).unwrap().output;
        let got = Host::of(
            streaming_attention_with(q, k, v, &text.config, options, AttentionOptions::default())
                .unwrap()
                .output,
        );
        close(format!("{text:?}"), &got, &expected, CLOSE);
        assert!(distance(&got, &Host::of(exact)) > 1e-2, "{name}: no cache quantizes everything");

        let weight = weight(&text);
        let expected = stream_gradients(
            (&text.query.data, shape),
            (&key.data, kv_shape),
            &value.data,
            &weight.f64(),
            &KvCacheConfig::float(),
            SteGradient::Identity,
        );
        let got = gradients_with(on, &text, &weight, options);
        for (got, expected) in got.iter().zip([expected.query, expected.key, expected.value]) {
            close(format!("{text:?}: gradient"), got, &expected, CLOSE);
        }
    }
}

#[test]
fn options_in_configuration_files() {
    let read = serde_json::from_str::<FakeQuantOptions>;
    assert_eq!(read("{}").unwrap(), FakeQuantOptions::default());
    assert_eq!(read(r#"{"gradient":"scale-min"}"#).unwrap(), options(SteGradient::ScaleMin));
    let everything = read(r#"{"quantize_everything":true}"#).unwrap();
    assert!(everything.quantize_everything && everything.gradient == SteGradient::Identity);
    assert!(read(r#"{"gradient":"none"}"#).is_err() && read(r#"{"grad":"identity"}"#).is_err());
}
