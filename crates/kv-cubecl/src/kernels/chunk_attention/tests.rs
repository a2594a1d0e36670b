use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::{ChunkBlueprint, kernel::partial_attention::PartialAttention, plan};
use crate::{
    CacheFloat, CacheShape,
    kernels::{
        cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
        decode_attention::DecodeProblem,
        row_blocks::VECTOR,
    },
    layout::CacheLayout,
};

/// CUDA C++ of the first kernel, and the plan it was written for.
fn source(cache: &str, head_dim: usize) -> (String, ChunkBlueprint) {
    let shape = CacheShape { batch: 1, n_kv_heads: 8, head_dim };
    let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
    let float = ElemType::Float(match layout.config().float {
        CacheFloat::F32 => FloatKind::F32,
        CacheFloat::F16 => FloatKind::F16,
    });
    let problem = DecodeProblem { layout, len: 4096, tokens: 4096, rows: 256, float };
    let properties = h200();
    let blueprint = plan(&problem, &properties).unwrap().blueprint;
    let kernel = PartialAttention::new(
        settings(blueprint.blocks.units, ExecutionMode::Unchecked),
        properties,
        Default::default(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        // Scalars have no compilation arguments: the struct of them is of size zero.
        ().dynamic_cast(),
        ().dynamic_cast(),
        VECTOR,
        blueprint,
        float,
    );
    (cuda_source(&format!("chunk-{cache}-d{head_dim}"), &kernel), blueprint)
}

#[test]
fn keys_weights_and_queries_are_read_in_wide_vectors() {
    let (source, bp) = source("k4v2-f16", 128);
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

/// Every width of keys and values, and head_dims with short and long runs of channels.
#[test]
fn sums_can_live_in_registers() {
    for cache in ["float", "float-f16", "k8v8", "k4v4", "k4v2-f16", "k2v2"] {
        for head_dim in [64, 128, 256] {
            let (source, _) = source(cache, head_dim);
            let dynamic = dynamic_indices(&source);
            assert!(dynamic.is_empty(), "{cache} {head_dim}: {dynamic:#?}");
        }
    }
}
