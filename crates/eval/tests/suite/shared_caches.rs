//! Evaluation of a model whose last two layers share the caches of earlier ones.

use std::{ops::ControlFlow, path::Path};

use kv_cubecl::{Flex, KvCacheConfig, KvFormat, On};
use kv_eval::{
    Mode, Plan, layer_errors,
    search::{SearchPlan, search},
    twin,
};
use kv_models::{LanguageModel, ModelCacheConfig, load};

const TOKENS: usize = 96;
const CACHE: &str = "k2v2-g16-r16";

fn shared() -> (On<Flex>, LanguageModel, Vec<u32>) {
    let device = On::<Flex>::open().unwrap();
    let path = "../models/tests/golden/models/gemma4-tiny";
    let model = load(Path::new(env!("CARGO_MANIFEST_DIR")).join(path), &device).unwrap().model;
    (device, model, (0..2 * TOKENS as u32 + 2).map(|i| (i * 37 + 11) % 256).collect())
}

/// All layers attend, so all have errors; counts of codes belong to the layers that own a cache.
#[test]
fn errors_are_of_all_layers_and_counts_of_owners() {
    let (device, model, ids) = shared();
    let config: KvCacheConfig = CACHE.parse().unwrap();
    let errors = layer_errors(&device, &model, &ids[..TOKENS], config).unwrap();
    assert_eq!(errors.iter().map(|error| error.layer).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let twin = twin(&device, &model, &ids[..TOKENS], config, None, |_| ()).unwrap();
    assert_eq!(twin.layers.iter().map(|it| it.layer).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert!(twin.layers.iter().all(|layer| layer.mean > 0.0));
    let restored = twin.layers.iter().map(|layer| layer.counters.restored.is_some());
    assert_eq!(restored.collect::<Vec<_>>(), [true, true, true, true, false, false]);
}

/// The search chooses formats for the four caches that exist.
#[test]
fn a_search_chooses_for_layers_that_own_a_cache() {
    let (device, model, ids) = shared();
    let text = |ids: &[u32]| {
        let none: [ModelCacheConfig; 0] = [];
        Plan::new(&model, Mode::Parallel, none, ids.to_vec(), TOKENS, None).unwrap()
    };
    let (seen, unseen) = ids.split_at(TOKENS + 1);
    let base = CACHE.parse::<KvCacheConfig>().unwrap().with_capacity(512);
    let caches = ModelCacheConfig::from("k4v4-g16-r16".parse::<KvCacheConfig>().unwrap());
    let caches = caches.with_capacity(512);
    let layers = model.spec().layers.iter().zip(caches.layers(model.spec()));
    let bytes = layers.map(|(layer, cache)| layer.cache_bytes(&cache, 1).unwrap().total()).sum();
    let plan = SearchPlan {
        base,
        formats: vec![KvFormat::Affine4, KvFormat::Affine2],
        bytes,
        name: "found".into(),
        seen: text(seen),
        unseen: text(unseen),
    };
    let found = search(&device, &model, &plan, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(found.sensitivities.len(), 4 * 4, "two sides in two formats, for four caches");
    assert!(found.sensitivities.iter().all(|part| part.layer < 4));
    found.policy.validate(&model).unwrap();
    let shown = found.policy.in_full(model.spec()).unwrap();
    assert!(shown.contains("layer 4 shared with layer 3, layer 5 shared with layer 2"), "{shown}");
    let own = &found.measured[0];
    assert!(own.bytes <= plan.bytes && own.seen.kl > 0.0, "{own:?}");
}
