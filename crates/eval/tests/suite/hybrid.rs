//! Evaluation of a model in which only one of four layers has a cache, and of one whose caches have
//! no values.

use std::{ops::ControlFlow, path::Path};

use kv_cubecl::{Flex, KvCacheConfig, KvFormat, On, Side};
use kv_eval::{
    Mode, Plan, layer_errors,
    search::{Found, SearchPlan, search},
    twin,
};
use kv_models::{LanguageModel, ModelCacheConfig, load};

const TOKENS: usize = 96;

fn tiny(name: &str) -> (On<Flex>, LanguageModel, Vec<u32>) {
    let device = On::<Flex>::open().unwrap();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/models");
    let model = load(models.join(name), &device).unwrap().model;
    (device, model, (0..2 * TOKENS as u32 + 2).map(|i| (i * 37 + 11) % 256).collect())
}

fn config() -> KvCacheConfig {
    "k2v2-g32-r32".parse().unwrap()
}

#[test]
fn errors_are_of_the_layer_with_a_cache() {
    let (device, model, ids) = tiny("qwen3_5-tiny");
    let errors = layer_errors(&device, &model, &ids[..TOKENS], config()).unwrap();
    assert_eq!(errors.iter().map(|error| error.layer).collect::<Vec<_>>(), [3]);
    let twin = twin(&device, &model, &ids[..TOKENS], config(), None, |_| ()).unwrap();
    assert_eq!(twin.layers.iter().map(|layer| layer.layer).collect::<Vec<_>>(), [3]);
    assert!(twin.steps.iter().all(|step| step.layers.len() == 1));
    assert!(twin.layers[0].mean > 0.0);
}

/// Searches formats for the capacity of 512 tokens, in as many bytes as `k4v4-g32-r32` has.
fn found(name: &str) -> (LanguageModel, Found) {
    let (device, model, ids) = tiny(name);
    let text = |ids: &[u32]| {
        let none: [ModelCacheConfig; 0] = [];
        Plan::new(&model, Mode::Parallel, none, ids.to_vec(), TOKENS, None).unwrap()
    };
    let (seen, unseen) = ids.split_at(TOKENS + 1);
    let cache: KvCacheConfig = "k4v4-g32-r32".parse().unwrap();
    let plan = SearchPlan {
        base: config().with_capacity(512),
        formats: vec![KvFormat::Affine4, KvFormat::Affine2],
        bytes: bytes(&model, &cache.with_capacity(512).into()),
        name: "found".into(),
        seen: text(seen),
        unseen: text(unseen),
    };
    let found = search(&device, &model, &plan, |_| ControlFlow::Continue(())).unwrap();
    found.policy.validate(&model).unwrap();
    let own = &found.measured[0];
    assert!(own.bytes <= plan.bytes && own.seen.kl > 0.0, "{own:?}");
    (model, found)
}

fn bytes(model: &LanguageModel, caches: &ModelCacheConfig) -> usize {
    let layers = model.spec().layers.iter().enumerate();
    let bytes = layers
        .map(|(i, layer)| layer.cache_bytes(&caches.layer(model.spec(), i), 1).unwrap().total());
    bytes.sum()
}

/// The search chooses only formats of the keys and of the values of layer 3.
#[test]
fn a_search_chooses_for_layers_with_a_cache() {
    let (model, found) = found("qwen3_5-tiny");
    assert_eq!(found.sensitivities.len(), 4, "two sides in two formats");
    assert!(found.sensitivities.iter().all(|part| part.layer == 3));
    let shown = found.policy.in_full(model.spec()).unwrap();
    assert!(shown.contains("layers 0..3 state, layer 3 k"), "{shown}");
}

/// A latent row is stored once, so the search chooses formats of keys, and its bytes are theirs.
#[test]
fn a_search_counts_latent_rows_once() {
    let (model, found) = found("deepseek_v3-tiny");
    assert_eq!(found.sensitivities.len(), 6, "the keys of three layers in two formats");
    assert!(found.sensitivities.iter().all(|part| part.side == Side::Keys), "{found:?}");
    let policy = found.policy.clone().with_capacity(512);
    assert_eq!(found.measured[0].bytes, bytes(&model, &policy));
    assert_eq!(
        found.front.last().unwrap().bytes,
        bytes(&model, &config().with_capacity(512).into())
    );
}
