//! Tokens picked on every device, compared with an oracle in f64.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use burn::tensor::{Device, Tensor, TensorData};
use kv_sampling::{Cursor, Draw, uniform};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

/// Makes a test of each case for every device.
macro_rules! on_each_device {
    ($($case:ident),+ $(,)?) => {
        mod flex {
            $(#[test] fn $case() { super::$case(&burn::tensor::Device::flex()); })+
        }
        #[cfg(feature = "wgpu")]
        mod wgpu {
            $(#[test] fn $case() { super::on_wgpu(super::$case); })+
        }
        #[cfg(feature = "remote")]
        mod remote {
            $(#[test] fn $case() { super::$case(&super::remote()); })+
        }
    };
}

on_each_device!(
    the_most_likely_is_picked,
    rows_that_are_not_finite_are_counted,
    ends_move_the_position,
    draws_are_those_of_an_oracle,
    shares_are_those_of_the_softmax,
    seeds_and_positions_differ,
);

/// Returns a device that a server in this process runs on the CPU.
#[cfg(feature = "remote")]
fn remote() -> Device {
    use std::sync::OnceLock;

    use burn::server::RemoteServer;
    use kv_device::remote::Loopback;
    static SERVER: OnceLock<Loopback> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let server = RemoteServer::new([Device::flex()]);
        let server = kv_sampling::remote::serve_ops::<burn::backend::Flex>(server);
        Loopback::serve(&server).unwrap()
    });
    server.device(0, None).unwrap()
}

/// Runs a case on WGPU. Without a device it fails, or is skipped if `KV_ALLOW_NO_DEVICE` is 1.
#[cfg(feature = "wgpu")]
fn on_wgpu(case: fn(&Device)) {
    use std::{io::Write, sync::OnceLock};
    // A runtime can be initialized only once per process.
    static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
    let open = || Device::wgpu_options().init().map_err(|error| error.to_string());
    match DEVICE.get_or_init(open) {
        Ok(device) => case(device),
        Err(error) if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") => {
            // Not through `eprintln!`, which the test harness captures.
            writeln!(std::io::stderr().lock(), "SKIPPED: {error}").unwrap();
        }
        Err(error) => panic!("{error} (KV_ALLOW_NO_DEVICE=1 skips the tests of a missing device)"),
    }
}

const DRAW: Draw = Draw { temperature: 1.0, ..Draw::GREEDY };

fn tensor(logits: &[f32], texts: usize, device: &Device) -> Tensor<2> {
    let shape = [texts, logits.len() / texts];
    Tensor::from_data(TensorData::new(logits.to_vec(), shape), device)
}

fn ids(cursor: &Cursor) -> Vec<u32> {
    cursor.ids().clone().into_data().iter::<u32>().collect()
}

fn one(tensor: &Tensor<1, burn::tensor::Int>) -> i32 {
    tensor.clone().into_scalar::<i32>()
}

fn normal(rng: &mut Xoshiro256PlusPlus) -> f32 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    ((-2.0 * (1.0 - u).ln()).sqrt() * (core::f64::consts::TAU * v).cos()) as f32
}

fn the_most_likely_is_picked(device: &Device) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    for (texts, vocab) in [(1, 1), (1, 2), (3, 255), (1, 256), (2, 257), (1, 5000), (5, 1031)] {
        // Few different values, hence equal ones.
        let logits: Vec<f32> =
            (0..texts * vocab).map(|_| (normal(&mut rng) * 2.0).round() - 3.0).collect();
        let mut cursor = Cursor::new(&vec![7; texts], 41, &[], device).unwrap();
        cursor.advance(tensor(&logits, texts, device), &Draw::GREEDY).unwrap();
        let first = |row: &[f32]| {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter().position(|&logit| logit == most).unwrap() as u32
        };
        let expected: Vec<u32> = logits.chunks(vocab).map(first).collect();
        assert_eq!(ids(&cursor), expected, "{texts} x {vocab}");
        assert_eq!((one(cursor.position()), one(cursor.broken())), (42, 0));
    }
}

fn rows_that_are_not_finite_are_counted(device: &Device) {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for draw in [Draw::GREEDY, Draw { top_k: 3, ..DRAW }] {
            let mut logits = vec![0.5; 3 * 300];
            logits[299] = 2.0;
            logits[300 + 270] = odd;
            let mut cursor = Cursor::new(&[1, 1, 1], 0, &[], device).unwrap();
            for times in 1..=2 {
                cursor.advance(tensor(&logits, 3, device), &draw).unwrap();
                assert_eq!(ids(&cursor)[1], 0, "{odd}, {draw:?}");
                assert_eq!((one(cursor.broken()), one(cursor.position())), (times, times));
            }
            cursor.mend();
            assert_eq!(one(cursor.broken()), 0);
        }
    }
}

