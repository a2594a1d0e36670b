//! Profiles of a device: its launches, and the steps that are replayed. Its memory.
#![cfg(feature = "wgpu")]

use std::fs;

use serde_json::Value;

use crate::{
    common::{Workspace, kv_eval},
    profile::{AUSTEN, Bar, Page, assert_near, generate, number, printed_speeds},
};

/// On a device: launches are named, run after they are issued and within the phase that waited for
/// them, and the device's time and its gaps are all there is between the first launch and the last.
#[test]
fn launches_of_a_device_are_on_the_hosts_clock() {
    let space = Workspace::new();
    let path = space.path("profile.html");
    let more = ["--backend", "wgpu", "--prompt-tokens", "100", "--max-tokens", "24"];
    let outcome = generate(AUSTEN, &path, &more);
    let page = Page::read(&path);
    let (prefill, decode) = printed_speeds(&outcome);
    let phases = page.table("Phases");
    // What is generated to compile kernels, beside the load, is neither.
    assert!(phases.contains_key("compile"));
    assert_eq!((&*phases["prefill"][0], &*phases["decode"][0]), ("1", "24"));
    assert_near(number(&phases["prefill"][1]) / 1e3, prefill, "prefill");
    assert_near(number(&phases["decode"][1]) / 1e3, decode, "decode");
    let clock = "<td>clock of the queue of main</td><td>the device&#39;s timestamps, within ";
    assert!(page.html.contains(clock), "no clock");
    assert!(page.html.contains("no launch begins before it is issued"));
    let bars = page.lane("queue of main");
    let (gaps, launches): (Vec<&Bar>, Vec<&Bar>) =
        bars.iter().partition(|bar| bar.name.starts_with("idle before "));
    assert!(!gaps.is_empty() && gaps.iter().all(|gap| gap.detail.contains("the host was")));
    let before: std::collections::BTreeSet<&str> =
        gaps.iter().map(|gap| gap.name.as_str()).collect();
    assert!(before.iter().any(|name| name.starts_with("idle before L0/")), "{before:?}");
    assert!(launches.iter().any(|bar| bar.name == "L1/attend" && bar.detail == "PartialAttention"));

    // Each step ends with a read of its logits, so that what it launched has run by then.
    let host = page.lane("main");
    let steps: Vec<&Bar> = host.iter().filter(|bar| bar.name.starts_with("decode_")).collect();
    assert_eq!(steps.len(), 24);
    let slack = 2.0;
    for (step, next) in steps.iter().zip(&steps[1..]) {
        let inside = launches.iter().filter(|bar| bar.start > step.start && bar.end < step.end);
        assert!(inside.count() > 20, "{}", step.name);
        let across = launches
            .iter()
            .filter(|bar| bar.start < step.end - slack && bar.end > next.start + slack);
        assert_eq!(across.count(), 0, "launches of {} run in {}", step.name, next.name);
    }

    // Sums by operation, by kernel and by bars drawn agree, and with the gaps fill the time.
    let kernels = number(&page.table("Kernels")["total"][1]);
    // Kernels are compiled beside the load, by a queue of their own.
    let compiled = page.lane("queue of compile");
    let compiled: Vec<&Bar> =
        compiled.iter().filter(|bar| !bar.name.starts_with("idle before ")).collect();
    let of_queues = [launches, compiled];
    let drawn: f64 = of_queues.iter().flatten().map(|bar| bar.end - bar.start).sum();
    assert_near(drawn, kernels, "launches");
    let idle = number(&page.table("Gaps between launches")["total"][1]);
    let spans = of_queues.iter().map(|launches| {
        let first = launches.iter().map(|bar| bar.start).fold(f64::INFINITY, f64::min);
        launches.iter().map(|bar| bar.end).fold(0.0, f64::max) - first
    });
    assert_near(kernels + idle, spans.sum(), "launches and gaps");
    let operations = page.table("Operations in decode");
    assert_eq!(operations["qkv"][4], operations["qkv"][0], "one launch each");
    let busy = number(&phases["decode"][8]);
    assert_near(number(&operations["total"][5]), busy, "launches of decoding");
    assert!(busy < number(&phases["decode"][1]), "busier than there was time");
}

