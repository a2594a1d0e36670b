//! Infinite, NaN and huge inputs: on every path, a row's output is not finite exactly where
//! something that the row sees makes it so. Tokens that are hidden from a row, or that it sees in
//! quantized form only, cannot.

use kv_cubecl::{
    Granularity, KvFormat, On, Target, fake_quantize, quantize, reference, streaming_attention,
};

use crate::common::{Host, Rng, Setup, attend, equal_bits, sampled, skipped, stamp};

stamp!(
    attention_of_poisoned_texts,
    long_history_of_a_poisoned_text,
    a_token_that_no_score_reaches,
    groups_of_the_quantizer,
);

/// Each is placed into an otherwise normal text, one per sequence of a batch. The last six are
/// finite, but their squares or their values in f16 may not be.
pub(crate) const POISON: [f32; 9] =
    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, 1e9, 65520.0, 65504.0, -65520.0];

/// Number of tokens of the texts, and at which of them a poison is placed, one per kv head: among
/// the sinks, twice among the quantized tokens, in the window, and last.
const TOKENS: usize = 45;
const PLACES: [usize; 5] = [1, 3, 11, 38, TOKENS - 1];

pub(crate) const NAMES: [&str; 8] = [
    "k2v2-g16-r16-s3",
    "k4v4-g16-r16-s3-after",
    // Groups narrower than some CPUs' vectors.
    "k8v8-g8-r8",
    "k2v16-g16-r16",
    "float",
    "k4v2-g16-r16-s3-f16",
    // Hidden tokens, within groups that are read.
    "k4v16-g16-r16-s2-w19",
    "float-w6",
];

/// A text with every poison at every place, in query (0), key (1) or value (2).
pub(crate) fn poisoned(name: &str, which: usize, head_dim: usize) -> Setup {
    let sizes = [POISON.len(), 2 * PLACES.len(), PLACES.len(), TOKENS, head_dim];
    let mut text = Setup::new(name, sizes, 50 + which as u64);
    let host = [&mut text.query, &mut text.key, &mut text.value].into_iter().nth(which).unwrap();
    let per_place = host.shape[1] / PLACES.len();
    for (sequence, poison) in POISON.into_iter().enumerate() {
        for head in 0..host.shape[1] {
            let lane = sequence * host.shape[1] + head;
            let channel = (5 * lane + 7) % head_dim;
            let token = PLACES[head / per_place];
            // On the CPU a code may count 2^32 times in a sum, which must not overflow with a
            // finite query.
            let huge = which == 0 && poison.is_finite();
            let poison = if huge { poison.clamp(-1e25, 1e25) } else { poison };
            host.data[(lane * TOKENS + token) * head_dim + channel] = poison;
        }
    }
    text
}

/// Asserts that `got` is not finite exactly where `want` is not, and that the rest is close. The
/// tolerance has to be coarse: a sum that includes the poison 65504 loses digits below 4e-3.
#[track_caller]
pub(crate) fn alike(what: &str, got: &Host, want: &[f64], tolerance: f64) {
    assert_eq!(got.data.len(), want.len(), "{what}: number of elements");
    let [_, heads, tokens, head_dim] = got.shape;
    for (index, (&got, &want)) in got.data.iter().zip(want).enumerate() {
        let (lane, at) = (index / (tokens * head_dim), index % (tokens * head_dim));
        let place = || {
            let (poison, head) = (POISON.get(lane / heads), lane % heads);
            let (token, channel) = (at / head_dim, at % head_dim);
            format!("{what}: poison {poison:?}, head {head}, token {token}, channel {channel}")
        };
        assert_eq!(got.is_finite(), want.is_finite(), "{}: {got}, expected {want}", place());
        let close = (f64::from(got) - want).abs() <= tolerance * want.abs().max(1.0);
        assert!(close || !want.is_finite(), "{}: {got}, expected {want}", place());
    }
}

/// Returns whether this is a debug build, which refuses such inputs before they reach a kernel.
pub(crate) fn refused_earlier() -> bool {
    if cfg!(debug_assertions) {
        skipped("debug builds return an error for input that is not finite");
    }
    cfg!(debug_assertions)
}

