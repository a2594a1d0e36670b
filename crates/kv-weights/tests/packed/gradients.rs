//! Gradients with respect to activations, against f64.

use burn::tensor::Device;
use kv_weights::{Activations, WeightFormat, project};

use crate::common::{Blocks, Rng, device_blocks, matrix, stamp_autodiff};

stamp_autodiff!(gradients_are_those_of_restored_weights);

fn gradients_are_those_of_restored_weights(device: &Device) {
    for (i, &format) in WeightFormat::ALL.iter().enumerate() {
        let mut rng = Rng::new(500 + i as u64);
        let ([rows, columns], n) = ([70, 512], 5);
        let blocks = Blocks::random(&mut rng, format, [rows, columns]);
        let (x, grad) = (rng.normals(n * columns), rng.normals(n * rows));
        let restored = blocks.restored();
        for activations in [Activations::Exact, Activations::Int16, Activations::Bytes] {
            let packed = device_blocks(&blocks, device);
            let x = matrix(&x, columns, device).require_grad();
            let y = project(x.clone(), &packed, activations).unwrap();
            let loss = (y * matrix(&grad, rows, device)).sum();
            let found = x.grad(&loss.backward()).unwrap().into_data();
            let found = found.try_into_vec::<f32>().unwrap();
            for (at, found) in found.into_iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                let terms = (0..rows).map(|r| {
                    f64::from(grad[row * rows + r]) * f64::from(restored[r * columns + column])
                });
                let sum: f64 = terms.clone().map(f64::abs).sum();
                let expected: f64 = terms.sum();
                let error = (f64::from(found) - expected).abs();
                assert!(error <= 1e-6 * sum, "{format}: {at}: {found}, not {expected}");
            }
        }
    }
}
