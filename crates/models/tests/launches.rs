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
    LoadObserver, LoadOptions, Planned, Sampling, Steps, Usage, ids_to_tensor,
    kv_cubecl::{KvCacheConfig, On, Wgpu},
    kv_weights::Activations,
    load_observed, load_with,
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};

/// An observer is told of every thread's launches, so that one test launches at a time.
static COUNTING: Mutex<()> = Mutex::new(());

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

/// Adds up the bytes that launches tell of, by kernel.
#[derive(Clone, Default)]
struct Reads(Arc<Mutex<BTreeMap<String, u64>>>);

impl Subscriber for Reads {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == kv_models::kv_weights::READ
    }

    fn event(&self, event: &Event<'_>) {
        #[derive(Default)]
        struct Fields(String, u64);
        impl Visit for Fields {
            fn record_str(&mut self, _: &Field, value: &str) {
                self.0 = value.into();
            }

            fn record_u64(&mut self, _: &Field, value: u64) {
                self.1 = value;
            }

            fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        *self.0.lock().unwrap().entry(fields.0).or_default() += fields.1;
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Tells what a step is planned to read.
struct Plan(Usage, usize, Arc<Mutex<[usize; 2]>>);

impl LoadObserver for Plan {
    fn begin(&mut self, planned: &Planned<'_>) -> kv_models::Result<()> {
        *self.2.lock().unwrap() = planned.read_by_a_step(&self.0, self.1)?;
        Ok(())
    }
}

/// What the launches of a step read of weights and cache is what the plan says before the model is
/// loaded, byte for byte: of a head that is tied to the embedding and of one that is not.
#[test]
fn bytes_of_a_step_are_those_of_the_plan() {
    const TOKENS: usize = 37;
    let _alone = COUNTING.lock();
    let wgpu = On::<Wgpu>::open().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    for name in ["llama-tiny", "phi3-tiny"] {
        let file = scratch.path().join(name).with_extension("gguf");
        write_gguf(&tiny(name), &file, GgmlDType::Q4_0, &[]);
        let config: KvCacheConfig = "k4v4-g8-r8".parse().unwrap();
        let config = config.with_capacity(64);
        let options = LoadOptions::default().with_packed(Some(Activations::Exact));
        let planned = Arc::<Mutex<[usize; 2]>>::default();
        let observer = Plan(Usage::new(config), TOKENS, planned.clone());
        let model = load_observed(&file, &wgpu, options, observer).unwrap().model;
        let mut cache = model.new_cache(config, 1, &wgpu).unwrap();
        model.hidden_step(ids_to_tensor(&[5; TOKENS], [1, TOKENS], &wgpu), &mut cache).unwrap();
        let reads = Reads::default();
        tracing::subscriber::with_default(reads.clone(), || {
            model.step(ids_to_tensor(&[1], [1, 1], &wgpu), &mut cache).unwrap();
        });
        let reads = reads.0.lock().unwrap();
        let [weights, cache] = planned.lock().unwrap().map(|bytes| bytes as u64);
        assert_eq!(reads["product"] + reads["restore"], weights, "{name}: {reads:?}");
        assert_eq!(reads["decode_attention"], cache, "{name}: {reads:?}");
        assert_eq!(reads.len(), 3, "{name}: {reads:?}");
    }
}

/// What is launched for a step of a model of this file, with weights packed, and the number of its
/// layers.
fn launched(file: &Path) -> (BTreeMap<&'static str, usize>, usize) {
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

/// With weights packed, norms, gates and additions are in the launches of products, of which each
/// layer has four; rotation is in that which appends and that which attends. Ids are clamped and
/// looked up, the final norm is in the product of the head, and the next token is picked in one.
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

/// However many experts there are, a layer multiplies with those that were picked in one launch for
/// each of its three matrices.
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
