//! `kv-eval generate` with a cache of another run.

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
};

use crate::common::{Outcome, Workspace, kv_eval};

fn generate(space: &Workspace, more: &[&str]) -> Outcome {
    let model = space.model();
    let mut args = vec!["generate", "--model", &model, "--no-chat"];
    if !more.contains(&"--max-tokens") {
        args.extend(["--max-tokens", "6"]);
    }
    args.extend(more);
    kv_eval(&args)
}

#[track_caller]
fn succeeds(outcome: Outcome) -> Outcome {
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    outcome
}

#[track_caller]
fn refused(outcome: &Outcome, parts: &[&str]) {
    let lines = outcome.error_lines();
    assert!(outcome.code != 0 && lines.len() == 1, "{} {}", outcome.stdout, outcome.stderr);
    assert!(outcome.stdout.is_empty(), "{}", outcome.stdout);
    for part in parts {
        assert!(lines[0].contains(part), "{part:?} in {}", lines[0]);
    }
}

const PREFIX: &str = "It is a truth universally acknowledged, that a single man";
const PROMPT: &str =
    "It is a truth universally acknowledged, that a single man in possession of a fortune";

#[test]
fn another_run_continues_from_the_prefix() {
    let space = Workspace::new();
    for cache in ["float", "k4v2-g16-r16-s3"] {
        let file = &space.path("prefix.safetensors");
        let whole = succeeds(generate(&space, &["--cache", cache, "--prompt", PROMPT]));
        let args =
            ["--cache", cache, "--prompt", PREFIX, "--max-tokens", "1", "--save-cache", file];
        let saved = succeeds(generate(&space, &args));
        let message = format!("saved the cache of {} tokens", PREFIX.len());
        assert!(saved.stderr.contains(&message), "{}", saved.stderr);
        let args = ["--cache", cache, "--prompt", PROMPT, "--load-cache", file];
        let loaded = succeeds(generate(&space, &args));
        assert_eq!(loaded.stdout, whole.stdout, "{cache}");
        let rest = format!("prefill {} tokens", PROMPT.len() - PREFIX.len());
        assert!(loaded.stderr.contains(&rest), "{}", loaded.stderr);
        let reused = format!("reused {} of {} prompt tokens", PREFIX.len(), PROMPT.len());
        assert!(loaded.stderr.contains(&reused), "{}", loaded.stderr);
        // The same file can be saved again: the prompt, and its reply with --save-reply.
        let more =
            ["--cache", cache, "--prompt", PROMPT, "--load-cache", file, "--save-cache", file];
        let capacity = ["--capacity", "300"];
        let again = [&more[..], &capacity].concat();
        for (again, n) in [(again.clone(), 0), ([&again[..], &["--save-reply"]].concat(), 5)] {
            let again = succeeds(generate(&space, &again));
            assert_eq!(again.stdout, whole.stdout, "{cache}");
            let message = format!("saved the cache of {} tokens", PROMPT.len() + n);
            assert!(again.stderr.contains(&message), "{}", again.stderr);
        }
    }
}

/// A document is processed once. Each question computes only its own tokens, even if repeated.
#[test]
fn prompts_reuse_the_prefix_shared_with_the_cache() {
    let space = Workspace::new();
    for cache in ["float", "k4v2-g16-r16-s3", "k2v2-g16-r16", "kint8vint8", "float-w20"] {
        let file = &space.path("document.safetensors");
        let run = |prompt: &str, more: &[&str]| {
            let args = [&["--cache", cache, "--prompt", prompt], more].concat();
            succeeds(generate(&space, &args))
        };
        let saved = run(PREFIX, &["--max-tokens", "0", "--save-cache", file]);
        assert_eq!(saved.stdout, "", "nothing was asked for");
        let message = format!("saved the cache of {} tokens", PREFIX.len());
        assert!(saved.stderr.contains(&message), "{}", saved.stderr);
        assert!(saved.stderr.contains("reached --max-tokens (0); prefill"), "{}", saved.stderr);
        let n = PREFIX.len();
        // A quantized cache is cut back to 16 tokens before the end of the saved tokens.
        let quantizes = !["float", "kint8vint8"].contains(&cache);
        let questions = [
            (PROMPT.to_string(), n),
            (format!("{PREFIX} who?"), n),
            (PREFIX.to_string(), if quantizes { n - 16 } else { n - 1 }),
            (format!("{} woman?", &PREFIX[..n - 3]), if quantizes { n - 16 } else { n - 3 }),
        ];
        for (question, reused) in &questions {
            let message = format!("reused {reused} of {} prompt tokens", question.len());
            let loaded = run(question, &["--load-cache", file]);
            assert!(loaded.stderr.contains(&message), "{cache} {question}: {}", loaded.stderr);
            let computed = format!("prefill {} tokens", question.len() - reused);
            assert!(loaded.stderr.contains(&computed), "{cache} {question}: {}", loaded.stderr);
            assert_eq!(loaded.stdout, run(question, &[]).stdout, "{cache} {question}");
            // Penalties include reused tokens.
            let penalty = ["--repeat-penalty", "3", "--presence-penalty", "1.5"];
            let loaded = run(question, &[&["--load-cache", file], &penalty[..]].concat());
            assert_eq!(loaded.stdout, run(question, &penalty).stdout, "{cache} {question}");
        }
        let other = run("Of another text", &["--load-cache", file]);
        assert!(other.stderr.contains("reused 0 of 15 prompt tokens"), "{}", other.stderr);
    }
}

