//! Random tensors on the host.

use core::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

/// A random generator that gives the same numbers for the same seed on every machine and version.
pub(crate) struct Rng(Xoshiro256PlusPlus);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// Uniform in [0, 1).
    pub(crate) fn uniform(&mut self) -> f32 {
        self.0.random::<f32>()
    }

    /// Uniform in `0..end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    /// Standard normal (Box-Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let (u, v): (f64, f64) = (self.0.random(), self.0.random());
        ((-2.0 * (1.0 - u).ln()).sqrt() * (core::f64::consts::TAU * v).cos()) as f32
    }
}

/// Numbers in f64, for the oracle.
pub(crate) fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().copied().map(f64::from).collect()
}

/// A tensor `[batch, heads, tokens, head_dim]` on the host.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Host {
    pub(crate) data: Vec<f32>,
    pub(crate) shape: [usize; 4],
}

impl Host {
    pub(crate) fn from_fn(shape: [usize; 4], mut element: impl FnMut() -> f32) -> Self {
        Self { data: (0..shape.iter().product()).map(|_| element()).collect(), shape }
    }

    pub(crate) fn normal(rng: &mut Rng, shape: [usize; 4]) -> Self {
        Self::from_fn(shape, || rng.normal())
    }

    /// Normal around a different mean in every channel, as keys are.
    pub(crate) fn keys(rng: &mut Rng, shape: [usize; 4]) -> Self {
        let mean: Vec<f32> = (0..shape[3]).map(|_| 2.0 * rng.normal()).collect();
        let mut keys = Self::normal(rng, shape);
        for (index, key) in keys.data.iter_mut().enumerate() {
            *key += mean[index % shape[3]];
        }
        keys
    }

    pub(crate) fn of(tensor: Tensor<4>) -> Self {
        let shape = tensor.dims();
        Self { data: tensor.into_data().iter::<f32>().collect(), shape }
    }

    pub(crate) fn on(&self, device: &Device) -> Tensor<4> {
        Tensor::from_data(TensorData::new(self.data.clone(), self.shape), device)
    }

    pub(crate) fn f64(&self) -> Vec<f64> {
        wide(&self.data)
    }

    /// The part with these tokens.
    pub(crate) fn tokens(&self, tokens: Range<usize>) -> Self {
        let [batch, heads, n_tokens, head_dim] = self.shape;
        let slices = self.data.chunks(n_tokens * head_dim);
        let part = tokens.start * head_dim..tokens.end * head_dim;
        let data = slices.flat_map(|slice| &slice[part.clone()]).copied().collect();
        Self { data, shape: [batch, heads, tokens.len(), head_dim] }
    }

    /// Concatenates along the tokens.
    pub(crate) fn cat(parts: &[Host]) -> Self {
        let [batch, heads, _, head_dim] = parts[0].shape;
        let mut data = Vec::new();
        for slice in 0..batch * heads {
            for part in parts {
                let len = part.shape[2] * head_dim;
                data.extend_from_slice(&part.data[slice * len..(slice + 1) * len]);
            }
        }
        let tokens = parts.iter().map(|part| part.shape[2]).sum();
        Self { data, shape: [batch, heads, tokens, head_dim] }
    }
}
