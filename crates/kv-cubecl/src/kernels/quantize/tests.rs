use cubecl::prelude::*;

use super::kernel::{
    dequantize_keys::DequantizeKeys, dequantize_values::DequantizeValues,
    fake_quantize_keys::FakeQuantizeKeys, fake_quantize_values::FakeQuantizeValues,
    scale_gradient_keys::ScaleGradientKeys, scale_gradient_values::ScaleGradientValues,
};
use crate::kernels::{
    ELEMENTWISE_UNITS,
    cuda_source::{buffer, each_ptx, named, settings},
};

/// Two bits in groups of 32: the narrowest codes, the most of them per word.
#[test]
fn no_array_is_in_local_memory() {
    let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    each_ptx(|card| {
        let d = || card.clone();
        let dequantize_keys = DequantizeKeys::new(s(), d(), t(), b(), b(), (), (), (), 32, 2);
        let dequantize_values = DequantizeValues::new(s(), d(), t(), b(), b(), (), (), 32, 2);
        let fake_quantize_keys =
            FakeQuantizeKeys::new(s(), d(), t(), b(), (), (), (), (), (), 32, 2);
        let fake_quantize_values =
            FakeQuantizeValues::new(s(), d(), t(), b(), (), (), (), (), 32, 2);
        let scale_gradient_keys =
            ScaleGradientKeys::new(s(), d(), t(), b(), b(), (), (), (), (), (), 32, 2);
        let scale_gradient_values =
            ScaleGradientValues::new(s(), d(), t(), b(), b(), (), (), (), (), 32, 2);
        vec![
            named("dequantize-keys-k2", dequantize_keys),
            named("dequantize-values-v2", dequantize_values),
            named("fake-quantize-keys-k2", fake_quantize_keys),
            named("fake-quantize-values-v2", fake_quantize_values),
            named("scale-gradient-keys-k2", scale_gradient_keys),
            named("scale-gradient-values-v2", scale_gradient_values),
        ]
    });
}
