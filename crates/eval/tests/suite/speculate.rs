//! Guessed tokens in `kv-eval generate` and `kv-eval bench llm`.

use std::fs;

use serde_json::Value;

use crate::{
    common::{Workspace, kv_eval},
    profile::AUSTEN,
};

const REPEATING: &str =
    "The evening passed quietly. The evening passed quietly. The evening passed";

fn reply(model: &str, more: &[&str]) -> Value {
    let args = ["generate", "-m", model, "--no-chat", "-p", REPEATING, "-n", "120", "--json"];
    let outcome = kv_eval(&[&args[..], more].concat());
    assert_eq!(outcome.code, 0, "{more:?}: {}", outcome.stderr);
    serde_json::from_str(&outcome.stdout).unwrap()
}

#[test]
fn guesses_change_no_text() {
    for cache in ["float", "k4v4-r32"] {
        let plain = reply(AUSTEN, &["--cache", cache, "--speculate", "never"]);
        assert!(plain["timings"].get("draft_n").is_none(), "{plain}");
        for more in [&["--speculate", "lookup"][..], &[], &["--draft-model", AUSTEN]] {
            let guessed = reply(AUSTEN, &[&["--cache", cache], more].concat());
            assert_eq!(guessed["text"], plain["text"], "{more:?}");
            assert_eq!(guessed["usage"], plain["usage"]);
            let count = |field: &str| guessed["timings"][field].as_u64().unwrap_or(0);
            assert!(count("draft_n") >= count("draft_n_accepted"), "{guessed}");
            assert!(count("draft_n_accepted") > 10, "{more:?}: {guessed}");
        }
    }
}

#[test]
fn wrong_draft_models_are_named() {
    let space = Workspace::new();
    let bytes = space.model();
    let refused = |model: &str, more: &[&str], parts: &[&str]| {
        let args = ["generate", "-m", model, "--no-chat", "-p", "x", "-n", "4"];
        let outcome = kv_eval(&[&args[..], more].concat());
        assert!(outcome.code != 0 && outcome.stdout.is_empty(), "{more:?}: {}", outcome.stderr);
        for part in parts {
            assert!(outcome.stderr.contains(part), "{part:?} is not in {}", outcome.stderr);
        }
    };
    refused(AUSTEN, &["--draft-model", &bytes], &["draft-model", "token 0 is", "same tokens"]);
    refused(AUSTEN, &["--draft-model", "/no/model"], &["/no/model", "no such"]);
    let both = ["--draft-model", AUSTEN, "--speculate", "never"];
    refused(AUSTEN, &both, &["--draft-model", "--speculate", "cannot be used"]);
    // Enough for the model alone.
    let small = ["-c", "1000", "--cache", "k4v4-r32", "--memory", "7MB", "--draft-model", AUSTEN];
    refused(AUSTEN, &small, &["needs 6.0 MB", "the rest of --memory"]);
    refused(AUSTEN, &["--speculate", "lookup", "--graph-capture"], &["graph"]);
}

#[test]
fn benchmarks_compare_texts_with_and_without_guesses() {
    let space = Workspace::new();
    let (text, json) = (space.path("text.txt"), space.path("llm.json"));
    fs::write(&text, REPEATING.repeat(30)).unwrap();
    let args = ["bench", "llm", "--model", AUSTEN, "--generate", "60", "--repetitions", "2"];
    let size = ["--depths", "100", "--prompt", "8", "--cache", "k4v4-r32", "--text", &text];
    let run = |more: &[&str]| kv_eval(&[&args[..], &size, more].concat());
    let outcome = run(&["--speculate", "lookup", "--json", &json]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("tg60 lookup"), "{}", outcome.stdout);
    let points: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let points = points["points"].as_array().unwrap();
    let tests: Vec<_> = points.iter().map(|point| point["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp8", "tg60", "tg60 lookup"]);
    assert!(points[1]["guesses"].is_null(), "{points:?}");
    let guesses = &points[2]["guesses"];
    // The text repeats itself, so nearly all guesses are right, whatever the model would pick.
    let [right, verified] = ["right", "verified"].map(|field| guesses[field].as_u64().unwrap());
    assert!(right >= 30 && right * 10 >= verified * 7, "{guesses}");
    fs::write(&text, REPEATING).unwrap();
    let short = run(&[]);
    assert!(
        short.code == 1 && short.stderr.contains("must have at least 161 tokens"),
        "{}",
        short.stderr
    );
}
