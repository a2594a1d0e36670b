//! The program's errors: one line that names the wrong value.

use std::{fs, path::Path};

use crate::common::{Workspace, assert_one_line, kv_eval, ppl};

#[test]
fn missing_models_to_compare_are_named() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let with = |base: &str, tuned: &str, text: &str| {
        kv_eval(&["--base", base, "--tuned", tuned, "--text", text])
    };
    assert_one_line(&with("no-base", &model, &text), &["base no-base", "not found", "--base"]);
    assert_one_line(&with(&model, "no-tuned", &text), &["tuned no-tuned", "not found"]);
    assert_one_line(&with(&model, &model, "no-text"), &["text no-text", "not found"]);
}

#[test]
fn a_truncated_gguf_is_named() {
    let space = Workspace::new();
    let path = space.path("short.gguf");
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(7u64.to_le_bytes()); // tensors that are not there
    bytes.extend(1u64.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let outcome = kv_eval(&["ppl", "--model", &path, "--text", &space.text()]);
    assert_one_line(&outcome, &["short.gguf", "GGUF"]);
}

#[test]
fn unknown_missing_and_misshapen_weights_are_named() {
    let space = Workspace::new();
    space.rewrite_weights(|_, _| None);
    assert_one_line(&ppl(&space, &[]), &["model.safetensors"]);

    let space = Workspace::new();
    space.rewrite_weights(|name, data| {
        (name != "model.layers.1.mlp.up_proj.weight").then(|| (name.to_string(), data))
    });
    let parts = ["model.safetensors", "model.layers.1.mlp.up_proj.weight", "missing"];
    assert_one_line(&ppl(&space, &[]), &parts);

    let space = Workspace::new();
    space.rewrite_weights(|name, data| Some((format!("encoder.{name}"), data)));
    assert_one_line(&ppl(&space, &[]), &["model.safetensors", "encoder."]);
}

#[test]
fn nan_weights_are_named() {
    let space = Workspace::new();
    space.rewrite_weights(|name, mut data| {
        if name == "model.norm.weight" {
            data[3] = f32::NAN;
        }
        Some((name.to_string(), data))
    });
    assert_one_line(&ppl(&space, &[]), &["model.norm.weight", "NaN"]);
}

#[test]
fn a_wrong_head_size_is_named() {
    let space = Workspace::new();
    space.rewrite_config("\"head_dim\": 16", "\"head_dim\": 24");
    assert_one_line(&ppl(&space, &[]), &["[", "model.safetensors"]);
}

#[test]
fn caches_that_do_not_fit_are_named() {
    let space = Workspace::new();
    // The model's head_dim is 16.
    assert_one_line(&ppl(&space, &["--cache", "k2v2-g32"]), &["group_size 32", "head_dim 16"]);
    let uneven = ["--cache", "k4v4-g16-r40"];
    assert_one_line(&ppl(&space, &uneven), &["residual_length 40", "group_size 16"]);
    assert_one_line(
        &ppl(&space, &["--cache", "k5v2"]),
        &["k5v2", "2, 3, 4, 8, vn2", "or 16 for float"],
    );
    let twice = ["--cache", "k8v8-g16", "--cache", "k8v8-g16-r128"];
    assert_one_line(&ppl(&space, &twice), &["k8v8-g16", "twice"]);
}

#[test]
fn a_text_too_short_to_score_is_an_error() {
    let space = Workspace::new();
    for text in ["", "x"] {
        fs::write(space.text(), text).unwrap();
        assert_one_line(&ppl(&space, &[]), &["at least two tokens"]);
    }
    fs::write(space.text(), [0xff, 0xfe, 0x41]).unwrap();
    assert_one_line(&ppl(&space, &[]), &["text.txt"]);
}

#[test]
fn contexts_beyond_the_model_or_the_cache_are_errors() {
    let space = Workspace::new();
    // The model's limit is 512 positions.
    assert_one_line(&ppl(&space, &["--window", "513"]), &["513", "512"]);
    let model = space.model();
    let beyond = ["generate", "--model", &model, "--prompt", "Hello", "--capacity", "4"];
    assert_one_line(&kv_eval(&beyond), &["5", "capacity 4"]);
    for (args, rule) in [
        (["--window", "0"], "'--window <WINDOW>': must be at least 2"),
        (["--tokens", "1"], "'--tokens <TOKENS>': must be at least 2"),
    ] {
        assert_one_line(&ppl(&space, &args), &[rule]);
    }
    let none = ["generate", "--model", &model, "--prompt", "Hello", "--capacity", "0"];
    assert_one_line(&kv_eval(&none), &["'--capacity <CAPACITY>': must be at least 1"]);
}

#[test]
fn missing_files_are_named() {
    let space = Workspace::new();
    let text = space.text();
    let gone = kv_eval(&["ppl", "--model", "no-such-model", "--text", &text]);
    assert_one_line(&gone, &["no-such-model", "no such file"]);
    let gone = kv_eval(&["ppl", "--model", &space.model(), "--text", "no-such-text"]);
    assert_one_line(&gone, &["no-such-text"]);
    assert_one_line(&ppl(&space, &["--backend", "tpu"]), &["tpu", "flex, wgpu, cuda"]);
    let (model, folder) = (space.model(), space.path(""));
    let load = ["generate", "--model", &model, "--prompt", "a", "--load-cache", &folder];
    assert_one_line(&kv_eval(&load), &["load-cache ", "is a folder", "--save-cache"]);
}

/// The system's reason is given for a path that exists and cannot be read.
#[cfg(unix)]
#[test]
fn unreadable_models_are_not_called_missing() {
    let space = Workspace::new();
    let text = space.text();
    let inside = format!("{text}/model");
    let parts = ["text.txt/model: cannot read", "Not a directory"];
    assert_one_line(&kv_eval(&["ppl", "--model", &inside, "--text", &text]), &parts);
    assert_one_line(&kv_eval(&["--base", &inside, "--text", &text]), &parts);
    assert_one_line(&kv_eval(&["plan", "--model", &inside]), &parts);
    let config = Path::new(&space.model()).join("config.json");
    fs::remove_file(&config).unwrap();
    std::os::unix::fs::symlink("config.json", &config).unwrap();
    assert_one_line(&ppl(&space, &[]), &["config.json: cannot read", "symbolic links"]);
}

#[test]
fn a_broken_generation_config_is_named() {
    let space = Workspace::new();
    let path = Path::new(&space.model()).join("generation_config.json");
    for (text, why) in [
        ("{\"eos_token_id\": ", "EOF while parsing"),
        ("{\"eos_token_id\": \"</s>\"}", "eos_token_id = \"</s>\": must be a token id or a list"),
    ] {
        fs::write(&path, text).unwrap();
        assert_one_line(&ppl(&space, &[]), &["generation_config.json", why]);
    }
}

#[test]
fn files_that_cannot_be_written_are_named_before_the_run() {
    let space = Workspace::new();
    let (missing, folder, text) = (space.path("no/such.json"), space.path(""), space.text());
    // Outputs are checked before the missing model is noticed.
    let before = |args: &[&str], parts: &[&str]| {
        let start = ["--model", "no-such-model"];
        let args: Vec<&str> = args.iter().copied().chain(start).collect();
        assert_one_line(&kv_eval(&args), parts);
    };
    let ppl = ["ppl", "--text", &text];
    before(&[&ppl[..], &["--json", &missing]].concat(), &["json", "no/such.json", "cannot write"]);
    before(&[&ppl[..], &["--json", &folder]].concat(), &["json", "is a folder"]);
    before(&[&ppl[..], &["--report", &text]].concat(), &["report", "text.txt", "cannot write"]);
    let decode = ["bench", "decode"];
    before(&[&decode[..], &["--json", &missing]].concat(), &["json", "no/such.json"]);
    before(&[&decode[..], &["--plot", &missing]].concat(), &["plot", "no/such.json"]);
    // A run that fails later leaves no new file and does not change existing ones.
    let kept = space.path("kept.json");
    fs::write(&kept, "before").unwrap();
    before(&[&ppl[..], &["--json", &kept]].concat(), &["no-such-model"]);
    assert_eq!(fs::read_to_string(&kept).unwrap(), "before");
    let new = space.path("new.json");
    before(&[&ppl[..], &["--json", &new]].concat(), &["no-such-model"]);
    assert!(!fs::exists(&new).unwrap());
    let left: Vec<_> = fs::read_dir(space.path("")).unwrap().collect();
    assert_eq!(left.len(), 3, "model, text, kept.json: {left:?}");
}

#[test]
fn errors_suggest_the_nearest_name() {
    let outcome = kv_eval(&["ppl", "--backends", "x"]);
    assert_one_line(
        &outcome,
        &["unexpected argument '--backends'", "a similar argument exists: '--backend'"],
    );
    let outcome = kv_eval(&["generates"]);
    assert_one_line(&outcome, &["a similar subcommand exists: 'generate'"]);
}

#[test]
fn an_end_token_of_another_type_is_named_without_rust_types() {
    let space = Workspace::new();
    space.rewrite_config("\"eos_token_id\": 2", "\"eos_token_id\": \"two\"");
    assert_one_line(&ppl(&space, &[]), &["config.json", "must be a token id or a list of them"]);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_backend_that_is_not_built_in_names_its_feature() {
    let outcome = ppl(&Workspace::new(), &["--backend", "cuda"]);
    assert_one_line(&outcome, &["cuda", "--features cuda"]);
}

#[cfg(feature = "wgpu")]
#[test]
fn a_machine_without_a_device_is_an_error() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let args = ["ppl", "--model", &model, "--text", &text, "--backend", "wgpu"];
    let nowhere = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "__EGL_VENDOR_LIBRARY_FILENAMES"]
        .map(|name| (name, "/nonexistent"));
    assert_one_line(&crate::common::kv_eval_in(&args, &nowhere), &["wgpu: no device"]);
}

