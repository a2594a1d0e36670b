//! How many launches a decode step is on a GPU.
#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use candle_core::quantized::GgmlDType;
use common::{tiny, write_gguf};
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

/// With weights packed, norms, gates and additions are in the launches of products, of which each layer has four;
/// rotation is in that which appends and that which attends. Ids are clamped and looked up, the final norm is in the
/// product of the head, and the next token is picked in one.
#[test]
fn launches_of_a_step() {
    const OF_A_LAYER: usize = 6;
    const OF_A_STEP: usize = 4;
    let wgpu = On::<Wgpu>::open().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("llama.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlDType::Q4_0, &[]);
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let model = load_with(&file, &wgpu, options).unwrap().model;
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
    let counted = count.0.lock().unwrap();
    let total: usize = counted.values().sum();
    let layers = model.spec().layers.len();
    assert!(
        total > 0 && total <= OF_A_LAYER * layers + OF_A_STEP,
        "{total} launches in {layers} layers: {counted:#?}"
    );
}
