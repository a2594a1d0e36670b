//! How many launches a decode step is on a GPU.
#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
};

use candle_core::quantized::GgmlDType;
use common::{fixture, tiny, write_gguf};
use cubecl::logging::{
    Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};
use kv_models::{
    LoadOptions, Sampling, Steps,
    kv_cubecl::{KvCacheConfig, On, Wgpu},
    kv_weights::Activations,
    load_with,
};

/// Counts launches by kernel.
#[derive(Debug, Default)]
struct Count(Mutex<BTreeMap<&'static str, usize>>);

impl LaunchObserver for Count {
    fn launched(&self, kernel: &'static str) {
        *self.0.lock().unwrap().entry(kernel).or_default() += 1;
    }

    fn timing(&self) -> TimingRequest {
        TimingRequest::None
    }

    fn profiled(&self, _: &'static str, _: ProfileDuration) {}

    fn timed(&self, _: &'static str, _: Duration, _: TimingMethod) {}
}

/// What is launched for a step of a model of this file, with weights packed, and the number of its layers.
fn launched(file: &Path) -> (BTreeMap<&'static str, usize>, usize) {
    // An observer is told of every thread's launches.
    static COUNTING: Mutex<()> = Mutex::new(());
    let _counting = COUNTING.lock();
    let wgpu = On::<Wgpu>::open().unwrap();
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let model = load_with(file, &wgpu, options).unwrap().model;
    let config: KvCacheConfig = "k4v4-g8-r8".parse().unwrap();
    let mut cache = model.new_cache(config.with_capacity(64), 1, &wgpu).unwrap();
    let mut steps = Steps::new(&model, &mut cache, false, Sampling::GREEDY, &wgpu).unwrap();
    let mut step = || {
        steps.step(&model, &[1], &wgpu).unwrap();
        steps.pick(&[1]).unwrap()
    };
    // A first step also makes tables.
    step();
    let count = Arc::new(Count::default());
    let observation = LaunchObservation::new(count.clone());
    step();
    drop(observation);
    let counted = count.0.lock().unwrap().clone();
    (counted, model.spec().layers.len())
}

/// With weights packed, norms, gates and additions are in the launches of products, of which each layer has four;
/// rotation is in that which appends and that which attends. Ids are clamped and looked up, the final norm is in the
/// product of the head, and the next token is picked in one.
#[test]
fn launches_of_a_step() {
    const OF_A_LAYER: usize = 6;
    const OF_A_STEP: usize = 4;
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("llama.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlDType::Q4_0, &[]);
    let (counted, layers) = launched(&file);
    let total: usize = counted.values().sum();
    assert!(
        total > 0 && total <= OF_A_LAYER * layers + OF_A_STEP,
        "{total} launches in {layers} layers: {counted:#?}"
    );
}

/// However many experts there are, a layer multiplies with those that were picked in one launch for each of its three
/// matrices.
#[test]
fn launches_of_experts() {
    let (counted, layers) = launched(&fixture("mxfp4").join("model.gguf"));
    let of = |kernel: &str| -> usize {
        counted.iter().filter(|(name, _)| name.contains(kernel)).map(|(_, n)| n).sum()
    };
    assert_eq!(of("PickedProduct<"), 3 * layers, "{counted:#?}");
    // Projections of attention, the router, and once the head.
    assert!(of("::product::Product<") <= 5 * layers + 1, "{counted:#?}");
}
