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
mod portable;
mod stacked;
mod threads;
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
pub use threads::in_parts;

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
        let (x, words) = (x.storage::<f32>(), words.storage::<u32>());
        let (columns, rows) = (layout.columns(), layout.rows());
        let picked = picked.storage::<i32>();
        let mut out = vec![0.0; picked.len() * rows];
        // The rows of each expert are read once for all of its picks.
        let mut slots: Vec<usize> = (0..picked.len()).collect();
        slots.sort_by_key(|&slot| picked[slot]);
        for slots in slots.chunk_by(|&a, &b| picked[a] == picked[b]) {
            let expert = &words[picked[slots[0]] as usize * picks.stride..];
            let blocks = &bytemuck::cast_slice::<u32, u8>(expert)[..layout.bytes()];
            let row = |&slot: &usize| &x[slot / picks.shared * columns..][..columns];
            let x: Vec<f32> = slots.iter().flat_map(row).copied().collect();
            let expert = Stacked::one(blocks, layout);
            let products = project(&x, &expert, picks.activations, None);
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

/// Returns the blocks of all rows.
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
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::{WeightFormat, reference};

    /// Multiplies shuffled fixture blocks in all ways of processors without byte instructions.
    #[test]
    fn products_match_the_definition() {
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
            let x: Vec<f32> =
                (0..5 * columns).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
            let restored = reference::restore(format, &matrix);
            let magnitudes = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
            let sums = reference::project(&magnitudes(&x), &magnitudes(&restored), columns);
            // Two pieces, which are divided among threads.
            let pieces = matrix.split_at(23 * layout.row_bytes());
            let pieces = [(pieces.0, 23), (pieces.1, rows - 23)];
            let layout = |rows| PackedLayout::new(format, [rows, columns]).unwrap();
            let matrix = Stacked::new(pieces.map(|(blocks, rows)| (blocks, layout(rows))));
            let dense = |x: &[f32], activations: Activations| {
                let rounded = activations.largest().map(|to| Integers::round(x, to).floats());
                dense::project(rounded.as_deref().unwrap_or(x), &matrix)
            };
            // One row of activations takes different loops than several.
            for (activations, n) in all.into_iter().flat_map(|all| [(all, 1), (all, 5)]) {
                let x = &x[..n * columns];
                let rounded = activations.largest().map(|to| reference::round_activations(x, to).0);
                let x_seen = rounded.as_deref().unwrap_or(x);
                let mut ways = vec![("dense".to_string(), dense(x, activations))];
                with_blocks!(format, F => {
                    let portable = portable::project::<F>(x, &matrix, activations);
                    ways.push(("portable".into(), portable));
                    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                    if Native::available() {
                        let products = few::project::<Native, F>(x, &matrix, activations);
                        ways.push(("native".into(), products));
                    }
                }, wide W => for &way in wide::Way::ALL.iter().filter(|way| way.is_available()) {
                    let products = wide::project_by::<W>(way, x, &matrix);
                    ways.push((format!("{way:?}"), products));
                });
                let expected = reference::project(x_seen, &restored, columns);
                for (way, products) in ways {
                    assert_eq!(products.len(), expected.len());
                    for (i, product) in products.into_iter().enumerate() {
                        let error = (f64::from(product) - expected[i]).abs();
                        assert!(
                            error <= 2e-6 * sums[i],
                            "{format} {activations:?} {way} by {n}: {i}"
                        );
                    }
                }
            }
        }
    }

    /// Returns blocks with random codes, scales of 1 / 64 and zero codes in the middle.
    fn blocks_of(format: WeightFormat, blocks: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut bytes: Vec<u8> = (0..blocks * format.block_bytes())
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u8
            })
            .collect();
        let (scale, min) = (0x2400u16, 0xad00u16);
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            let words: &[(usize, u16)] = match format {
                WeightFormat::Q4_1 | WeightFormat::Q5_1 => &[(0, scale), (2, min)],
                WeightFormat::Q4K | WeightFormat::Q5K => &[(0, scale), (2, scale)],
                WeightFormat::Q6K => &[(208, scale)],
                WeightFormat::Int4(_) => &[(0, scale), (2, 8)],
                WeightFormat::Int8(_) => &[(0, scale), (2, 128)],
                WeightFormat::Mxfp4 => &[(0, 0x7979)],
                _ => &[(0, scale)],
            };
            for &(at, word) in words {
                block[at..at + 2].copy_from_slice(&word.to_le_bytes());
            }
            if format.is_float() {
                for number in block.as_chunks_mut::<2>().0 {
                    // A quarter of the numbers is 0. The others have exponents of about 0.
                    number[1] = if number[0] < 64 { 0 } else { number[1] & 0x83 | 0x3c };
                    number[0] = if number[0] < 64 { 0 } else { number[0] };
                }
            }
        }
        bytes
    }

    /// Activations of 1e4 at weights of 0 must not change the sum of the others, of 1e-2, in any
    /// way of multiplying.
    #[test]
    fn exact_products_survive_outliers() {
        for &format in WeightFormat::ALL {
            let (rows, columns) = (69, 1024);
            let matrix = blocks_of(format, rows * columns / format.block_numbers());
            let restored = reference::restore(format, &matrix);
            let layout = PackedLayout::new(format, [rows, columns]).unwrap();
            let stacked = Stacked::one(&matrix, layout);
            for n in [1, 5] {
                // Outliers are placed at the zeros of one row of weights for each row of
                // activations.
                let x: Vec<f32> = (0..n * columns)
                    .map(|i| match restored[i] {
                        0.0 => 1e4 * (1.0 - 2.0 * (i % 2) as f32),
                        _ => ((i * 7919) % 1009) as f32 / 5e4,
                    })
                    .collect();
                assert!(x.iter().any(|x| x.abs() > 1e3), "{format} has zeros");
                let exact = Activations::Exact;
                let mut ways = vec![("dense".to_string(), dense::project(&x, &stacked))];
                ways.push(("best".into(), project(&x, &stacked, exact, None)));
                with_blocks!(format, F => {
                    ways.push(("portable".into(), portable::project::<F>(&x, &stacked, exact)));
                    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                    if Native::available() {
                        let products = few::project::<Native, F>(&x, &stacked, exact);
                        ways.push(("native".into(), products));
                    }
                }, wide W => for &way in wide::Way::ALL.iter().filter(|way| way.is_available()) {
                    ways.push((format!("{way:?}"), wide::project_by::<W>(way, &x, &stacked)));
                });
                let magnitudes = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
                let expected = reference::project(&x, &restored, columns);
                let sums = reference::project(&magnitudes(&x), &magnitudes(&restored), columns);
                for (way, products) in ways {
                    for (i, product) in products.into_iter().enumerate() {
                        let error = (f64::from(product) - expected[i]).abs();
                        // Each of `columns` additions may round to the last digit of the sum.
                        let bound = columns as f64 * 2f64.powi(-24) * sums[i];
                        assert!(error <= bound, "{format} {way} by {n}: {i}: {error:.1e}");
                    }
                }
            }
        }
    }
}
