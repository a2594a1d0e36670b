use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::{
    DecodeBlueprint, DecodeProblem,
    base::{Hardware, prepare},
    kernel::partial_attention::PartialAttention,
};
use crate::{
    CacheFloat, CacheShape,
    kernels::cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
    layout::CacheLayout,
};

/// CUDA C++ of the first kernel, with the length on the device or not, and the plan it was written for.
fn source(cache: &str, head_dim: usize, rows: usize, at: bool) -> (String, DecodeBlueprint) {
    let shape = CacheShape { batch: 1, n_kv_heads: 8, head_dim };
    let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
    let float = ElemType::Float(match layout.config().float {
        CacheFloat::F32 => FloatKind::F32,
        CacheFloat::F16 => FloatKind::F16,
    });
    let problem = DecodeProblem { layout, len: 4096, tokens: 4096, rows, float };
    let properties = h200();
    let (blueprint, _) = prepare(&problem, Hardware::of(&properties)).unwrap();
    let kernel = PartialAttention::new(
        settings(blueprint.units, ExecutionMode::Unchecked),
        properties,
        Default::default(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        match at {
            true => ComptimeOptionCompilationArg::Some(buffer()),
            false => ComptimeOptionCompilationArg::None,
        },
        // Scalars have no compilation arguments: the struct of them is of size zero.
        ().dynamic_cast(),
        blueprint.vector,
        blueprint,
        float,
    );
    let at = if at { "-at" } else { "" };
    let name = format!("decode{at}-{cache}-d{head_dim}-rows{rows}");
    (cuda_source(&name, &kernel), blueprint)
}

#[test]
fn packed_keys_are_read_in_wide_vectors() {
    let (source, bp) = source("k4v2-f16", 128, 4, false);
    let contains = |part: &str| assert!(source.contains(part), "no {part:?} in\n{source}");
    contains("struct alignas(16) uint32_t_4 ");
    contains("struct alignas(8) __half_4 ");
    contains("uint32_t_4 const* const __restrict__ ");
    contains(&format!("__launch_bounds__({})", bp.units));
    let wide = |line: &str| line.contains("uint32_t_4 const ") && line.contains(" = *");
    assert!(source.lines().any(wide), "no load of four words in\n{source}");
    contains("__shfl_xor_sync(__activemask(), ");
}

/// Every width of keys and values, and what `kv-eval bench` measures on CUDA.
#[test]
fn sums_can_live_in_registers() {
    for cache in ["float", "float-f16", "k8v8", "k4v4", "k4v2-f16", "k2v2"] {
        for head_dim in [64, 128] {
            for (rows, at) in [(1, false), (3, false), (4, false), (4, true)] {
                let (source, _) = source(cache, head_dim, rows, at);
                let dynamic = dynamic_indices(&source);
                assert!(dynamic.is_empty(), "{cache} {head_dim} {rows} {at}: {dynamic:#?}");
            }
        }
    }
}
