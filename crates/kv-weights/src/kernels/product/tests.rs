use cubecl::prelude::*;

use super::{
    base::{Hardware, ProductBlueprint, ProductProblem, prepare},
    kernel::product::Product,
};
use crate::{
    Gate, GroupSize, PackedLayout, WeightFormat,
    formats::{cube::BlocksInKernels, with_kernels},
    kernels::cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
};

/// What a launch has beside activations, one matrix and an output.
#[derive(Clone, Copy, Debug, Default)]
struct Extras {
    parts: usize,
    norm: bool,
    gate: Option<Gate>,
    residual: bool,
}

/// A buffer, if it is there.
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
        optional(extras.parts > 1),
        optional(extras.parts > 2),
        optional(extras.norm),
        optional(false),
        optional(extras.residual),
        buffer(),
        // Scalars have no compilation arguments: the struct of them is of size zero.
        ().dynamic_cast(),
        bp,
    )
}

/// The launches of a decode step, of a few sequences and of one: what a compiler keeps in registers only if every array
/// is indexed by constants.
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
    let groups = |format| !matches!(format, WeightFormat::Int4(g) | WeightFormat::Int8(g) if g != GroupSize::G64);
    for &format in WeightFormat::ALL.iter().filter(|format| groups(**format)) {
        for (name, n, extras) in launches {
            let part = PackedLayout::new(format, [1536, 2048]).unwrap();
            let problem = ProductProblem {
                n,
                parts: vec![part; extras.parts],
                gate: extras.gate,
                norm: extras.norm,
                epsilon: 1e-5,
                plus_one: false,
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
