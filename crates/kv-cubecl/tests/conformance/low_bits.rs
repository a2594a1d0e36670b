//! Ranges that clip, variance-normalized tiles, and Lloyd-Max codes. Codes of tiles follow from
//! many sums and products in f32, so a few of them may be on the other side of a rounding edge.

use kv_cubecl::{
    Granularity, GroupRange, KvCacheConfig, KvFormat, Logical, On, Side, SteGradient, Target,
    fake_quantize_side, hadamard, layout::QuantSpec, quantize_side, reference,
};

use crate::common::{File, Host, Rng, close, equal_bits, sampled, stamp, wide};

mod caches;
mod configurations;

stamp!(golden_files, golden_tokens, odd_tiles, odd_tokens, random_ranges);

/// The folder of the golden files, whose codes other software computed in f64.
const FOLDER: &str = "formats2";

/// Returns the results of affine formats and of tiles: name, side and configuration.
fn cases(file: &File) -> Vec<(String, Side, KvCacheConfig)> {
    let names = file.names().into_iter();
    let names = names.filter_map(|name| name.strip_suffix("_codes").map(str::to_string));
    names.filter_map(|name| case(&name).map(|(side, config)| (name, side, config))).collect()
}

/// Returns the codes in a file.
fn codes_in(file: &File, name: &str) -> Vec<u32> {
    file.codes(&format!("{name}_codes")).into_iter().map(u32::from).collect()
}

/// Returns the side and the configuration of a name such as `vn2_key_t128_c180`; `None` for a
/// format that this crate does not have.
fn case(name: &str) -> Option<(Side, KvCacheConfig)> {
    let mut parts = name.split('_');
    let format = parts.next()?;
    let format = KvFormat::named(format.strip_prefix("affine").unwrap_or(format))?;
    let side = match parts.next()? {
        "key" => Side::Keys,
        "value" => Side::Values,
        _ => return None,
    };
    let mut config =
        KvCacheConfig::new(format, format).with_ranges(GroupRange::MinMax, GroupRange::MinMax);
    for part in parts {
        let number = || part[1..].parse().unwrap();
        match part.as_bytes()[0] {
            b'g' => config = config.with_group_size(number()),
            b't' => config.tile.tokens = number(),
            _ => {
                let range = part.parse().unwrap();
                config = config.with_ranges(range, range);
            }
        }
    }
    Some((side, config))
}

/// Returns the code of each element, in the order of the tensor.
fn codes(logical: &Logical, spec: QuantSpec, [_, _, _, head_dim]: [usize; 4]) -> Vec<u32> {
    let groups = logical.scale.len();
    let mut codes = vec![u32::MAX; groups * spec.group_size];
    for group in 0..groups {
        let (first, stride) = spec.logical_words(group, head_dim);
        for nth in 0..spec.group_size {
            let at = match spec.granularity {
                Granularity::PerChannel => {
                    (group / head_dim * spec.group_size + nth) * head_dim + group % head_dim
                }
                Granularity::PerToken => group * spec.group_size + nth,
            };
            codes[at] = spec.code(nth, |word| logical.codes[first + word * stride]);
        }
    }
    codes
}

/// Asserts that at most one code in a thousand differs, by one step, or none.
#[track_caller]
fn check_codes(what: &str, got: &[u32], expected: &[u32], exact: bool) {
    assert_eq!(got.len(), expected.len(), "{what}: number of codes");
    let wrong: Vec<_> = (0..got.len()).filter(|&i| got[i] != expected[i]).collect();
    let allowed = if exact { 0 } else { got.len() / 1000 };
    assert!(wrong.len() <= allowed, "{what}: {} of {} codes differ", wrong.len(), got.len());
    assert!(wrong.into_iter().all(|i| got[i].abs_diff(expected[i]) == 1), "{what}: far codes");
}

