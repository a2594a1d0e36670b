//! Products with fused operations, compared with f64.

use burn::tensor::{Device, Tensor, TensorData};
use kv_weights::{
    Activations, Fused, Gate, Norm, PackedMatrix, WeightFormat, gated, project_fused,
};

use crate::common::{Blocks, Rng, device_blocks, host, matrix, stamp};

stamp!(
    parts_are_joined_with_bias_and_residual,
    fused_gates_match_f64,
    gates_alone_match_f64,
    gates_keep_nan_and_accept_views,
    gates_far_below_zero_return_zero,
    fused_gates_far_below_zero_return_zero,
    views_match_copies,
    mismatched_inputs_are_rejected
);

fn vector(x: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(x.to_vec(), [x.len()]), device)
}

/// Normalizes rows: `x / sqrt(mean(x^2) + epsilon) * gains`.
fn normed(x: &[f32], gains: &[f32], epsilon: f64, plus_one: bool) -> Vec<f64> {
    let gain = |gain: f32| f64::from(gain) + f64::from(u8::from(plus_one));
    x.chunks(gains.len())
        .flat_map(|x| {
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
            let root = (mean + epsilon).sqrt();
            x.iter().zip(gains).map(move |(x, g)| f64::from(*x) / root * gain(*g))
        })
        .collect()
}

/// Returns products of rows of `x` with the rows of all parts, each with its sum of magnitudes.
fn products(x: &[f64], parts: &[&Blocks]) -> Vec<[f64; 2]> {
    let columns = parts[0].shape[1];
    let weights: Vec<Vec<f32>> = parts.iter().map(|part| part.restored()).collect();
    let product = |x: &[f64], row: &[f32]| {
        let terms = x.iter().zip(row).map(|(x, w)| x * f64::from(*w));
        terms.fold([0.0, 0.0], |[sum, size], term| [sum + term, size + term.abs()])
    };
    x.chunks(columns)
        .flat_map(|x| {
            weights.iter().flat_map(move |w| w.chunks(columns).map(move |row| product(x, row)))
        })
        .collect()
}

/// Asserts that numbers are within `1e-5` of their sizes from the expected ones.
#[track_caller]
fn close(name: &str, got: Tensor<3>, expected: &[[f64; 2]]) {
    let got = host(got);
    assert_eq!(got.len(), expected.len(), "{name}");
    for (i, (got, [expected, size])) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= 1e-5 * size, "{name}: {i}: {got}, not {expected}: {:.1e}", error / size);
    }
}

/// Covers queries, keys and values of one format or two.
fn parts_are_joined_with_bias_and_residual(device: &Device) {
    let q4 = WeightFormat::Q4_0;
    let cases = [[q4, q4, q4], [q4, q4, WeightFormat::Q6K], [WeightFormat::Q5K; 3]];
    for (case, formats) in cases.into_iter().enumerate() {
        for n in [1, 2, 7, 33] {
            let mut rng = Rng::new(1000 + case as u64);
            let columns = 512;
            let blocks: Vec<Blocks> = formats
                .iter()
                .zip([70, 1, 33])
                .map(|(format, rows)| Blocks::random(&mut rng, *format, [rows, columns]))
                .collect();
            let [x, gains, bias] = [n * columns, columns, 104].map(|n| rng.normals(n));
            let residual = rng.normals(n * 104);
            let packed: Vec<PackedMatrix> =
                blocks.iter().map(|blocks| device_blocks(blocks, device)).collect();
            for used in [1, 2, 3] {
                let blocks: Vec<&Blocks> = blocks[..used].iter().collect();
                let packed: Vec<&PackedMatrix> = packed[..used].iter().collect();
                let rows: usize = blocks.iter().map(|blocks| blocks.shape[0]).sum();
                let norm = Norm::new(vector(&gains, device), 1e-2).with_plus_one(used == 2);
                let fused = Fused::default()
                    .with_norm(norm)
                    .with_bias(vector(&bias[..rows], device))
                    .with_residual(matrix(&residual[..n * rows], rows, device));
                let y = matrix(&x, columns, device);
                let y = project_fused(y, &packed, Activations::Exact, fused).unwrap();
                let mut expected = products(&normed(&x, &gains, 1e-2, used == 2), &blocks);
                for (i, [sum, size]) in expected.iter_mut().enumerate() {
                    let (bias, added) = (f64::from(bias[i % rows]), f64::from(residual[i]));
                    *sum += bias + added;
                    *size += bias.abs() + added.abs();
                }
                close(&format!("{formats:?} {used} by {n}"), y, &expected);
            }
        }
    }
}

