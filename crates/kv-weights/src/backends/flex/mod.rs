//! The CPU: kernels on slices, which read the blocks where they lie.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

mod dense;
mod portable;
mod threads;
#[cfg(target_arch = "x86_64")]
mod vnni;

use burn::{
    backend::{
        Flex,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, TensorData},
};
use burn_flex::FlexTensor;

pub use threads::in_parts;

use crate::{Activations, PackedLayout, WeightOps, formats::flex::with_blocks};

/// From so many rows of exact activations on, parts of the matrix are restored and multiplied with as floats, where
/// there are no instructions for bytes.
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
        tensor(project(x, blocks, &layout, activations), [n, layout.rows()])
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
            portable::restore(&blocks[id * row..][..row], layout.format(), out);
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

/// `x W^T`, by the instructions that this processor has.
fn project(x: &[f32], blocks: &[u8], layout: &PackedLayout, activations: Activations) -> Vec<f32> {
    with_blocks!(layout.format(), F => {
        #[cfg(target_arch = "x86_64")]
        if vnni::available() {
            return vnni::project::<F>(x, blocks, layout, activations);
        }
        match activations {
            Activations::Exact if x.len() / layout.columns() >= MANY => {
                dense::project(x, blocks, layout)
            }
            _ => portable::project::<F>(x, blocks, layout, activations),
        }
    })
}

/// The blocks of all rows.
fn blocks<'a>(words: &'a FlexTensor, layout: &PackedLayout) -> &'a [u8] {
    debug_assert_eq!(words.dtype(), DType::U32);
    &words.bytes()[..layout.bytes()]
}

/// `tensor` in row-major order and alone in its buffer: `storage` returns the whole buffer, even where the tensor is
/// a view of a part. A tensor that is so already is not copied.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let bytes = layout.num_elements() * tensor.dtype().size();
    let first = layout.start_offset() == 0 && bytes == tensor.bytes().len();
    if first && layout.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

fn tensor(data: Vec<f32>, shape: [usize; 2]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}
