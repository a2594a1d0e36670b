//! Several devices give the numbers of one, bit for bit.

use core::ops::ControlFlow;

use kv_cubecl::{Flex, KvCacheConfig, KvFormat, On};
use kv_eval::{
    Error, Mode, Plan, evaluate,
    search::{SearchPlan, search},
    tasks::{TaskPlan, score_tasks},
};
use kv_models::{LanguageModel, ModelCacheConfig, load};
use serde_json::{Value, json};

use crate::{
    common::{AUSTEN, assert_one_line, austen, kv_eval},
    tasks::task,
};

fn tiny(device: &On<Flex>) -> (LanguageModel, Vec<u32>) {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models");
    let model = load(format!("{golden}/llama-tiny"), device).unwrap().model;
    (model, (0..230).map(|i: u32| (i * i * 31 + i * 7) % 251).collect())
}

#[test]
fn eval_windows_are_shared_out() {
    let device = On::<Flex>::open().unwrap();
    let caches: [KvCacheConfig; 2] = ["k2v2-g16-r16", "k4v4-g16-r16"].map(|it| it.parse().unwrap());
    // Long windows, whose attention is split among threads, and many short ones.
    let (_, austen, text) = austen(1400);
    let (tiny, ids) = tiny(&device);
    for (model, ids, window) in [(austen, text, 460), (tiny, ids, 40)] {
        for mode in [Mode::Parallel, Mode::Streaming] {
            let plan = Plan::new(&model, mode, caches, ids.clone(), window, None).unwrap();
            let numbers = |n: usize| -> Vec<Value> {
                let devices = vec![device.clone(); n];
                let mut progress = vec![];
                let runs =
                    evaluate(&devices[..], &model, &plan, |it| progress.push(it.done)).unwrap();
                assert!(progress.is_sorted());
                assert_eq!(progress.last(), Some(&(3 * plan.scored_tokens())));
                let number = |run| {
                    let mut run = serde_json::to_value(run).unwrap();
                    run["seconds"] = Value::Null;
                    run
                };
                runs.iter().map(number).collect()
            };
            let one = numbers(1);
            for n in [2, 3, 9] {
                assert_eq!(numbers(n), one, "{n} devices, {mode}, windows of {window}");
            }
        }
    }
}

#[test]
fn items_of_tasks_are_shared_out() {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let (model, tokenizer) = (loaded.model, loaded.tokenizer.unwrap());
    let line = |i: usize| {
        let context = format!("Number {i}: it is a truth that");
        json!({"context": context, "choices": ["a man", "the wife is", "they"], "gold": i % 3})
    };
    let tasks = vec![
        task("first", &(0..7).map(line).collect::<Vec<_>>()),
        task("second", &(7..9).map(line).collect::<Vec<_>>()),
    ];
    let caches = ["float", "k2v2-g16-r16"].map(|name| name.parse::<ModelCacheConfig>().unwrap());
    let plan = TaskPlan::new(&model, &tokenizer, caches, tasks, None).unwrap();
    let scores = |n: usize| {
        let mut seen = 0;
        let devices = vec![device.clone(); n];
        let scores = score_tasks(&devices[..], &model, &plan, || seen += 1).unwrap();
        assert_eq!(seen, 2 * plan.continuations());
        scores
    };
    let one = scores(1);
    assert_eq!(one.iter().map(Vec::len).collect::<Vec<_>>(), [14, 4]);
    for n in [2, 4] {
        assert_eq!(scores(n), one, "{n} devices");
    }
}

#[test]
fn searches_share_out_their_windows() {
    let device = On::<Flex>::open().unwrap();
    let (model, ids) = tiny(&device);
    let text = |ids: &[u32]| {
        let none: [ModelCacheConfig; 0] = [];
        Plan::new(&model, Mode::Parallel, none, ids.to_vec(), 40, None).unwrap()
    };
    let (seen, unseen) = ids.split_at(120);
    let base: KvCacheConfig = "k4v4-g16-r16".parse().unwrap();
    let plan = SearchPlan {
        base: base.with_capacity(512),
        formats: vec![KvFormat::Affine4, KvFormat::Affine2],
        bytes: 1 << 20,
        name: "found".into(),
        seen: text(seen),
        unseen: text(unseen),
    };
    let found = |n: usize| {
        let devices = vec![device.clone(); n];
        let found = search(&devices[..], &model, &plan, |_| ControlFlow::Continue(())).unwrap();
        serde_json::to_value(found).unwrap()
    };
    let one = found(1);
    assert_eq!(found(2), one);
    assert_eq!(found(3), one);
    // A search that is stopped ends.
    let devices = vec![device.clone(); 3];
    let stopped = search(&devices[..], &model, &plan, |progress| match progress.done {
        0..5 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    });
    assert!(matches!(stopped, Err(Error::Stopped)));
}

#[test]
fn the_programs_name_devices() {
    let (text, folder) = (format!("{AUSTEN}/heldout.txt"), tempfile::tempdir().unwrap());
    let ppl = |name: &str, devices: &str| {
        let json = folder.path().join(name);
        let args =
            ["ppl", "--model", AUSTEN, "--text", &text, "--tokens", "600", "--window", "200"];
        let args = [&args[..], &["--cache", "k2v2-g32-r32", "--devices", devices]].concat();
        let outcome = kv_eval(&[&args[..], &["--json", json.to_str().unwrap()]].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        report["runs"].as_array().unwrap().iter().map(|run| run["nll"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(ppl("one.json", "flex"), ppl("three.json", "flex:3"));
    let refuses = |devices: &str, more: &[&str], parts: &[&str]| {
        let args = ["ppl", "--model", AUSTEN, "--text", &text, "--devices", devices];
        assert_one_line(&kv_eval(&[&args[..], more].concat()), parts);
    };
    refuses("2", &[], &["--devices", "must start with a backend: flex:2"]);
    refuses("flex:0", &[], &["--devices", "at least one"]);
    refuses("flex:2", &["--backend", "flex"], &["--devices", "--backend"]);
    refuses("flex:900", &["--memory", "200M"], &["--memory allows 200.0 MB"]);
    #[cfg(feature = "wgpu")]
    refuses("wgpu:77", &[], &["devices wgpu:77: wgpu has devices 0 to"]);
    #[cfg(not(feature = "cuda"))]
    refuses("cuda:0-7", &[], &["cuda is not built into"]);
}