fn fused_gates_match_f64(device: &Device) {
    let (q4, q8) = (WeightFormat::Q4_1, WeightFormat::Q8_0);
    for (case, formats) in [vec![q4], vec![q4, q4], vec![q8, q4]].into_iter().enumerate() {
        for (gate, n) in
            [(Gate::Silu, 1), (Gate::GeluTanh, 1), (Gate::Silu, 9), (Gate::GeluTanh, 40)]
        {
            let mut rng = Rng::new(1100 + case as u64);
            let (columns, outputs) = (288, 75);
            let rows = 2 * outputs / formats.len();
            let blocks: Vec<Blocks> = formats
                .iter()
                .map(|format| Blocks::random(&mut rng, *format, [rows, columns]))
                .collect();
            // Some gates are far from 0 on either side.
            let x: Vec<f32> = rng.normals(n * columns).iter().map(|x| 30.0 * x).collect();
            // Without a bias, products and gate are one operation.
            let bias = match n {
                40 => vec![0.0; 2 * outputs],
                _ => rng.normals(2 * outputs),
            };
            let packed: Vec<PackedMatrix> =
                blocks.iter().map(|blocks| device_blocks(blocks, device)).collect();
            let packed: Vec<&PackedMatrix> = packed.iter().collect();
            let fused = match n {
                40 => Fused::default(),
                _ => Fused::default().with_bias(vector(&bias, device)),
            };
            let y = matrix(&x, columns, device);
            let y = project_fused(y, &packed, Activations::Exact, fused.with_gate(gate)).unwrap();
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let both = products(&wide, &blocks.iter().collect::<Vec<_>>());
            let expected: Vec<[f64; 2]> = (0..n * outputs)
                .map(|i| {
                    let (row, i) = (i / outputs, i % outputs);
                    let [a, b] = [i, i + outputs].map(|i| {
                        let [sum, size] = both[row * 2 * outputs + i];
                        [sum + f64::from(bias[i]), size + f64::from(bias[i].abs())]
                    });
                    let f = match gate {
                        Gate::Silu => a[0] / (1.0 + (-a[0]).exp()),
                        _ => {
                            let z = 0.797_884_560_802_865_4 * (a[0] + 0.044715 * a[0].powi(3));
                            0.5 * a[0] * (1.0 + z.tanh())
                        }
                    };
                    [f * b[0], a[1] * b[1]]
                })
                .collect();
            close(&format!("{formats:?} {gate:?} by {n}"), y, &expected);
        }
    }
}

/// Covers widths below and above a vector, one row and enough for several threads, and numbers of
/// all magnitudes.
fn gates_alone_match_f64(device: &Device) {
    for (n, rows) in [(1, 1), (7, 3), (64, 1), (1536, 1), (129, 200)] {
        let value = |i: usize| {
            let magnitude = [1e-6, 0.1, 1.0, 3.0, 10.0, 50.0, 300.0][i % 7];
            (((i * 7919) % 2003) as f32 / 1001.0 - 1.0) * magnitude
        };
        let x: Vec<f32> = (0..2 * n * rows).map(value).collect();
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let y = gated(matrix(&x, 2 * n, device), gate).unwrap();
            assert_eq!(y.dims(), [1, rows, n]);
            for (i, got) in host(y).into_iter().enumerate() {
                let at = i / n * 2 * n + i % n;
                let (a, b) = (f64::from(x[at]), f64::from(x[at + n]));
                let inner = 0.797_884_560_802_865_4 * (a + 0.044715 * a.powi(3));
                let expected = b * match gate {
                    Gate::Silu => a / (1.0 + (-a).exp()),
                    _ => a / (1.0 + (-2.0 * inner).exp()),
                };
                // The exponent is rounded four times, and below 60 unless the result is near 0.
                let off = (f64::from(got) - expected).abs();
                assert!(
                    off <= 1.5e-5 * expected.abs() + 1e-30,
                    "{gate:?} {a}: {got}, not {expected}"
                );
            }
        }
    }
}

