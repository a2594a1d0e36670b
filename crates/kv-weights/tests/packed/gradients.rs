//! Gradients with respect to activations, compared with f64.

use burn::tensor::{Device, Tensor, TensorData, activation};
use kv_weights::{
    Activations, Fused, Gate, Norm, WeightFormat, back_project, project, project_fused,
};

use crate::common::{Blocks, Rng, device_blocks, host, matrix, stamp_autodiff};

stamp_autodiff!(gradients_match_restored_weights, gradients_pass_fused_operations);

fn gradients_match_restored_weights(device: &Device) {
    for (i, &format) in WeightFormat::ALL.iter().enumerate() {
        let mut rng = Rng::new(500 + i as u64);
        let ([rows, columns], n) = ([70, 512], 5);
        let blocks = Blocks::random(&mut rng, format, [rows, columns]);
        let (x, grad) = (rng.normals(n * columns), rng.normals(n * rows));
        let restored = blocks.restored();
        for activations in [Activations::Exact, Activations::Int16, Activations::Int8] {
            let packed = device_blocks(&blocks, device);
            let x = matrix(&x, columns, device).require_grad();
            let y = project(x.clone(), &packed, activations).unwrap();
            let loss = (y * matrix(&grad, rows, device)).sum();
            let found = x.grad(&loss.backward()).unwrap().into_data();
            let found = found.try_into_vec::<f32>().unwrap();
            let alone = back_project(matrix(&grad, rows, device), &packed).unwrap().into_data();
            assert_eq!(alone.try_into_vec::<f32>().unwrap(), found, "{format}");
            let error = back_project(x, &packed).unwrap_err().to_string();
            assert_eq!(
                error,
                "back_project: y has shape [1, 5, 512]: the last axis must be 70, the rows of the \
                 matrix"
            );
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

/// Compares gradients of fused operations with those of separate ones.
fn gradients_pass_fused_operations(device: &Device) {
    let mut rng = Rng::new(550);
    let ([rows, columns], n) = ([34, 64], 3);
    let blocks = Blocks::random(&mut rng, WeightFormat::Q4_0, [rows, columns]);
    let (x, gains) = (rng.normals(n * columns), rng.normals(columns));
    let packed = device_blocks(&blocks, device);
    let gains = Tensor::<1>::from_data(TensorData::new(gains, [columns]), device);
    let grads = |f: &dyn Fn(Tensor<3>, Tensor<1>) -> Tensor<3>| {
        let (x, gains) = (matrix(&x, columns, device).require_grad(), gains.clone().require_grad());
        let grads = f(x.clone(), gains.clone()).powf_scalar(2.0).sum().backward();
        let [x, gains] = [x.grad(&grads).unwrap().flatten::<1>(0, 2), gains.grad(&grads).unwrap()];
        [x, gains].map(host)
    };
    let fused = grads(&|x, gains| {
        let fused = Fused::default().with_norm(Norm::new(gains, 1e-5)).with_gate(Gate::Silu);
        let fused = fused.with_residual(x.clone().narrow(2, 0, rows / 2));
        project_fused(x, &[&packed], Activations::Exact, fused).unwrap()
    });
    let plain = grads(&|x, gains| {
        let root = (x.clone().square().mean_dim(2) + 1e-5).sqrt();
        let normed = x.clone() / root * gains.unsqueeze();
        let y = project(normed, &packed, Activations::Exact).unwrap();
        let up = y.clone().narrow(2, rows / 2, rows / 2);
        activation::silu(y.narrow(2, 0, rows / 2)) * up + x.narrow(2, 0, rows / 2)
    });
    for (fused, plain) in fused.iter().flatten().zip(plain.iter().flatten()) {
        assert!((fused - plain).abs() <= 1e-4 * (1.0 + plain.abs()), "{fused}, not {plain}");
    }
}
