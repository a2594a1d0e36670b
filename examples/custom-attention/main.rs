//! The quantized-cache attention inside a user's own Burn module: trained with the noise of the
//! cache, then served token by token from that cache with the same numbers.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

use anyhow::{Result, ensure};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    tensor::{Device, Distribution, Int, Tensor},
};
use burn_kv::cache::{Autodiff, CacheShape, Flex, KvCache, KvCacheConfig, KvMemory, On};
use burn_optim::{AdamConfig, GradientsParams};

const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const WIDTH: usize = N_HEADS * HEAD_DIM;

/// Grouped-query attention with a residual connection.
#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl Attention {
    fn new(device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(WIDTH, outputs).with_bias(false).init(device);
        Self {
            query: linear(WIDTH),
            key: linear(N_KV_HEADS * HEAD_DIM),
            value: linear(N_KV_HEADS * HEAD_DIM),
            output: linear(WIDTH),
        }
    }

    /// `[batch, tokens, heads * head_dim]` to `[batch, heads, tokens, head_dim]`.
    fn split(x: Tensor<3>, heads: usize) -> Tensor<4> {
        let [batch, tokens, _] = x.dims();
        x.reshape([batch, tokens, heads, HEAD_DIM]).swap_dims(1, 2)
    }

    /// All there is to attention over a cache: `memory` says whether the whole sequence is here, to
    /// be computed as the cache would token by token, with gradients, or the next tokens of a
    /// cache.
    fn forward(&self, x: Tensor<3>, memory: KvMemory<'_>) -> Result<Tensor<3>> {
        let q = Self::split(self.query.forward(x.clone()), N_HEADS);
        let k = Self::split(self.key.forward(x.clone()), N_KV_HEADS);
        let v = Self::split(self.value.forward(x.clone()), N_KV_HEADS);
        let heads = memory.attend(q, k, v)?.output;
        let [batch, tokens, width] = x.dims();
        Ok(x + self.output.forward(heads.swap_dims(1, 2).reshape([batch, tokens, width])))
    }
}

fn main() -> Result<()> {
    let config: KvCacheConfig = "k2v2-r32".parse()?;
    let device = On::<Autodiff<Flex>>::open()?;
    device.seed(7);

    // A toy task: output the mean of all tokens so far.
    let tokens = 128;
    let x = Tensor::<3>::random([2, tokens, WIDTH], Distribution::Default, &*device);
    let seen = Tensor::<1, Int>::arange(1..tokens as i64 + 1, &*device).float();
    let target = x.clone().cumsum(1) / seen.reshape([1, tokens, 1]);

    let mut model = Attention::new(&device);
    let mut optimizer = AdamConfig::new().init();
    for step in 0..=60 {
        let error = model.forward(x.clone(), KvMemory::parallel(config))? - target.clone();
        let loss = error.powi_scalar(2).mean();
        if step % 20 == 0 {
            println!(
                "step {step:>2}  loss with the 2-bit cache {:.5}",
                loss.clone().into_scalar::<f32>()
            );
        }
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, grads);
    }

    // Serve the trained module, with the same kind of cache it was trained for.
    let (model, x) = (model.valid(), x.inner());
    let shape = CacheShape::new(2, N_KV_HEADS, HEAD_DIM);
    let mut cache = KvCache::new(&config.with_capacity(tokens), shape, &x.device())?;
    let streamed: Vec<_> = (0..tokens)
        .map(|t| model.forward(x.clone().narrow(1, t, 1), KvMemory::Cached(&mut cache)))
        .collect::<Result<_>>()?;
    let difference = Tensor::cat(streamed, 1) - model.forward(x, KvMemory::parallel(config))?;
    let worst = difference.abs().max().into_scalar::<f32>();
    println!("token by token against all at once: largest difference {worst:.1e}");
    ensure!(worst < 1e-3, "streaming and parallel disagree");
    Ok(())
}
