//! Clipping of gradients.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use burn::{nn::LinearConfig, tensor::TensorData};
use kv_models::kv_cubecl::{Autodiff, Flex, On};

use super::*;

#[test]
fn clips_to_the_global_norm() {
    let device: Device = (*On::<Autodiff<Flex>>::open().unwrap()).clone();
    let linear = LinearConfig::new(2, 2).init(&device);
    let input = Tensor::<2>::from_data(TensorData::new(vec![3f32, 4.0], [1, 2]), &device);
    let grads = || {
        let mut grads = linear.forward(input.clone()).sum().backward();
        GradientsParams::from_module(&mut grads, &linear)
    };
    let all = |mut grads: GradientsParams| -> Vec<f32> {
        let weight = grads.remove::<2>(linear.weight.id).unwrap().into_data();
        let bias = grads.remove::<1>(linear.bias.as_ref().unwrap().id).unwrap().into_data();
        weight.iter::<f32>().chain(bias.iter::<f32>()).collect()
    };
    // The gradients are the inputs twice and two ones, so the norm is sqrt(52).
    let before = all(grads());
    let norm = |grads: &[f32]| grads.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    assert!((norm(&before) - 52f64.sqrt()).abs() < 1e-6, "{before:?}");
    assert_eq!(all(clip(&linear, grads(), Some(8.0)).unwrap()), before);
    assert_eq!(all(clip(&linear, grads(), None).unwrap()), before);
    let after = all(clip(&linear, grads(), Some(0.5)).unwrap());
    // The tolerance covers the rounding of one f32 factor.
    assert!((norm(&after) - 0.5).abs() < 1e-6, "{after:?}");
    let ratios = after.iter().zip(&before).map(|(after, before)| after / before);
    assert!(ratios.clone().all(|ratio| (ratio - after[0] / before[0]).abs() < 1e-6));
}

/// The squares of 1e20 exceed f32, though the gradients themselves do not.
#[test]
fn a_norm_that_is_not_finite_is_an_error() {
    let device: Device = (*On::<Autodiff<Flex>>::open().unwrap()).clone();
    let linear = LinearConfig::new(2, 2).init(&device);
    for input in [1e20f32, f32::INFINITY, f32::NAN] {
        for limit in [Some(1.0), None] {
            let input = Tensor::<2>::from_data(TensorData::new(vec![1.0, input], [1, 2]), &device);
            let mut grads = linear.forward(input).sum().backward();
            let grads = GradientsParams::from_module(&mut grads, &linear);
            let error = clip(&linear, grads, limit).err().unwrap();
            assert!(error.contains("weight"), "{error}");
        }
    }
}
