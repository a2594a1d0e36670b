//! Eval windows with a begin-of-text token, compared with the transformers library; see
//! `crates/models/tests/fixtures/README.md`.

use std::{fs, path::Path};

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Mode, Plan, evaluate};
use kv_models::{LanguageModel, Loaded, load};
use serde_json::Value;

use crate::common::{Workspace, kv_eval};

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/bos").join(name)
}

fn expected() -> Value {
    serde_json::from_slice(&fs::read(fixture("expected.json")).unwrap()).unwrap()
}

/// Creates a workspace with the tiny Llama, its tokenizer, and a text.
fn workspace() -> (Workspace, Value) {
    let (space, expected) = (Workspace::new(), expected());
    fs::copy(fixture("tokenizer.json"), Path::new(&space.model()).join("tokenizer.json")).unwrap();
    fs::write(space.text(), expected["text"].as_str().unwrap()).unwrap();
    (space, expected)
}

fn nll(device: &On<Flex>, model: &LanguageModel, plan: &Plan) -> (f64, usize) {
    let run = evaluate(device, model, plan, |_| ()).unwrap().remove(0);
    assert_eq!(run.position_nll.iter().map(|at| at.tokens).sum::<usize>(), run.tokens);
    assert_eq!(run.position_nll[0].start, 1);
    (run.nll, run.tokens)
}

#[test]
fn windows_with_bos_have_the_scores_of_transformers() {
    let device = On::<Flex>::open().unwrap();
    let (space, expected) = workspace();
    let Loaded { model, tokenizer, .. } = load(space.model(), &device).unwrap();
    let tokenizer = tokenizer.unwrap();
    let ids = tokenizer.encode(expected["text"].as_str().unwrap()).unwrap();
    for case in expected["perplexities"].as_array().unwrap() {
        let number = |field: &str| case[field].as_u64().unwrap() as usize;
        for mode in [Mode::Parallel, Mode::Streaming] {
            let (window, tokens) = (number("window"), Some(number("tokens")));
            let float = KvCacheConfig::float();
            let plan = Plan::new(&model, mode, [float], ids.clone(), window, tokens).unwrap();
            let bos = tokenizer.bos().filter(|_| case["bos"].as_bool().unwrap());
            let plan = plan.with_bos(&model, bos).unwrap();
            assert_eq!(plan.window(), window, "{case}");
            let (nll, scored) = nll(&device, &model, &plan);
            assert_eq!((scored, plan.scored_tokens()), (number("scored"), scored), "{case}");
            let difference = (nll.exp() / case["nll"].as_f64().unwrap().exp() - 1.0).abs();
            assert!(difference < 1e-5, "{case} {mode}: {difference}");
        }
    }
}

#[test]
fn strides_score_every_token_once_after_bos() {
    let device = On::<Flex>::open().unwrap();
    let (space, _) = workspace();
    let model = load(space.model(), &device).unwrap().model;
    let ids: Vec<u32> = (0..100).map(|i| (i * i * 31 + i * 7) % 251).collect();
    let plan = |window| {
        Plan::new(&model, Mode::Parallel, [KvCacheConfig::float()], ids.clone(), window, None)
    };
    let whole = plan(200).unwrap().with_bos(&model, 1).unwrap();
    assert_eq!((whole.window(), whole.stride(), whole.scored_tokens()), (101, 100, 100));
    for stride in [1, 10, 39] {
        let plan = plan(40).unwrap().with_bos(&model, 1).unwrap().with_stride(stride).unwrap();
        assert_eq!(plan.scored_tokens(), 100, "{stride}");
    }
    // In a window of 101 every token sees all tokens before it, with any stride.
    let strided = whole.clone().with_stride(7).unwrap();
    let (a, b) = (nll(&device, &model, &whole), nll(&device, &model, &strided));
    assert!((a.0 - b.0).abs() < 1e-5 && a.1 == b.1, "{a:?} {b:?}");
    let plan = || plan(40).unwrap();
    for (result, message) in [
        (plan().with_bos(&model, 1).unwrap().with_stride(40), "stride 40: must be at least 1"),
        (plan().with_stride(40).unwrap().with_bos(&model, 1), "stride 40: must be at least 1"),
        (plan().with_bos(&model, 256), "token id 256: the model knows 256 tokens"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

fn run(space: &Workspace, more: &[&str]) -> (String, f64) {
    let (model, text, json) = (space.model(), space.text(), space.path("report.json"));
    let mut args = vec!["ppl", "--model", &model, "--text", &text, "--json", &json];
    args.extend(["--tokens", "400", "--window", "64"]);
    args.extend(more);
    let outcome = kv_eval(&args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let report: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    (outcome.stdout, report["runs"][0]["nll"].as_f64().unwrap())
}

#[test]
fn the_program_follows_the_files_and_its_arguments() {
    let (space, expected) = workspace();
    let nll = |i: usize| expected["perplexities"][i]["nll"].as_f64().unwrap();
    let (with, without) = (nll(1), nll(2));
    for (more, expected, note) in [
        (&[][..], with, "in windows of 64, parallel, BOS <s>"),
        (&["--bos"], with, "in windows of 64, parallel, BOS <s>"),
        (&["--no-bos"], without, "in windows of 64, parallel, no BOS"),
    ] {
        let (stdout, nll) = run(&space, more);
        assert!(stdout.contains(note), "{more:?}: {stdout}");
        assert!((nll - expected).abs() < 1e-5, "{more:?}: {nll}, not {expected}");
    }
    let config = Path::new(&space.model()).join("tokenizer_config.json");
    fs::write(config, r#"{"add_bos_token": false}"#).unwrap();
    assert!(run(&space, &[]).0.contains("no BOS"));
    let (model, text) = (space.model(), space.text());
    let outcome = kv_eval(&["ppl", "--model", &model, "--text", &text, "--bos"]);
    let message = "bos: the model's tokenizer has no begin-of-text token; run without --bos";
    assert!(outcome.stderr.contains(message), "{}", outcome.stderr);
}
