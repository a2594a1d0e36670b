//! The quantizer, bit for bit against the oracle.

use burn::tensor::Tensor;
use kv_cubecl::{Granularity, KvFormat, On, Target, fake_quantize, hadamard, quantize, reference};
use proptest::prelude::*;

use crate::common::{Host, Rng, check_properties, equal_bits, stamp};

stamp!(
    random_inputs,
    ties_go_to_even,
    constant_groups,
    huge_values_saturate,
    tiny_values,
    strided_inputs,
    any_scale,
    one_token_and_one_channel,
    hadamard_transforms,
);

const GRANULARITIES: [Granularity; 2] = [Granularity::PerChannel, Granularity::PerToken];
const BITS: [KvFormat; 4] =
    [KvFormat::Affine2, KvFormat::Affine3, KvFormat::Affine4, KvFormat::Affine8];

/// Asserts that `tensor`, which holds `host`, quantizes and restores as the oracle does.
#[track_caller]
fn check(
    what: impl core::fmt::Display,
    tensor: Tensor<4>,
    host: &Host,
    (granularity, bits, group_size): (Granularity, KvFormat, usize),
) {
    let what = format!("{what}: {:?} {granularity:?} {bits:?} G {group_size}", host.shape);
    let n_bits = bits.n_bits();
    let expected = reference::quantize(&host.data, host.shape, granularity, n_bits, group_size);
    let packed = quantize(tensor.clone(), granularity, bits, group_size).unwrap();
    let got = packed.to_logical();
    assert!(got.scale == expected.scale, "{what}: scale");
    assert!(got.min == expected.min, "{what}: min");
    let wrong = got.codes.iter().zip(&expected.codes).position(|(got, expected)| got != expected);
    if let Some(word) = wrong {
        let (got, expected) = (got.codes[word], expected.codes[word]);
        panic!("{what}: code word {word} is {got:#010x}, not {expected:#010x}");
    }
    assert_eq!(got, expected, "{what}");

    let shape = host.shape;
    let restored = reference::dequantize(&expected, shape, granularity, n_bits, group_size);
    assert_eq!(packed.shape(), shape, "{what}: shape");
    equal_bits(format!("{what}: dequantize"), &Host::of(packed.dequantize()).data, &restored);
    let fake = fake_quantize(tensor, granularity, bits, group_size).unwrap();
    assert_eq!(fake.dims(), shape, "{what}: shape of fake_quantize");
    equal_bits(format!("{what}: fake_quantize"), &Host::of(fake).data, &restored);
}

/// Checks one input with every granularity, number of bits and group size.
#[track_caller]
fn check_all<T: Target>(on: &On<T>, what: &str, host: &Host) {
    for granularity in GRANULARITIES {
        for bits in BITS {
            for group_size in [16, 32, 64] {
                // 16 codes of 3 bits do not fill whole words.
                if bits == KvFormat::Affine3 && group_size == 16 {
                    continue;
                }
                check(what, host.on(on), host, (granularity, bits, group_size));
            }
        }
    }
}

fn random_inputs<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(1);
    check_all(on, "normal, seed 1", &Host::normal(&mut rng, [2, 3, 128, 64]));
    check_all(on, "keys, seed 1", &Host::keys(&mut rng, [1, 2, 64, 128]));
    // Sizes that are not powers of two.
    for (head_dim, group_size) in [(80, 16), (96, 32), (256, 64), (8, 8), (24, 8)] {
        let bits = if group_size < 16 { KvFormat::Affine4 } else { KvFormat::Affine2 };
        let values = Host::normal(&mut rng, [1, 3, 7, head_dim]);
        let spec = (Granularity::PerToken, bits, group_size);
        check("odd tokens, seed 1", values.on(on), &values, spec);
        let keys = Host::normal(&mut rng, [3, 1, 3 * group_size, head_dim - 3]);
        let spec = (Granularity::PerChannel, bits, group_size);
        check("odd channels, seed 1", keys.on(on), &keys, spec);
    }
}

/// On a grid of quarters, many elements lie exactly between two codes.
fn ties_go_to_even<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(2);
    let grid = Host::from_fn([1, 2, 64, 64], || rng.below(13) as f32 * 0.25);
    check_all(on, "quarters, seed 2", &grid);
    let grid = Host::from_fn([1, 2, 64, 64], || rng.below(511) as f32 * 0.5);
    check_all(on, "halves, seed 2", &grid);
}

fn constant_groups<T: Target>(on: &On<T>) {
    for constant in [0.0, 1.0, -0.1, 1e-7, 3e-9, 65504.0, -65504.0, 70000.0] {
        let host = Host::from_fn([1, 2, 64, 64], || constant);
        check_all(on, &format!("constant {constant}"), &host);
        for bits in BITS {
            let restored = fake_quantize(host.on(on), Granularity::PerChannel, bits, 32).unwrap();
            let expected = half::f16::from_f32(constant.clamp(-65504.0, 65504.0)).to_f32();
            let got = Host::of(restored).data;
            assert!(got.iter().all(|&x| x == expected), "constant {constant}: {}", got[0]);
        }
    }
    // One constant channel between others.
    let mut rng = Rng::new(3);
    let mut host = Host::normal(&mut rng, [1, 2, 64, 64]);
    host.data.iter_mut().skip(5).step_by(64).for_each(|x| *x = 2.5);
    check_all(on, "one constant channel, seed 3", &host);
}

