//! Several prompts continued together: outputs and errors.

use std::{
    fs::{self, File},
    process::{Command, Stdio},
};

use crate::common::{Outcome, Workspace, kv_eval};

const PROMPTS: [&str; 4] = ["The quick", "brown fox jumps", "0123", "over the lazy dog, and"];

fn generate(space: &Workspace, more: &[&str]) -> Outcome {
    let model = space.model();
    kv_eval(&[&["generate", "--model", &model, "--max-tokens", "30"], more].concat())
}

/// Returns the lines of each prompt without their numbers.
fn texts(outcome: &Outcome, prompts: usize) -> Vec<String> {
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let mut texts = vec![String::new(); prompts];
    // The model writes any byte, including other line separators than `\n`.
    for line in outcome.stdout.split_terminator('\n') {
        let (number, rest) = line.strip_prefix('[').and_then(|line| line.split_once("] ")).unwrap();
        texts[number.parse::<usize>().unwrap() - 1] += &format!("{rest}\n");
    }
    texts
}

/// Continues each prompt alone, the first with `seed`, each other one with the next seed.
fn alone(space: &Workspace, more: &[&str], seed: usize) -> Vec<String> {
    let one = |(i, prompt): (usize, &&str)| {
        let seed = (seed + i).to_string();
        let outcome = generate(space, &[&["--prompt", prompt, "--seed", &seed], more].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        outcome.stdout
    };
    PROMPTS.iter().enumerate().map(one).collect()
}

#[test]
fn each_text_is_the_same_as_alone() {
    let space = Workspace::new();
    let prompts = PROMPTS.map(|prompt| ["--prompt", prompt]).concat();
    let file = space.path("prompts.txt");
    fs::write(&file, format!("\n{}\n  \n", PROMPTS.join("\n\n"))).unwrap();
    for more in [&[][..], &["--temperature", "1.3", "--top-k", "40"]] {
        let expected = alone(&space, more, 7);
        for batch in ["1", "2", "8"] {
            let more = [more, &["--seed", "7", "--batch", batch]].concat();
            let given = generate(&space, &[&prompts[..], &more].concat());
            assert_eq!(texts(&given, 4), expected, "batch {batch}");
            let read = generate(&space, &[&["--prompts", &file][..], &more].concat());
            assert_eq!(texts(&read, 4), expected, "batch {batch}");
        }
    }
}

#[test]
fn totals_are_printed_at_the_end() {
    let space = Workspace::new();
    let prompts = PROMPTS.map(|prompt| ["--prompt", prompt]).concat();
    let outcome = generate(&space, &[&prompts[..], &["--batch", "3"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let lines = outcome.error_lines();
    for (i, prompt) in PROMPTS.iter().enumerate() {
        let (n, i) = (prompt.len(), i + 1);
        let begins =
            format!("[{i}] reached --max-tokens (30); prefill {n} tokens, first token after ");
        let line = lines.iter().find(|line| line.starts_with(&begins));
        let line = line.unwrap_or_else(|| panic!("{begins:?} is not in {lines:?}"));
        assert!(line.ends_with(" s, generated 30"), "{line}");
    }
    let n: usize = PROMPTS.iter().map(|prompt| prompt.len()).sum();
    let last = lines.last().unwrap();
    // The last token of each is not processed; the longest prompt and 30 tokens fit.
    for part in [
        "4 prompts, 3 at a time: ".to_string(),
        format!("prefill {n} tokens, "),
        "decode 116 tokens, ".to_string(),
        "tokens/s in all; ".to_string(),
        format!("cache float: 3 sequences of up to {} tokens, ", PROMPTS[3].len() + 30),
    ] {
        assert!(last.contains(&part), "{part:?} is not in {last:?}");
    }
}

/// A single prompt prints no numbers, with every argument that gives a prompt.
#[test]
fn one_prompt_has_no_number() {
    let space = Workspace::new();
    let file = space.path("one.txt");
    fs::write(&file, "The quick\n").unwrap();
    let given = generate(&space, &["--prompt", "The quick"]);
    let read = generate(&space, &["--prompts", &file]);
    assert_eq!(given.stdout, read.stdout);
    for outcome in [&given, &read] {
        assert!(outcome.stderr.contains("prefill 9 tokens") && !outcome.stderr.contains("in all"));
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
    command.args(["generate", "--model", &space.model(), "--max-tokens", "30", "--prompts", "-"]);
    let output = command.stdin(File::open(file).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), given.stdout);
}

/// With a closed output, there is no panic and no further text.
#[test]
fn a_closed_output_ends_generation() {
    let space = Workspace::new();
    let prompts = PROMPTS.map(|prompt| ["--prompt", prompt]).concat();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-eval"));
    command.args(["generate", "--model", &space.model(), "--batch", "1"]).args(prompts);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    assert!(!errors.contains("panicked") && !errors.contains("[4]"), "{errors}");
}

#[test]
fn errors_are_named() {
    let space = Workspace::new();
    let (empty, one) = (space.path("empty.txt"), space.path("one.txt"));
    fs::write(&empty, "\n \n").unwrap();
    fs::write(&one, "x\n").unwrap();
    let two = ["--prompt", "a", "--prompt", "b"];
    for (more, part) in [
        (vec!["--prompts", &empty], "empty.txt: has no line with a prompt"),
        (vec!["--prompts", "/nonexistent"], "prompts /nonexistent: cannot read"),
        (vec!["--prompts", &one, "--prompt", "x"], "cannot be used with"),
        (vec!["--prompts", &one, "--prompt-file", &one], "cannot be used with"),
        ([&two[..], &["--batch", "0"]].concat(), "batch 0: must be at least 1"),
        (
            [&two[..], &["--graph-capture"]].concat(),
            "graph_capture = true: sequences of different lengths do not",
        ),
        (vec!["--prompt", "a", "--prompt", ""], "prompt 2: prompt: must have at least one token"),
        (
            vec!["--prompt", "a", "--prompt", "abcdef", "--capacity", "5"],
            "prompt 2: context of 6 tokens (0 cached + 6 new) exceeds capacity 5",
        ),
    ] {
        let outcome = generate(&space, &more);
        assert_ne!(outcome.code, 0, "{more:?}");
        assert!(outcome.stderr.contains(part), "{more:?}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    }
}
