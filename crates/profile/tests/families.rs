//! Every family's operations have their names, taken from its modules: no family defines them
//! itself.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::BTreeSet, fs, path::Path, time::Instant};

use burn::tensor::Device;
use kv_models::{
    LanguageModel, LoadOptions, ids_to_tensor, kv_cubecl::KvCacheConfig, kv_weights::Activations,
    load, load_with, spans::OPERATION,
};
use kv_profile::Recorder;
use kv_report::{
    Timeline,
    timeline::{Kind, Label},
};
use tracing::subscriber::with_default;
use tracing_subscriber::layer::SubscriberExt;

/// Records one pass of three tokens.
fn a_pass(model: &LanguageModel, device: &Device) -> Timeline {
    let recorder = Recorder::new();
    recorder.name_operations(model.operation_names());
    let config = KvCacheConfig::float().with_capacity(8);
    with_default(tracing_subscriber::registry().with(recorder.layer()), || {
        let mut cache = model.new_cache(config, 1, device).unwrap();
        model.step(ids_to_tensor(&[1, 0, 1], [1, 3], device), &mut cache).unwrap();
    });
    recorder.finish("a pass", vec![])
}

/// The labels of all bars.
fn drawn(timeline: &Timeline) -> Vec<&Label> {
    let bars = timeline.lanes.iter().flat_map(|lane| &lane.bars);
    bars.map(|bar| &timeline.labels[bar.label as usize]).collect()
}

/// Packed weights are no parameters, and their operations have the names of those that restored
/// ones have; a gate is part of its product.
#[test]
fn packed_matrices_are_named_as_parameters_are() {
    let file = "../models/tests/fixtures/gguf-types/types.gguf";
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let device = Device::flex();
    let operations = |packed| {
        let options = LoadOptions::default().with_packed(packed);
        let model = load_with(&file, &device, options).unwrap().model;
        assert_eq!(model.is_packed(), packed.is_some());
        let timeline = a_pass(&model, &device);
        let labels = drawn(&timeline);
        let names = labels.into_iter().filter(|label| label.kind == Kind::Operation);
        names.map(|label| (label.name.clone(), label.group.clone())).collect::<BTreeSet<_>>()
    };
    let packed = operations(Some(Activations::Int8));
    let mut restored = operations(None);
    restored.retain(|(_, group)| group != "gate");
    assert_eq!(packed, restored);
    let named = |name: &str, group: &str| packed.contains(&(name.into(), group.into()));
    for operation in ["qkv", "output", "mlp.gate_up", "mlp.down"] {
        assert!(named(&format!("L1/{operation}"), operation), "{operation} in {packed:?}");
    }
    assert!(named("embedding", "embedding") && !packed.iter().any(|(name, _)| name == "module"));
}

#[test]
fn layers_of_all_families_are_named() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/models");
    let device = Device::flex();
    let mut families = 0;
    for folder in fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()) {
        if !folder.join("config.json").is_file() {
            continue;
        }
        families += 1;
        let model = load(&folder, &device).unwrap().model;
        let timeline = a_pass(&model, &device);
        let drawn = drawn(&timeline);
        let names: BTreeSet<&str> = drawn.iter().map(|label| label.name.as_str()).collect();
        let at = folder.display();
        for layer in 0..model.n_layers() {
            // A layer of one of several kinds is a part of its own, as in `L3/attention.qkv`.
            let [input, mixes] = match model.spec().layers[layer].delta.is_none() {
                true => ["qkv", "attend"],
                false => ["mixed", "delta"],
            };
            for operation in ["attention_norm", input, mixes, "output", "mlp_norm"] {
                let own = |name: &&str| {
                    let own = name.strip_prefix(&*format!("L{layer}/"));
                    own.is_some_and(|own| own.rsplit('.').next() == Some(operation))
                };
                assert!(names.iter().any(own), "{at}: no {operation} in L{layer} of {names:?}");
            }
            assert!(names.contains(&*format!("L{layer}")), "{at}: no layer {layer}");
        }
        for name in ["embedding", "norm", "head", "pass"] {
            assert!(names.contains(name), "{at}: no {name} in {names:?}");
        }
        // No parameter without a name, and no group with the number of a layer.
        assert!(!names.contains("module"), "{at}: {names:?}");
        let operations = drawn.iter().filter(|label| label.kind == Kind::Operation);
        for label in operations {
            assert!(!label.group.contains('/'), "{at}: {label:?}");
        }
    }
    assert!(families >= 10, "{families} families");
}

/// A model that is not profiled pays little: far less than the norm of one row, the cheapest
/// operation there is.
#[test]
fn a_span_that_nobody_hears_is_nearly_free() {
    const SPANS: u32 = 1_000_000;
    let start = Instant::now();
    for n in 0..SPANS {
        let span = tracing::trace_span!(target: OPERATION, "module", parameter = u64::from(n));
        drop(std::hint::black_box(span.entered()));
    }
    let each = start.elapsed() / SPANS;
    assert!(each.as_nanos() < 100, "{each:?}");
}