/// The check comes before the weights are read and uses --memory instead of the free memory.
#[test]
fn a_model_beyond_the_memory_limit_is_refused() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let commands = [
        vec!["generate", "--model", &model, "--prompt", "x", "--capacity", "500"],
        vec!["ppl", "--model", &model, "--text", &text],
        vec!["bench", "decode", "--model", &model, "--contexts", "64"],
        vec!["bench", "llm", "--model", &model, "--prompt", "64", "--generate", "50"],
    ];
    for command in commands {
        let outcome = kv_eval(&[&command[..], &["--memory", "100k"]].concat());
        assert_eq!(outcome.code, 1, "{command:?}: {}", outcome.stderr);
        let lines = outcome.error_lines();
        assert_eq!(lines.len(), 1, "{command:?}: {}", outcome.stderr);
        assert!(lines[0].starts_with("error: memory: "), "{command:?}: {}", lines[0]);
        assert!(
            lines[0].contains("but --memory allows 0.1 MB: weights"),
            "{command:?}: {}",
            lines[0]
        );
    }
    // With a limit above the weights, the error names a context that fits, and it loads.
    let of = |more: &[&str]| {
        let command = ["generate", "--model", &model, "--prompt", "x", "--max-tokens", "2"];
        kv_eval(&[&command[..], more].concat())
    };
    let outcome = of(&["--capacity", "500", "--memory", "1.2M"]);
    let line = outcome.error_lines().join(" ");
    let tokens = line.split_once("try a context of ").map(|(_, rest)| rest);
    let tokens = tokens.and_then(|rest| rest.split_once(" tokens")).map(|(tokens, _)| tokens);
    let tokens = tokens.unwrap_or_else(|| panic!("no advice in {line}"));
    let outcome = of(&["--capacity", tokens, "--memory", "1.2M"]);
    assert_eq!(outcome.code, 0, "{tokens}: {}", outcome.stderr);

    let outcome = of(&["--memory", "much"]);
    assert_eq!(outcome.code, 2);
    assert!(outcome.stderr.contains("is no size such as 8G"), "{}", outcome.stderr);
}
