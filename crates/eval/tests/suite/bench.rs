//! `kv-eval bench`: every benchmark runs, reports its points, and names a wrong argument.

use std::fs;

use serde_json::Value;

use crate::common::{Workspace, kv_eval};

/// Runs a benchmark with `--json` and returns the JSON.
#[track_caller]
fn bench(space: &Workspace, args: &[&str]) -> Value {
    let json = space.path("bench.json");
    let outcome = kv_eval(&[&["bench"], args, &["--samples", "2", "--json", &json]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("GB/s"), "the copy bandwidth is printed: {}", outcome.stdout);
    let report: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let target = if args.contains(&"wgpu") { "wgpu" } else { "flex" };
    assert_eq!(report["target"], target);
    assert!(report["copy_bandwidth"].as_f64().unwrap() > 1e8);
    report
}

#[track_caller]
fn assert_timing(timing: &Value) {
    let [low, median, high] = ["low", "median", "high"].map(|name| timing[name].as_f64().unwrap());
    assert!(0.0 < low && low <= median && median <= high, "{timing}");
}

/// Returns cache and context of every point.
fn points(report: &Value) -> Vec<(String, u64)> {
    let points = report["points"].as_array().unwrap().iter();
    points
        .map(|point| {
            let context = point.get("context").unwrap_or(&point["tokens"]);
            (point["cache"].as_str().unwrap().to_string(), context.as_u64().unwrap())
        })
        .collect()
}

#[test]
fn decode_attention_times_each_cache_at_each_context() {
    let space = Workspace::new();
    let plot = space.path("plot.svg");
    let mut args = vec!["decode-attention", "--contexts", "40,300", "--working-set", "1"];
    args.extend(["--cache", "float", "--cache", "k4v4", "--plot", &plot]);
    for more in [vec![], vec!["--batch", "2", "--heads", "4", "--kv-heads", "2", "--tokens", "3"]] {
        let report = bench(&space, &[args.clone(), more].concat());
        let expected = [("float", 40), ("k4v4", 40), ("float", 300), ("k4v4", 300)];
        assert_eq!(points(&report), expected.map(|(name, n)| (name.to_string(), n)));
        let bytes: Vec<u64> = report["points"]
            .as_array()
            .unwrap()
            .iter()
            .inspect(|point| assert_timing(&point["seconds"]))
            .map(|point| point["bytes_read"].as_u64().unwrap())
            .collect();
        // All of 40 tokens are in the residual; most of 300 are quantized.
        assert_eq!(bytes[0], bytes[1]);
        assert!(bytes[3] < bytes[2] * 2 / 3, "{bytes:?}");
    }
    assert!(fs::read_to_string(plot).unwrap().starts_with("<svg"));
}

#[test]
fn flush_times_steps_that_flush_keys_separately() {
    let space = Workspace::new();
    let args = ["flush", "--contexts", "64", "--cache", "float", "--cache", "k2v2-g16-r16"];
    let report = bench(&space, &args);
    let points = report["points"].as_array().unwrap();
    assert!(points[0]["append_flush"].is_null() && points[0]["step_flush"].is_null());
    for field in ["append", "append_flush", "step", "step_flush"] {
        assert_timing(&points[1][field]);
    }
    // Two periods of 16 steps were timed, with one flush in each.
    assert_eq!(points[1]["append_flush"]["samples"], 2);
    assert_eq!(points[1]["append"]["samples"], 30);
}

#[test]
fn quantize_covers_bits_and_sides() {
    let space = Workspace::new();
    let report =
        bench(&space, &["quantize", "--kv-heads", "2", "--tokens", "64", "--head-dim", "32"]);
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 6);
    for point in points {
        assert_eq!(point["float_bytes"], 4 * 2 * 64 * 32);
        assert_timing(&point["quantize"]);
        assert_timing(&point["dequantize"]);
    }
}

/// A small layer of sparse attention.
const SPARSE: [&str; 15] = [
    "sparse",
    "--heads",
    "4",
    "--head-dim",
    "64",
    "--rope-dim",
    "32",
    "--sliding-window",
    "8",
    "--index-heads",
    "4",
    "--index-head-dim",
    "32",
    "--top-k",
    "6",
];

