//! The program with weights in 16 bits.
#![allow(clippy::print_stderr, reason = "a skipped test prints a note")]

use std::fs;

use serde_json::Value;

use crate::common::{Outcome, Workspace, kv_eval};

fn ppl(space: &Workspace, dtype: &str, more: &[&str]) -> Outcome {
    let (model, text) = (space.model(), space.text());
    let mut args =
        vec!["ppl", "--model", &model, "--text", &text, "--tokens", "150", "--dtype", dtype];
    args.extend(more);
    kv_eval(&args)
}

fn runs(outcome: &Outcome, json: &str) -> Vec<Value> {
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let report: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    report["runs"].as_array().unwrap().clone()
}

#[test]
fn perplexity_in_16_bits_is_close_and_takes_half_the_bytes() {
    let space = Workspace::new();
    let (json, folder) = (space.path("report.json"), space.path("report"));
    let more = ["--cache", "k4v4-g16-r16", "--json", &json, "--report", &folder];
    let wide = runs(&ppl(&space, "f32", &more), &json);
    let number = |run: &Value, field: &str| run[field].as_f64().unwrap();
    // The model's file is f32, and the logits differ by about 2^-8 and 2^-11.
    for (dtype, near) in [("bf16", 5e-3), ("f16", 5e-4)] {
        for mode in ["streaming", "parallel"] {
            let outcome = ppl(&space, dtype, &[&more[..], &["--mode", mode]].concat());
            let found = runs(&outcome, &json);
            assert!(outcome.stdout.contains(&format!("weights in {dtype}")), "{}", outcome.stdout);
            for (run, wide) in found.iter().zip(&wide) {
                assert_eq!((&run["dtype"], &wide["dtype"]), (&dtype.into(), &"f32".into()));
                assert_eq!(2.0 * number(run, "weight_bytes"), number(wide, "weight_bytes"));
                let difference = (number(run, "nll") - number(wide, "nll")).abs();
                assert!(difference > 0.0 && difference < near, "{dtype} {mode}: {difference}");
            }
            let error = |run: &Value| number(&run["layers"][1], "key_error");
            assert!((error(&found[1]) / error(&wide[1]) - 1.0).abs() < 0.05);
        }
    }
    // The auto type of an f32 file is f32.
    assert_eq!(runs(&ppl(&space, "auto", &more), &json)[0]["dtype"], "f32");
}

#[test]
fn generation_and_benchmarks_take_the_type() {
    let space = Workspace::new();
    let model = space.model();
    let generate = ["generate", "--model", &model, "--prompt", "a b", "--max-tokens", "5"];
    let outcome = kv_eval(&[&generate[..], &["--dtype", "bf16", "--cache", "float"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let decode = ["bench", "decode", "--model", &model, "--contexts", "16", "--samples", "1"];
    let outcome = kv_eval(&[&decode[..], &["--dtype", "bf16", "--cache", "float"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("in bf16"), "{}", outcome.stdout);
}

#[test]
fn an_unknown_type_is_one_line() {
    let space = Workspace::new();
    let outcome = ppl(&space, "bf17", &[]);
    assert_ne!(outcome.code, 0);
    let lines = outcome.error_lines();
    assert_eq!(lines.len(), 1, "{}", outcome.stderr);
    for part in ["--dtype", "bf17", "f32, f16, bf16 or auto"] {
        assert!(lines[0].contains(part), "{part:?} is not in {:?}", lines[0]);
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn wgpu_in_f16_has_the_numbers_of_flex() {
    let space = Workspace::new();
    let json = space.path("report.json");
    let more = |backend| ["--backend", backend, "--cache", "k4v4-g16-r16", "--json", &json];
    let outcome = ppl(&space, "f16", &more("wgpu"));
    if outcome.stderr.contains("unsupported dtype f16") {
        eprintln!("SKIPPED: {}", outcome.stderr);
        return;
    }
    let (wgpu, flex) = (runs(&outcome, &json), runs(&ppl(&space, "f16", &more("flex")), &json));
    for (run, near) in [(0, 3e-4), (1, 2e-3)] {
        let [a, b] = [&wgpu, &flex].map(|runs| runs[run]["nll"].as_f64().unwrap());
        assert!((a - b).abs() < near, "{a} and {b}");
    }
}

/// WebGPU has no bf16.
#[cfg(feature = "wgpu")]
#[test]
fn wgpu_without_the_type_is_one_line() {
    let space = Workspace::new();
    let outcome = ppl(&space, "bf16", &["--backend", "wgpu"]);
    assert_ne!(outcome.code, 0, "{}", outcome.stdout);
    let lines = outcome.error_lines();
    assert_eq!(lines.len(), 1, "{}", outcome.stderr);
    for part in ["unsupported dtype bf16", "the device does not support bf16"] {
        assert!(lines[0].contains(part), "{part:?} is not in {:?}", lines[0]);
    }
}
