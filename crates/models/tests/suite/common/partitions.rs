//! Texts that are divided into calls in any way.

use burn::tensor::Tensor;
use kv_models::{LanguageModel, ids_to_tensor, kv_cubecl::KvCacheConfig, load};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use super::{device, tiny};

/// Checks a tiny checkpoint as [`partition_equals_the_closed_form`] describes. A case is a cache, a
/// tolerance and a number of partitions.
pub(crate) fn partitions_equal_the_closed_form(checkpoint: &str, cases: &[(&str, f32, usize)]) {
    let model = load(tiny(checkpoint), &device()).unwrap().model;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(31);
    for &case in cases {
        partition_equals_the_closed_form(&model, checkpoint, case, &mut rng);
    }
}

/// Checks that any partition of a text into calls gives the logits of the closed form. A case is a
/// cache, a tolerance relative to the largest logit, and a number of partitions. Sums are in
/// another order; in a quantized cache that changes single codes, so there the mean difference is
/// small.
pub(crate) fn partition_equals_the_closed_form(
    model: &LanguageModel,
    name: &str,
    (cache, tolerance, n): (&str, f32, usize),
    rng: &mut Xoshiro256PlusPlus,
) {
    const LEN: usize = 160;
    let device = device();
    let config: KvCacheConfig = cache.parse().unwrap();
    let ids: Vec<u32> = (0..LEN).map(|_| rng.random_range(0..256)).collect();
    let ids = ids_to_tensor(&ids, [1, LEN], &device);
    let whole = model.forward(ids.clone(), config).unwrap();
    let largest = whole.clone().abs().max().into_scalar::<f32>();
    for case in 0..n {
        let mut state = model.new_cache(config.with_capacity(LEN), 1, &device).unwrap();
        let mut parts = vec![];
        let most = [3, 40, 90][case % 3];
        while state.len() < LEN {
            let next = rng.random_range(1..=most).min(LEN - state.len());
            let part = ids.clone().narrow(1, state.len(), next);
            parts.push(model.step(part, &mut state).unwrap());
        }
        let difference = (Tensor::cat(parts, 1) - whole.clone()).abs();
        let off = match cache {
            "float" => difference.max(),
            _ => difference.mean(),
        };
        let off = off.into_scalar::<f32>();
        assert!(off <= tolerance * largest, "{name} {cache}, case {case}: {off} of {largest}");
    }
}