/// A conversation in two runs has the answers of a single run.
#[test]
fn a_conversation_continues_in_another_run() {
    let space = Workspace::new();
    let template = "{% for turn in messages %}[{{ turn.role }}: {{ turn.content }}]{% endfor %}";
    let config = serde_json::json!({ "chat_template": template });
    fs::write(Path::new(&space.model()).join("tokenizer_config.json"), config.to_string()).unwrap();
    let talk = |lines: &str, more: &[&str]| {
        let input = space.path("lines.txt");
        fs::write(&input, lines).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
        command.args(["generate", "--model", &space.model(), "--max-tokens", "6", "--json"]);
        command.args(["--cache", "k4v4-g8-r16"]).args(more);
        let output = command.stdin(File::open(input).unwrap()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        let answers = String::from_utf8(output.stdout).unwrap();
        let answers = answers.lines().map(|line| {
            let answer: serde_json::Value = serde_json::from_str(line).unwrap();
            answer["text"].as_str().unwrap().to_string()
        });
        (answers.collect::<Vec<_>>(), errors)
    };
    let (whole, _) = talk("first\nsecond\nthird\n", &["--system", "be brief"]);
    assert_eq!(whole.len(), 3);
    for more in [&[][..], &["--save-reply"]] {
        let file = &space.path("talk.safetensors");
        let saves = [&["--system", "be brief", "--save-cache", file], more].concat();
        let (answers, _) = talk("first\nsecond\n", &saves);
        assert_eq!(answers, whole[..2]);
        let (answers, errors) = talk("third\n", &["--load-cache", file]);
        assert_eq!(answers, whole[2..]);
        assert!(errors.contains("continuing a conversation of 5 messages"), "{errors}");
        assert!(!errors.contains("reused 0 of"), "{errors}");
        let (same, _) = talk("third\n", &["--load-cache", file, "--system", "be brief"]);
        assert_eq!(same, answers);
        let other = generate(&space, &["--load-cache", file, "--system", "be long"]);
        assert_ne!(other.code, 0, "{}", other.stderr);
    }
}

#[test]
fn mismatches_are_one_line_before_anything_is_generated() {
    let space = Workspace::new();
    let file = &space.path("prefix.safetensors");
    let save = ["--prompt", PREFIX, "--save-cache", file, "--save-reply"];
    succeeds(generate(&space, &save));
    let load = |more: &[&str]| generate(&space, &[&["--load-cache", file], more].concat());
    let cache = ["--prompt", PROMPT, "--cache", "k4v4-g16-r16"];
    let parts = ["prefix.safetensors", "saved with --cache float", "layers.0.cache = float"];
    refused(&load(&cache), &parts);
    let half = ["--prompt", PROMPT, "--dtype", "bf16"];
    refused(&load(&half), &["weights = f32", "bf16 weights", "the same --weights and --dtype"]);
    refused(&load(&["--prompt", PROMPT, "--capacity", "20"]), &["capacity = 20", "62 tokens"]);
    let two = ["--prompt", PROMPT, "--prompt", PREFIX];
    refused(&load(&two), &["load-cache", "holds one text"]);
    refused(&load(&["--prompt", PROMPT, "--memory", "1000B"]), &["memory: "]);

    // The same model in another folder.
    let tuned = space.copy("tuned");
    let tuned =
        ["generate", "--model", &tuned, "--no-chat", "--prompt", PROMPT, "--load-cache", file];
    assert_eq!(kv_eval(&tuned).code, 0, "a copy of the model is the model");

    let whole = fs::read(file).unwrap();
    fs::write(file, &whole[..whole.len() - 1]).unwrap();
    refused(&load(&["--prompt", PROMPT]), &["not a readable saved cache file"]);
    let mut changed = whole.clone();
    let middle = whole.len() / 2;
    changed[middle] ^= 4;
    fs::write(file, &changed).unwrap();
    refused(&load(&["--prompt", PROMPT]), &["has another checksum"]);
    let none = &space.path("none");
    refused(&generate(&space, &["--prompt", PROMPT, "--load-cache", none]), &["none: not found"]);
    refused(&generate(&space, &["--prompt", PROMPT, "--save-cache", "-"]), &["save-cache -"]);
    let folder = &space.path("other");
    fs::create_dir(folder).unwrap();
    refused(
        &generate(&space, &["--prompt", PROMPT, "--save-cache", folder]),
        &["save-cache", "folder"],
    );
    let beyond = &space.path("no/such/file");
    refused(&generate(&space, &["--prompt", PROMPT, "--save-cache", beyond]), &["cannot write"]);
    assert!(!Path::new(beyond).exists());
}

/// A path that is not a regular file is refused before anything is generated.
#[cfg(unix)]
#[test]
fn a_cache_is_saved_only_to_regular_files() {
    let space = Workspace::new();
    let saves = ["--prompt", PROMPT, "--save-cache", "/dev/null"];
    refused(&generate(&space, &saves), &["save-cache /dev/null: must be a regular file"]);
    let pipe = &space.path("pipe");
    assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
    let saves = ["--prompt", PROMPT, "--save-cache", pipe];
    refused(&generate(&space, &saves), &["save-cache", "pipe: must be a regular file"]);
}

#[test]
fn a_cache_replaces_a_saved_cache_and_no_other_file() {
    let space = Workspace::new();
    let file = &space.path("notes.txt");
    let save = || generate(&space, &["--prompt", PROMPT, "--save-cache", file]);
    for (before, replaces) in [("", true), ("notes", false)] {
        fs::write(file, before).unwrap();
        match replaces {
            true => drop(succeeds(save())),
            false => refused(&save(), &["save-cache", "holds no cache", "name another"]),
        }
    }
    assert_eq!(fs::read_to_string(file).unwrap(), "notes");
    let model = &format!("{}/model.safetensors", space.model());
    let copy = &space.path("weights.safetensors");
    fs::copy(model, copy).unwrap();
    refused(&generate(&space, &["--prompt", PROMPT, "--save-cache", copy]), &["holds no cache"]);
    let saved = &space.path("saved");
    for _ in 0..2 {
        succeeds(generate(&space, &["--prompt", PROMPT, "--save-cache", saved]));
    }
}

/// The first turn is saved if the second one does not fit, with templates that repeat earlier
/// messages or not.
#[test]
fn a_turn_that_fails_keeps_the_previous_ones() {
    let turn = "[{{ turn.content }}]";
    for turn in [turn, &format!("{{% if loop.last %}}{turn}{{% endif %}}")] {
        let space = Workspace::new();
        let template = format!("{{% for turn in messages %}}{turn}{{% endfor %}}");
        let config = serde_json::json!({ "chat_template": template });
        let path = Path::new(&space.model()).join("tokenizer_config.json");
        fs::write(path, config.to_string()).unwrap();
        let (input, file) = (space.path("lines.txt"), space.path("turns.safetensors"));
        let long = "and so on, ".repeat(10);
        fs::write(&input, format!("first\n{long}\n")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
        command.args(["generate", "--model", &space.model(), "--max-tokens", "1"]);
        command.args(["--capacity", "40", "--save-cache", &file]);
        let output = command.stdin(File::open(input).unwrap()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{template}: {errors}");
        let message = format!("saved the cache of {} tokens", "[first]".len());
        assert!(errors.contains(&message), "{template}: {errors}");
        assert!(errors.contains("error: ") && errors.contains("capacity"), "{template}: {errors}");
        // Another run continues it.
        let more = ["--prompt", "[first] more", "--load-cache", &file];
        let loaded = succeeds(generate(&space, &more));
        assert!(loaded.stderr.contains("prefill 5 tokens"), "{}", loaded.stderr);
    }
}

/// A model of the same architecture with other weights is refused.
#[test]
fn another_model_is_refused() {
    let space = Workspace::new();
    let file = &space.path("prefix.safetensors");
    let save = ["--prompt", PREFIX, "--max-tokens", "1", "--save-cache", file];
    succeeds(generate(&space, &save));
    space.rewrite_weights(|name, mut values| {
        if name.ends_with("1.self_attn.v_proj.weight") {
            values.iter_mut().for_each(|value| *value += 0.5);
        }
        Some((name.into(), values))
    });
    let load = generate(&space, &["--prompt", PROMPT, "--load-cache", file]);
    refused(&load, &["model = model: its weights differ from this model's"]);
}

/// A Hadamard transform of values is folded into the weights, which changes them.
#[test]
fn a_cache_that_differs_by_its_hadamard_transform_is_named() {
    let space = Workspace::new();
    let file = &space.path("prefix.safetensors");
    let transformed = "k4v4-g16-r16-hadv";
    let save = ["--prompt", PREFIX, "--cache", transformed, "--save-cache", file];
    succeeds(generate(&space, &save));
    let load = |cache| ["--prompt", PROMPT, "--cache", cache, "--load-cache", file];
    succeeds(generate(&space, &load(transformed)));
    let other = generate(&space, &load("k4v4-g16-r16"));
    refused(&other, &[&format!("saved with --cache {transformed}"), "k4v4-g16-r16 is asked for"]);
}
