//! The CPU: kernels on slices, which read blocks in place.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dense;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod few;
mod gate;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod instructions;
mod integers;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod native;
#[cfg(target_arch = "aarch64")]
mod neon;
mod picked;
mod portable;
mod stacked;
mod tuning;
#[cfg(target_arch = "x86_64")]
mod vnni;
mod wide;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod wide_row;

use burn::{
    backend::{
        Flex,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, TensorData},
};
use burn_flex::FlexTensor;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use instructions::Instructions;
use integers::Integers;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use native::Native;
use stacked::Stacked;

use super::composed;
use crate::{
    Activations, ExpertSelection, FusedInputs, FusedPlan, Gate, PackedLayout, WeightOps,
    formats::{unpack::Blocks, with_blocks},
};

/// Rows of activations from which parts of the matrix are restored, without byte instructions.
const MANY: usize = 18;

impl WeightOps for Flex {
    fn packed_project(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
        activations: Activations,
    ) -> FloatTensor<Self> {
        let (x, words) = (contiguous(x), contiguous(words));
        let (x, blocks) = (x.storage::<f32>(), blocks(&words, &layout));
        let n = x.len() / layout.columns();
        let matrix = Stacked::one(blocks, layout);
        tensor(project(x, &matrix, activations, None), [n, layout.rows()])
    }

    fn packed_fused(
        x: FloatTensor<Self>,
        inputs: FusedInputs<Self>,
        plan: FusedPlan,
    ) -> FloatTensor<Self> {
        let products = |x, words: Vec<_>, gate| {
            let x = contiguous(x);
            let words: Vec<_> = words.into_iter().map(contiguous).collect();
            let parts = words.iter().zip(&plan.parts);
            let parts = parts.map(|(words, layout)| (blocks(words, layout), *layout));
            let x = x.storage::<f32>();
            let y = project(x, &Stacked::new(parts), plan.activations, gate);
            let n = x.len() / plan.parts[0].columns();
            let outputs = y.len() / n;
            tensor(y, [n, outputs])
        };
        composed::fused_around::<Self>(x, inputs, &plan, products, Self::packed_gate)
    }

    fn packed_picked(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        picked: IntTensor<Self>,
        layout: PackedLayout,
        picks: ExpertSelection,
    ) -> FloatTensor<Self> {
        let (x, words, picked) = (contiguous(x), contiguous(words), contiguous(picked));
        let (x, picked) = (x.storage::<f32>(), picked.storage::<i32>());
        let out = picked::project(x, words.storage::<u32>(), picked, layout, picks);
        tensor(out, [picked.len(), layout.rows()])
    }

    fn packed_gate(x: FloatTensor<Self>, gate: Gate) -> FloatTensor<Self> {
        let x = contiguous(x);
        let [n, width] = x.layout().shape().dims();
        tensor(gate::gated(x.storage::<f32>(), width / 2, gate), [n, width / 2])
    }

    fn packed_project_backward(
        grad: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self> {
        let (grad, words) = (contiguous(grad), contiguous(words));
        let grad = grad.storage::<f32>();
        let out = dense::backward(grad, blocks(&words, &layout), &layout);
        tensor(out, [grad.len() / layout.rows(), layout.columns()])
    }

    fn packed_rows(
        words: IntTensor<Self>,
        ids: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self> {
        let words = contiguous(words);
        let (blocks, row) = (blocks(&words, &layout), layout.row_bytes());
        let ids: Vec<usize> = ids.into_data().iter::<i64>().map(|id| id as usize).collect();
        let mut out = vec![0.0; ids.len() * layout.columns()];
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(layout.columns())) {
            portable::restore(layout.format(), &blocks[id * row..][..row], out);
        }
        tensor(out, [ids.len(), layout.columns()])
    }

    fn packed_restore(
        words: IntTensor<Self>,
        layout: PackedLayout,
        start: usize,
        n: usize,
    ) -> FloatTensor<Self> {
        let words = contiguous(words);
        let row = layout.row_bytes();
        let blocks = &blocks(&words, &layout)[start * row..][..n * row];
        let mut out = vec![0.0; n * layout.columns()];
        dense::restore(blocks, &layout, &mut out);
        tensor(out, [n, layout.columns()])
    }
}

/// Returns `x W^T`, with a gate of the halves of the rows, by the best instructions available.
fn project(
    x: &[f32],
    matrix: &Stacked<'_>,
    activations: Activations,
    gate: Option<Gate>,
) -> Vec<f32> {
    let products = with_blocks!(matrix.layout().format(), F => {
        #[cfg(target_arch = "x86_64")]
        if vnni::available() {
            return vnni::project::<F>(x, matrix, activations, gate);
        }
        blocks_project::<F>(x, matrix, activations)
    }, wide W => {
        if x.len() / matrix.columns() >= MANY {
            dense::project(x, matrix)
        } else {
            wide::project::<W>(x, matrix)
        }
    });
    gate::gated_products(products, matrix, gate)
}

/// Returns `x W^T` without byte instructions.
fn blocks_project<F: Blocks>(
    x: &[f32],
    matrix: &Stacked<'_>,
    activations: Activations,
) -> Vec<f32> {
    if x.len() / matrix.columns() >= MANY {
        return match activations.largest() {
            Some(largest) => dense::project(&Integers::round(x, largest).floats(), matrix),
            None => dense::project(x, matrix),
        };
    }
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if Native::available() {
        return few::project::<Native, F>(x, matrix, activations);
    }
    portable::project::<F>(x, matrix, activations)
}

fn blocks<'a>(words: &'a FlexTensor, layout: &PackedLayout) -> &'a [u8] {
    debug_assert_eq!(words.dtype(), DType::U32);
    &words.bytes()[..layout.bytes()]
}

/// Returns `tensor` in row-major order and as the only content of its buffer.
///
/// `storage` returns a whole buffer even if the tensor is a view of a part. Copies only if
/// necessary.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let bytes = layout.num_elements() * tensor.dtype().size();
    let first = layout.start_offset() == 0 && bytes == tensor.bytes().len();
    if first && layout.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

fn tensor(data: Vec<f32>, shape: [usize; 2]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}

#[cfg(test)]
mod tests;