fn huge_values_saturate<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(4);
    for size in [1e4, 65504.0, 1e6, 1e30, 3e38] {
        let host = Host::from_fn([1, 2, 64, 64], || size * (2.0 * rng.uniform() - 1.0));
        check_all(on, &format!("up to {size:e}, seed 4"), &host);
    }
    // Outliers take the whole range of their groups, but nothing overflows.
    let mut host = Host::normal(&mut rng, [1, 1, 64, 64]);
    host.data.iter_mut().step_by(17).for_each(|x| *x *= 1e6);
    check_all(on, "outliers, seed 4", &host);
}

/// Scales that are subnormal as f16, and ranges too small for any f16. No subnormal f32: a GPU may
/// flush them to zero.
fn tiny_values<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(5);
    for size in [1e-3, 1e-5, 1e-6, 2e-7, 1e-8, 1e-20, 1e-36] {
        let host = Host::from_fn([1, 2, 64, 64], || size * (1.0 + rng.uniform()));
        check_all(on, &format!("about {size:e}, seed 5"), &host);
    }
    // A range that is small compared with the values: the rounding error of the f16 minimum exceeds
    // a step.
    let host = Host::from_fn([1, 2, 64, 64], || 1000.0 + 0.1 * rng.uniform());
    check_all(on, "1000 and a tenth, seed 5", &host);
}

fn strided_inputs<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(6);
    // Stored as [batch, tokens, heads, head_dim], the output of a projection.
    let projected = Host::normal(&mut rng, [2, 64, 3, 64]).on(on).swap_dims(1, 2);
    // Stored with tokens innermost.
    let transposed = Host::normal(&mut rng, [1, 2, 64, 128]).on(on).swap_dims(2, 3);
    // A part of every axis; the view begins inside the buffer.
    let part = Host::normal(&mut rng, [3, 4, 80, 100]).on(on);
    let part = part.narrow(0, 1, 2).narrow(1, 1, 2).narrow(2, 9, 64).narrow(3, 5, 64);
    // One head repeated for all, with stride 0.
    let shared = Host::normal(&mut rng, [2, 1, 64, 64]).on(on).expand([2, 3, 64, 64]);
    let inputs =
        [("projected", projected), ("transposed", transposed), ("part", part), ("shared", shared)];
    for (what, tensor) in inputs {
        let host = Host::of(tensor.clone());
        for granularity in GRANULARITIES {
            for (bits, group_size) in [
                (KvFormat::Affine2, 64),
                (KvFormat::Affine3, 32),
                (KvFormat::Affine4, 16),
                (KvFormat::Affine8, 32),
            ] {
                check(what, tensor.clone(), &host, (granularity, bits, group_size));
            }
        }
    }
}

/// Any magnitude, any number of bits, groups of one to four times the fewest codes that fill words.
fn any_scale<T: Target>(on: &On<T>) {
    let sizes = (1..=2usize, 1..=3usize, 1..=3usize, 1..=3usize);
    let spec = (prop::sample::select(BITS.to_vec()), 1..=4usize, any::<bool>());
    let values = (sizes, spec, -7.0f32..5.0, -7.0f32..5.0, any::<u32>());
    check_properties(24, values, |(sizes, spec, spread, offset, seed)| {
        let ((batch, heads, groups, other), (bits, words, per_channel)) = (sizes, spec);
        let group_size = match bits {
            KvFormat::Affine3 => words * 32,
            _ => words * 32 / bits.n_bits() as usize,
        };
        let (granularity, shape) = match per_channel {
            true => (Granularity::PerChannel, [batch, heads, groups * group_size, 5 * other]),
            false => (Granularity::PerToken, [batch, heads, 5 * other, groups * group_size]),
        };
        let mut rng = Rng::new(seed.into());
        let (spread, offset) = (10f32.powf(spread), 10f32.powf(offset));
        let host = Host::from_fn(shape, || offset + spread * rng.normal());
        check(format!("seed {seed}"), host.on(on), &host, (granularity, bits, group_size));
    });
}

/// One token, or one channel, with a single group.
fn one_token_and_one_channel<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(7);
    let token = Host::normal(&mut rng, [1, 1, 1, 64]);
    check("one token", token.on(on), &token, (Granularity::PerToken, KvFormat::Affine2, 64));
    let channel = Host::normal(&mut rng, [1, 1, 32, 1]);
    check(
        "one channel",
        channel.on(on),
        &channel,
        (Granularity::PerChannel, KvFormat::Affine4, 32),
    );
}

/// Sums are taken in the same order everywhere, so that values after the Hadamard transform have
/// the same codes everywhere.
fn hadamard_transforms<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(29);
    for shape in [[1, 1, 1, 1], [2, 3, 5, 2], [1, 2, 33, 64], [1, 1, 7, 256], [2, 8, 200, 128]] {
        let host = Host::normal(&mut rng, shape);
        let hadamard_values = hadamard(host.on(on)).unwrap();
        let rows = host.data.chunks(shape[3]);
        let expected: Vec<f32> = rows.flat_map(reference::hadamard).collect();
        equal_bits(format!("{shape:?}"), &Host::of(hadamard_values.clone()).data, &expected);
        // Twice is nothing, but for the rounding of sums of up to 256 numbers.
        let back = Host::of(hadamard(hadamard_values.swap_dims(1, 2)).unwrap().swap_dims(1, 2));
        crate::common::close(format!("{shape:?} transformed back"), &back, &host.f64(), 1e-6);
    }
    for shape in [[1, 1, 1, 96], [1, 1, 1, 512], [1, 1, 1, 3]] {
        let error = hadamard(Host::from_fn(shape, || 1.0).on(on)).unwrap_err().to_string();
        assert!(error.contains("head_dim must be a power of two up to 256"), "{error}");
    }
}
