//! The kernel as CUDA C++, for the shape of DeepSeek-V3.

use cubecl::prelude::*;

use super::{
    UNITS,
    kernel::{SharedBlueprint, partial_attention::PartialAttention},
};
use crate::{
    CacheShape, KvCacheConfig,
    kernels::{
        cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
        decode_attention::compilation_args,
    },
    layout::{CacheLayout, Sides},
};

#[test]
fn sums_can_live_in_registers() {
    for name in ["float-f16", "k4v4-g64", "k3v3-w512", "k2v2", "kint8vint8", "kmxfp4vmxfp4"] {
        for at in [false, true] {
            let config: KvCacheConfig = name.parse().unwrap();
            let shape = CacheShape::new(1, 1, Sides { keys: 576, values: 512 });
            let layout = CacheLayout::new(&config, shape.with_shared_values()).unwrap();
            let float = config.float.elem();
            let kernel = PartialAttention::new(
                settings(UNITS, ExecutionMode::Checked),
                h200(),
                Default::default(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                compilation_args(at),
                SharedBlueprint {
                    head_dim: shape.head_dim,
                    spec: layout.specs().keys,
                    window: config.sliding_window.is_some(),
                    softcap: at,
                    flat: false,
                },
                float,
                float,
            );
            let name = format!("shared-{name}{}", if at { "-at" } else { "" });
            let source = cuda_source(&name, &kernel);
            let dynamic = dynamic_indices(&source);
            assert!(dynamic.is_empty(), "{name}: {dynamic:#?}");
        }
    }
}