fn ends_move_the_position(device: &Device) {
    let logits = |id: usize| -> Vec<f32> { (0..9).map(|i| f32::from(u8::from(i == id))).collect() };
    let mut cursor = Cursor::new(&[1], 5, &[8, 3], device).unwrap().with_past(100);
    for (id, position) in [(4, 6), (3, 107), (2, 108), (8, 209)] {
        cursor.advance(tensor(&logits(id), 1, device), &Draw::GREEDY).unwrap();
        assert_eq!((ids(&cursor), one(cursor.position())), (vec![id as u32], position));
    }
    let mut idle = Cursor::idle(1, &[8, 3], device).unwrap().with_past(100);
    for id in [4, 3] {
        idle.advance(tensor(&logits(id), 1, device), &Draw::GREEDY).unwrap();
        assert!(one(idle.position()) < -1_000_000_000, "it takes part");
    }
    cursor.set_position(2);
    cursor.set_ids(&[6]).unwrap();
    assert_eq!((ids(&cursor), one(cursor.position())), (vec![6], 2));
}

/// Every filter, alone and together.
const DRAWS: [Draw; 9] = [
    DRAW,
    Draw { temperature: 0.3, ..DRAW },
    Draw { temperature: 2.5, ..DRAW },
    Draw { top_k: 1, ..DRAW },
    Draw { top_k: 5, ..DRAW },
    Draw { top_k: 10_000, ..DRAW },
    Draw { top_p: 0.6, ..DRAW },
    Draw { min_p: 0.2, ..DRAW },
    Draw { temperature: 0.8, top_k: 20, top_p: 0.9, min_p: 0.05, seed: u64::MAX - 5 },
];

/// Returns the probability of every token, and the smallest distance to a filter's threshold: of a
/// cumulative probability to `top_p`, or of a share to `min_p`.
fn probabilities(logits: &[f32], draw: &Draw) -> (Vec<f64>, f64) {
    let temperature = f64::from(draw.temperature);
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if draw.top_k > 0 {
        order.truncate(draw.top_k);
    }
    let weight = |id: usize| (f64::from(logits[id] - most) / temperature).exp();
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let (mut mass, mut nearest, mut kept) = (0.0, f64::INFINITY, vec![]);
    for &id in &order {
        if draw.top_p < 1.0 && mass >= f64::from(draw.top_p) * total {
            break;
        }
        mass += weight(id);
        kept.push(id);
        if draw.top_p < 1.0 {
            nearest = nearest.min((mass / total - f64::from(draw.top_p)).abs());
        }
    }
    if draw.min_p > 0.0 {
        for &id in &kept {
            nearest = nearest.min((weight(id) - f64::from(draw.min_p)).abs());
        }
        kept.retain(|&id| weight(id) >= f64::from(draw.min_p));
    }
    let sum: f64 = kept.iter().map(|&id| weight(id)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    kept.iter().for_each(|&id| probabilities[id] = weight(id) / sum);
    (probabilities, nearest)
}

/// Every draw is the largest of the logits with noise that an oracle keeps, unless rounding may
/// decide.
fn draws_are_those_of_an_oracle(device: &Device) {
    const TEXTS: usize = 24;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
    let (mut compared, mut undecided) = (0, 0);
    for draw in DRAWS {
        for vocab in [2, 300, 2000] {
            let logits: Vec<f32> =
                (0..TEXTS * vocab).map(|_| 3.0 * normal(&mut rng) - 20.0).collect();
            let position = rng.random_range(0..100_000);
            let mut cursor = Cursor::new(&[0; TEXTS], position, &[], device).unwrap();
            cursor.advance(tensor(&logits, TEXTS, device), &draw).unwrap();
            let picked = ids(&cursor);
            for (text, (row, &picked)) in logits.chunks(vocab).zip(&picked).enumerate() {
                let (probabilities, nearest) = probabilities(row, &draw);
                let noise = |id: usize| {
                    let u = uniform(draw.seed, text as u32, position as u32, id as u32);
                    f64::from(row[id] / draw.temperature) - (-f64::from(u).ln()).ln()
                };
                let kept = (0..vocab).filter(|&id| probabilities[id] > 0.0);
                let mut scores: Vec<(f64, usize)> = kept.map(|id| (noise(id), id)).collect();
                scores.sort_by(|a, b| b.0.total_cmp(&a.0));
                let gap = scores.get(1).map_or(f64::INFINITY, |second| scores[0].0 - second.0);
                // Scores of up to 100 in f32, and the logarithms of a device's own.
                if gap < 1e-3 || nearest < 1e-5 {
                    undecided += 1;
                    continue;
                }
                compared += 1;
                assert_eq!(picked as usize, scores[0].1, "{draw:?}, {vocab}, text {text}");
            }
        }
    }
    assert!(undecided * 50 < compared, "{undecided} of {compared} were not compared");
}

/// Each token has its share of some thousand draws: only 1 in 10^5 true samples exceeds this
/// chi-square.
fn shares_are_those_of_the_softmax(device: &Device) {
    const TEXTS: usize = 250;
    const STEPS: usize = 16;
    let logits = [0.15f32, 0.5, 0.05, 0.3].map(|p| p.ln() + 4.0);
    let rows = tensor(&logits.repeat(TEXTS), TEXTS, device);
    for draw in [
        DRAW,
        Draw { temperature: 0.5, seed: 9, ..DRAW },
        Draw { top_p: 0.75, ..DRAW },
        Draw { top_k: 3, ..DRAW },
        Draw { min_p: 0.29, ..DRAW },
    ] {
        let mut cursor = Cursor::new(&[0; TEXTS], 0, &[], device).unwrap();
        let mut counts = [0.0; 4];
        for _ in 0..STEPS {
            cursor.advance(rows.clone(), &draw).unwrap();
            ids(&cursor).iter().for_each(|&id| counts[id as usize] += 1.0);
        }
        let (expected, _) = probabilities(&logits, &draw);
        let n = (TEXTS * STEPS) as f64;
        let mut chi_square = 0.0;
        for (count, share) in counts.iter().zip(&expected) {
            match *share > 0.0 {
                true => chi_square += (count - share * n).powi(2) / (share * n),
                false => assert_eq!(*count, 0.0, "{draw:?}: {counts:?}"),
            }
        }
        // Three degrees of freedom, or fewer.
        assert!(chi_square < 25.9, "{draw:?}: {counts:?}, chi-square {chi_square}");
    }
}

fn seeds_and_positions_differ(device: &Device) {
    let rows = tensor(&[0.0; 64 * 100], 64, device);
    let drawn = |seed, position| {
        let mut cursor = Cursor::new(&[0; 64], position, &[], device).unwrap();
        cursor.advance(rows.clone(), &Draw { seed, ..DRAW }).unwrap();
        ids(&cursor)
    };
    assert_eq!(drawn(1, 5), drawn(1, 5));
    for other in [drawn(2, 5), drawn(1, 6), drawn(1 + (1 << 32), 5)] {
        let same = drawn(1, 5).iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 8, "{same} of 64 are the same by chance");
    }
}

