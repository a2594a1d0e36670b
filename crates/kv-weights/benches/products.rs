//! Benchmarks, for development: `cargo bench -p kv-weights --features flex`.
//!
//! The matrices are those of SmolLM2-135M in a Q4_1 file: 30 layers, used in turn, and the
//! vocabulary in Q8_0. For comparison, Burn's matmul multiplies the restored weights.
#![allow(missing_docs, reason = "a program")]

use burn::tensor::{Bytes, Device, Distribution, Tensor};
use divan::{Bencher, counter::BytesCount};
use kv_weights::{Activations, PackedMatrix, WeightFormat, project};

const ACTIVATIONS: [Activations; 3] = [Activations::Int8, Activations::Int16, Activations::Exact];
const LAYERS: usize = 30;
/// Shapes of a layer: queries, keys and values; attention output; gate and up; down.
const LAYER: [[usize; 2]; 4] = [[960, 576], [576, 576], [3072, 576], [576, 1536]];
const VOCABULARY: [usize; 2] = [49152, 576];

fn main() {
    divan::main();
}

/// Returns blocks with random codes and scales of 1 / 1024.
fn blocks(format: WeightFormat, [rows, columns]: [usize; 2], seed: usize) -> Vec<u8> {
    let n = rows * columns / format.block_numbers() * format.block_bytes();
    let mut state = seed as u64 + 1;
    let mut bytes: Vec<u8> = (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        })
        .collect();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        let scales: &[usize] = match format {
            WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => {
                &[0, 2]
            }
            WeightFormat::Q6K => &[208],
            WeightFormat::Mxfp4 => {
                block[0] = 120;
                &[]
            }
            _ => &[0],
        };
        for &at in scales {
            block[at..at + 2].copy_from_slice(&0x1400u16.to_le_bytes());
        }
    }
    bytes
}

/// Returns format and shape of all matrices of a decode step, in order.
fn model() -> Vec<(WeightFormat, [usize; 2])> {
    let layer = LAYER.map(|shape| (WeightFormat::Q4_1, shape));
    let layers = core::iter::repeat_n(layer, LAYERS).flatten();
    layers.chain([(WeightFormat::Q8_0, VOCABULARY)]).collect()
}

fn packed(format: WeightFormat, shape: [usize; 2], seed: usize) -> PackedMatrix {
    let bytes = Bytes::from_bytes_vec(blocks(format, shape, seed));
    PackedMatrix::from_bytes(bytes, format, shape, &Device::flex()).expect("whole blocks")
}

fn random(rows: usize, columns: usize) -> Tensor<3> {
    Tensor::random([1, rows, columns], Distribution::Normal(0.0, 1.0), &Device::flex())
}

/// Times all products of a decode step for `N` sequences.
#[divan::bench(args = ACTIVATIONS, consts = [1, 2, 8, 12, 16, 32], sample_count = 30)]
fn step<const N: usize>(bencher: Bencher<'_, '_>, activations: Activations) {
    let matrices: Vec<_> =
        model().into_iter().enumerate().map(|(i, (f, s))| packed(f, s, i)).collect();
    let bytes: usize = matrices.iter().map(|matrix| matrix.layout().bytes()).sum();
    let x = [576, 1536].map(|columns| random(N, columns));
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        for matrix in &matrices {
            let x = &x[usize::from(matrix.dims()[1] == 1536)];
            divan::black_box(project(x.clone(), matrix, activations).expect("it fits"));
        }
    });
}

/// Times the products of a layer for a prompt of `N` tokens.
#[divan::bench(args = ACTIVATIONS, consts = [64, 512], sample_count = 30)]
fn prompt<const N: usize>(bencher: Bencher<'_, '_>, activations: Activations) {
    let matrices = LAYER.map(|shape| packed(WeightFormat::Q4_1, shape, 1));
    let x = [576, 1536].map(|columns| random(N, columns));
    bencher.bench_local(|| {
        for matrix in &matrices {
            let x = &x[usize::from(matrix.dims()[1] == 1536)];
            divan::black_box(project(x.clone(), matrix, activations).expect("it fits"));
        }
    });
}

/// Times the products of a layer with restored weights.
#[divan::bench(consts = [64, 512], sample_count = 30)]
fn prompt_restored<const N: usize>(bencher: Bencher<'_, '_>) {
    let restore = |shape| packed(WeightFormat::Q4_1, shape, 1).restore().expect("on the CPU");
    let matrices = LAYER.map(restore);
    let x = [576, 1536].map(|columns| random(N, columns).squeeze_dim::<2>(0));
    bencher.bench_local(|| {
        for matrix in &matrices {
            let x = &x[usize::from(matrix.dims()[1] == 1536)];
            divan::black_box(x.clone().matmul(matrix.clone().transpose()));
        }
    });
}

/// Times one row by `[8192, 4096]` in each format, with activations rounded to `BITS` bits.
#[divan::bench(args = WeightFormat::ALL, consts = [8, 16], sample_count = 30)]
fn row<const BITS: usize>(bencher: Bencher<'_, '_>, format: &WeightFormat) {
    let activations = if BITS == 8 { Activations::Int8 } else { Activations::Int16 };
    let (matrix, x) = (packed(*format, [8192, 4096], 1), random(1, 4096));
    bencher.counter(BytesCount::new(matrix.layout().bytes())).bench_local(|| {
        divan::black_box(project(x.clone(), &matrix, activations).expect("it fits"))
    });
}
