//! The repository's two models: the loss of the first with a 2-bit cache, and the part of it that
//! training recovered in the second.
use std::path::Path;

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Mode, Plan, Run, evaluate};
use kv_models::{LanguageModel, ModelCacheConfig};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

/// Returns the runs with a float cache and with `caches` on the default text of `kv-eval`.
fn runs(model: &LanguageModel, ids: &[u32], caches: &[ModelCacheConfig]) -> Vec<Run> {
    let (device, window) = (On::<Flex>::open().unwrap(), model.max_positions());
    let plan =
        Plan::new(model, Mode::Parallel, caches.to_vec(), ids.to_vec(), window, Some(65_536));
    evaluate(&device, model, &plan.unwrap(), |_| ()).unwrap()
}

#[test]
fn training_recovers_most_of_the_loss_by_two_bits() {
    let device = On::<Flex>::open().unwrap();
    let [base, tuned] = ["austen", "austen-k2v2-gflush"]
        .map(|folder| kv_models::load(Path::new(MODELS).join(folder), &device).unwrap());
    let text = std::fs::read_to_string(Path::new(MODELS).join("austen/heldout.txt")).unwrap();
    let ids = base.tokenizer.unwrap().encode(&text).unwrap();
    let k4v4 = ModelCacheConfig::from("k4v4-gflush".parse::<KvCacheConfig>().unwrap());
    let k2v2 = ModelCacheConfig::from("k2v2-gflush".parse::<KvCacheConfig>().unwrap());
    assert_eq!(tuned.cache.as_ref(), Some(&k2v2));

    let before = runs(&base.model, &ids, &[k4v4, k2v2.clone()]);
    let after = runs(&tuned.model, &ids, &[k2v2]);
    let [float, four_bits, two_bits] = [0, 1, 2].map(|run| before[run].perplexity);
    let cost = two_bits - float;
    // A thousand tokens and more in each eighth of the window.
    assert!(before[2].position_kl.iter().all(|at| at.p99 <= at.p999 && at.p99.is_some()));
    // Clearly more than the fraction of a percent that float noise causes by flipping codes.
    assert!(cost > 0.1 * float, "{two_bits} against {float}");
    // The step between two 4-bit codes is a fifth of the 2-bit step, so its squared error is a
    // twenty-fifth.
    assert!(four_bits - float < cost / 10.0, "{four_bits} and {two_bits} against {float}");
    let won_back = (two_bits - after[1].perplexity) / cost;
    assert!(won_back >= 0.7, "{won_back} of {cost} won back");
    let drift = after[0].perplexity / float;
    assert!(drift <= 1.02, "the float cache's perplexity times {drift}");
}