#[test]
fn sparse_compares_selected_entries_with_all() {
    let space = Workspace::new();
    let formats = ["--entries", "f32,bf16,k4", "--keys", "f32,e4m3b,e2m1b"];
    // Two samples after two steps to warm up: the second completes a window of 4.
    let report = bench(&space, &[&SPARSE, &formats[..], &["--contexts", "64,300"]].concat());
    let points = report["points"].as_array().unwrap();
    let found: Vec<_> =
        points.iter().map(|p| format!("{} {} {}", p["entries"], p["keys"], p["context"])).collect();
    let at = |context| {
        [("f32", "f32"), ("bf16", "e4m3b"), ("k4", "e2m1b")]
            .map(|(entries, keys)| format!("{entries:?} {keys:?} {context}"))
    };
    assert_eq!(found, [at(64), at(300)].concat());
    // Bytes of a key of 32 channels: floats, bytes with a scale, and codes of 4 bits with a scale.
    let key_bytes = [32 * 4, 32 + 1, 16 + 1];
    for (point, bytes) in points.iter().zip(key_bytes.iter().cycle()) {
        for field in ["step", "step_completing", "dense", "index", "copy"] {
            assert_timing(&point[field]);
        }
        assert_eq!(point["step"]["samples"], 2);
        assert_eq!(point["step_completing"]["samples"], 1);
        let number = |name: &str| point[name].as_u64().unwrap();
        let n = number("n_entries");
        assert_eq!(n, number("context") / 4);
        assert!(number("key_bytes").abs_diff(bytes * n) <= n, "{point}");
        assert_eq!(number("bytes"), number("bytes_after"));
        assert_eq!(number("score_bytes"), 4 * n);
        let ratio = |name: &str| point[name].as_f64().unwrap();
        assert!(ratio("dense_over_step") > 0.0 && ratio("index_over_copy") > 0.0, "{point}");
    }
}

/// The peak of a step grows only by its scores, 4 bytes for each entry. The number of blocks does
/// not grow: `crates/kv-cubecl/tests/scratch.rs` counts them exactly. Here the queue by which calls
/// enter the thread pool allocates one block in 63 calls. One thread, because with several the
/// number also depends on scheduling.
#[test]
fn memory_of_sparse_steps_grows_by_their_scores_only() {
    let space = Workspace::new();
    let more = ["--contexts", "8192,65536", "--threads", "1"];
    for formats in [["--entries", "f32"], ["--entries", "k4"]] {
        let report = bench(&space, &[&SPARSE, &formats[..], &more].concat());
        let number = |i: usize, name: &str| report["points"][i][name].as_u64().unwrap();
        let grown = |name: &str| number(1, name) - number(0, name);
        assert!(number(1, "allocations").abs_diff(number(0, "allocations")) <= 1, "{report}");
        let (peak, scores) = (grown("peak_bytes"), grown("score_bytes"));
        assert!(peak <= scores + scores / 10, "{report}");
    }
}

#[test]
fn models_decode_and_prefill() {
    let space = Workspace::new();
    let model = space.model();
    for command in ["decode", "prefill"] {
        let caches = ["--cache", "float", "--cache", "k2v2-g16-r16"];
        let args = [command, "--model", &model, "--contexts", "20,60"];
        let report = bench(&space, &[&args[..], &caches].concat());
        assert_eq!(points(&report).len(), 4, "{command}");
    }
}