/// In f32, SiLU and GELU are 0 from about -104 down to the most negative number, for any factor
/// beside the gate.
fn gates_far_below_zero_return_zero(device: &Device) {
    let gates = [-1e3, -1e10, -1e19, -3e19, -1e30, -1e38, f32::MIN.next_up(), f32::MIN];
    let ups = [0.0, 1.0, -1e-30, 1e10, -1e19, 1e38, f32::MAX, f32::MIN];
    let pairs: Vec<[f32; 2]> = gates.iter().flat_map(|&gate| ups.map(|up| [gate, up])).collect();
    // Widths of a vector, less and more, and several rows.
    for n in [1, 8, 64] {
        let rows = pairs.chunks(n).map(|pairs| [0, 1].map(|i| pairs.iter().map(move |p| p[i])));
        let x: Vec<f32> = rows.flat_map(|[gates, ups]| gates.chain(ups)).collect();
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let y = host(gated(matrix(&x, 2 * n, device), gate).unwrap());
            for (y, pair) in y.into_iter().zip(&pairs) {
                assert_eq!(y, 0.0, "{gate:?} {pair:?}");
            }
        }
    }
    // Gates far above 0 are open.
    for gate in [Gate::Silu, Gate::GeluTanh] {
        let x = [1e3, 1e19, 1e38, f32::MAX, 1.0, 2.0, -1.0, 1.0];
        let y = host(gated(matrix(&x, 8, device), gate).unwrap());
        assert_eq!(y, [1e3, 2e19, -1e38, f32::MAX], "{gate:?}");
    }
}

/// Repeats the test for a gate fused with products.
fn fused_gates_far_below_zero_return_zero(device: &Device) {
    let x = [-1e3, -1e19, -1e30, -1e37];
    let bytes: Vec<u8> = [1.0f32, 3.0]
        .into_iter()
        .flat_map(|weight| {
            let mut row = [half::f16::ZERO; 32];
            row[0] = half::f16::from_f32(weight);
            row.into_iter().flat_map(half::f16::to_le_bytes)
        })
        .collect();
    let blocks = Blocks { format: WeightFormat::F16, shape: [2, 32], bytes };
    let packed = device_blocks(&blocks, device);
    for gate in [Gate::Silu, Gate::GeluTanh] {
        for n in [1, 4, 40] {
            let rows = (0..n).flat_map(|i| {
                let mut row = [0.0; 32];
                row[0] = x[i % x.len()];
                row
            });
            let rows: Vec<f32> = rows.collect();
            let fused = Fused::default().with_gate(gate);
            let y = matrix(&rows, 32, device);
            let y = host(project_fused(y, &[&packed], Activations::Exact, fused).unwrap());
            assert!(y.iter().all(|y| *y == 0.0), "{gate:?} by {n}: {y:?}");
        }
    }
}