/// Asserts that halves are equal up to `ulps` steps.
#[track_caller]
fn check_halves(what: &str, got: &[half::f16], expected: &[half::f16], ulps: i32) {
    assert_eq!(got.len(), expected.len(), "{what}: number of halves");
    let ordered = |x: half::f16| match i32::from(x.to_bits() as i16) {
        bits if bits < 0 => -(bits & 0x7fff),
        bits => bits,
    };
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        // Near 0, a minimum is a difference of larger numbers.
        let near = (got.to_f32() - expected.to_f32()).abs() < 1e-4;
        let far = (ordered(got) - ordered(expected)).abs() > ulps && !near;
        assert!(!far, "{what}: half {i} is {got}, not {expected}");
    }
}

fn transformed(host: &Host) -> Host {
    let rows = host.data.chunks(host.shape[3]);
    Host { data: rows.flat_map(reference::hadamard).collect(), shape: host.shape }
}

fn golden_files<T: Target>(on: &On<T>) {
    for file in File::all(FOLDER) {
        let input = file.input();
        for (name, side, config) in sampled::<T, _>(cases(&file)) {
            let what = format!("{} {name}", file.name);
            let expected = codes_in(&file, &name);
            let tiled = config.keys.is_tiled();
            let rows = match tiled {
                true => hadamard(input.on(on)).unwrap(),
                false => input.on(on),
            };
            let packed = quantize_side(rows.clone(), side, &config).unwrap();
            let logical = packed.to_logical();
            check_codes(&what, &codes(&logical, packed.spec(), input.shape), &expected, !tiled);
            // Products of f32 round to f16 on either side of an edge.
            let ulps = if tiled { 1 } else { 0 };
            check_halves(&what, &logical.scale, &file.halves(&format!("{name}_scale")), ulps);
            check_halves(&what, &logical.min, &file.halves(&format!("{name}_min")), ulps);
            if tiled {
                let factors = match side {
                    Side::Keys => "token",
                    Side::Values => "channel",
                };
                let factors = file.halves(&format!("{name}_{factors}"));
                check_halves(&what, &logical.factors, &factors, 1);
            }
            let restored = match tiled {
                true => hadamard(packed.dequantize()).unwrap(),
                false => packed.dequantize(),
            };
            // The files have the original frame. A Hadamard transform spreads the step of a code
            // that differs over all channels.
            let dequant = wide(&file.f32s(&format!("{name}_dequant")));
            match tiled {
                false => close(&what, &Host::of(restored), &dequant, 1e-6),
                true => {
                    let restored = Host::of(restored);
                    let size: f64 = dequant.iter().map(|x| x * x).sum();
                    let differences = restored.data.iter().zip(&dequant);
                    let error: f64 = differences.map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
                    assert!(error <= 1e-4 * size, "{what}: error {error}, size {size}");
                }
            }
            let fake = fake_quantize_side(rows, side, &config, SteGradient::Identity).unwrap();
            equal_bits(
                format!("{what}: fake"),
                &Host::of(fake).data,
                &Host::of(packed.dequantize()).data,
            );
        }
    }
}

/// The formats of whole tokens whose codes are of a normal distribution.
const LLOYD_MAX: [KvFormat; 3] = [KvFormat::LloydMax2, KvFormat::LloydMax3, KvFormat::LloydMax4];

/// Tokens in Lloyd-Max codes. The files have the norm of each token, not the scale with which its
/// codes get that norm.
fn golden_tokens<T: Target>(on: &On<T>) {
    for file in File::all(FOLDER) {
        let input = file.input();
        for format in sampled::<T, _>(LLOYD_MAX) {
            for side in Side::BOTH {
                let what = format!("{} {format} {side}", file.name);
                let config = KvCacheConfig::new(format, format);
                let rows = hadamard(input.on(on)).unwrap();
                let packed = quantize_side(rows.clone(), side, &config).unwrap();
                let got = codes(&packed.to_logical(), packed.spec(), input.shape);
                check_codes(&what, &got, &codes_in(&file, &format.to_string()), true);
                let restored = Host::of(hadamard(packed.dequantize()).unwrap());
                // Scales are rounded to f16 here, and norms in the files.
                let expected = wide(&file.f32s(&format!("{format}_nc_dequant")));
                let tokens = restored.data.chunks(input.shape[3]);
                for (row, expected) in tokens.zip(expected.chunks(input.shape[3])) {
                    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    for (&x, &expected) in row.iter().zip(expected) {
                        let error = (f64::from(x) - expected).abs();
                        assert!(error <= 1.5e-3 * largest, "{what}: {x}, not {expected}");
                    }
                }
                let fake = fake_quantize_side(rows, side, &config, SteGradient::Identity).unwrap();
                equal_bits(
                    format!("{what}: fake"),
                    &Host::of(fake).data,
                    &Host::of(packed.dequantize()).data,
                );
            }
        }
    }
}

