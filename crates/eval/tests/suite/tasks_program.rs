//! `kv-eval tasks`: output, files and errors.

use std::fs;

use kv_eval::tasks::{TaskPlan, TaskReport, score_tasks};
use kv_models::{ModelCacheConfig, load};
use serde_json::{Value, json};

use crate::{
    common::{AUSTEN, Workspace, assert_one_line, kv_eval},
    tasks::task,
};

const CACHE: &str = "k2v2-g16-r16";

fn lines() -> (Vec<Value>, Vec<Value>) {
    let context = "Anne said that she was not at all surprised by it, and then went to";
    let choice = |gold: usize| json!({"context": context, "choices": ["him", "bed"], "gold": gold});
    let word = |word: &str| json!({"text": format!("{context} {word}")});
    (vec![choice(0), choice(1), choice(1)], vec![word("them"), word("Bath")])
}

fn write(space: &Workspace, name: &str, lines: &[Value]) -> String {
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    fs::write(space.path(name), text.join("\n")).unwrap();
    space.path(name)
}

#[test]
fn the_program_prints_and_writes_the_metrics() {
    let (space, (choices, words)) = (Workspace::new(), lines());
    let paths = [write(&space, "a.jsonl", &choices), write(&space, "b.jsonl", &words)];
    let device = kv_cubecl::On::<kv_cubecl::Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let caches = ["float", CACHE].map(|name| name.parse::<ModelCacheConfig>().unwrap());
    let tasks = vec![task(&paths[0], &choices), task(&paths[1], &words)];
    let (model, tokenizer) = (loaded.model, loaded.tokenizer.unwrap());
    let plan = TaskPlan::new(&model, &tokenizer, caches, tasks, None).unwrap();
    let scores = score_tasks(&device, &model, &plan, || ()).unwrap();
    let report = TaskReport::new(&plan, scores);

    let (json, items) = (space.path("out.json"), space.path("items.jsonl"));
    let start = ["tasks", "--model", AUSTEN, "--cache", "float", "--cache", CACHE];
    let files = ["--task", &paths[0], "--task", &paths[1]];
    let outputs = ["--json", &json, "--items", &items];
    let outcome = kv_eval(&[&start[..], &files, &outputs].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(outcome.stdout, report.to_string());
    let rows: Vec<Vec<&str>> =
        outcome.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..6], ["task", "cache", "items", "acc", "+-", "acc_norm"]);
    assert_eq!(rows[1][..3], [&paths[0], "float", "3"]);
    assert_eq!(rows[2][..3], [&paths[0], CACHE, "3"]);
    assert_eq!(rows[3][3..6], ["acc", "+-", "perplexity"]);
    assert_eq!(rows[5][..3], [&paths[1], CACHE, "2"]);
    assert_eq!(rows[5].last().unwrap(), &"100.0%");
    let written = serde_json::to_string_pretty(&report).unwrap() + "\n";
    assert_eq!(fs::read_to_string(&json).unwrap(), written);
    let lines = fs::read_to_string(&items).unwrap();
    assert_eq!(lines, report.items_jsonl().unwrap());
    let lines: Vec<Value> = lines.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
    assert_eq!(lines.len(), 10);
    assert_eq!((&lines[1]["cache"], &lines[1]["line"]), (&json!(CACHE), &json!(1)));
    assert_eq!(lines[9]["log_likelihoods"].as_array().unwrap().len(), 1);

    // JSON on standard output moves the tables to standard error.
    let outcome = kv_eval(&[&start[..], &files[..2], &["--limit", "1", "--items", "-"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let lines: Vec<Value> =
        outcome.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    assert!(outcome.stderr.contains("acc_norm"), "{}", outcome.stderr);
}

/// Files are checked before the model is loaded; here it does not even exist.
#[test]
fn wrong_files_are_refused_first() {
    let (space, (choices, words)) = (Workspace::new(), lines());
    let good = write(&space, "good.jsonl", &choices);
    let mixed = write(&space, "mixed.jsonl", &[choices[0].clone(), words[0].clone()]);
    let empty = write(&space, "empty.jsonl", &[]);
    let run = |model: &str, files: &[&str], more: &[&str]| {
        let files = files.iter().flat_map(|file| ["--task", file]);
        let args: Vec<&str> = ["tasks", "--model", model].into_iter().chain(files).collect();
        kv_eval(&[&args[..], more].concat())
    };
    assert_one_line(&run("none", &[&good, &mixed], &[]), &["mixed.jsonl:2: context = missing: "]);
    assert_one_line(&run("none", &[&empty], &[]), &["task ", "empty.jsonl: has no items"]);
    assert_one_line(&run("none", &["no.jsonl"], &[]), &["task no.jsonl: cannot read"]);
    let dir = space.model();
    assert_one_line(&run("none", &[&dir], &[]), &["line = unreadable"]);
    let format = ["--format", "piqa"];
    assert_one_line(&run("none", &[&good], &format), &["good.jsonl:1: goal = missing"]);
    let format = ["--format", "boolq"];
    assert_one_line(&run("none", &[&good], &format), &["--format", "hellaswag"]);
    assert_one_line(&run("none", &[&good], &["--limit", "0"]), &["--limit", "at least 1"]);
    let over = ["--items", &good];
    assert_one_line(&run("none", &[&good], &over), &["items ", "--task"]);
    assert_one_line(&run("none", &[&good], &[]), &["none"]);
    // These need the tokenizer.
    assert_one_line(&run(AUSTEN, &[&good, &good], &[]), &["task ", "is given twice"]);
    let long = json!({"context": "a", "continuation": "word ".repeat(2000)});
    let long = write(&space, "long.jsonl", &[long]);
    let parts = ["long.jsonl:1: continuation = \"word word", "at most the model's 1024 positions"];
    assert_one_line(&run(AUSTEN, &[&long], &[]), &parts);
    let blank = write(&space, "blank.jsonl", &[json!({"context": " ", "continuation": "a"})]);
    let parts = ["blank.jsonl:1: context = \"\": must have a token, or be empty"];
    assert_one_line(&run(AUSTEN, &[&blank], &[]), &parts);
    assert_one_line(&run(AUSTEN, &[&good], &["--bos"]), &["bos: the model's tokenizer has no"]);
    assert_one_line(&run(AUSTEN, &[&good], &["--memory", "1M"]), &["--memory", "needs"]);
}
