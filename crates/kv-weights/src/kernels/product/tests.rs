use cubecl::prelude::*;

use super::{
    base::{Hardware, ProductBlueprint, ProductProblem, prepare},
    kernel::{ExtrasCompilationArg, OtherPartsCompilationArg, product::Product},
};
use crate::{
    Gate, GroupSize, PackedLayout, WeightFormat,
    formats::{cube::BlocksInKernels, with_kernels},
    kernels::cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
};

/// Optional parts of a launch.
#[derive(Clone, Copy, Debug, Default)]
struct Extras {
    parts: usize,
    norm: bool,
    gate: Option<Gate>,
    residual: bool,
}

fn optional<T: LaunchArg<CompilationArg = BufferCompilationArg>>(
    there: bool,
) -> ComptimeOptionCompilationArg<T> {
    match there {
        true => ComptimeOptionCompilationArg::Some(buffer()),
        false => ComptimeOptionCompilationArg::None,
    }
}

fn kernel<F: BlocksInKernels>(bp: ProductBlueprint, extras: Extras) -> impl CubeKernel {
    Product::<F>::new(
        settings(bp.units, ExecutionMode::Unchecked),
        h200(),
        Default::default(),
        buffer(),
        buffer(),
        OtherPartsCompilationArg {
            second: optional(extras.parts > 1),
            third: optional(extras.parts > 2),
        },
        ExtrasCompilationArg {
            norm: optional(extras.norm),
            bias: optional(false),
            residual: optional(extras.residual),
        },
        buffer(),
        // Scalars have no compilation arguments: their struct has size zero.
        ().dynamic_cast(),
        bp,
    )
}

/// Checks the launches of a decode step, for one sequence and several. Arrays can stay in registers
/// only if every index is a constant.
#[test]
fn codes_and_sums_can_live_in_registers() {
    let one = Extras { parts: 1, ..Extras::default() };
    let launches = [
        ("head", 1, one),
        ("batch", 8, one),
        ("qkv", 1, Extras { parts: 3, norm: true, ..one }),
        ("gate-up", 1, Extras { parts: 2, norm: true, gate: Some(Gate::Silu), ..one }),
        ("down", 1, Extras { residual: true, ..one }),
    ];
    let groups = |format| match format {
        WeightFormat::Int4(group) | WeightFormat::Int8(group) => group == GroupSize::G64,
        _ => true,
    };
    for &format in WeightFormat::ALL.iter().filter(|format| groups(**format)) {
        for (name, n, extras) in launches {
            let part = PackedLayout::new(format, [1536, 2048]).unwrap();
            let problem = ProductProblem {
                parts: vec![part; extras.parts],
                gate: extras.gate,
                norm: extras.norm,
                ..ProductProblem::plain(n, part)
            };
            let bp = prepare(&problem, Hardware::of(&h200()));
            let name = format!("project-{name}-{format}");
            let source = with_kernels!(format, F => cuda_source(&name, &kernel::<F>(bp, extras)));
            let dynamic = dynamic_indices(&source);
            assert!(dynamic.is_empty(), "{name}: {dynamic:#?}");
            assert!(source.contains("__shfl_xor_sync"), "{name} adds up without planes");
        }
    }
}
