//! The models of the repository: what 2 bits cost the one, and what training gave the other back.
#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

use std::path::Path;

use kv_cubecl::{Flex, On};
use kv_eval::{Mode, Plan, Run, evaluate};
use kv_models::ModelCacheConfig;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

/// The float run and that with `cache`, or with the model's own.
fn runs(folder: &str, cache: Option<&ModelCacheConfig>) -> (Run, Run, ModelCacheConfig) {
    let device = On::<Flex>::open().unwrap();
    let loaded = kv_models::load(Path::new(MODELS).join(folder), &device).unwrap();
    let text = std::fs::read_to_string(Path::new(MODELS).join("austen/heldout.txt")).unwrap();
    let ids = loaded.tokenizer.unwrap().encode(&text).unwrap();
    let cache = cache.cloned().or(loaded.cache).unwrap();
    let window = loaded.model.max_positions();
    let caches = [cache.clone()];
    let plan = Plan::new(&loaded.model, Mode::Parallel, caches, ids, window, Some(65_536)).unwrap();
    let mut runs = evaluate(&device, &loaded.model, &plan, |_| ()).unwrap().into_iter();
    (runs.next().unwrap(), runs.next().unwrap(), cache)
}

#[test]
fn training_wins_back_most_of_what_two_bits_cost() {
    let (float_after, after, cache) = runs("austen-k2v2", None);
    let (float_before, before, _) = runs("austen", Some(&cache));
    assert_eq!((cache.cache.key_bits.n_bits(), cache.cache.value_bits.n_bits()), (2, 2));
    let cost = before.perplexity - float_before.perplexity;
    // Clearly more than the float noise of codes at rounding edges, a fraction of a percent.
    assert!(cost > 0.03 * float_before.perplexity, "{before:?} against {float_before:?}");
    let won_back = (before.perplexity - after.perplexity) / cost;
    assert!(won_back >= 0.7, "won back {won_back}: {after:?}");
    let float = float_after.perplexity / float_before.perplexity;
    assert!(float <= 1.02, "the float cache's perplexity times {float}");
}

#[test]
fn four_bits_cost_next_to_nothing() {
    let cache = ModelCacheConfig::from("k4v4".parse::<kv_cubecl::KvCacheConfig>().unwrap());
    let (float, k4v4, _) = runs("austen", Some(&cache));
    assert!(k4v4.perplexity < 1.005 * float.perplexity, "{k4v4:?} against {float:?}");
}