/// Zeros, constants, tiny and huge numbers, infinities and NaN in tokens: the oracle's codes and
/// scales.
fn odd_tokens<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(94);
    let mut host = Host::normal(&mut rng, [1, 2, 33, 64]);
    let mut rows = host.data.chunks_mut(64);
    let mut row = || rows.next().unwrap();
    row().fill(0.0);
    row().fill(-3.25);
    row().iter_mut().for_each(|x| *x *= 1e-5);
    row().iter_mut().for_each(|x| *x *= 1e9);
    row()[7] = f32::NAN;
    row().fill(f32::NAN);
    row()[3] = f32::INFINITY;
    row()[60] = f32::NEG_INFINITY;
    for format in sampled::<T, _>(LLOYD_MAX) {
        let config = KvCacheConfig::new(format, format);
        for side in Side::BOTH {
            let packed = quantize_side(host.on(on), side, &config).unwrap();
            let expected = reference::quantize_side(&host.data, host.shape, side, &config);
            let (got, spec) = (packed.to_logical(), packed.spec());
            let what = format!("{format} {side}");
            let [got_codes, codes] = [&got, &expected].map(|all| codes(all, spec, host.shape));
            check_codes(&what, &got_codes, &codes, true);
            check_halves(&what, &got.scale, &expected.scale, 1);
            let restored = Host::of(packed.dequantize());
            assert!(restored.data.iter().all(|x| x.is_finite()), "{what}");
        }
    }
}

/// The oracle agrees with the files on all codes and parameters.
#[test]
fn oracle_of_low_bits() {
    let mut checked = 0;
    for file in File::all(FOLDER) {
        let input = file.input();
        for (name, side, config) in cases(&file) {
            checked += 1;
            let rows = if config.keys.is_tiled() { transformed(&input) } else { input.clone() };
            let logical = reference::quantize_side(&rows.data, rows.shape, side, &config);
            let spec = config.spec(side, input.shape[3]).unwrap();
            let expected = codes_in(&file, &name);
            let what = format!("{} {name}", file.name);
            // The Hadamard transform of the oracle is one of f32.
            let tiled = config.keys.is_tiled();
            check_codes(&what, &codes(&logical, spec, input.shape), &expected, !tiled);
            let ulps = if tiled { 1 } else { 0 };
            check_halves(&what, &logical.scale, &file.halves(&format!("{name}_scale")), ulps);
            check_halves(&what, &logical.min, &file.halves(&format!("{name}_min")), ulps);
        }
    }
    assert!(checked > 0);
}

