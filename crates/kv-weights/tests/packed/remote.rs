//! Operations on a remote device, whose server runs them on the CPU: bit for bit what the CPU
//! computes itself.

use burn::tensor::{Device, Int, Tensor, TensorData};
use kv_weights::{
    Activations, Fused, Gate, Norm, PackedExperts, PackedMatrix, Quantize, WeightFormat,
    back_project, gated, lookup, project, project_fused, project_picked, quantize,
};

use crate::common::{Rng, devices};

const COLUMNS: usize = 64;

fn matrix(rng: &mut Rng, rows: usize, device: &Device) -> PackedMatrix {
    let shape = [rows, COLUMNS];
    let blocks = blocks(rng, shape);
    PackedMatrix::from_bytes(burn::tensor::Bytes::from_bytes_vec(blocks), FORMAT, shape, device)
        .unwrap()
}

const FORMAT: WeightFormat = WeightFormat::Int8(kv_weights::GroupSize::G32);

fn blocks(rng: &mut Rng, shape: [usize; 2]) -> Vec<u8> {
    let weights: Vec<f32> = (0..shape[0] * shape[1]).map(|_| rng.normal()).collect();
    quantize(&weights, shape, FORMAT, Quantize::default()).unwrap()
}

fn floats<const D: usize>(rng: &mut Rng, shape: [usize; D], device: &Device) -> Tensor<D> {
    let n = shape.iter().product::<usize>();
    let numbers: Vec<f32> = (0..n).map(|_| rng.normal()).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

fn operations(device: &Device) -> Vec<(&'static str, TensorData)> {
    let rng = &mut Rng::new(7);
    let parts = [matrix(rng, 48, device), matrix(rng, 48, device), matrix(rng, 16, device)];
    let x = floats(rng, [1, 5, COLUMNS], device);
    let mut outputs = Vec::new();
    for activations in [Activations::Exact, Activations::Int16, Activations::Int8] {
        let y = project(x.clone(), &parts[0], activations).unwrap();
        outputs.push(("packed_project", y.into_data()));
    }
    let grad = floats(rng, [1, 5, 48], device);
    outputs.push(("packed_project_backward", back_project(grad, &parts[0]).unwrap().into_data()));
    let norm = Norm::new(floats(rng, [COLUMNS], device), 1e-5);
    let residual = floats(rng, [1, 5, 48], device);
    let fused = Fused::default().with_norm(norm).with_gate(Gate::Silu).with_residual(residual);
    let two = [&parts[0], &parts[1]];
    let y = project_fused(x.clone(), &two, Activations::Exact, fused).unwrap();
    outputs.push(("packed_fused", y.into_data()));
    let biased = Fused::default().with_bias(floats(rng, [112], device));
    let three = [&parts[0], &parts[1], &parts[2]];
    let y = project_fused(x.clone(), &three, Activations::Exact, biased).unwrap();
    outputs.push(("packed_fused", y.into_data()));
    outputs.push(("packed_gate", gated(x.clone(), Gate::GeluTanh).unwrap().into_data()));
    let ids = Tensor::<2, Int>::from_data(TensorData::new(vec![3i32, 0, 47], [1, 3]), device);
    outputs.push(("packed_rows", lookup(ids, &parts[0]).unwrap().into_data()));
    outputs.push(("packed_restore", parts[0].restore().unwrap().into_data()));
    let experts: Vec<_> = (0..3).map(|_| blocks(rng, [16, COLUMNS])).collect();
    let experts = PackedExperts::from_bytes(&experts, FORMAT, [16, COLUMNS], device).unwrap();
    let picked = TensorData::new(vec![2i32, 0, 1, 1, 0, 2, 2, 2, 0, 1], [5, 2]);
    let picked = Tensor::<2, Int>::from_data(picked, device);
    let y = project_picked(x.reshape([5, 1, COLUMNS]), &experts, picked, Activations::Exact);
    outputs.push(("packed_picked", y.unwrap().into_data()));
    outputs
}

#[test]
fn operations_are_the_same() {
    let here = operations(&Device::flex());
    let there = operations(&devices::remote().unwrap());
    assert_eq!(here.len(), there.len());
    for ((name, here), (_, there)) in here.into_iter().zip(there) {
        assert_eq!((here.shape(), here.dtype()), (there.shape(), there.dtype()), "{name}");
        assert!(here.as_bytes() == there.as_bytes(), "{name}: other bits");
    }
}
