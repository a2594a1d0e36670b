//! Products compared with f64, and restored numbers compared with the definitions of the formats.

use burn::tensor::{Device, Int, Tensor};
use half::f16;
use kv_weights::{Activations, WeightFormat, lookup, project, reference};

use crate::common::{Blocks, Rng, device_blocks, host, magnitudes, matrix, stamp};

stamp!(
    launches_spread_over_several_axes,
    rows_are_restored_bit_for_bit,
    exact_products_match_restored_weights,
    integer_products_match_rounded_activations,
    outliers_do_not_affect_exact_products,
    outliers_round_integers_by_half_a_step,
    zero_weights_contribute_nothing
);

/// Rows of weights, rows of activations and blocks of 256: less than a vector, tails of every
/// length, several parts.
const SHAPES: [[usize; 3]; 7] =
    [[1, 1, 1], [5, 1, 3], [67, 1, 2], [70, 3, 1], [33, 8, 2], [200, 32, 1], [131, 70, 3]];

/// Calls `case` with weights, activations and a name, for every format and shape. Formats with
/// short blocks also get rows that are not a multiple of 256.
fn each(seed: u64, case: impl Fn(&Blocks, &[f32], &str)) {
    each_of(&SHAPES, seed, case);
}

/// [`each`] with other shapes.
fn each_of(shapes: &[[usize; 3]], seed: u64, case: impl Fn(&Blocks, &[f32], &str)) {
    for &format in WeightFormat::ALL {
        for (i, &[rows, n, blocks]) in shapes.iter().enumerate() {
            let mut rng = Rng::new(seed + i as u64);
            let numbers = format.block_numbers();
            let short = if numbers < 256 { numbers * (1 + rng.below(7)) } else { 0 };
            let columns = 256 * blocks + short;
            let weights = Blocks::random(&mut rng, format, [rows, columns]);
            let x = rng.normals(n * columns);
            case(&weights, &x, &format!("{format} [{rows}, {columns}] by {n}"));
        }
    }
}

fn rows_are_restored_bit_for_bit(device: &Device) {
    each(100, |weights, _, name| {
        let ([rows, columns], restored) = (weights.shape, weights.restored());
        let packed = device_blocks(weights, device);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let all = host(packed.restore().unwrap());
        assert!(bits(&all) == bits(&restored), "{name}");
        let (start, n) = (rows / 3, rows - rows / 2);
        let some = host(packed.restore_rows(start, n).unwrap());
        assert!(bits(&some) == bits(&restored[start * columns..][..n * columns]), "{name}");
        let ids = [rows - 1, 0, rows / 2, 0].map(|id| id as i64);
        let ids = Tensor::<2, Int>::from_data([ids], device);
        let found = host(lookup(ids, &packed).unwrap());
        for (found, row) in found.chunks(columns).zip([rows - 1, 0, rows / 2, 0]) {
            assert!(bits(found) == bits(&restored[row * columns..][..columns]), "{name}");
        }
    });
}

/// Asserts that products are within `tolerance` of the sum of magnitudes.
#[track_caller]
fn close(name: &str, got: &[f32], x: &[f32], weights: &Blocks, tolerance: f64) {
    let (restored, columns) = (weights.restored(), weights.shape[1]);
    let expected = reference::project(x, &restored, columns);
    let sums = reference::project(&magnitudes(x), &magnitudes(&restored), columns);
    assert_eq!(got.len(), expected.len(), "{name}");
    for (i, ((got, expected), sum)) in got.iter().zip(expected).zip(sums).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(
            error <= tolerance * sum,
            "{name}: {i}: {got}, not {expected}: {:.1e}",
            error / sum
        );
    }
}

fn product(x: &[f32], weights: &Blocks, activations: Activations, device: &Device) -> Vec<f32> {
    let x = matrix(x, weights.shape[1], device);
    host(project(x, &device_blocks(weights, device), activations).unwrap())
}

fn exact_products_match_restored_weights(device: &Device) {
    each(200, |weights, x, name| {
        let y = product(x, weights, Activations::Exact, device);
        // A sum of n terms in f32 is off by less than n * 2^-24, and a sum in parts by far less.
        close(name, &y, x, weights, 1e-6);
    });
}

fn integer_products_match_rounded_activations(device: &Device) {
    let flex = matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_));
    // Parts of every length of the rows that the CPU multiplies together.
    let parts = [[70, 7, 1], [40, 8, 1], [33, 9, 2], [64, 10, 1], [65, 11, 1], [31, 12, 1]];
    let shapes: Vec<_> = SHAPES.into_iter().chain(parts).collect();
    let shapes = if flex { &shapes[..] } else { &SHAPES };
    each_of(shapes, 300, |weights, x, name| {
        for (activations, to) in [(Activations::Int16, 32639.0), (Activations::Int8, 127.0)] {
            let name = format!("{name}, {activations:?}");
            let y = product(x, weights, activations, device);
            // Other backends do not round activations, and neither do products with 16-bit weights.
            if flex && !weights.format.is_float() {
                let (rounded, _) = reference::round_activations(x, to);
                close(&name, &y, &rounded, weights, 2e-6);
            }
            // Rounding is off by at most half a step. The largest of 32 numbers is at most five
            // times their mean magnitude.
            close(&name, &y, x, weights, 5.0 * 0.5 / f64::from(to));
        }
    });
}