fn gates_keep_nan_and_accept_views(device: &Device) {
    let x = matrix(&[f32::NAN, f32::INFINITY, 1.0, 1.0], 4, device);
    let y = host(gated(x.clone(), Gate::Silu).unwrap());
    assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{y:?}");
    // As in PyTorch, negative infinity times 0 is NaN, and so is 0 times infinity or NaN.
    let (infinite, none) = (f32::INFINITY, f32::NAN);
    for gate in [Gate::Silu, Gate::GeluTanh] {
        let x = [-infinite, -1e19, -1e19, infinite, 1.0, infinite, none, none];
        let y = host(gated(matrix(&x, 8, device), gate).unwrap());
        assert!(y.iter().all(|y| y.is_nan()), "{gate:?} {y:?}");
    }
    let all = matrix(&[9.0, 1.0, 2.0, 9.0, 9.0, 3.0, 4.0, 9.0], 4, device);
    let y = host(gated(all.narrow(2, 1, 2), Gate::Silu).unwrap());
    let expected = host(gated(matrix(&[1.0, 2.0, 3.0, 4.0], 2, device), Gate::Silu).unwrap());
    assert_eq!(y, expected);
    let nothing = gated(Tensor::zeros([2, 0, 4], device), Gate::GeluTanh).unwrap();
    assert_eq!(nothing.dims(), [2, 0, 2]);
    let error = gated(x.narrow(2, 0, 3), Gate::Silu).unwrap_err().to_string();
    assert_eq!(
        error,
        "gated: x has shape [1, 1, 3]: the last axis must be even, since half of it is gates"
    );
}

/// Covers parts of larger tensors, with strides and with offsets that are not whole vectors.
fn views_match_copies(device: &Device) {
    let mut rng = Rng::new(1150);
    let blocks = Blocks::random(&mut rng, WeightFormat::Q5_1, [9, 64]);
    let packed = device_blocks(&blocks, device);
    let wide = |rng: &mut Rng, rows: usize, columns: usize| {
        matrix(&rng.normals(rows * columns), columns, device)
    };
    let x = wide(&mut rng, 6, 99).narrow(2, 3, 64).narrow(1, 1, 4);
    let residual = wide(&mut rng, 9, 6).swap_dims(1, 2).narrow(1, 2, 4);
    let gains: Tensor<1> = wide(&mut rng, 1, 70).reshape([70]).narrow(0, 5, 64);
    let bias: Tensor<1> = wide(&mut rng, 9, 2).narrow(2, 1, 1).reshape([9]);
    let copy = |x: Tensor<3>| {
        let shape = x.dims();
        Tensor::<3>::from_data(TensorData::new(host(x), shape), device)
    };
    let product = |x, gains, bias, residual| {
        let fused = Fused::default().with_norm(Norm::new(gains, 1e-5)).with_bias(bias);
        let fused = fused.with_residual(residual);
        let y = project_fused(x, &[&packed], Activations::Exact, fused).unwrap();
        host(y)
    };
    let whole = |x: Tensor<1>| copy(x.clone().reshape([1, 1, x.dims()[0]])).flatten::<1>(0, 2);
    let expected =
        product(copy(x.clone()), whole(gains.clone()), whole(bias.clone()), copy(residual.clone()));
    assert_eq!(product(x, gains, bias, residual), expected);
}

fn mismatched_inputs_are_rejected(device: &Device) {
    let mut rng = Rng::new(1200);
    let format = WeightFormat::Q4_0;
    let [odd, wide] = [[3, 64], [4, 96]].map(|shape| Blocks::random(&mut rng, format, shape));
    let [odd, wide] = [odd, wide].map(|blocks| device_blocks(&blocks, device));
    let x = matrix(&rng.normals(64), 64, device);
    let says = |parts: &[&PackedMatrix], fused, expected: &str| {
        let error = project_fused(x.clone(), parts, Activations::Exact, fused).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    says(&[], Fused::default(), "parts 0: must be one matrix or more");
    says(
        &[&odd, &wide],
        Fused::default(),
        "project_fused: x has shape [1, 1, 64]: the last axis must be 96, the columns of the \
         matrix",
    );
    let gate = Fused::default().with_gate(Gate::Silu);
    says(&[&odd], gate, "rows 3: must be even, half of them for the gate");
    let bias = Fused::default().with_bias(vector(&[0.0; 4], device));
    says(&[&odd], bias, "project_fused: bias has shape [4]: must be [3]");
    let residual = Fused::default().with_residual(x.clone());
    says(&[&odd], residual, "project_fused: residual has shape [1, 1, 64]: must be [1, 1, 3]");
}
