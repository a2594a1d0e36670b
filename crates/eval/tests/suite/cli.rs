//! The program as users run it: results and output.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::common::{Workspace, assert_one_line, kv_eval, ppl};

#[test]
fn streaming_equals_parallel_and_the_report_is_complete() {
    let space = Workspace::new();
    let caches = ["--cache", "k8v8-g16-r16", "--cache", "k2v2-g16-r32-s3-after"];
    let mut reports = Vec::new();
    for mode in ["streaming", "parallel"] {
        let json = space.path(&format!("{mode}.json"));
        let mut args = vec!["--mode", mode, "--window", "90", "--tokens", "200", "--json", &json];
        args.extend(caches);
        let outcome = ppl(&space, &args);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("perplexity"));
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        assert!(report["command"].as_array().unwrap().iter().any(|arg| arg == "ppl"));
        assert!(report["versions"]["burn"].is_string() && report["device"].is_string());
        reports.push(report["runs"].as_array().unwrap().clone());
    }
    for (streamed, parallel) in reports[0].iter().zip(&reports[1]) {
        let number = |run: &serde_json::Value, field: &str| run[field].as_f64().unwrap();
        assert_eq!(streamed["cache"], parallel["cache"]);
        assert_eq!(
            (&streamed["mode"], &parallel["mode"]),
            (&"streaming".into(), &"parallel".into())
        );
        for run in [streamed, parallel] {
            // Windows of 90, 90 and 20 tokens score all but their first token.
            assert_eq!(run["tokens"], 197);
            assert!((number(run, "perplexity") - number(run, "nll").exp()).abs() < 1e-9);
            assert!(number(run, "seconds") > 0.0 && number(run, "nll_stderr") > 0.0);
            assert!(number(run, "kl_mean") <= number(run, "kl_p999"));
        }
        // The parallel form reports the bytes that the streaming cache allocated.
        assert_eq!(streamed["cache_bytes"], parallel["cache_bytes"]);
        // With a float cache only float noise; with 2 bits, also codes that flip at rounding edges.
        let bound = if streamed["cache"] == "float" { 1e-4 } else { 2e-2 };
        let difference = (number(streamed, "nll") - number(parallel, "nll")).abs();
        assert!(difference < bound, "{}: {difference}", streamed["cache"]);
    }
    let float = &reports[0][0];
    assert_eq!(float["cache"], "float");
    assert_eq!(float["cache_bytes"], float["float_cache_bytes"]);
    assert_eq!(float["kl_mean"], 0.0);
    assert!(reports[0][2]["kl_mean"].as_f64().unwrap() > 0.0, "two bits change something");
}

#[test]
fn a_sliding_window_is_evaluated_past_its_length() {
    let space = Workspace::new();
    let json = space.path("report.json");
    let within = ["--window", "90", "--tokens", "200", "--json", &json];
    let past = ["--window", "200", "--tokens", "200", "--json", &json];
    let nll = |args: &[&str]| {
        let outcome = ppl(&space, args);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        report["runs"][0]["nll"].as_f64().unwrap()
    };
    let full = [nll(&within), nll(&past)];
    space.rewrite_config(
        "\"max_position_embeddings\": 512",
        "\"max_position_embeddings\": 512, \"sliding_window\": 100",
    );
    assert_eq!(nll(&within), full[0]);
    assert_ne!(nll(&past), full[1]);
}