#[test]
fn llm_times_prompts_and_tokens_by_depth() {
    let space = Workspace::new();
    let (model, json) = (space.model(), space.path("llm.json"));
    let args = ["--model", &model, "--prompt", "20", "--generate", "50", "--depths", "0,30"];
    let more = ["--repetitions", "3", "--cache", "float", "--cache", "k2v2-g16-r16"];
    let outcome = kv_eval(&[&["bench", "llm", "--json", &json][..], &args, &more].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let report: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let points = report["points"].as_array().unwrap();
    let found: Vec<_> = points.iter().map(|p| format!("{} {}", p["test"], p["depth"])).collect();
    let at = |depth| ["pp20", "tg50"].map(|test| format!("\"{test}\" {depth}"));
    assert_eq!(found, [at(0), at(0), at(30), at(30)].concat());
    for point in points {
        let rate = |name: &str| point[name]["mean"].as_f64().unwrap();
        let (wall, forward) = (rate("tokens_per_second"), rate("forward_tokens_per_second"));
        assert!(0.0 < wall && wall <= forward, "{point}");
        let first = &point["first_token_seconds"];
        assert_eq!(first.is_null(), point["test"] == "tg50", "{point}");
        let longest = point["longest_step"]["over_median"].as_f64();
        assert_eq!(longest.is_some_and(|times| times >= 1.0), point["test"] == "tg50", "{point}");
    }
}

#[test]
fn decode_compares_batch_sizes() {
    let space = Workspace::new();
    let model = space.model();
    let args = ["decode", "--model", &model, "--contexts", "20,60", "--cache", "k2v2-g16-r16"];
    let report = bench(&space, &[&args[..], &["--batch", "1,5"]].concat());
    let points = report["points"].as_array().unwrap();
    let found: Vec<_> =
        points.iter().map(|p| (p["context"].as_u64(), p["batch"].as_u64())).collect();
    assert_eq!(
        found,
        [20, 20, 60, 60].map(Some).into_iter().zip([1, 5, 1, 5].map(Some)).collect::<Vec<_>>()
    );
    points.iter().for_each(|point| assert_timing(&point["seconds"]));
    assert!(points[1]["bytes_read"].as_u64() == points[0]["bytes_read"].as_u64().map(|n| 5 * n));
}

#[test]
fn contexts_are_within_the_models_limit_and_no_tokenizer_is_needed() {
    let space = Workspace::new();
    let model = space.model();
    fs::remove_file(space.path("model/tokenizer.json")).unwrap();
    let caches = ["--cache", "float", "--cache", "k2v2-g16-r16"];
    // The model has 512 positions; 2 samples and 2 warm-up steps need 4 of them.
    for (command, last) in [("decode", 508), ("prefill", 512)] {
        let report = bench(&space, &[&[command, "--model", &model][..], &caches].concat());
        let expected = ["float", "k2v2-g16-r16"].map(|name| (name.to_string(), last));
        assert_eq!(points(&report), expected, "{command}");
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn captured_steps_are_compared_with_launched_ones() {
    let space = Workspace::new();
    let (model, on) =
        (space.model(), ["--graph-capture", "--backend", "wgpu", "--cache", "k2v2-g16-r16"]);
    let args = ["decode", "--model", &model, "--contexts", "20,60"];
    let report = bench(&space, &[&args[..], &on].concat());
    let replayed = report["points"].as_array().unwrap().iter().map(|p| p["graph_capture"].clone());
    assert_eq!(replayed.collect::<Vec<_>>(), [false, true, false, true]);
    let args = ["decode-attention", "--contexts", "40", "--working-set", "0"];
    assert_eq!(points(&bench(&space, &[&args[..], &on].concat())).len(), 1);
}

/// Older scripts pass `--recorded`, which the help does not list.
#[test]
fn the_old_flag_of_graph_capture_is_read() {
    let space = Workspace::new();
    let model = space.model();
    for args in [
        vec!["llm", "--model", &model, "--depths", "0", "--cache", "float"],
        vec!["decode-attention", "--contexts", "40", "--working-set", "0"],
        vec!["decode", "--model", &model, "--contexts", "20", "--cache", "float"],
    ] {
        let [old, new] = ["--recorded", "--graph-capture"]
            .map(|flag| kv_eval(&[&["bench"], &args[..], &[flag]].concat()));
        let lines = new.error_lines();
        assert!(lines.len() == 1 && lines[0].contains("graph_capture true: flex"), "{lines:?}");
        assert_eq!((old.code, old.error_lines()), (new.code, lines), "{args:?}");
        let help = kv_eval(&["bench", args[0], "--help"]).stdout;
        assert!(help.contains("--graph-capture") && !help.contains("--recorded"), "{help}");
    }
}

#[test]
fn a_wrong_argument_is_named() {
    let space = Workspace::new();
    let model = space.model();
    for (args, part) in [
        (vec!["decode-attention", "--heads", "5"], "heads 5: must be a multiple of the 3 kv heads"),
        (vec!["decode-attention", "--samples", "0"], "samples 0: must be at least 1"),
        (vec!["decode-attention", "--contexts", "0"], "contexts 0: must be at least 1"),
        (vec!["flush", "--batch", "0"], "batch 0: must be at least 1"),
        (vec!["decode-attention", "--head-dim", "50", "--cache", "k2v2"], "head_dim"),
        (vec!["quantize", "--group-size", "5"], "group_size 5"),
        (vec!["sparse", "--contexts", "0"], "contexts 0: must be at least 1"),
        (vec!["sparse", "--contexts", "3"], "contexts 3: must be at least the ratio, 4"),
        (vec!["sparse", "--contexts", "99999999999"], "contexts 99999999999: must be at most"),
        (vec!["sparse", "--top-k", "0"], "top_k 0: must be at least 1"),
        (vec!["sparse", "--ratio", "0"], "ratio 0: must be at least 1"),
        (vec!["sparse", "--heads", "0"], "heads 0: must be at least 1"),
        (vec!["sparse", "--sliding-window", "0"], "sliding_window 0: must be at least 1"),
        (vec!["sparse", "--samples", "0"], "samples 0: must be at least 1"),
        (vec!["sparse", "--rope-dim", "7"], "rope_dim 7: must be even, from 2 to the 128"),
        (vec!["sparse", "--keys", "f32,bf16"], "keys f32,bf16: must be one format, or one for"),
        (vec!["sparse", "--entries", "k9"], "must be f32, f16, bf16 or one of k2"),
        (
            vec!["sparse", "--index-head-dim", "100", "--keys", "e4m3b"],
            "head_dim 100: must be a multiple of 32",
        ),
        (vec!["sparse", "--heads", "99999999999"], "must be below 2^32 elements"),
        (
            vec!["decode", "--model", &model, "--contexts", "20,21", "--cache", "float"],
            "must be above 0 and ascend",
        ),
        (
            vec![
                "decode",
                "--model",
                &model,
                "--contexts",
                "20",
                "--batch",
                "1,21",
                "--cache",
                "float",
            ],
            "batch 21: must be from 1 to the shortest context, 20",
        ),
        (vec!["decode-attention", "--graph-capture", "--tokens", "2"], "tokens 2: must be 1"),
        (
            vec!["llm", "--model", &model, "--generate", "49", "--cache", "float"],
            "generate 49: must be at least 50",
        ),
        (
            vec!["llm", "--model", &model, "--graph-capture", "--depths", "0", "--cache", "float"],
            "graph_capture true: flex cannot",
        ),
        (
            vec!["decode-attention", "--graph-capture", "--contexts", "40", "--working-set", "0"],
            "graph_capture true: flex cannot capture",
        ),
        (
            vec![
                "decode",
                "--graph-capture",
                "--model",
                &model,
                "--contexts",
                "20",
                "--cache",
                "float",
            ],
            "graph_capture true: flex cannot capture",
        ),
    ] {
        let outcome = kv_eval(&[&["bench"], &args[..]].concat());
        assert_ne!(outcome.code, 0, "{args:?}");
        let lines = outcome.error_lines();
        assert!(lines.len() == 1 && lines[0].contains(part), "{args:?}: {lines:?}");
    }
}

/// Caches that fit alone but not at once are refused. The estimated logits of an evaluation refuse
/// nothing.
#[test]
fn caches_that_do_not_fit_at_once_are_refused() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");
    let text = format!("{model}/heldout.txt");
    let bench = ["bench", "llm", "--model", model, "--memory", "7MB"];
    let caches = ["--cache", "float", "--cache", "k4v4", "--cache", "float-f16"];
    let outcome = kv_eval(&[&bench[..], &caches].concat());
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    let rule = "at once, but --memory is 7.0 MB; compare fewer caches";
    assert!(outcome.stderr.contains("cache = 3 caches: need 9.2 MB"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains(rule), "{}", outcome.stderr);
    let ppl = ["ppl", "--model", model, "--text", &text, "--tokens", "300", "--memory", "7MB"];
    let outcome = kv_eval(&ppl);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}
