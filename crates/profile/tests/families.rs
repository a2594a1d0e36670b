//! Every family's operations have their names, by what its modules are called: nothing of a family says them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::BTreeSet, fs, path::Path, time::Instant};

use burn::tensor::Device;
use kv_models::{ids_to_tensor, kv_cubecl::KvCacheConfig, load, spans::OPERATION};
use kv_profile::Recorder;
use kv_report::timeline::Kind;
use tracing::subscriber::with_default;
use tracing_subscriber::layer::SubscriberExt;

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
        let recorder = Recorder::new();
        recorder.name_operations(&model);
        let config = KvCacheConfig::float().with_capacity(8);
        with_default(tracing_subscriber::registry().with(recorder.layer()), || {
            let mut cache = model.new_cache(config, 1, &device).unwrap();
            model.step(ids_to_tensor(&[1, 2, 3], [1, 3], &device), &mut cache).unwrap();
        });
        let timeline = recorder.finish("a pass", vec![]);
        let drawn: Vec<_> = timeline
            .lanes
            .iter()
            .flat_map(|lane| &lane.bars)
            .map(|bar| &timeline.labels[bar.label as usize])
            .collect();
        let names: BTreeSet<&str> = drawn.iter().map(|label| label.name.as_str()).collect();
        let at = folder.display();
        for layer in 0..model.n_layers() {
            for operation in ["attention_norm", "qkv", "attend", "output", "mlp_norm"] {
                let name = format!("L{layer}/{operation}");
                assert!(names.contains(&*name), "{at}: no {name} in {names:?}");
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

/// What a model that nobody profiles pays: far less than the norm of one row, the cheapest operation there is.
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