fn attention_of_poisoned_texts<T: Target>(on: &On<T>) {
    if refused_earlier() {
        return;
    }
    let names = NAMES.map(|name| (name, 64));
    // 18 is no multiple of 4, so kernels read its channels one by one.
    for (name, head_dim) in sampled::<T, _>(names.into_iter().chain([("k2v16-g16-r16", 18)])) {
        if name.ends_with("f16") && !on.supports_dtype(burn::tensor::DType::F16) {
            skipped("the device has no f16");
            continue;
        }
        for (which, what) in ["query", "key", "value"].into_iter().enumerate() {
            let text = poisoned(name, which, head_dim);
            let expected = text.reference().output;
            assert!(expected.iter().any(|x| !x.is_finite()));
            // With a huge query, rounding in f32 alone changes scores enough to change the softmax:
            // only whether outputs are finite is compared.
            let tolerance = if which == 0 { f64::INFINITY } else { 2e-2 };
            let [q, k, v] = text.on(on);
            let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
            alike(&format!("{name} {what} in parallel"), &parallel, &expected, tolerance);
            for sizes in [vec![1; TOKENS], vec![TOKENS], vec![2, 10, 1, 25, 7]] {
                let streamed = attend(&mut text.cache(on), &text, &sizes, on);
                let what = format!("{name} {what} in chunks of {sizes:?}");
                alike(&what, &streamed, &expected, tolerance);
            }
        }
    }
}

/// Chunks of many rows over a history of several tiles: a NaN score must not count as a masked one.
fn long_history_of_a_poisoned_text<T: Target>(on: &On<T>) {
    if refused_earlier() {
        return;
    }
    for name in ["k2v2-s4", "float"] {
        for which in [1, 2] {
            let mut text = Setup::new(name, [3, 4, 2, 700, 64], 60);
            let host = if which == 1 { &mut text.key } else { &mut text.value };
            for (lane, slice) in host.data.chunks_mut(700 * 64).enumerate() {
                let token = [2, 300, 530][lane / 2];
                slice[token * 64 + 9] = [f32::NAN, f32::NEG_INFINITY][lane % 2];
            }
            let expected = text.reference().output;
            let streamed = attend(&mut text.cache(on), &text, &[500, 40, 1, 1, 100, 58], on);
            alike(&format!("{name} {which}"), &streamed, &expected, 2e-2);
        }
    }
}

/// Tokens with score -inf have weight 0, even if all other scores of their split or part of the
/// cache are -inf as well.
fn a_token_that_no_score_reaches<T: Target>(on: &On<T>) {
    if refused_earlier() {
        return;
    }
    let mut text = Setup::new("float", [1, 2, 1, 40, 64], 61);
    text.query.data.iter_mut().for_each(|q| *q = q.abs() + 0.1);
    for token in 0..20 {
        text.key.data[token * 64 + 5] = f32::NEG_INFINITY;
    }
    let expected = text.reference().output;
    assert!(expected[..20 * 64].iter().all(|x| x.is_nan()));
    assert!(expected[20 * 64..40 * 64].iter().all(|x| x.is_finite()));
    for sizes in [vec![1; 40], vec![40], vec![20, 20], vec![10, 5, 10, 15]] {
        let streamed = attend(&mut text.cache(on), &text, &sizes, on);
        alike(&format!("chunks of {sizes:?}"), &streamed, &expected, 1e-4);
    }
}

/// Infinite elements saturate like all beyond the range of f16, and a NaN is restored as its
/// group's minimum: bit for bit as by the oracle.
fn groups_of_the_quantizer<T: Target>(on: &On<T>) {
    if refused_earlier() {
        return;
    }
    let mut rng = Rng::new(62);
    for granularity in [Granularity::PerChannel, Granularity::PerToken] {
        for (bits, group_size) in [
            (KvFormat::Affine2, 16),
            (KvFormat::Affine3, 32),
            (KvFormat::Affine4, 8),
            (KvFormat::Affine8, 32),
        ] {
            let mut host = Host::normal(&mut rng, [1, 2, 64, 32]);
            // Special groups 0 to 4: all NaN; NaN but for one number; poisons; normal numbers and a
            // NaN with its sign bit set; all infinite.
            for i in 0..group_size {
                let at = |group: usize| match granularity {
                    Granularity::PerChannel => i * 32 + group,
                    Granularity::PerToken => group * 32 + i,
                };
                host.data[at(0)] = f32::NAN;
                host.data[at(1)] = if i == 3 { -2.5 } else { f32::NAN };
                host.data[at(2)] = if i < 9 { POISON[i % POISON.len()] } else { 1.0 };
                host.data[at(3)] = if i == 0 { -f32::NAN } else { host.data[at(3)] };
                host.data[at(4)] = f32::INFINITY;
            }
            let (n_bits, shape) = (bits.n_bits(), host.shape);
            let expected = reference::quantize(&host.data, shape, granularity, n_bits, group_size);
            let packed = quantize(host.on(on), granularity, bits, group_size).unwrap();
            let what = format!("{granularity:?} {bits:?}");
            assert_eq!(packed.to_logical(), expected, "{what}");
            let restored = reference::dequantize(&expected, shape, granularity, n_bits, group_size);
            assert!(restored.iter().all(|x| x.is_finite()));
            equal_bits(&what, &Host::of(packed.dequantize()).data, &restored);
            let fake = fake_quantize(host.on(on), granularity, bits, group_size).unwrap();
            equal_bits(&what, &Host::of(fake).data, &restored);
        }
    }
}

