//! Random blocks and numbers.

use burn::tensor::{Bytes, Device, Tensor, TensorData};
use half::{bf16, f16};
use kv_weights::{PackedMatrix, WeightFormat};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

/// A random generator with the same sequence for a seed on every machine and version.
pub(crate) struct Rng(Xoshiro256PlusPlus);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// Returns a standard normal number (Box-Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let (u, v): (f64, f64) = (self.0.random(), self.0.random());
        ((-2.0 * (1.0 - u).ln()).sqrt() * (core::f64::consts::TAU * v).cos()) as f32
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    fn byte(&mut self) -> u8 {
        self.0.random()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) format: WeightFormat,
    pub(crate) shape: [usize; 2],
    pub(crate) bytes: Vec<u8>,
}

impl Blocks {
    /// Creates blocks with random codes and with scales of both signs and 0, in sizes typical of
    /// models.
    pub(crate) fn random(rng: &mut Rng, format: WeightFormat, shape: [usize; 2]) -> Self {
        let blocks = shape[0] * shape[1] / format.block_numbers();
        let mut bytes = Vec::new();
        for i in 0..blocks {
            let start = bytes.len();
            bytes.extend((0..format.block_bytes()).map(|_| rng.byte()));
            let block = &mut bytes[start..];
            let mut put = |rng: &mut Rng, at: usize, size: f32| {
                let value = if i % 13 == 5 { 0.0 } else { rng.normal() * size };
                block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            };
            match format {
                WeightFormat::Q4_1 | WeightFormat::Q5_1 => {
                    put(rng, 0, 0.02);
                    put(rng, 2, 0.1);
                }
                WeightFormat::Q4K | WeightFormat::Q5K => {
                    put(rng, 0, 0.001);
                    put(rng, 2, 0.001);
                }
                WeightFormat::Q6K => put(rng, 208, 0.0005),
                WeightFormat::F16 => (0..32).for_each(|at| put(rng, 2 * at, 0.01)),
                WeightFormat::Bf16 => {
                    for number in block.as_chunks_mut::<2>().0 {
                        *number = bf16::from_f32(rng.normal() * 0.01).to_le_bytes();
                    }
                }
                // Exponent 127 means 1.
                WeightFormat::Mxfp4 => block[0] = 116 + block[0] % 16,
                WeightFormat::Int4(_) | WeightFormat::Int8(_) => {
                    put(rng, 0, 0.01);
                    let zero =
                        rng.below(if matches!(format, WeightFormat::Int4(_)) { 16 } else { 256 });
                    block[2..4].copy_from_slice(&(zero as u16).to_le_bytes());
                }
                _ => put(rng, 0, 0.01),
            }
        }
        Self { format, shape, bytes }
    }

    pub(crate) fn restored(&self) -> Vec<f32> {
        kv_weights::reference::restore(self.format, &self.bytes)
    }
}

pub(crate) fn device_blocks(blocks: &Blocks, device: &Device) -> PackedMatrix {
    let bytes = Bytes::from_bytes_vec(blocks.bytes.clone());
    PackedMatrix::from_bytes(bytes, blocks.format, blocks.shape, device).unwrap()
}

/// Creates a tensor `[1, rows, columns]`.
pub(crate) fn matrix(x: &[f32], columns: usize, device: &Device) -> Tensor<3> {
    let shape = [1, x.len() / columns, columns];
    Tensor::from_data(TensorData::new(x.to_vec(), shape), device)
}

/// Returns the numbers of a tensor.
pub(crate) fn host<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().unwrap()
}

pub(crate) fn magnitudes(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| x.abs()).collect()
}
