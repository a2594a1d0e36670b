//! `kv-eval plan`: its plans and errors, and the same rules in the commands that load a model.

use std::fs;

use burn::tensor::Device;
use kv_eval::planner::formats;
use kv_models::{LoadOptions, kv_weights};
use serde_json::Value;

use crate::common::{Outcome, Workspace, kv_eval};

fn device() -> Device {
    Device::flex()
}

fn packed() -> LoadOptions {
    LoadOptions::default().with_packed(Some(kv_weights::Activations::Int16))
}

fn json(space: &Workspace, args: &[&str]) -> Value {
    let path = space.path("plan.json");
    let all = [&["plan", "--json", &path], args].concat();
    let outcome = kv_eval(&all);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_program_plans_for_names_configurations_folders_and_files() {
    let space = Workspace::new();
    let (model, config) = (space.model(), format!("{}/config.json", space.model()));
    let args = ["--context", "64", "--memory", "1G", "--model"];
    let folder = json(&space, &[&args[..], &[&model]].concat());
    let file = json(&space, &[&args[..], &[&config]].concat());
    assert_eq!(folder["caches"], file["caches"]);
    assert_eq!(folder["weights"], file["weights"]);
    assert_eq!(folder["memory"]["usable"], 1_000_000_000);
    let names =
        folder["caches"].as_array().unwrap().iter().map(|row| row["cache"].as_str().unwrap());
    assert_eq!(
        names.collect::<Vec<_>>(),
        formats().iter().map(ToString::to_string).collect::<Vec<_>>()
    );
    // A folder without weights.
    let bare = space.path("bare");
    fs::create_dir(&bare).unwrap();
    fs::copy(&config, format!("{bare}/config.json")).unwrap();
    space.write_cache(&bare);
    let plan = json(&space, &[&args[..], &[&bare]].concat());
    assert_eq!(plan["weights"], folder["weights"]);
    assert_eq!(plan["caches"][0]["cache"], "k2v2-g16-r32-s3");

    let outcome = kv_eval(&["plan", "--model", "smollm2-135m", "--memory", "16G"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    for part in [
        "SmolLM2-135M",
        "4096 tokens of 8192",
        "BF16",
        "k2v2-f16",
        "longest context",
        "16.00 GB of memory (--memory)",
    ] {
        assert!(outcome.stdout.contains(part), "{part} in {}", outcome.stdout);
    }
    let plan = json(&space, &["--model", "GameRFT", "--frames", "60", "--memory", "3G"]);
    assert_eq!(plan["context"], 3840);
}

#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let outcome: Outcome = kv_eval(&[&["plan"], args].concat());
    let lines = outcome.error_lines();
    assert!(outcome.code != 0 && lines.len() == 1, "{} {}", outcome.stdout, outcome.stderr);
    for part in parts {
        assert!(lines[0].contains(part), "{part} in {}", lines[0]);
    }
}

#[test]
fn each_error_is_one_line() {
    let space = Workspace::new();
    let model = &space.model();
    refused(&["--model", "no-such"], &["no-such", "Llama-3.1-8B", "DeepSeek-V4-Pro"]);
    refused(&["--model", "GPT-2", "--revision", "main"], &["revision main"]);
    refused(
        &["--model", model, "--context", "1152921504606846976"],
        &["context 1152921504606846976", "512"],
    );
    refused(&["--model", model, "--batch", "1000000000000"], &["batch 1000000000000"]);
    refused(&["--model", model, "--frames", "3"], &["frames 3", "is not a model of frames"]);
    refused(
        &["--model", "GameRFT", "--frames", "1152921504606846976"],
        &["frames 1152921504606846976"],
    );
    refused(&["--model", model, "--cache", "k5v5"], &["k5v5"]);
    refused(&["--model", model, "--memory", "much"], &["much"]);
    let path = space.path("config.json");
    // Numbers whose product exceeds any file.
    let config = fs::read_to_string(format!("{model}/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    for field in ["hidden_size", "intermediate_size", "vocab_size"] {
        config[field] = (1u64 << 31).into();
    }
    fs::write(&path, config.to_string()).unwrap();
    refused(&["--model", &path], &["embed_tokens.weight", "2^40 bytes"]);
    fs::write(&path, "{\"model_type\": \"llama\"").unwrap();
    refused(&["--model", &path], &["config.json"]);
    fs::write(&path, "{\"model_type\": \"mamba\"}").unwrap();
    refused(&["--model", &path], &["mamba"]);
}

/// Other commands use the same arithmetic to refuse a model before they read a weight.
#[test]
fn models_that_cannot_fit_are_refused_before_they_are_allocated() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let refused = |args: &[&str], parts: &[&str]| {
        let outcome = kv_eval(&[args, &["--model", &model]].concat());
        let lines = outcome.error_lines();
        assert!(outcome.code != 0 && lines.len() == 1, "{} {}", outcome.stdout, outcome.stderr);
        assert!(parts.iter().all(|part| lines[0].contains(part)), "{parts:?} in {}", lines[0]);
    };
    let generate = ["generate", "--no-chat", "--prompt", "It is"];
    for capacity in ["513", "1152921504606846976"] {
        let rule = format!("capacity = {capacity}: must be at most 512, the positions that the");
        refused(&[&generate[..], &["--capacity", capacity]].concat(), &[&rule]);
    }
    let small = [&generate[..], &["--memory", "1M"]].concat();
    refused(&small, &["memory: ", "but --memory allows 1.0 MB: "]);
    refused(&["ppl", "--text", &text, "--memory", "1M"], &["memory: ", "but --memory allows"]);
    refused(&["ppl", "--text", &text, "--cache", "k5v5"], &["k5v5"]);
}

/// A model loads with exactly the memory of its plan, and fails with one byte less.
#[test]
fn a_plan_and_a_load_have_one_rule() {
    let space = Workspace::new();
    let model = space.model();
    let args = ["--model", &*model, "--cache", "k8v8-g16-r16", "--memory"];
    let plan = json(&space, &[&args[..], &["1G", "--context", "64"]].concat());
    let total = plan["caches"][0]["needs"]["total"].as_u64().unwrap();
    for (bytes, fits) in [(total, true), (total - 1, false)] {
        let memory = format!("{bytes}B");
        let plan = json(&space, &[&args[..], &[&memory, "--context", "64"]].concat());
        assert_eq!(plan["caches"][0]["fits"], fits, "{memory}");
        let run = ["generate", "--no-chat", "--prompt", "It", "--max-tokens", "2"];
        let run = [&run[..], &["--capacity", "64"], &args, &[&memory]].concat();
        let outcome = kv_eval(&run);
        assert_eq!(outcome.code == 0, fits, "{memory}: {}", outcome.stderr);
    }
}

/// Weights planned in a format have the size that `save_quantized` writes and loading keeps packed.
#[test]
fn planned_weights_have_the_size_of_quantized_ones() {
    use kv_models::{QuantizeOptions, kv_weights::WeightFormat, save_quantized};

    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models");
    let folder = tempfile::tempdir().unwrap();
    for (model, format, name) in [
        ("llama-tiny", "int4-g32", "int4"),
        ("llama-tiny", "int8-g32", "int8"),
        ("llama-tiny", "mxfp4", "mxfp4"),
        ("gpt2-tiny", "int4-g32", "int4"),
    ] {
        let path = format!("{golden}/{model}");
        let loaded = kv_models::load(&path, &device()).unwrap();
        let space = Workspace::new();
        let tokenizer = kv_models::load(space.model(), &device()).unwrap().tokenizer.unwrap();
        let out = folder.path().join(format!("{model}-{name}"));
        let format: WeightFormat = format.parse().unwrap();
        let options = QuantizeOptions::new([Some(format); 3]);
        save_quantized(&out, &loaded.model, &tokenizer, options).unwrap();
        let written = kv_models::load_with(&out, &device(), packed()).unwrap().model;
        let plan = json(&space, &["--model", &path, "--weights", name, "--memory", "1G"]);
        let types = plan["weights"].as_object().unwrap();
        let planned: u64 = types.values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(planned, written.weight_bytes() as u64, "{model} {name}: {types:?}");
        let in_format = written.weight_types().into_iter().find(|(kind, _)| *kind == format.name());
        assert_eq!(types[format.name()], in_format.unwrap().1, "{model} {name}");
    }
    refused(
        &["--model", "GPT-2", "--weights", "int3"],
        &["int3", "must be packed, restored, int4"],
    );
}

/// The example of the README: the authors' weights take all memory.
#[test]
fn a_named_model_that_does_not_fit_is_planned_in_a_smaller_format() {
    let space = Workspace::new();
    let args = ["--model", "Llama-3.1-8B", "--context", "32768", "--memory", "16G"];
    let plan = json(&space, &args);
    let fits =
        |plan: &Value| plan["caches"].as_array().unwrap().iter().any(|row| row["fits"] == true);
    assert!(fits(&plan), "{plan}");
    let note = plan["notes"].as_array().unwrap().iter().find_map(Value::as_str).unwrap();
    assert!(note.contains("16.06 GB") && note.contains("int8"), "{note}");
    // 8030261248 parameters in 9 bits, except the norms of 4096.
    let norms = 65 * 4096;
    let int8 = (8_030_261_248u64 - norms) / 32 * 36;
    assert_eq!(plan["weights"]["int8-g32"], int8);
    let given = json(&space, &[&args[..], &["--weights", "packed"]].concat());
    assert!(!fits(&given), "what is asked for is what is planned");
    let phi = ["--model", "Phi-4-mini", "--weights", "int4", "--memory", "16G"];
    let plan = json(&space, &phi);
    assert!(fits(&plan) && plan["notes"].as_array().unwrap().is_empty(), "{plan}");
}

/// An error for restored weights suggests packed ones if they fit.
#[test]
fn an_error_suggests_packed_weights_if_they_fit() {
    let space = Workspace::new();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models/llama-tiny");
    let loaded = kv_models::load(golden, &device()).unwrap();
    let own = kv_models::load(space.model(), &device()).unwrap();
    let out = space.path("int4");
    let int4 = Some("int4-g32".parse().unwrap());
    let options = kv_models::QuantizeOptions::new([int4; 3]);
    kv_models::save_quantized(&out, &loaded.model, &own.tokenizer.unwrap(), options).unwrap();
    let text = space.text();
    let ppl = ["ppl", "--model", &out, "--text", &text, "--tokens", "16", "--memory"];
    let whole = kv_eval(&[&ppl[..], &["100B"]].concat()).stderr;
    assert!(!whole.contains("--weights packed"), "{whole}");
    let restored = loaded.model.weight_bytes();
    let memory = format!("{restored}B");
    let outcome = kv_eval(&[&ppl[..], &[&memory]].concat());
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("try --weights packed (weights take "), "{}", outcome.stderr);
    let outcome = kv_eval(&[&ppl[..], &[&memory, "--weights", "packed"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}
