//! A quantized cache compared with a float cache: the library's steps and the divergence of an
//! evaluation, and the program.

use std::path::Path;

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Mode, Plan, Twin, evaluate, twin};
use kv_models::LanguageModel;

use crate::common::{Workspace, kv_eval};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");
const TOKENS: usize = 96;

/// Returns the repository's model, and the first tokens of its text.
fn austen() -> (On<Flex>, LanguageModel, Vec<u32>) {
    let device = On::<Flex>::open().unwrap();
    let loaded = kv_models::load(Path::new(MODELS).join("austen"), &device).unwrap();
    let text = std::fs::read_to_string(Path::new(MODELS).join("austen/heldout.txt")).unwrap();
    let mut ids = loaded.tokenizer.unwrap().encode(&text).unwrap();
    ids.truncate(TOKENS + 1);
    (device, loaded.model, ids)
}

fn config(name: &str) -> KvCacheConfig {
    name.parse().unwrap()
}

fn run(name: &str, stop: Option<f64>) -> Twin {
    let (device, model, ids) = austen();
    twin(&device, &model, &ids[..TOKENS], config(name), stop, |_| ()).unwrap()
}

#[test]
fn a_float_twin_is_the_same() {
    let same = run("float", Some(0.0));
    assert_eq!(same.steps.len(), TOKENS);
    assert!(!same.stopped);
    for step in &same.steps {
        assert!(step.kl == 0.0 && step.same_top, "{step:?}");
        assert!(step.layers.iter().all(|&error| error == 0.0), "{step:?}");
    }
    let counters = |layer: &kv_eval::TwinLayer| layer.counters;
    assert!(same.layers.iter().map(counters).all(|c| c.keys.is_none() && c.values.is_none()));
}

/// `ppl` computes the same numbers from hidden states of whole windows and blocks of logits.
#[test]
fn steps_add_up_to_the_divergence_of_an_evaluation() {
    let (device, model, ids) = austen();
    for name in ["kint8vint8", "k2v2-g16-r16"] {
        let twin = run(name, None);
        let window = TOKENS + 1;
        let plan = Plan::new(&model, Mode::Streaming, [config(name)], ids.clone(), window, None);
        let runs = evaluate(&device, &model, &plan.unwrap(), |_| ()).unwrap();
        let (got, expected) = (twin.kl_mean(), runs[1].kl_mean);
        assert!((got - expected).abs() <= 1e-3 * expected + 1e-7, "{name}: {got} {expected}");
        let same = twin.steps.iter().filter(|step| step.same_top).count() as f64 / TOKENS as f64;
        assert!((same - runs[1].same_top).abs() < 1e-9, "{name}");
    }
}

#[test]
fn fewer_bits_have_larger_differences_in_every_layer() {
    let (near, far) = (run("kint8vint8", None), run("k2v2-g16-r16", None));
    for (near, far) in near.layers.iter().zip(&far.layers) {
        assert!(near.mean > 0.0 && far.mean > 5.0 * near.mean, "{near:?} {far:?}");
        assert!(near.largest >= near.mean, "{near:?}");
        // Steps read codes in place. Tests of kv-cubecl check the counts of restored bytes.
        for restored in [near.counters.restored, far.counters.restored] {
            let restored = restored.expect("steps are counted");
            assert_eq!((restored.keys, restored.values), (0, 0));
        }
        for counters in [near.counters.keys, near.counters.values] {
            let counters = counters.unwrap();
            // Each token's largest number has the largest code.
            let least = 1.0 / 64.0 / 4.0;
            assert!(counters.extreme >= least && counters.extreme < 0.5, "{counters:?}");
            assert!(counters.scale_min > 0.0 && counters.scale_min <= counters.scale_max);
            assert!(counters.scale_mean >= f64::from(counters.scale_min), "{counters:?}");
        }
    }
    // The largest error of a layer is the error of the step of its token.
    let layer = &far.layers[0];
    assert_eq!(far.steps[layer.largest_at].layers[0], layer.largest);
    // With 2 bits, nothing is quantized before the residual of 16 is full.
    assert!(far.steps[..15].iter().all(|step| step.kl == 0.0));
}

#[test]
fn the_first_step_beyond_the_threshold_is_the_last() {
    let whole = run("k2v2-g16-r16", None);
    let stop = whole.kl_mean();
    let first = whole.steps.iter().position(|step| f64::from(step.kl) > stop).unwrap();
    let stopped = run("k2v2-g16-r16", Some(stop));
    assert!(stopped.stopped && !whole.stopped);
    assert_eq!(stopped.steps.len(), first + 1);
    assert!(stopped.to_string().contains(&format!("stopped at token {first}")));
}

/// Logits that are not finite are an error that names the token, because JSON has no such numbers.
#[test]
fn logits_that_are_not_finite_are_an_error() {
    let workspace = Workspace::new();
    // The weights are finite, but they scale activations with a mean square of 1, and the larger
    // ones become infinite.
    workspace.rewrite_weights(|name, mut values| {
        if name == "model.norm.weight" {
            values.fill(3e38);
        }
        Some((name.into(), values))
    });
    let (model, text) = (workspace.path("model"), workspace.path("text.txt"));
    let args = ["twin", "--model", &model, "--text", &text, "--cache", "kint8vint8"];
    let outcome = kv_eval(&[&args[..], &["--tokens", "4", "--json", "-"]].concat());
    assert_ne!(outcome.code, 0, "{}", outcome.stdout);
    let lines = outcome.error_lines().join("\n");
    assert!(lines.contains("run float: token 0 has"), "{lines}");
    assert!(lines.contains("which is not finite"), "{lines}");
    assert!(!outcome.stdout.contains("null"), "{}", outcome.stdout);
}

#[test]
fn the_program_prints_and_writes_its_results() {
    let workspace = Workspace::new();
    let (model, text) = (workspace.path("model"), workspace.path("text.txt"));
    let args = ["twin", "--model", &model, "--text", &text, "--cache", "kint8vint8"];
    let outcome = kv_eval(&[&args[..], &["--tokens", "20", "--json", "-"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("kint8vint8 beside float, 20 steps"), "{}", outcome.stderr);
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(json["steps"].as_array().unwrap().len(), 20);
    assert!(json["layers"][0]["counters"]["keys"]["scale_mean"].as_f64().unwrap() > 0.0);
    assert_eq!(json["layers"][0]["counters"]["restored"]["keys"], 0);
    assert!(outcome.stderr.contains("restored bytes"), "{}", outcome.stderr);

    let outcome = kv_eval(&[&args[..], &["--stop", "-1"]].concat());
    assert_ne!(outcome.code, 0);
    let lines = outcome.error_lines().join("\n");
    assert!(lines.contains("must be a divergence in nats, 0 or more"), "{lines}");
}

/// The number of tokens is clamped to the model's limit, with a note.
#[test]
fn tokens_beyond_the_models_limit_are_left_out() {
    let workspace = Workspace::new();
    let (model, text) = (workspace.path("model"), workspace.path("text.txt"));
    workspace.rewrite_config("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 24");
    let args = ["twin", "--model", &model, "--text", &text, "--cache", "kint8vint8"];
    for tokens in ["99999", "18446744073709551615"] {
        let outcome = kv_eval(&[&args[..], &["--tokens", tokens]].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("kint8vint8 beside float, 24 steps"), "{}", outcome.stdout);
        let note = format!("note: the model has 24 positions, fewer than --tokens {tokens}");
        assert!(outcome.stderr.contains(&note), "{}", outcome.stderr);
    }
}
