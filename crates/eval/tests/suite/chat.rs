//! Conversations with a model: the prompt, and the reason why an answer ends. SmolLM2 answers a
//! plain question.

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
};

use crate::common::{Outcome, Workspace, kv_eval};

/// One id per byte: a prompt has as many tokens as its text has bytes.
const TEMPLATE: &str =
    "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\\n{% endfor %}>";

fn with_template() -> Workspace {
    let space = Workspace::new();
    let config = format!(r#"{{"chat_template": "{TEMPLATE}"}}"#);
    fs::write(Path::new(&space.model()).join("tokenizer_config.json"), config).unwrap();
    space
}

fn generate(space: &Workspace, more: &[&str]) -> Outcome {
    let model = space.model();
    let mut args = vec!["generate", "--model", &model, "--max-tokens", "3"];
    args.extend(more);
    kv_eval(&args)
}

#[track_caller]
fn assert_printed(outcome: &Outcome, parts: &[&str]) {
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    for part in parts {
        assert!(outcome.stderr.contains(part), "{part:?} is not in {}", outcome.stderr);
    }
}

#[test]
fn the_template_is_used_if_the_model_has_one() {
    let (space, plain) = (with_template(), Workspace::new());
    let n = "[user] hi\n>".len();
    let by_default = generate(&space, &["--prompt", "hi"]);
    assert_printed(&by_default, &[&format!("prefill {n} tokens"), "--no-chat"]);
    let asked = generate(&space, &["--prompt", "hi", "--chat"]);
    assert_printed(&asked, &[&format!("prefill {n} tokens")]);
    assert!(!asked.stderr.contains("note"), "{}", asked.stderr);
    assert_eq!(asked.stdout, by_default.stdout);
    let n = "[system] be brief\n[user] hi\n>".len();
    let outcome = generate(&space, &["--prompt", "hi", "--system", "be brief"]);
    assert_printed(&outcome, &[&format!("prefill {n} tokens")]);

    let continued = generate(&space, &["--prompt", "hi", "--no-chat"]);
    assert_printed(&continued, &["prefill 2 tokens"]);
    assert_eq!(generate(&plain, &["--prompt", "hi"]).stdout, continued.stdout);
}

#[test]
fn the_reason_for_stopping_is_printed() {
    let space = with_template();
    let stops = |more: &[&str], reason: &str| {
        let all = [&["--prompt", "hi", "--no-chat"], more].concat();
        assert_printed(&generate(&space, &all), &[&format!("{reason};")]);
    };
    stops(&[], "reached --max-tokens (3)");
    stops(&["--capacity", "3"], "stopped by a full cache");
    // Every id is an end-of-text id.
    let all: Vec<String> = (0..256).map(|id| id.to_string()).collect();
    let config = format!(r#"{{"eos_token_id": [{}]}}"#, all.join(","));
    fs::write(Path::new(&space.model()).join("generation_config.json"), config).unwrap();
    stops(&[], "stopped by the end of the text");
}

#[test]
fn a_conversation_is_read_line_by_line() {
    let space = with_template();
    let input = space.path("lines.txt");
    fs::write(&input, "first\n\nsecond\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
    command.args(["generate", "--model", &space.model(), "--max-tokens", "1"]);
    let output = command.stdin(File::open(input).unwrap()).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors.matches("reached --max-tokens (1)").count(), 2, "{errors}");
    assert!(errors.contains(&format!("prefill {} tokens", "[user] first\n>".len())), "{errors}");
}

#[test]
fn errors_are_named() {
    let (space, plain) = (with_template(), Workspace::new());
    for (space, more, message) in [
        (
            &plain,
            &["--prompt", "hi", "--chat"][..],
            "chat: the model's files have no chat template",
        ),
        (&plain, &["--prompt", "hi", "--system", "x"], "system: the model's files have no"),
        (&plain, &[], "prompt: none given"),
        (&plain, &["--prompt", ""], "prompt: must have at least one token"),
        (&space, &["--prompt", "hi", "--prompt-tokens", "1"], "prompt-tokens: the model's chat"),
        (&space, &["--prompt", "hi", "--bos"], "bos: the model's chat template decides that"),
        (&space, &["--prompt", "hi", "--top-k", "5"], "top_k = 5: needs a temperature above 0"),
    ] {
        let outcome = generate(space, more);
        assert_eq!(outcome.code, 1, "{more:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(message), "{more:?}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    }
    let config = r#"{"chat_template": "{% if %}"}"#;
    fs::write(Path::new(&space.model()).join("tokenizer_config.json"), config).unwrap();
    let outcome = generate(&space, &["--prompt", "hi"]);
    assert!(outcome.stderr.contains("--no-chat") && outcome.stderr.contains("line 1"));
    assert_eq!(generate(&space, &["--prompt", "hi", "--no-chat"]).code, 0);
}

#[test]
fn a_text_is_read_only_up_to_the_requested_tokens() {
    let space = Workspace::new();
    let text = fs::read(space.text()).unwrap();
    // The byte that is not UTF-8 comes long after the requested tokens.
    let long = [&text.repeat(1000)[..], b"\xff"].concat();
    fs::write(space.text(), long).unwrap();
    let (model, text) = (space.model(), space.text());
    let ppl = |more: &[&str]| {
        let args = [&["ppl", "--model", &model, "--text", &text], more].concat();
        kv_eval(&args)
    };
    let outcome = ppl(&["--tokens", "60"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("60 tokens"));
    let outcome = ppl(&[]);
    assert!(outcome.stderr.contains("is not UTF-8; texts must be"), "{}", outcome.stderr);
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_knows_the_capital_of_france() {
    let default =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let model = std::env::var("KV_SMOLLM2").unwrap_or(default.into());
    let question = "What is the capital of France?";
    let outcome = kv_eval(&["generate", "--chat", "--model", &model, "--prompt", question]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("Paris"), "{}", outcome.stdout);
    // The number of tokens of transformers' `apply_chat_template`.
    assert!(outcome.stderr.contains("prefill 37 tokens"), "{}", outcome.stderr);
}
