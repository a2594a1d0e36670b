use cubecl::prelude::*;

use super::kernel::{UNITS, tiled::Tiled};
use crate::{
    GroupSize, WeightFormat,
    formats::{cube::BlocksInKernels, with_kernels},
    kernels::cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
};

fn kernel<F: BlocksInKernels>(x_rows: usize) -> impl CubeKernel {
    Tiled::<F>::new(
        settings(UNITS, ExecutionMode::Unchecked),
        h200(),
        Default::default(),
        buffer(),
        buffer(),
        buffer(),
        // Scalars have no compilation arguments: their struct has size zero.
        ().dynamic_cast(),
        x_rows,
    )
}

/// Arrays can stay in registers only if every index is a constant.
#[test]
fn codes_and_sums_of_tiles_can_live_in_registers() {
    let groups = |format| match format {
        WeightFormat::Int4(group) | WeightFormat::Int8(group) => group == GroupSize::G64,
        _ => true,
    };
    for &format in WeightFormat::ALL.iter().filter(|format| groups(**format)) {
        for x_rows in [4, 8] {
            let name = format!("project-tiled{}-{format}", 8 * x_rows);
            let source = with_kernels!(format, F => cuda_source(&name, &kernel::<F>(x_rows)));
            let dynamic = dynamic_indices(&source);
            assert!(dynamic.is_empty(), "{name}: {dynamic:#?}");
        }
    }
}