#[cfg(feature = "autodiff")]
mod gradients {
    use burn::tensor::Tensor;
    use kv_cubecl::{
        FakeQuantOptions, GroupRange, On, SteGradient, Target,
        reference::fake_quantize_group_backward, streaming_attention,
    };

    use super::{NAMES, POISON, alike, poisoned, refused_earlier};
    use crate::{
        common::{Host, Setup, sampled, skipped, stamp_autodiff},
        gradients::{expected_gradients, gradients_with, weight},
    };

    stamp_autodiff!(gradients_of_poisoned_texts, saturation_is_the_same_when_recorded);

    fn gradients_of_poisoned_texts<T: Target>(on: &On<T>) {
        if refused_earlier() {
            return;
        }
        let names = NAMES.map(|name| (name, 64)).into_iter().chain([("float", 18)]);
        for (name, head_dim) in sampled::<T, _>(names) {
            if name.ends_with("f16") && !on.supports_dtype(burn::tensor::DType::F16) {
                skipped("the device has no f16");
                continue;
            }
            for which in 0..3 {
                let text = poisoned(name, which, head_dim);
                let weight = weight(&text);
                for gradient in [SteGradient::Identity, SteGradient::ScaleMin] {
                    let sides = expected_gradients(&text, &weight, gradient);
                    let options = FakeQuantOptions { gradient, ..FakeQuantOptions::default() };
                    let got = gradients_with(on, &text, &weight, options);
                    for ((got, want), side) in got.iter().zip(sides).zip(["query", "key", "value"])
                    {
                        // Products with the poison cancel to rounding errors: only whether
                        // gradients are finite is compared.
                        let what = format!("{name} {gradient:?}: {which}, gradient of {side}");
                        alike(&what, got, &want, f64::INFINITY);
                    }
                }
            }
        }
        // Here the finite gradients are compared too, those of rows that see no poison among them.
        let mut text = Setup::new("k2v2-g16-r16-s3", [1, 2, 1, 45, 64], 63);
        text.query.data[44 * 64 + 3] = f32::NAN;
        text.value.data[40 * 64 + 4] = f32::INFINITY;
        let weight = weight(&text);
        for gradient in [SteGradient::Identity, SteGradient::ScaleMin] {
            let expected = expected_gradients(&text, &weight, gradient);
            let options = FakeQuantOptions { gradient, ..FakeQuantOptions::default() };
            let got = gradients_with(on, &text, &weight, options);
            for ((got, want), side) in got.iter().zip(expected).zip(["query", "key", "value"]) {
                alike(&format!("{gradient:?}, of {side}"), got, &want, 1e-4);
            }
            assert!(got[0].data[..40 * 64].iter().all(|x| x.is_finite()));
        }
    }

    /// An f16 cache rounds and saturates alike whether gradients are recorded or not, and its
    /// gradient is the identity.
    fn saturation_is_the_same_when_recorded<T: Target>(on: &On<T>) {
        if refused_earlier() {
            return;
        }
        if !on.supports_dtype(burn::tensor::DType::F16) {
            return skipped("the device has no f16");
        }
        let mut text = poisoned("float-f16", 2, 64);
        // One token sees itself alone, so that the output is what was stored.
        text = text.tokens(super::TOKENS - 1..super::TOKENS);
        let [q, k, v] = text.on(on).map(Tensor::require_grad);
        let output = streaming_attention(q, k, v.clone(), &text.config).unwrap().output;
        let grads = output.clone().sum().backward();
        let got = Host::of(output);
        for (got, poison) in got.data.chunks(got.data.len() / POISON.len()).zip(POISON) {
            let stored = poison.clamp(-65504.0, 65504.0);
            let found = got
                .iter()
                .any(|x| x.to_bits() == stored.to_bits() || x.is_nan() && stored.is_nan());
            assert!(found, "{poison} is stored as none of {got:?}");
        }
        let inner = (**on).clone().without_autodiff();
        let [q, k, v2] = text.on(&inner);
        let plain = Host::of(streaming_attention(q, k, v2, &text.config).unwrap().output);
        for (got, plain) in got.data.iter().zip(&plain.data) {
            assert!(got == plain || got.is_nan() && plain.is_nan(), "{got}, unrecorded {plain}");
        }
        let grad = Host::of(v.grad(&grads).unwrap());
        assert!(grad.data.iter().all(|x| (x - 2.0).abs() < 1e-5), "two query heads, weight 1");
        let errors = fake_quantize_group_backward(
            &[f32::NAN, 0.0, 1.0, 3.0],
            &[1.0; 4],
            2,
            GroupRange::MinMax,
        );
        assert!(errors.iter().all(|x| x.is_finite()));
    }
}