/// A replayed step is one launch of many kernels that nothing observes: it is timed as a whole, so
/// that the device is not taken to be idle. The first step is launched instead, and replays are
/// divided among operations like it.
#[test]
fn replays_are_timed_as_a_whole() {
    let space = Workspace::new();
    let path = space.path("profile.html");
    let more =
        ["--backend", "wgpu", "--graph-capture", "--prompt-tokens", "20", "--max-tokens", "9"];
    generate(AUSTEN, &path, &more);
    let page = Page::read(&path);
    let operations = page.table("Operations in decode");
    let replay = &operations["replay"];
    // Of nine tokens, the prompt computes one, and one is launched.
    assert_eq!((number(&replay[0]), number(&replay[4])), (7.0, 7.0));
    assert_eq!(number(&operations["launched_step"][0]), 1.0);
    let parts = page.table("Replays in decode");
    for name in ["qkv", "attend", "mlp.gate_up", "mlp.down", "head"] {
        assert_eq!(parts[name][0], operations[name][5], "{name}");
        let share = number(&parts[name][0]) / number(&parts["total"][0]);
        assert!((number(&parts[name][1]) / 100.0 - share).abs() < 0.001, "{name}");
        assert!((number(&parts[name][2]) - share * number(&replay[5])).abs() < 0.01, "{name}");
    }
    assert!(number(&operations["qkv"][0]) == 3.0 && number(&operations["head"][0]) == 1.0);
    let busy = number(&replay[5]);
    let bars = page.lane("queue of main");
    let replays: Vec<&Bar> =
        bars.iter().filter(|bar| bar.name == "replay" && bar.detail == "replay").collect();
    let drawn: f64 = replays.iter().map(|bar| bar.end - bar.start).sum();
    assert_near(drawn, busy, "replays");
    // Each step has one. Its share of the step says how busy the machine is, but it cannot be
    // shorter than reading the weights once takes, at 100 GB/s, which is more than the few
    // processors that run these tests have.
    let weights = fs::metadata(format!("{AUSTEN}/model.safetensors")).unwrap().len();
    let at_least = weights as f64 / 100e9 * 1e3;
    let host = page.lane("main");
    let steps = host.iter().filter(|bar| bar.name.starts_with("decode_"));
    let by_step: Vec<Vec<f64>> = steps
        .map(|step| {
            let begun = replays.iter().filter(|bar| bar.start > step.start && bar.start < step.end);
            begun.map(|bar| bar.end - bar.start).collect()
        })
        .collect();
    let (last, replayed) = by_step.split_last().unwrap();
    // The first step is launched, and the last token is not computed on.
    assert_eq!((replayed.len(), replayed[0].len(), last.len()), (8, 0, 0), "{by_step:?}");
    for of_step in &replayed[1..] {
        assert!(of_step.len() == 1 && of_step[0] > at_least, "{at_least} ms of {by_step:?}");
    }
    assert!(page.html.contains("a replay is all of them as one"));
}

/// The caches of 64 texts and of one that reads prompts are 98 MB of a plan of 102 MB, so a plan
/// without one of its parts would be off by more than the pages that the allocator rounds up to.
#[test]
fn a_device_reserves_what_is_planned() {
    let space = Workspace::new();
    let prompts = space.path("prompts.txt");
    fs::write(&prompts, "She was\n".repeat(64)).unwrap();
    let args = ["generate", "--backend", "wgpu", "--model", AUSTEN, "--prompts", &prompts];
    let more = ["--no-chat", "--batch", "64", "--capacity", "1000", "-n", "2"];
    let outcome = kv_eval(&[&args[..], &more].concat());
    let line = outcome.stderr.lines().find_map(|line| line.strip_prefix("device memory: peak "));
    let (peak, planned) = line.unwrap().split_once(" MB, planned ").unwrap();
    let [peak, planned] = [peak, planned].map(|text| number(text.trim_end_matches(" MB")));
    assert!(planned > 98.0 && peak > planned && peak < 1.15 * planned, "{line:?}");

    // A benchmark of two sequences holds a third, which reads the text for each of them.
    let planned = ["1", "2"].map(|batch| {
        let json = space.path(batch);
        let args = ["bench", "decode", "--backend", "wgpu", "--model", AUSTEN, "--json", &json];
        let more = ["--contexts", "500", "--batch", batch, "--samples", "3", "--cache", "float"];
        let outcome = kv_eval(&[&args[..], &more].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("\ndevice memory: peak "), "{}", outcome.stdout);
        let json: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        let [peak, planned] = ["peak_bytes", "planned_bytes"]
            .map(|name| json["device_memory"][name].as_u64().unwrap());
        assert!(peak > planned, "{peak} {planned}");
        planned
    });
    let sequence = 500 * 1540; // the bytes of a token by `kv-eval plan`
    assert!(planned[1] - planned[0] > 2 * sequence, "{planned:?}");
}