/// Returns activations of about 1e-2 with one of 1e4 in every 32, as in some channels of language
/// models.
fn with_outliers(rng: &mut Rng, n: usize) -> Vec<f32> {
    let mut x: Vec<f32> = rng.normals(n).into_iter().map(|x| 1e-2 * x).collect();
    for block in x.chunks_mut(32) {
        block[rng.below(32)] = if rng.below(2) == 0 { 1e4 } else { -1e4 };
    }
    x
}

/// Calls `case` for every format with weights that are often 0, since minima are multiples of
/// scales.
fn each_with_zeros(seed: u64, rows: usize, case: impl Fn(&mut Rng, &Blocks, &str)) {
    for &format in WeightFormat::ALL {
        let mut rng = Rng::new(seed);
        let columns = 512 + if format.block_numbers() < 256 { format.block_numbers() } else { 0 };
        let mut weights = Blocks::random(&mut rng, format, [rows, columns]);
        for block in weights.bytes.chunks_mut(format.block_bytes()) {
            let halves: &[(usize, f32)] = match format {
                WeightFormat::Q4_1 | WeightFormat::Q5_1 => &[(0, 0.125), (2, -0.625)],
                WeightFormat::Q4K | WeightFormat::Q5K => &[(0, 0.125), (2, 0.125)],
                _ => &[],
            };
            for &(at, value) in halves {
                block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            }
            if format.is_float() && rng.below(2) == 0 {
                block.fill(0);
            }
        }
        case(&mut rng, &weights, &format.to_string());
    }
}

/// Outliers at weights of 0 must leave no trace in the sum of the other products.
fn outliers_do_not_affect_exact_products(device: &Device) {
    for n in [1, 5, 40] {
        each_with_zeros(400 + n as u64, 131, |rng, weights, name| {
            let columns = weights.shape[1];
            let x = with_outliers(rng, n * columns);
            let y = product(&x, weights, Activations::Exact, device);
            // Each of `columns` additions is off by at most 2^-24 of the magnitudes. After an
            // outlier, all are rounded to its last digit.
            let tolerance = columns as f64 * 2f64.powi(-24);
            close(&format!("{name} by {n}"), &y, &x, weights, tolerance);
            // With a single outlier in a row, the sum of the others is easiest to lose.
            let mut x = vec![1e-2; n * columns];
            let zeros = weights.restored();
            let at = zeros[..columns].iter().position(|&weight| weight == 0.0).unwrap_or(0);
            x.iter_mut().skip(at).step_by(columns).for_each(|x| *x = 1e4);
            let y = product(&x, weights, Activations::Exact, device);
            close(&format!("{name} by {n}, one outlier"), &y, &x, weights, tolerance);
        });
    }
}

fn outliers_round_integers_by_half_a_step(device: &Device) {
    for n in [1, 5, 40] {
        each_with_zeros(500 + n as u64, 67, |rng, weights, name| {
            let (columns, restored) = (weights.shape[1], weights.restored());
            let x = with_outliers(rng, n * columns);
            for (activations, to) in [(Activations::Int16, 32639.0), (Activations::Int8, 127.0)] {
                let y = product(&x, weights, activations, device);
                let expected = reference::project(&x, &restored, columns);
                let steps = reference::round_activations(&x, to).1;
                let steps: Vec<f32> = (0..x.len()).map(|i| steps[i / 32]).collect();
                let weights = magnitudes(&restored);
                let half_steps = reference::project(&steps, &weights, columns);
                let sums = reference::project(&magnitudes(&x), &weights, columns);
                for (i, (got, expected)) in y.iter().zip(&expected).enumerate() {
                    let error = (f64::from(*got) - expected).abs();
                    // The sums in f32 are also off, by less than in tests of exact products.
                    let bound = 0.5 * half_steps[i] + 2e-6 * sums[i];
                    assert!(error <= bound, "{name} {activations:?} by {n}: {i}: {error:.1e}");
                }
            }
        });
    }
}

/// Activations are 0 except at weights of 0.
fn zero_weights_contribute_nothing(device: &Device) {
    for rows in [1, 5, 40] {
        each_with_zeros(600 + rows as u64, rows, |rng, weights, name| {
            let (columns, restored) = (weights.shape[1], weights.restored());
            let x = rng.normals(rows * columns);
            let x: Vec<f32> = x.into_iter().map(|x| 1000.0 * x).collect();
            let zeros = restored.iter().map(|weight| f32::from(u8::from(*weight == 0.0)));
            let x: Vec<f32> = x.into_iter().zip(zeros).map(|(x, zero)| x * zero).collect();
            assert!(rows == 1 || x.iter().any(|x| *x != 0.0), "{name}: no weight is 0");
            let y = product(&x, weights, Activations::Exact, device);
            // Row `i` of activations is made for row `i` of weights.
            for row in 0..rows {
                assert_eq!(y[row * rows + row], 0.0, "{name}: row {row} of {rows}");
            }
        });
    }
}

/// Launches more cubes than WebGPU guarantees along an axis: 65535, each for four rows of
/// activations.
fn launches_spread_over_several_axes(device: &Device) {
    let mut rng = Rng::new(350);
    let weights = Blocks::random(&mut rng, WeightFormat::Q4_0, [3, 32]);
    let n = 4 * 65_535 + 77;
    let x: Vec<f32> = (0..32 * n).map(|i| (i % 1009) as f32 / 500.0 - 1.0).collect();
    let y = product(&x, &weights, Activations::Exact, device);
    close("q4_0", &y, &x, &weights, 1e-6);
}