/// The files of a report with measured layers. The texts are too short for percentiles of the
/// divergence by position.
#[track_caller]
fn assert_report(folder: &str) {
    for name in ["quality", "position", "excess", "layers"] {
        let svg = fs::read_to_string(format!("{folder}/{name}.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
        assert!(
            fs::read(format!("{folder}/{name}.png")).unwrap().starts_with(b"\x89PNG"),
            "{name}"
        );
    }
    assert!(!Path::new(&format!("{folder}/divergence.svg")).exists());
    let page = fs::read_to_string(format!("{folder}/report.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 4);
    for outside in ["<script", "src=", "href=", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn a_report_folder_has_the_page_and_its_charts() {
    let space = Workspace::new();
    let folder = space.path("made/here");
    let args = ["--window", "90", "--tokens", "200", "--report", &folder];
    let caches = ["--cache", "k4v4-g16-r32", "--cache", "k2v2-g16-r32-s3"];
    let outcome = ppl(&space, &[&args[..], &caches].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("report.html"), "{}", outcome.stdout);
    assert_report(&folder);
    let page = fs::read_to_string(format!("{folder}/report.html")).unwrap();
    for part in ["k2v2-g16-r32-s3", "quantized from 32", "quantized from 35", "burn 0.", "--report"]
    {
        assert!(page.contains(part), "{part}");
    }

    // Without a quantized cache there are fewer charts.
    let folder = space.path("float");
    let outcome = ppl(&space, &["--tokens", "60", "--report", &folder]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(fs::exists(format!("{folder}/position.png")).unwrap());
    assert!(!fs::exists(format!("{folder}/layers.png")).unwrap());

    let file = space.text();
    assert_one_line(&ppl(&space, &["--tokens", "60", "--report", &file]), &["text.txt", "write"]);
}

#[test]
fn a_models_own_cache_is_the_default() {
    let space = Workspace::new();
    let (model, own) = (space.model(), "k2v2-g16-r32-s3");
    space.write_cache(&model);
    let outcome = ppl(&space, &["--tokens", "100"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains(own), "{}", outcome.stdout);
    assert!(outcome.stderr.contains("note: ") && outcome.stderr.contains("kv_cache.json"));
    let outcome = ppl(&space, &["--tokens", "100", "--cache", "k8v8-g16"]);
    assert!(!outcome.stdout.contains(own), "{}", outcome.stdout);
    assert!(!outcome.stderr.contains("note: "), "{}", outcome.stderr);

    let args = ["generate", "--model", &model, "--prompt", "Hello", "--max-tokens", "3"];
    assert!(kv_eval(&args).stderr.contains(&format!("cache {own}:")));
    let float = [&args[..], &["--cache", "float"]].concat();
    assert!(kv_eval(&float).stderr.contains("cache float:"));
}

#[test]
fn without_a_command_the_two_models_are_compared() {
    let space = Workspace::new();
    let (base, tuned) = (space.copy("base"), space.copy("tuned"));
    let (text, folder, json) = (space.text(), space.path("report"), space.path("report.json"));
    let mut args = vec!["--base", &base, "--tuned", &tuned, "--text", &text, "--tokens", "300"];
    args.extend(["--report", &folder, "--json", &json]);
    assert_one_line(&kv_eval(&args), &["tuned", "kv_cache.json"]);

    space.write_cache(&tuned);
    let outcome = kv_eval(&args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_report(&folder);
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let runs: Vec<(&str, &str)> = report["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| (run["model"].as_str().unwrap(), run["cache"].as_str().unwrap()))
        .collect();
    let expected = [
        ("base", "float"),
        ("base", "k4v4-g16-r32-s3"),
        ("base", "k2v2-g16-r32-s3"),
        ("tuned", "float"),
        ("tuned", "k2v2-g16-r32-s3"),
    ];
    assert_eq!(runs, expected);
    assert_eq!(report["window"], 300);
    // The table has a line per run.
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    for (model, cache) in expected {
        let row = |line: &&str| line.starts_with(model) && line.contains(&format!(" {cache} "));
        assert_eq!(lines.iter().copied().filter(row).count(), 1, "{}", outcome.stdout);
    }
    assert_eq!(lines.iter().filter(|line| line.contains("perplexity")).count(), 1);
}

#[test]
fn generation_streams_text_and_is_reproducible() {
    let space = Workspace::new();
    let model = space.model();
    let args = ["generate", "--model", &model, "--prompt", "Hello", "--max-tokens", "12"];
    let sampled = [&args[..], &["--temperature", "0.8", "--top-p", "0.9", "--seed", "5"]].concat();
    for args in [args.to_vec(), sampled] {
        let (first, second) = (kv_eval(&args), kv_eval(&args));
        assert_eq!(first.code, 0, "{}", first.stderr);
        assert_eq!(first.stdout, second.stdout);
        assert!(first.stderr.contains("prefill 5 tokens") && first.stderr.contains("decode"));
    }
}

/// The report names the number of compute threads, not of cores.
#[test]
fn threads_argument_sets_the_number_of_threads() {
    let space = Workspace::new();
    for (name, n) in [("--threads", "3"), ("-t", "5")] {
        let json = space.path("threads.json");
        let outcome = ppl(&space, &["--tokens", "40", "--json", &json, name, n]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        assert!(report.to_string().contains(&format!("cpu, {n} threads")), "{report}");
    }
    for n in ["0", "-1", "1000000", "many"] {
        let outcome = ppl(&space, &[&format!("--threads={n}")]);
        assert_eq!(outcome.code, 2, "{}", outcome.stderr);
        assert_one_line(&outcome, &["--threads", n]);
    }
}

#[test]
fn a_float_cache_with_a_window_is_not_the_float_cache() {
    let space = Workspace::new();
    let json = space.path("windows.json");
    let window = ["--window", "90", "--tokens", "90", "--cache", "float-w9", "--json", &json];
    assert_eq!(ppl(&space, &window).code, 0);
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let runs = report["runs"].as_array().unwrap();
    let names: Vec<_> = runs.iter().map(|run| run["cache"].as_str().unwrap()).collect();
    assert_eq!(names, ["float", "float-w9"]);
    assert_ne!(runs[0]["nll"], runs[1]["nll"]);
}

#[test]
fn a_hadamard_transform_in_the_weights_changes_no_text() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");
    let novel = std::fs::read_to_string(format!("{model}/heldout.txt")).unwrap();
    let prompt: String = novel.chars().take(600).collect();
    let text = |cache| {
        let args = ["--prompt", &prompt, "--max-tokens", "60", "--cache", cache];
        let outcome = kv_eval(&[&["generate", "--model", model][..], &args].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        outcome.stdout
    };
    assert!(text("k8v8-r32").len() > prompt.len() / 10);
    assert_eq!(text("k8v8-r32"), text("k8v8-r32-hadv"));
}

/// Runs the program with an input and standard output to `sink`. Returns exit code and errors.
#[cfg(unix)]
fn kv_eval_into(sink: impl Into<Stdio>, args: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
    let output = command.args(args).stdout(sink).stderr(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[cfg(unix)]
#[test]
fn a_closed_output_is_not_an_error() {
    let space = Workspace::new();
    let (model, text, json) = (space.model(), space.text(), space.path("report.json"));
    let closed = || std::io::pipe().unwrap().1;
    let args = ["ppl", "--model", &model, "--text", &text, "--tokens", "60", "--json", &json];
    assert_eq!(kv_eval_into(closed(), &args), (Some(0), String::new()));
    // The JSON file, which is not the closed output, was written.
    assert!(fs::read_to_string(&json).unwrap().contains("perplexity"));
    assert_eq!(kv_eval_into(closed(), &["--help"]), (Some(0), String::new()));
    let (code, errors) =
        kv_eval_into(closed(), &["generate", "--model", &model, "--prompt", "Hello"]);
    assert!(code == Some(0) && !errors.contains("panicked"), "{errors}");

    // A full disk is an error.
    if let Ok(full) = fs::File::options().write(true).open("/dev/full") {
        let (code, errors) = kv_eval_into(full, &args);
        assert_eq!(code, Some(1));
        assert!(errors.starts_with("error: standard output: cannot write"), "{errors}");
    }
}

#[test]
fn any_number_of_tokens_is_accepted() {
    let space = Workspace::new();
    let model = space.model();
    let most = usize::MAX.to_string();
    let args = ["generate", "--model", &model, "--prompt", "Hello", "--max-tokens", &most];
    let outcome = kv_eval(&args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    // The model's limit is 512 positions.
    assert!(outcome.stderr.contains("of 512 tokens"), "{}", outcome.stderr);
    let outcome = ppl(&space, &["--tokens", &most]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}

#[test]
fn dashes_are_standard_input_and_output() {
    let space = Workspace::new();
    let model = space.model();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
    command.args(["ppl", "--model", &model, "--text", "-", "--json", "-", "--tokens", "100"]);
    command.stdin(fs::File::open(space.text()).unwrap());
    let output = command.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["text"], &report["text_tokens"]), (&"standard input".into(), &100.into()));
    assert!(errors.contains("100 tokens of standard input") && errors.contains("perplexity"));

    let from_file = space.path("file.json");
    assert_eq!(ppl(&space, &["--tokens", "100", "--json", &from_file]).code, 0);
    let other: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(from_file).unwrap()).unwrap();
    assert_eq!(report["runs"][0]["nll"], other["runs"][0]["nll"]);
}

#[test]
fn another_name_of_the_float_cache_is_explained() {
    let space = Workspace::new();
    let caches = ["--tokens", "60", "--cache", "k16v16", "--cache", "k8v8-g16"];
    let outcome = ppl(&space, &caches);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("note: k16v16 is the float cache"), "{}", outcome.stderr);
    let outcome = ppl(&space, &["--tokens", "60", "--cache", "float"]);
    assert!(!outcome.stderr.contains("note"), "{}", outcome.stderr);
}

#[test]
fn a_model_is_named_after_its_file() {
    let space = Workspace::new();
    let named = space.copy("Tiny-1.5B");
    let outcome = kv_eval(&["ppl", "--model", &named, "--text", &space.text(), "--tokens", "40"]);
    assert!(outcome.stdout.starts_with("Tiny-1.5B on flex"), "{}", outcome.stdout);
}

#[test]
fn a_text_has_bits_per_byte() {
    let space = Workspace::new();
    let json = space.path("report.json");
    fs::write(space.text(), "Größe: ".repeat(30)).unwrap();
    assert_eq!(ppl(&space, &["--tokens", "90", "--json", &json]).code, 0);
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    // Every token of this tokenizer is a byte.
    assert_eq!((&report["text_tokens"], &report["text_bytes"]), (&90.into(), &90.into()));
    let run = &report["runs"][0];
    let bits = run["nll"].as_f64().unwrap() / 2f64.ln();
    assert!((run["bits_per_byte"].as_f64().unwrap() - bits).abs() < 1e-12);
}

/// The number of compute threads is printed, not the number of cores.
#[test]
fn the_threads_of_rayon_are_counted() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let args = ["ppl", "--model", &model, "--text", &text, "--tokens", "40"];
    let outcome = crate::common::kv_eval_in(&args, &[("RAYON_NUM_THREADS", "3")]);
    assert!(outcome.stdout.contains("(cpu, 3 threads)"), "{}", outcome.stdout);
}

#[test]
fn windows_overlap_by_the_stride() {
    let space = Workspace::new();
    let json = space.path("report.json");
    let args = ["--tokens", "200", "--window", "90", "--stride", "30", "--json", &json];
    let outcome = ppl(&space, &args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("in windows of 90 every 30, parallel"), "{}", outcome.stdout);
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!((&report["stride"], &report["runs"][0]["tokens"]), (&30.into(), &199.into()));
    assert_one_line(&ppl(&space, &["--window", "90", "--stride", "91"]), &["stride 91", "90"]);
}

#[cfg(feature = "wgpu")]
#[test]
fn wgpu_has_the_numbers_of_flex() {
    let space = Workspace::new();
    let mut runs = Vec::new();
    for backend in ["flex", "wgpu"] {
        let json = space.path(&format!("{backend}.json"));
        let args =
            ["--backend", backend, "--tokens", "60", "--cache", "k4v4-g16-r16", "--json", &json];
        for mode in ["streaming", "parallel"] {
            let outcome = ppl(&space, &[&args[..], &["--mode", mode]].concat());
            assert_eq!(outcome.code, 0, "{}", outcome.stderr);
            let report: serde_json::Value =
                serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
            runs.push(report["runs"].as_array().unwrap().clone());
        }
    }
    let nll = |i: usize, run: usize| runs[i][run]["nll"].as_f64().unwrap();
    for mode in 0..2 {
        // With a float cache only float noise; with 4 bits, also codes that flip at rounding edges.
        assert!((nll(mode, 0) - nll(mode + 2, 0)).abs() < 1e-4);
        assert!((nll(mode, 1) - nll(mode + 2, 1)).abs() < 2e-3);
    }
}
