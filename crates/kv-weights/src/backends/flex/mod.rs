//! The CPU: kernels on slices, which read the blocks where they lie.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
mod dense;
mod gate;
mod integers;
mod portable;
mod threads;
#[cfg(target_arch = "x86_64")]
mod vnni;
mod wide;

use burn::{
    backend::{
        Flex,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, TensorData},
};
use burn_flex::FlexTensor;

use integers::Integers;
pub use threads::in_parts;

use crate::{Activations, Gate, PackedLayout, Picks, WeightOps, formats::flex::with_blocks};

/// From so many rows of activations on, parts of the matrix are restored and multiplied with as floats, where there are
/// no instructions for bytes.
const MANY: usize = 18;
/// Bytes of weights that a thread takes at a time, about: reading in order is fastest, and so is a last part that no
/// thread has to wait for.
const PART: usize = 256 << 10;
/// Multiplications that are worth a second thread.
const PARALLEL: usize = 1 << 17;
/// Bytes of a line of the processor's cache.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
/// How many bytes before they are multiplied blocks are brought into the cache. The processor foresees by itself what
/// is read in order, but not past the end of a page.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 2048;

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

    fn packed_picked(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        picked: IntTensor<Self>,
        layout: PackedLayout,
        picks: Picks,
    ) -> FloatTensor<Self> {
        let (x, words, picked) = (contiguous(x), contiguous(words), contiguous(picked));
        let (x, words) = (x.storage::<f32>(), words.storage::<u32>());
        let (columns, rows) = (layout.columns(), layout.rows());
        let picked = picked.storage::<i32>();
        let mut out = vec![0.0; picked.len() * rows];
        // Each expert reads its rows once, for all that picked it.
        let mut slots: Vec<usize> = (0..picked.len()).collect();
        slots.sort_by_key(|&slot| picked[slot]);
        for slots in slots.chunk_by(|&a, &b| picked[a] == picked[b]) {
            let expert = &words[picked[slots[0]] as usize * picks.stride..];
            let blocks = &bytemuck::cast_slice::<u32, u8>(expert)[..layout.bytes()];
            let row = |&slot: &usize| &x[slot / picks.shared * columns..][..columns];
            let x: Vec<f32> = slots.iter().flat_map(row).copied().collect();
            let products = project(&x, blocks, &layout, picks.activations);
            for (&slot, products) in slots.iter().zip(products.chunks_exact(rows)) {
                out[slot * rows..][..rows].copy_from_slice(products);
            }
        }
        tensor(out, [picked.len(), rows])
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
        if x.len() / layout.columns() >= MANY {
            return match activations.largest() {
                Some(largest) => dense::project(&Integers::round(x, largest).floats(), blocks, layout),
                None => dense::project(x, blocks, layout),
            };
        }
        #[cfg(target_arch = "x86_64")]
        if avx2::available() {
            return avx2::project::<F>(x, blocks, layout, activations);
        }
        portable::project::<F>(x, blocks, layout, activations)
    }, wide W => {
        if x.len() / layout.columns() >= MANY {
            return dense::project(x, blocks, layout);
        }
        wide::project::<W>(x, blocks, layout)
    })
}

/// Calls `work` with parts of the products of each row of weights with `n` rows of activations, and the number of the
/// first row of each part: all products, `[rows of activations, rows of weights]`.
fn by_weight_rows(
    layout: &PackedLayout,
    n: usize,
    parallel: bool,
    work: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let (rows, threads) = (layout.rows(), rayon::current_num_threads());
    let mut by_weight = vec![0.0; rows * n];
    let rounds = layout.bytes().div_ceil(PART * threads);
    let part = rows.div_ceil(rounds * threads);
    let parts = by_weight.chunks_mut(part * n).enumerate();
    in_parts(parts, parallel, |(i, out)| work(i * part, out));
    if n == 1 {
        return by_weight;
    }
    let mut out = Vec::with_capacity(by_weight.len());
    for row in 0..n {
        out.extend(by_weight[row..].iter().step_by(n));
    }
    out
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

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::{WeightFormat, reference};

    /// The blocks of the tests' fixtures in another order in each row, in all ways that processors without instructions
    /// for bytes take.
    #[test]
    fn products_are_those_of_the_definition() {
        for &format in WeightFormat::ALL.iter().filter(|format| format.ggml_type().is_some()) {
            let mut all = vec![Activations::Exact];
            if !format.is_float() {
                all.extend([Activations::Int16, Activations::Int8]);
            }
            let name = format!("{format}.blocks");
            let path: PathBuf =
                [env!("CARGO_MANIFEST_DIR"), "tests/packed/fixtures", &name].iter().collect();
            let fixture = fs::read(path).unwrap();
            let blocks: Vec<_> = fixture.chunks(format.block_bytes()).collect();
            let (rows, columns) = (69, blocks.len() * format.block_numbers());
            let matrix: Vec<u8> = (0..rows)
                .flat_map(|row| (0..blocks.len()).map(move |i| i * 5 + row))
                .flat_map(|i| blocks[i % blocks.len()].iter().copied())
                .collect();
            let layout = PackedLayout::new(format, [rows, columns]).unwrap();
            let n = 5;
            let x: Vec<f32> =
                (0..n * columns).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
            let restored = reference::restore(format, &matrix);
            let magnitudes = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
            let sums = reference::project(&magnitudes(&x), &magnitudes(&restored), columns);
            let dense = |x: &[f32], activations: Activations| {
                let rounded = activations.largest().map(|to| Integers::round(x, to).floats());
                dense::project(rounded.as_deref().unwrap_or(x), &matrix, &layout)
            };
            for activations in all {
                let rounded =
                    activations.largest().map(|to| reference::round_activations(&x, to).0);
                let x_seen = rounded.as_ref().unwrap_or(&x);
                let mut ways = vec![("dense".to_string(), dense(&x, activations))];
                with_blocks!(format, F => {
                    let portable = portable::project::<F>(&x, &matrix, &layout, activations);
                    ways.push(("portable".into(), portable));
                    #[cfg(target_arch = "x86_64")]
                    if avx2::available() {
                        let products = avx2::project::<F>(&x, &matrix, &layout, activations);
                        ways.push(("AVX2".into(), products));
                    }
                }, wide W => for &way in wide::Way::ALL.iter().filter(|way| way.is_available()) {
                    let products = wide::project_by::<W>(way, &x, &matrix, &layout);
                    ways.push((format!("{way:?}"), products));
                });
                let expected = reference::project(x_seen, &restored, columns);
                for (way, products) in ways {
                    assert_eq!(products.len(), expected.len());
                    for (i, product) in products.into_iter().enumerate() {
                        let error = (f64::from(product) - expected[i]).abs();
                        assert!(error <= 2e-6 * sums[i], "{format} {activations:?} {way}: {i}");
                    }
                }
            }
        }
    }
}