/// Zeros, constants, outliers, infinities and NaN in tiles: finite, and near the oracle.
fn odd_tiles<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(92);
    let shape = [1, 2, 128, 64];
    let mut hosts = vec![("zeros", Host { data: vec![0.0; 2 * 128 * 64], shape })];
    hosts.push(("constant", Host { data: vec![3.25; 2 * 128 * 64], shape }));
    let normal = Host::normal(&mut rng, shape);
    for (what, factor) in [("tiny", 1e-6), ("large", 3e3)] {
        let data = normal.data.iter().map(|x| x * factor).collect();
        hosts.push((what, Host { data, shape }));
    }
    let mut outliers = normal.clone();
    outliers.data.iter_mut().step_by(97).for_each(|x| *x *= 1e3);
    hosts.push(("outliers", outliers));
    let mut rows = normal.clone();
    rows.data[64..640].fill(0.0);
    hosts.push(("zero rows", rows));
    check_tiles(on, &hosts, ["kvn2vvn2-t64-c0", "kvn3vvn3-t64", "kvn2vvn2", "kvn4vvn4-i0"]);
    // Rows and columns that do not fill vectors.
    for (head_dim, name) in [(8, "kvn4vvn4-t64"), (16, "kvn2vvn2-t64")] {
        let narrow = Host::normal(&mut rng, [1, 2, 128, head_dim]);
        check_tiles(on, &[("narrow", narrow)], [name]);
    }
    // A NaN counts as 0, and infinities as the largest number of f16.
    let (mut odd, mut finite) = (normal.clone(), normal);
    for (place, (x, y)) in [(f32::NAN, 0.0), (f32::INFINITY, 65504.0), (-f32::INFINITY, -65504.0)]
        .into_iter()
        .enumerate()
    {
        odd.data[70 * place + 3] = x;
        finite.data[70 * place + 3] = y;
    }
    let config: KvCacheConfig = "kvn3vvn3".parse().unwrap();
    for side in Side::BOTH {
        let codes = |host: &Host| quantize_side(host.on(on), side, &config).unwrap().to_logical();
        assert_eq!(codes(&odd), codes(&finite), "{side}");
    }
}

/// Checks restored tiles against the oracle.
fn check_tiles<T: Target, const N: usize>(
    on: &On<T>,
    hosts: &[(&str, Host)],
    names: [&'static str; N],
) {
    for (what, host) in hosts {
        let shape = host.shape;
        for name in sampled::<T, _>(names) {
            let config: KvCacheConfig = name.parse().unwrap();
            for side in Side::BOTH {
                let fake = fake_quantize_side(host.on(on), side, &config, SteGradient::Identity);
                let got = Host::of(fake.unwrap());
                let expected = reference::fake_quantize_side(&host.data, shape, side, &config);
                let size: f64 = wide(&expected).iter().map(|x| x * x).sum();
                let pairs = got.data.iter().zip(&expected);
                let error: f64 = pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum();
                // A thousandth of the codes may be a step off. Tiny numbers are restored from f16
                // parameters that are a few of f16's smallest steps, and may be off by one.
                let smallest = got.data.len() as f64 * 2f64.powi(-24).powi(2);
                let allowed = 2e-3 * size + 4.0 * smallest;
                assert!(error <= allowed, "{name} {side} {what}: {error} of {size}");
            }
        }
    }
}

/// Ranges of KIVI's groups are the oracle's, code by code.
fn random_ranges<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(93);
    let names = ["k2v2-c195", "k2v2-g64-clip", "k3v3-c270", "k4v4-clip", "k8v8-c250-g16"];
    for name in sampled::<T, _>(names) {
        let config: KvCacheConfig = name.parse().unwrap();
        let mut host = Host::keys(&mut rng, [2, 2, 64, 64]);
        host.data.iter_mut().step_by(61).for_each(|x| *x *= 40.0);
        host.data[..64].fill(0.0);
        for side in Side::BOTH {
            let packed = quantize_side(host.on(on), side, &config).unwrap();
            let expected = reference::quantize_side(&host.data, host.shape, side, &config);
            let (got, spec) = (packed.to_logical(), packed.spec());
            let what = format!("{name} {side}");
            // Mean and deviation are sums in another order. Of the ranges tried, two may lose
            // equally much up to rounding, so a group may differ as a whole.
            let pairs =
                codes(&got, spec, host.shape).into_iter().zip(codes(&expected, spec, host.shape));
            let differ = pairs.filter(|(a, b)| a != b).count();
            assert!(differ * 500 <= host.data.len(), "{what}: {differ} codes differ");
        }
    }
}