/// Numbers are uniform over ids, positions and texts, and neighbors are not correlated. There are
/// 64 bins for 2^16 numbers; only 1 in 10^5 true samples exceeds this chi-square of 63 degrees of
/// freedom.
#[test]
fn noise_is_uniform() {
    type Along = fn(u32) -> f32;
    let along: [Along; 3] =
        [|i| uniform(3, 0, 7, i), |i| uniform(3, 0, i, 7), |i| uniform(3, i, 0, 7)];
    for number in along {
        let mut bins = [0.0f64; 64];
        let mut product = 0.0;
        for i in 0..1 << 16 {
            let u = number(i);
            assert!(u > 0.0 && u < 1.0);
            bins[(u * 64.0) as usize] += 1.0;
            product += f64::from(u - 0.5) * f64::from(number(i + 1) - 0.5);
        }
        let chi_square: f64 = bins.iter().map(|n| (n - 1024.0).powi(2) / 1024.0).sum();
        assert!(chi_square < 121.0, "{chi_square}");
        // The mean of 2^16 products of deviation 1/12 is below 5 / 12 / 2^8.
        assert!((product / 65536.0).abs() < 5.0 / 12.0 / 256.0, "{product}");
    }
}

#[test]
fn wrong_arguments_are_named() {
    let device = Device::flex();
    let message = |result: kv_sampling::Result<()>| result.unwrap_err().to_string();
    let no_texts = Cursor::new(&[], 0, &[], &device).map(drop);
    assert_eq!(message(no_texts), "ids = none: there must be a text");
    let ends = message(Cursor::new(&[1, 2], 0, &[3], &device).map(drop));
    assert_eq!(ends, "texts = 2: must be 1 for texts that end, which share a position");
    let mut cursor = Cursor::new(&[1], 0, &[], &device).unwrap();
    let set = message(cursor.set_ids(&[1, 2]));
    assert_eq!(set, "ids = 2: must be one for each of 1 texts");
    let logits = || tensor(&[0.0; 6], 2, &device);
    let rows = message(cursor.advance(logits(), &Draw::GREEDY));
    assert!(rows.starts_with("logits = [2, 3] of F32: must be [1, vocab]"), "{rows}");
    for (draw, field) in [
        (Draw { temperature: f32::NAN, ..DRAW }, "temperature"),
        (Draw { temperature: -1.0, ..DRAW }, "temperature"),
        (Draw { top_p: 0.0, ..DRAW }, "top_p"),
        (Draw { min_p: 1.5, ..DRAW }, "min_p"),
    ] {
        let wrong = message(cursor.advance(tensor(&[0.0; 3], 1, &device), &draw));
        assert!(wrong.starts_with(&format!("{field} = ")), "{wrong}");
    }
}
