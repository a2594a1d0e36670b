#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

use std::sync::Arc;

use cubecl::prelude::*;

use super::{base::ChunkBlueprint, kernel::partial_attention::PartialAttention, plan};
use crate::{
    CacheShape,
    kernels::{
        cuda_source::{buffer, settings},
        decode_attention::{CacheBuffersCompilationArg, DecodeProblem, compilation_args},
        row_blocks::VECTOR,
    },
    layout::CacheLayout,
    scores::Scores,
};

/// Every number of bits, both float types, and every kind of token that is packed by itself.
const CACHES: [&str; 10] = [
    "float",
    "float-f16",
    "k8v8",
    "k4v4",
    "k4v2-f16",
    "k3v3",
    "k2v2",
    "kint8vint8",
    "ke4m3ve5m2",
    "kmxfp4ve4m3b",
];
/// Short and long runs of channels.
const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// The first of the two kernels for a card, its plan, and a name.
fn kernel(
    properties: Arc<DeviceProperties>,
    cache: &str,
    head_dim: usize,
) -> (impl CubeKernel, ChunkBlueprint, String) {
    let shape = CacheShape::new(1, 8, head_dim);
    let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
    let float = layout.config().float.elem();
    let problem = DecodeProblem {
        layout,
        len: 4096,
        tokens: 4096,
        rows: 256,
        float,
        query: float,
        scores: Scores::PLAIN,
    };
    let blueprint = plan(&problem, &properties).unwrap().blueprint;
    let kernel = PartialAttention::new(
        settings(blueprint.blocks.units, ExecutionMode::Unchecked),
        properties,
        Default::default(),
        buffer(),
        CacheBuffersCompilationArg { keys: buffer(), values: buffer(), floats: buffer() },
        buffer(),
        compilation_args(false),
        // Scalars have no compilation arguments: the struct of them is of size zero.
        ().dynamic_cast(),
        VECTOR,
        blueprint,
        float,
    );
    (kernel, blueprint, format!("chunk-{cache}-d{head_dim}"))
}

#[cfg(feature = "cuda-source")]
mod cpp {
    use super::*;
    use crate::kernels::cuda_source::{cuda_source, dynamic_indices, h200};

    #[test]
    fn keys_weights_and_queries_are_read_in_wide_vectors() {
        let (kernel, bp, name) = kernel(h200(), "k4v2-f16", 128);
        let source = cuda_source(&name, &kernel);
        let contains = |part: &str| assert!(source.contains(part), "no {part:?} in\n{source}");
        contains("struct alignas(16) uint32_t_4 ");
        contains("struct alignas(16) float_4 ");
        contains("struct alignas(8) __half_4 ");
        contains(&format!("__launch_bounds__({})", bp.blocks.units));
        for vector in ["uint32_t_4 const ", "float_4 const "] {
            let wide = |line: &str| line.contains(vector) && line.contains(" = *");
            assert!(source.lines().any(wide), "no load of {vector} in\n{source}");
        }
    }

    #[test]
    fn sums_can_live_in_registers() {
        for cache in CACHES {
            for head_dim in HEAD_DIMS {
                let (kernel, _, name) = kernel(h200(), cache, head_dim);
                let source = cuda_source(&name, &kernel);
                let dynamic = dynamic_indices(&source);
                assert!(dynamic.is_empty(), "{name}: {dynamic:#?}");
            }
        }
    }
}

#[cfg(feature = "cuda-ptx")]
mod ptx {
    use super::*;
    use crate::kernels::cuda_source::{cuda_ptx, each_ptx, named, properties};

    #[test]
    fn keys_weights_and_queries_are_read_in_wide_vectors() {
        let (kernel, bp, name) = kernel(properties(90), "k4v2-f16", 128);
        let ptx = cuda_ptx(&name, &kernel, 90);
        let contains = |part: &str| assert!(ptx.contains(part), "no {part:?} in\n{ptx}");
        contains(&format!(".reqntid {}", bp.blocks.units));
        contains("ld.global.nc.v4.b32");
        contains("ld.shared.v4.b32");
    }

    #[test]
    fn no_array_is_in_local_memory() {
        each_ptx(|card| {
            let mut kernels = Vec::new();
            for cache in CACHES {
                for head_dim in HEAD_DIMS {
                    let (kernel, _, name) = kernel(card.clone(), cache, head_dim);
                    kernels.push(named(name, kernel));
                }
            }
            kernels
        });
    }
}
