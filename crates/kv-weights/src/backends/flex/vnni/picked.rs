//! Byte products with the experts that a router selected.

use std::borrow::Cow;

use kv_device::threads::in_parts;

use super::{MANY, Multiplied, activations::groups, available, exact, some_rows};
use crate::{
    Activations, PackedLayout,
    backends::flex::{
        picked::Expert,
        stacked::transposed,
        tuning::{PARALLEL, PART},
    },
    formats::{
        vnni::{GROUP, Groups},
        with_blocks,
    },
};

/// Returns the products of each expert, `[picks of the expert, rows]`, or `None` if this module has
/// nothing better than one product after the other: without the instructions, for formats without
/// codes, and for many picks of one expert.
pub(in crate::backends::flex) fn project_picked(
    x: &[f32],
    experts: &[Expert<'_>],
    layout: &PackedLayout,
    activations: Activations,
) -> Option<Vec<Vec<f32>>> {
    if !available() || experts.iter().any(|expert| expert.inputs.len() >= MANY) {
        return None;
    }
    with_blocks!(layout.format(), F => {
        let columns = layout.columns();
        Some(match activations {
            Activations::Exact => few_picked::<F, _>(&exact::groups(x, columns), experts, layout),
            Activations::Int16 => {
                // SAFETY: the processor has the instructions.
                let x = unsafe { groups::<F, 2>(x, columns) };
                few_picked::<F, _>(&x, experts, layout)
            }
            Activations::Int8 => {
                // SAFETY: the processor has the instructions.
                let x = unsafe { groups::<F, 1>(x, columns) };
                few_picked::<F, _>(&x, experts, layout)
            }
        })
    }, wide W => None)
}

/// Multiplies each expert with the rows of `x` of its picks. Threads do not wait between experts.
fn few_picked<F: Groups, X: Multiplied>(
    x: &[X],
    experts: &[Expert<'_>],
    layout: &PackedLayout,
) -> Vec<Vec<f32>> {
    assert!(available());
    let (rows, row, groups) = (layout.rows(), layout.row_bytes(), layout.columns().div_ceil(GROUP));
    let inputs = |expert: &Expert<'_>| {
        let mut inputs = expert.inputs.iter().map(|i| &x[i * groups..][..groups]);
        match expert.inputs.len() {
            1 => Cow::Borrowed(inputs.next().expect("there is one")),
            _ => Cow::Owned(inputs.collect::<Vec<_>>().concat()),
        }
    };
    let inputs: Vec<Cow<'_, [X]>> = experts.iter().map(inputs).collect();
    let zeros = |expert: &Expert<'_>| vec![0.0; expert.inputs.len() * rows];
    let mut products: Vec<Vec<f32>> = experts.iter().map(zeros).collect();
    let threads = rayon::current_num_threads();
    let rounds = (experts.len() * layout.bytes()).div_ceil(PART * threads).max(1);
    let at_a_time = (experts.len() * rows).div_ceil(rounds * threads).max(1);
    let picks: usize = experts.iter().map(|expert| expert.inputs.len()).sum();
    let of_experts = experts.iter().zip(&inputs).zip(&mut products);
    let pieces = of_experts.flat_map(|((expert, x), out)| {
        let blocks = expert.blocks.chunks(at_a_time * row);
        blocks.zip(out.chunks_mut(at_a_time * expert.inputs.len())).map(move |piece| (x, piece))
    });
    let parallel = picks * rows * layout.columns() * X::WORK >= PARALLEL;
    in_parts(pieces, parallel, |(x, (blocks, out))| {
        // SAFETY: the processor has the instructions, as asserted.
        unsafe { some_rows::<F, X>(blocks, layout, x, out) };
    });
    let by_row = products.into_iter().zip(experts);
    by_row.map(|(products, expert)| transposed(products, expert.inputs.len())).collect()
}
