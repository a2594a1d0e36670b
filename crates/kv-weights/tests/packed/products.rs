//! Products against f64, and restored numbers against the definitions of the formats.

use burn::tensor::{Device, Int, Tensor};
use kv_weights::{Activations, WeightFormat, lookup, project, reference};

use crate::common::{Blocks, Rng, device_blocks, matrix, stamp};

stamp!(
    launches_go_over_several_axes,
    rows_are_restored_bit_for_bit,
    products_are_those_of_restored_weights,
    products_of_integers_are_those_of_rounded_activations
);

/// Rows of weights, rows of activations and blocks of 256: less than a vector, tails of every length, several parts.
const SHAPES: [[usize; 3]; 7] =
    [[1, 1, 1], [5, 1, 3], [67, 1, 2], [70, 3, 1], [33, 8, 2], [200, 32, 1], [131, 70, 3]];

/// Calls `case` with blocks, activations and their numbers of rows and columns, for every format and shape; formats
/// with short blocks also have rows that are not a whole number of long ones.
fn each(seed: u64, case: impl Fn(&Blocks, &[f32], &str)) {
    for &format in WeightFormat::ALL {
        for (i, [rows, n, blocks]) in SHAPES.into_iter().enumerate() {
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
        let all = packed.restore().unwrap().into_data().try_into_vec::<f32>().unwrap();
        assert!(bits(&all) == bits(&restored), "{name}");
        let (start, n) = (rows / 3, rows - rows / 2);
        let some =
            packed.restore_rows(start, n).unwrap().into_data().try_into_vec::<f32>().unwrap();
        assert!(bits(&some) == bits(&restored[start * columns..][..n * columns]), "{name}");
        let ids = [rows - 1, 0, rows / 2, 0].map(|id| id as i64);
        let ids = Tensor::<2, Int>::from_data([ids], device);
        let found = lookup(ids, &packed).unwrap().into_data().try_into_vec::<f32>().unwrap();
        for (found, row) in found.chunks(columns).zip([rows - 1, 0, rows / 2, 0]) {
            assert!(bits(found) == bits(&restored[row * columns..][..columns]), "{name}");
        }
    });
}

/// Asserts that products are within `tolerance` of the sum of the magnitudes that are added.
#[track_caller]
fn close(name: &str, got: &[f32], x: &[f32], weights: &Blocks, tolerance: f64) {
    let (restored, columns) = (weights.restored(), weights.shape[1]);
    let magnitudes = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
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

fn products_are_those_of_restored_weights(device: &Device) {
    each(200, |weights, x, name| {
        let packed = device_blocks(weights, device);
        let y = project(matrix(x, weights.shape[1], device), &packed, Activations::Exact).unwrap();
        // A sum of n terms in f32 is off by less than n * 2^-24, and in parts by far less.
        close(name, &y.into_data().try_into_vec::<f32>().unwrap(), x, weights, 1e-6);
    });
}

fn products_of_integers_are_those_of_rounded_activations(device: &Device) {
    each(300, |weights, x, name| {
        let packed = device_blocks(weights, device);
        for (activations, to) in [(Activations::Int16, 32639.0), (Activations::Int8, 127.0)] {
            let name = format!("{name}, {activations:?}");
            let y = project(matrix(x, weights.shape[1], device), &packed, activations).unwrap();
            let y = y.into_data().try_into_vec::<f32>().unwrap();
            // Elsewhere activations are not rounded, nor are those that floats are multiplied with.
            let flex = matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_));
            if flex && !weights.format.is_float() {
                let (rounded, _) = reference::round_activations(x, to);
                close(&name, &y, &rounded, weights, 2e-6);
            }
            // Rounding is off by at most half a step, which is this part of the largest number of 32; that is not
            // above five times their mean magnitude.
            close(&name, &y, x, weights, 5.0 * 0.5 / f64::from(to));
        }
    });
}

/// More cubes than a device with WebGPU's limits has along an axis, 65535 of four rows of activations.
fn launches_go_over_several_axes(device: &Device) {
    let mut rng = Rng::new(350);
    let weights = Blocks::random(&mut rng, WeightFormat::Q4_0, [3, 32]);
    let n = 4 * 65_535 + 77;
    let x: Vec<f32> = (0..32 * n).map(|i| (i % 1009) as f32 / 500.0 - 1.0).collect();
    let packed = device_blocks(&weights, device);
    let y = project(matrix(&x, 32, device), &packed, Activations::Exact).unwrap();
    close("q4_0", &y.into_data().try_into_vec::<f32>().unwrap(), &x, &weights, 1e-6);
}
