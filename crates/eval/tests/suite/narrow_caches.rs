//! Logits of 16-bit caches compared with a 32-bit one while 600 tokens are decoded.
//!
//! SmolLM2 is found as in `real_model.rs`; its test runs with `--ignored smollm2`.
use std::{env, fs, path::Path};

use burn::tensor::Tensor;
use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_models::{Loaded, ids_to_tensor, load};

const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const TOKENS: usize = 600;

/// Returns the largest difference between the logits of an f32 cache and of `cache`, relative to
/// the largest logit of that token, over the first tokens of a text.
fn largest_difference(model: &Path, text: &Path, cache: &str) -> f32 {
    let device = On::<Flex>::open().unwrap();
    let Loaded { model, tokenizer, .. } = load(model, &device).unwrap();
    let text = fs::read_to_string(text).unwrap();
    let ids = tokenizer.unwrap().encode(&text).unwrap();
    assert!(ids.len() >= TOKENS);
    let new_cache = |name: &str| {
        let config: KvCacheConfig = name.parse().unwrap();
        model.new_cache(config.with_capacity(TOKENS), 1, &device).unwrap()
    };
    let mut caches = [new_cache("float"), new_cache(cache)];
    let mut largest: f32 = 0.0;
    for &id in &ids[..TOKENS] {
        let step = |cache| model.step(ids_to_tensor(&[id], [1, 1], &device), cache).unwrap();
        let [float, other]: [Tensor<3>; 2] = caches.each_mut().map(step);
        let [difference, scale] =
            [float.clone() - other, float].map(|it| it.abs().max().into_scalar::<f32>());
        largest = largest.max(difference / scale);
    }
    largest
}

/// Allows 1% for f16, which rounds by 2^-11 of a number, and 8% for bf16, which rounds by 2^-8. The
/// difference must be above 0, and larger for bf16 than for f16.
fn check(model: &Path, text: &Path) {
    let f16 = largest_difference(model, text, "float-f16");
    assert!(0.0 < f16 && f16 < 1e-2, "f16: {f16}");
    let bf16 = largest_difference(model, text, "float-bf16");
    assert!(2.0 * f16 < bf16 && bf16 < 8e-2, "bf16: {bf16}, f16: {f16}");
}

#[test]
fn logits_of_600_tokens() {
    let models = Path::new(PROJECT).join("models");
    check(&models.join("austen"), &models.join("austen/heldout.txt"));
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_logits_of_600_tokens() {
    let default = || Path::new(PROJECT).join("target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let model = env::var_os("KV_SMOLLM2").map_or_else(default, Into::into);
    check(&model, &Path::new(PROJECT).join("crates/models/tests/fixtures/licenses.txt"));
}
