//! Counts the launches of a decode step on a GPU.
#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "suite/common/mod.rs"]
#[allow(dead_code, reason = "this program uses a part")]
mod common;

use std::{
    collections::BTreeMap,
    env, fs, mem,
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
    thread::sleep,
};

use common::{GgmlType, fixture, tiny, write_gguf};
use cubecl::logging::{
    Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};
use kv_models::{
    CompileAhead, GenerateOptions, LanguageModel, LayerRule, LoadObserver, LoadOptions,
    ModelCacheConfig, Planned, Sampling, Steps, Stores, Usage, generate, ids_to_tensor,
    kv_cubecl::{KvCacheConfig, On, Wgpu},
    kv_weights::Activations,
    load_observed, load_with, spans,
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};

/// An observer sees the launches of all threads, so one test runs at a time.
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

/// Sums the bytes of launches by kernel.
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

/// Stores the bytes that a step is planned to read.
struct Plan(Usage, usize, Arc<Mutex<[usize; 2]>>);

impl LoadObserver for Plan {
    fn begin(&mut self, planned: &Planned<'_>) -> kv_models::Result<()> {
        *self.2.lock().unwrap() = planned.read_by_a_step(&self.0, self.1)?;
        Ok(())
    }
}

/// The weight and cache bytes that a step reads equal the plan made before the model is loaded,
/// with a tied head and with its own.
#[test]
fn bytes_of_a_step_are_those_of_the_plan() {
    const TOKENS: usize = 37;
    let _alone = COUNTING.lock();
    let wgpu = On::<Wgpu>::open().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    for name in ["llama-tiny", "phi3-tiny"] {
        let file = scratch.path().join(name).with_extension("gguf");
        write_gguf(&tiny(name), &file, GgmlType::Q4_0, &[]);
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

/// Returns the launches of a step with packed weights, and the number of layers.
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
    // The first step also computes tables.
    step();
    let count = Arc::new(Count::default());
    let observation = LaunchObservation::new(count.clone());
    step();
    drop(observation);
    let counted = count.0.lock().unwrap().clone();
    (counted, model.spec().layers.len())
}

/// With packed weights, a layer has four products; norms, gates and additions are part of their
/// launches. Rope is part of the append and of attention. Ids are clamped and looked up, the final
/// norm is part of the head, and one launch picks the next token.
#[test]
fn launches_of_a_step() {
    const OF_A_LAYER: usize = 6;
    const OF_A_STEP: usize = 4;
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("llama.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::Q4_0, &[]);
    let (counted, layers) = launched(&file);
    let total: usize = counted.values().sum();
    assert!(
        total > 0 && total <= OF_A_LAYER * layers + OF_A_STEP,
        "{total} launches in {layers} layers: {counted:#?}"
    );
}

/// With any number of experts, a layer multiplies with the selected ones in one launch for each of
/// its three matrices.
#[test]
fn launches_of_experts() {
    let (counted, layers) = launched(&fixture("mxfp4").join("model.gguf"));
    let of = |kernel: &str| -> usize {
        counted.iter().filter(|(name, _)| name.contains(kernel)).map(|(_, n)| n).sum()
    };
    assert_eq!(of("PickedProduct<"), 3 * layers, "{counted:#?}");
    // The projections of attention, the router, and the head.
    assert!(of("::product::Product<") <= 5 * layers + 1, "{counted:#?}");
}

/// Counts spans of operations.
#[derive(Clone, Default)]
struct Operations(Arc<Mutex<BTreeMap<&'static str, usize>>>);

impl Subscriber for Operations {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == spans::OPERATION
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        *self.0.lock().unwrap().entry(span.metadata().name()).or_default() += 1;
        Id::from_u64(1)
    }

    fn event(&self, _: &Event<'_>) {}

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// With a subscriber, the first step of a graph is launched, which changes no bit of the logits.
#[test]
fn a_launched_step_is_like_a_replayed_one() {
    let _alone = COUNTING.lock();
    let wgpu = On::<Wgpu>::open().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("llama.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::Q4_0, &[]);
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let model = load_with(&file, &wgpu, options).unwrap().model;
    let config: KvCacheConfig = "k4v4-g8-r8".parse().unwrap();
    let logits = || {
        let mut cache = model.new_cache(config.with_capacity(64), 1, &wgpu).unwrap();
        model.hidden_step(ids_to_tensor(&[5; 20], [1, 20], &wgpu), &mut cache).unwrap();
        let mut steps = Steps::new(&model, &mut cache, true, Sampling::GREEDY, &wgpu).unwrap();
        let step = |id| steps.step(&model, &[id], &wgpu).unwrap().into_data().try_to_vec().unwrap();
        // The tokens fill and flush the residual of 8.
        (1..20).map(step).collect::<Vec<Vec<f32>>>()
    };
    let replayed = logits();
    let operations = Operations::default();
    let launched = tracing::subscriber::with_default(operations.clone(), logits);
    let counted = operations.0.lock().unwrap();
    assert_eq!((counted[spans::LAUNCHED], counted[spans::REPLAY]), (1, 18));
    assert_eq!(launched, replayed);
}

/// Compiles for each layer, with a cache of its own, while a model is loaded.
struct Compiles([KvCacheConfig; 2], Option<CompileAhead>);

impl LoadObserver for Compiles {
    fn layer(&mut self, index: usize, model: &dyn Fn() -> LanguageModel) {
        self.1.as_mut().unwrap().layer(model(), self.0[index]);
    }

    fn end(&mut self) {
        self.1.take().and_then(CompileAhead::finish);
    }
}

/// With [`CompileAhead`], a prompt of several chunks, launched steps and captured ones compile less
/// than a tenth of the kernels that they compile without it.
#[test]
fn kernels_are_compiled_during_the_load() {
    // CubeCL reads the name of its log from a file in the current folder, once per process.
    const CHILD: &str = "KV_COMPILED_AHEAD";
    if let Some(ahead) = env::var_os(CHILD) {
        return print_compiled(ahead == "1");
    }
    let config = "[compilation]\nlogger = { level = \"basic\", file = \"compiled.log\" }\n";
    let compiled = ["1", "0"].map(|ahead| {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join("cubecl.toml"), config).unwrap();
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", "kernels_are_compiled_during_the_load", "--nocapture"]);
        let out = child.env(CHILD, ahead).current_dir(&scratch).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        let out = String::from_utf8(out.stdout).unwrap();
        let (during, after) = out.split_once("kernels during the load\n").unwrap();
        let during = during.lines().last().unwrap().trim().parse::<usize>().unwrap();
        let after = after.lines().filter(|line| line.starts_with("[Compiling kernel]"));
        (during, after.map(str::to_string).collect::<Vec<_>>())
    });
    let [(during, after), (not_during, without)] = compiled;
    assert!(during > not_during + 20, "{during} and {not_during} kernels");
    // Elementwise kernels of small tensors depend on their sizes.
    assert!(after.len() * 10 < without.len(), "{after:#?} of {}", without.len());
    assert!(without.len() > 20, "{without:#?}");
}

/// Loads and generates, and prints what is compiled during the load and what after it.
#[allow(clippy::print_stdout, reason = "the other process reads it")]
fn print_compiled(ahead: bool) {
    const CHUNK: usize = 64;
    const CAPACITY: usize = 4 * CHUNK + 16;
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("llama.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::Q4_0, &[]);
    let wgpu = On::<Wgpu>::open().unwrap();
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let caches = ["k4v4-g8-r8", "k2v2-g16-r16-s2"].map(|text| {
        let config: KvCacheConfig = text.parse().unwrap();
        config.with_capacity(CAPACITY)
    });
    let model = match ahead {
        true => {
            let observer = Compiles(caches, Some(CompileAhead::new(&wgpu, CHUNK)));
            load_observed(&file, &wgpu, options, observer)
        }
        false => load_with(&file, &wgpu, options),
    };
    let model = model.unwrap().model;
    let compiled = || {
        // CubeCL writes its log on another thread, so it is read until it grows no more.
        let mut log = String::new();
        loop {
            let before = mem::replace(&mut log, fs::read_to_string("compiled.log").unwrap());
            if log == before {
                let lines = log.lines().filter(|line| line.starts_with("[Compiling kernel]"));
                return lines.map(str::to_string).collect::<Vec<_>>();
            }
            sleep(std::time::Duration::from_millis(500));
        }
    };
    let during = compiled().len();
    let [first, second] = caches;
    let policy = ModelCacheConfig::from(first)
        .with_rule(LayerRule::new(1..2, Stores::Cache(second)))
        .with_capacity(CAPACITY);
    for (graph_capture, rest) in [(false, 49), (true, 54), (false, 60)] {
        let mut cache = model.new_cache(policy.clone(), 1, &wgpu).unwrap();
        let options = GenerateOptions {
            max_tokens: 8,
            graph_capture: Some(graph_capture),
            prefill_chunk: CHUNK,
            ..GenerateOptions::default()
        };
        generate(&model, &mut cache, &vec![3; 3 * CHUNK + rest], &options, &wgpu, |_| true)
            .unwrap();
    }
    println!("\n{during} kernels during the load");
    compiled()[during..].iter().for_each(|line| println!("{line}"));
}
