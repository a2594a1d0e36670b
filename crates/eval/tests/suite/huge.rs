//! Numbers that exceed any memory are refused in one line, without a panic or an allocation.
#![cfg(unix)]
use std::process::Command;

const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");
const WORLD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/world");
/// 2^64 - 1, a number whose bytes exceed any machine, one below 2^32, and one whose bytes exceed
/// the limit below.
const HUGE: [&str; 4] = ["18446744073709551615", "100000000000", "4000000000", "3000000"];

/// Runs the program with an address space of 3 GB.
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let limited = "ulimit -v 3000000; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", limited, "sh", env!("CARGO_BIN_EXE_kv-eval")])
        .args(args)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{args:?}: {}: {errors}", output.status);
    let lines: Vec<&str> = errors.lines().filter(|line| !line.starts_with("note: ")).collect();
    assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{args:?}: {errors}");
    assert!(parts.iter().all(|part| lines[0].contains(part)), "{args:?}: {errors}");
    // Rust types have braces, sentences do not.
    assert!(!lines[0].contains('{'), "{args:?}: {errors}");
}

#[test]
fn a_tensor_that_is_quantized() {
    for huge in HUGE {
        for option in ["--tokens", "--kv-heads", "--head-dim"] {
            refused(&["bench", "quantize", option, huge], &[]);
        }
    }
    refused(&["bench", "quantize", "--tokens", HUGE[0]], &["1 x 3 x 18446744073709551615 x 64"]);
    refused(&["bench", "quantize", "--tokens", HUGE[3]], &["memory: needs ", "ulimit -v"]);
}

#[test]
fn samples() {
    for huge in &HUGE[..3] {
        let parts = ["samples ", huge, "must be at most 1000000"];
        for bench in ["quantize", "frames", "decode-attention", "flush"] {
            refused(&["bench", bench, "--samples", huge], &parts);
        }
        for bench in ["decode", "prefill"] {
            refused(&["bench", bench, "--model", AUSTEN, "--samples", huge], &parts);
        }
        let llm = ["bench", "llm", "--model", AUSTEN, "--repetitions", huge];
        refused(&llm, &["repetitions", huge, "must be at most 1000000"]);
    }
}

#[test]
fn a_layer_and_its_contexts() {
    for huge in HUGE {
        for option in ["--contexts", "--batch", "--kv-heads", "--head-dim"] {
            let with_heads = ["--heads", if option == "--kv-heads" { huge } else { "9" }];
            for bench in ["decode-attention", "flush"] {
                refused(&[&["bench", bench, option, huge], &with_heads[..]].concat(), &[]);
            }
        }
        for option in ["--frames", "--tokens-per-frame", "--batch", "--heads", "--head-dim"] {
            refused(&["bench", "frames", option, huge], &[]);
        }
        refused(&["bench", "decode-attention", "--tokens", huge], &[]);
        refused(&["bench", "decode-attention", "--working-set", huge], &[]);
    }
}

#[test]
fn a_models_contexts() {
    for huge in &HUGE[..3] {
        // With its steps added, the first number wraps to a small one in 64 bits.
        let contexts = ["--contexts", &*format!("8,{huge}")];
        for bench in ["decode", "prefill"] {
            refused(&[&["bench", bench, "--model", AUSTEN], &contexts[..]].concat(), &[]);
        }
        for option in ["--prompt", "--generate", "--depths"] {
            refused(&["bench", "llm", "--model", AUSTEN, option, huge], &[]);
        }
        refused(&["bench", "decode", "--model", AUSTEN, "--batch", huge], &["batch"]);
    }
}

#[test]
fn games() {
    for huge in HUGE {
        for option in ["--frames", "--seeds", "--context"] {
            refused(&["world", "--model", WORLD, option, huge], &[]);
        }
    }
    for huge in &HUGE[..3] {
        refused(&["world", "--model", WORLD, "--sinks", huge], &[]);
    }
}

#[test]
fn a_search_and_a_plan() {
    let text = format!("{AUSTEN}/heldout.txt");
    for huge in &HUGE[..3] {
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("policy.toml");
        let out = ["--out", out.to_str().unwrap()];
        let search =
            ["search", "--model", AUSTEN, "--text", &text, "--bytes", "1M", "--base", "k4v4-r32"];
        for option in ["--context", "--window"] {
            refused(&[&search[..], &out, &[option, huge]].concat(), &[]);
        }
        for option in ["--context", "--frames"] {
            refused(&["plan", "--model", "GPT-2", "--memory", "1G", option, huge], &[]);
        }
    }
    // A batch below 2^32 has a row with the reason why it does not fit.
    for huge in &HUGE[..2] {
        refused(&["plan", "--model", "GPT-2", "--memory", "1G", "--batch", huge], &["batch"]);
    }
}
