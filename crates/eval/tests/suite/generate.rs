//! `kv-eval generate`: JSON, stop strings, penalties, Ctrl-C.

use std::fs;

use serde_json::Value;

use crate::common::{Outcome, Workspace, kv_eval};

fn generate(space: &Workspace, more: &[&str]) -> Outcome {
    let model = space.model();
    let outcome = kv_eval(&[&["generate", "-m", &model, "--no-chat"], more].concat());
    assert_eq!(outcome.code, 0, "{more:?}: {}", outcome.stderr);
    outcome
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn help_has_examples_defaults_and_short_options() {
    let help = kv_eval(&["generate", "--help"]).stdout;
    for part in [
        "Examples:",
        "-m, --model",
        "-p, --prompt",
        "-n, --max-tokens",
        "-c, --capacity",
        "-t, --threads",
        "[default: 128]",
        "[default: one per core]",
        "--save-cache book.kv",
    ] {
        assert!(help.contains(part), "{part:?} is not in {help}");
    }
    assert!(help.lines().all(|line| line.chars().count() < 500), "a line that nobody reads");
    let space = Workspace::new();
    let short = generate(&space, &["-p", "Hello", "-n", "9", "-c", "40", "-t", "1"]);
    let long = ["--prompt", "Hello", "--max-tokens", "9", "--capacity", "40", "--threads", "1"];
    assert_eq!(short.stdout, generate(&space, &long).stdout);
    assert!(short.stderr.contains("of 40 tokens"), "{}", short.stderr);
}

/// Timings are printed on standard error, not with the text.
#[test]
fn times_and_rates_are_printed() {
    let space = Workspace::new();
    let outcome = generate(&space, &["-p", "Hello", "-n", "9"]);
    let stderr = outcome.stderr.lines().last().unwrap();
    for part in [
        "reached --max-tokens (9); prefill 5 tokens, ",
        " tokens/s; first token after ",
        " s; decode 8 tokens, ",
        " tokens/s; cache float: 13 of 14 tokens, ",
    ] {
        assert!(stderr.contains(part), "{part:?} is not in {stderr}");
    }
    assert!(!stderr.contains("reused"), "there is nothing to reuse: {stderr}");
    // The cache of the shortest prompt has a capacity above 0.
    for prompt in ["a", "abc"] {
        let outcome = generate(&space, &["-p", prompt, "-n", "0"]);
        assert_eq!(outcome.stdout, "");
        let n = prompt.len();
        let message = format!("reached --max-tokens (0); prefill {n} tokens");
        assert!(outcome.stderr.contains(&message), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("first token"), "{}", outcome.stderr);
    }
}

#[test]
fn a_reply_is_a_line_of_json() {
    let space = Workspace::new();
    let text = generate(&space, &["-p", "Hello", "-n", "9"]).stdout;
    let outcome = generate(&space, &["-p", "Hello", "-n", "9", "--json"]);
    let replies = json_lines(&outcome.stdout);
    let [reply] = &replies[..] else { panic!("{}", outcome.stdout) };
    assert_eq!(format!("{}\n", reply["text"].as_str().unwrap()), text);
    assert_eq!((&reply["index"], &reply["finish_reason"]), (&0.into(), &"length".into()));
    let usage = serde_json::json!({
        "prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14,
        "prompt_tokens_details": { "cached_tokens": 0 },
    });
    assert_eq!(reply["usage"], usage);
    let timings = &reply["timings"];
    assert_eq!((&timings["prompt_n"], &timings["predicted_n"]), (&5.into(), &8.into()));
    for field in ["prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"] {
        assert!(timings[field].as_f64().unwrap() > 0.0, "{field}: {timings}");
    }
    assert!(timings["first_token_ms"].as_f64() >= timings["prompt_ms"].as_f64());

    // With a file, the text is printed too. A file that cannot be written is named first.
    let file = &space.path("replies.jsonl");
    let outcome = generate(&space, &["-p", "Hello", "-n", "9", "--json", file]);
    assert_eq!(outcome.stdout, text);
    assert_eq!(json_lines(&fs::read_to_string(file).unwrap())[0]["text"], reply["text"]);
    let folder = space.model();
    let wrong = kv_eval(&["generate", "-m", "no-model", "-p", "x", "--json", &folder]);
    assert!(wrong.code == 1 && wrong.stderr.starts_with("error: json "), "{}", wrong.stderr);

    // All ids are end-of-text ids, so the reason differs.
    let all: Vec<usize> = (0..256).collect();
    let config = serde_json::json!({ "eos_token_id": all }).to_string();
    fs::write(format!("{folder}/generation_config.json"), config).unwrap();
    let ended = json_lines(&generate(&space, &["-p", "Hello", "--json"]).stdout);
    assert_eq!((&ended[0]["finish_reason"], &ended[0]["text"]), (&"stop".into(), &"".into()));
}

#[test]
fn each_prompt_has_a_line_of_json() {
    let space = Workspace::new();
    let prompts = ["The quick", "brown fox jumps", "0123"];
    let file = space.path("prompts.txt");
    fs::write(&file, prompts.join("\n")).unwrap();
    for batch in ["1", "3"] {
        let args = ["--prompts", &file, "--batch", batch, "-n", "7", "--json"];
        let mut replies = json_lines(&generate(&space, &args).stdout);
        replies.sort_by_key(|reply| reply["index"].as_u64());
        assert_eq!(replies.len(), 3);
        for (i, (reply, prompt)) in replies.iter().zip(prompts).enumerate() {
            let alone = generate(&space, &["-p", prompt, "-n", "7"]).stdout;
            assert_eq!(format!("{}\n", reply["text"].as_str().unwrap()), alone, "{batch}");
            assert_eq!((&reply["index"], &reply["finish_reason"]), (&i.into(), &"length".into()));
            assert_eq!(reply["usage"]["prompt_tokens"], prompt.len());
        }
    }
}

/// The text ends before the string, for one prompt and for several. Each byte is a token here.
#[test]
fn a_stop_string_ends_the_text() {
    let space = Workspace::new();
    let prompts = ["The quick", "brown fox jumps"];
    for prompt in prompts {
        let text = generate(&space, &["-p", prompt, "-n", "60"]).stdout;
        let text: Vec<char> = text.strip_suffix('\n').unwrap().chars().collect();
        for (from, n) in [(0, 2), (5, 1), (12, 3)] {
            let stop: String = text[from..from + n].iter().collect();
            let text: String = text.iter().collect();
            // An invalid byte is printed as the replacement character.
            if stop.contains(char::REPLACEMENT_CHARACTER) || stop.starts_with('-') {
                continue;
            }
            let want = &text[..text.find(&stop).unwrap()];
            let never = "this is not in it";
            let args = ["-p", prompt, "-n", "60", "--stop", never, "--stop", &stop];
            let stopped = generate(&space, &args);
            assert_eq!(stopped.stdout, format!("{want}\n"), "{stop:?}");
            let message = format!("stopped by --stop {stop:?}; prefill");
            assert!(stopped.stderr.contains(&message), "{}", stopped.stderr);
            let reply =
                &json_lines(&generate(&space, &[&args[..], &["--json"]].concat()).stdout)[0];
            assert_eq!((&reply["text"], &reply["finish_reason"]), (&want.into(), &"stop".into()));
            assert_eq!(reply["stopping_word"], *stop);

            let several = ["-p", prompts[0], "-p", prompts[1], "-n", "60", "--stop", &stop];
            let several = generate(&space, &[&several[..], &["--json"]].concat()).stdout;
            let replies = json_lines(&several);
            let index = prompts.iter().position(|other| *other == prompt).unwrap();
            let own = replies.iter().find(|reply| reply["index"] == index).unwrap();
            assert_eq!((&own["text"], &own["finish_reason"]), (&want.into(), &"stop".into()));
        }
    }
    let model = space.model();
    let empty = kv_eval(&["generate", "-m", &model, "-p", "x", "--stop", ""]);
    assert!(empty.code == 1 && empty.stderr.contains("stop = \"\""), "{}", empty.stderr);
}

#[test]
fn penalties_change_the_text() {
    let space = Workspace::new();
    let run = |more: &[&str]| generate(&space, &[&["-p", "Hello", "-n", "40"], more].concat());
    let plain = run(&[]).stdout;
    assert_eq!(run(&["--frequency-penalty", "0", "--presence-penalty", "0"]).stdout, plain);
    // Negative penalties make tokens likely that occurred often, or at all.
    for (penalty, likely) in [("--frequency-penalty", "l"), ("--presence-penalty", "Helo")] {
        let (more, less) = (run(&[penalty, "1000"]).stdout, run(&[penalty, "-1000"]).stdout);
        assert!(more != plain && more != less, "{penalty}");
        assert!(less.trim_end().chars().all(|c| likely.contains(c)), "{penalty}: {less:?}");
        let model = space.model();
        let wrong = kv_eval(&["generate", "-m", &model, "-p", "x", penalty, "NaN"]);
        let message = format!("{} = NaN: must be finite", penalty[2..].replace('-', "_"));
        assert!(wrong.code == 1 && wrong.stderr.contains(&message), "{}", wrong.stderr);
    }
}

#[cfg(unix)]
mod interrupts {
    use std::{
        io::{Read, Write},
        path::Path,
        process::{Child, Command, Stdio},
    };

    use super::*;

    /// Returns the repository's model with a template and without a limit or end-of-text token.
    fn endless() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let austen = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen"));
        for file in ["model.safetensors", "tokenizer.json"] {
            fs::copy(austen.join(file), folder.path().join(file)).unwrap();
        }
        let config = fs::read_to_string(austen.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["max_position_embeddings"] = 200_000.into();
        config.as_object_mut().unwrap().remove("eos_token_id");
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let template =
            "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}";
        let config = serde_json::json!({ "chat_template": template });
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let path = folder.path().to_str().unwrap().to_string();
        (folder, path)
    }

    fn start(model: &str, more: &[&str]) -> Child {
        Command::new(env!("CARGO_BIN_EXE_kv-eval"))
            .args(["generate", "-m", model, "-n", "100000", "-c", "150000", "--cache", "k4v4"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Waits for a part of the text.
    fn reads(run: &mut Child) {
        run.stdout.as_mut().unwrap().read_exact(&mut [0; 30]).unwrap();
    }

    fn interrupt(run: &Child) {
        let id = run.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    }

    /// Reads standard error up to `part`.
    fn hears(run: &mut Child, stderr: &mut String, part: &str) {
        let mut byte = [0];
        while !stderr.contains(part) {
            run.stderr.as_mut().unwrap().read_exact(&mut byte).unwrap();
            stderr.push(char::from(byte[0]));
        }
    }

    fn ends(mut run: Child, mut stderr: String) -> (Option<i32>, String) {
        run.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (run.wait().unwrap().code(), stderr)
    }

    #[test]
    fn an_interrupted_text_is_saved() {
        let (folder, model) = endless();
        let file = folder.path().join("cache.kv");
        let file = file.to_str().unwrap();
        let prompt = ["-p", "It is a truth universally acknowledged", "--no-chat"];
        let mut run = start(&model, &[&prompt[..], &["--save-cache", file]].concat());
        reads(&mut run);
        interrupt(&run);
        // Later output must not fill the pipe.
        let mut rest = run.stdout.take().unwrap();
        let reader = std::thread::spawn(move || rest.read_to_end(&mut vec![]).unwrap());
        let (code, stderr) = ends(run, String::new());
        reader.join().unwrap();
        assert_eq!(code, Some(130), "{stderr}");
        assert!(
            stderr.contains("interrupted; ") && stderr.contains("saved the cache of"),
            "{stderr}"
        );
        let args =
            [&["generate", "-m", &model, "-n", "3", "--cache", "k4v4"], &prompt[..]].concat();
        let loaded = kv_eval(&[&args[..], &["--load-cache", file]].concat());
        assert_eq!(loaded.code, 0, "{}", loaded.stderr);
        assert!(!loaded.stderr.contains("reused 0 of"), "{}", loaded.stderr);
        assert_eq!(loaded.stdout, kv_eval(&args).stdout);
    }

    #[test]
    fn several_texts_are_interrupted_together() {
        let (_folder, model) = endless();
        let mut run = start(&model, &["-p", "It is", "-p", "There was", "--no-chat", "--json"]);
        // Waits until they run, because nothing is written before they end.
        std::thread::sleep(std::time::Duration::from_secs(3));
        interrupt(&run);
        let mut text = String::new();
        run.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        let (code, stderr) = ends(run, String::new());
        assert_eq!(code, Some(130), "{stderr}");
        let replies = json_lines(&text);
        assert_eq!(replies.len(), 2, "{stderr}");
        assert!(replies.iter().all(|reply| reply["finish_reason"] == "abort"), "{text}");
    }

    /// The first signal stops a turn, and the conversation continues. The next signal ends it and
    /// saves its cache.
    #[test]
    fn an_interrupted_turn_does_not_end_a_conversation() {
        let (folder, model) = endless();
        let file = folder.path().join("talk.kv");
        let mut run = start(&model, &["--save-cache", file.to_str().unwrap()]);
        let mut rest = run.stdout.take().unwrap();
        let (sender, bytes) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut byte = [0];
            while rest.read_exact(&mut byte).is_ok() {
                let _ = sender.send(byte[0]);
            }
        });
        let mut stderr = String::new();
        for turn in 0..2 {
            writeln!(run.stdin.as_mut().unwrap(), "Is it so?").unwrap();
            let _ = bytes.recv().unwrap();
            interrupt(&run);
            let mut now = String::new();
            hears(&mut run, &mut now, "interrupted; ");
            hears(&mut run, &mut now, "MiB\n");
            assert_eq!(now.contains("reused"), turn > 0, "{now}");
            stderr += &now;
            // Then it waits for the next turn, and the rest of this one has been read.
            while bytes.recv_timeout(std::time::Duration::from_millis(300)).is_ok() {}
        }
        interrupt(&run);
        let (code, stderr) = ends(run, stderr);
        assert_eq!(code, Some(130), "{stderr}");
        assert!(stderr.contains("saved the cache of"), "{stderr}");
        assert!(file.exists());
    }
}
