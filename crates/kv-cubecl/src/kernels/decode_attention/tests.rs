#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

use std::sync::Arc;

use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::{
    DecodeProblem,
    args::{CacheBuffersCompilationArg, compilation_args},
    base::{DecodeBlueprint, Hardware, prepare},
    kernel::partial_attention::PartialAttention,
};
use crate::{
    CacheShape,
    kernels::cuda_source::{buffer, settings},
    layout::CacheLayout,
    scores::Scores,
};

/// Every number of bits, both float types, and scales per token and per block.
const CACHES: [&str; 11] = [
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
    "kint8vint8-hadk-hadv",
];
/// Query rows per kv head, and whether the kernel reads the length from the device: what
/// `kv-eval bench` measures on CUDA.
const ROWS: [(usize, bool); 4] = [(1, false), (3, false), (4, false), (4, true)];

/// The first of the two kernels, its plan, and a name; for a card, with the length on the device
/// and rotary positions or neither.
fn kernel(
    properties: Arc<DeviceProperties>,
    cache: &str,
    head_dim: usize,
    (rows, at): (usize, bool),
) -> (impl CubeKernel, DecodeBlueprint, String) {
    let shape = CacheShape::new(1, 8, head_dim);
    let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
    let float = layout.config().float.elem();
    let problem = DecodeProblem {
        layout,
        len: 4096,
        tokens: 4096,
        rows,
        float,
        query: float,
        scores: Scores::PLAIN,
    };
    let (blueprint, _) = prepare(&problem, Hardware::of(&properties)).unwrap();
    let kernel = PartialAttention::new(
        settings(blueprint.units, ExecutionMode::Unchecked),
        properties,
        Default::default(),
        buffer(),
        CacheBuffersCompilationArg { keys: buffer(), values: buffer(), floats: buffer() },
        buffer(),
        buffer(),
        compilation_args(at),
        blueprint.vector,
        blueprint,
        float,
        ElemType::Float(FloatKind::F32),
    );
    let at = if at { "-at" } else { "" };
    (kernel, blueprint, format!("decode{at}-{cache}-d{head_dim}-rows{rows}"))
}

#[cfg(feature = "cuda-source")]
mod cpp {
    use super::*;
    use crate::kernels::cuda_source::{cuda_source, dynamic_indices, h200};

    #[test]
    fn packed_keys_are_read_in_wide_vectors() {
        let (kernel, bp, name) = kernel(h200(), "k4v2-f16", 128, (4, false));
        let source = cuda_source(&name, &kernel);
        let contains = |part: &str| assert!(source.contains(part), "no {part:?} in\n{source}");
        contains("struct alignas(16) uint32_t_4 ");
        contains("struct alignas(8) __half_4 ");
        contains("uint32_t_4 const* const __restrict__ ");
        contains(&format!("__launch_bounds__({})", bp.units));
        let wide = |line: &str| line.contains("uint32_t_4 const ") && line.contains(" = *");
        assert!(source.lines().any(wide), "no load of four words in\n{source}");
        contains("__shfl_xor_sync(__activemask(), ");
    }

    #[test]
    fn sums_can_live_in_registers() {
        for cache in CACHES {
            for head_dim in [64, 128] {
                for rows in ROWS {
                    let (kernel, _, name) = kernel(h200(), cache, head_dim, rows);
                    let source = cuda_source(&name, &kernel);
                    let dynamic = dynamic_indices(&source);
                    assert!(dynamic.is_empty(), "{name}: {dynamic:#?}");
                }
            }
        }
    }
}

#[cfg(feature = "cuda-ptx")]
mod ptx {
    use super::*;
    use crate::kernels::{
        cuda_source::{cuda_ptx, each_ptx, named, properties},
        decode_attention::{kernel::merge_partials::MergePartials, launch::merge_units},
    };

    #[test]
    fn packed_keys_are_read_in_wide_vectors() {
        let (kernel, bp, name) = kernel(properties(90), "k4v2-f16", 128, (4, false));
        let ptx = cuda_ptx(&name, &kernel, 90);
        let contains = |part: &str| assert!(ptx.contains(part), "no {part:?} in\n{ptx}");
        contains(".target sm_90a");
        contains(&format!(".reqntid {}", bp.units));
        contains("ld.global.nc.v4.b32");
        contains("shfl.sync.bfly.b32");
    }

    #[test]
    fn no_array_is_in_local_memory() {
        each_ptx(|card| {
            let merge = |head_dim: usize, hadamard: bool| {
                let units = merge_units(head_dim);
                let [partials, output, lse] = [(); 3].map(|()| buffer());
                MergePartials::new(
                    settings(units, ExecutionMode::Checked),
                    card.clone(),
                    Default::default(),
                    partials,
                    output,
                    lse,
                    (),
                    (),
                    head_dim,
                    units,
                    hadamard,
                    ElemType::Float(FloatKind::F32),
                )
            };
            let mut kernels =
                vec![named("merge", merge(96, false)), named("merge-hadamard", merge(128, true))];
            for cache in CACHES {
                for (head_dim, rows) in
                    [64, 128].into_iter().flat_map(|d| ROWS.map(|rows| (d, rows)))
                {
                    let (kernel, _, name) = kernel(card.clone(), cache, head_dim, rows);
                    kernels.push(named(name, kernel));
                }
            }
            kernels
        });
    }
}
