use cubecl::prelude::*;

use super::kernel::{
    dequantize::Dequantize, fake_quantize::FakeQuantize, scale_gradient::ScaleGradient,
};
use crate::{
    Granularity, KvFormat,
    kernels::{
        ELEMENTWISE_UNITS,
        cuda_source::{buffer, each_ptx, named, settings},
    },
    layout::QuantSpec,
};

/// Two bits in groups of 32: the narrowest codes, the most of them per word.
#[test]
fn no_array_is_in_local_memory() {
    let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    for (side, granularity) in [("k2", Granularity::PerChannel), ("v2", Granularity::PerToken)] {
        let spec = QuantSpec::new(granularity, KvFormat::Affine2, 32).unwrap();
        each_ptx(|card| {
            let d = || card.clone();
            let r = || ().dynamic_cast();
            let dequantize = Dequantize::new(s(), d(), t(), b(), b(), (), (), (), (), spec);
            let fake_quantize = FakeQuantize::new(s(), d(), t(), b(), (), r(), spec);
            let scale_gradient = ScaleGradient::new(s(), d(), t(), b(), b(), (), r(), spec);
            vec![
                named(format!("dequantize-{side}"), dequantize),
                named(format!("fake-quantize-{side}"), fake_quantize),
                named(format!("scale-gradient-{side}"), scale_gradient),
            ]
        });
    }
}
