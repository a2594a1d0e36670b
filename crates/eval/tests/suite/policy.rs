//! Layer policies in the program: files and presets as cache names, and the search for policies.

use std::{fs, path::Path, process::Command, thread::sleep, time::Duration};

use kv_models::ModelCacheConfig;
use serde_json::Value;

use crate::common::{Outcome, Workspace, kv_eval};

const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");

const POLICY: &str = r#"
name = "mine"
[[rules]]
cache = "k4v4-g16-r16"
[[rules]]
layers = "-1"
side = "keys"
format = "int8"
"#;

#[track_caller]
fn succeeds(args: &[&str]) -> Outcome {
    let outcome = kv_eval(args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    outcome
}

/// Asserts that the program fails with exactly one line that contains all of `parts`.
#[track_caller]
fn fails(args: &[&str], parts: &[&str]) {
    let outcome = kv_eval(args);
    assert_ne!(outcome.code, 0, "it succeeded: {}", outcome.stdout);
    let lines = outcome.error_lines();
    assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{:?}", outcome.stderr);
    for part in parts {
        assert!(lines[0].contains(part), "{part:?} is not in {:?}", lines[0]);
    }
}

fn json(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn every_cache_argument_accepts_a_policy() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let (toml, as_json) = (space.path("policy.toml"), space.path("policy.json"));
    fs::write(&toml, POLICY).unwrap();
    ModelCacheConfig::read(&toml).unwrap().write(&as_json).unwrap();
    let note = "note: mine: layer 0 k4v4-g16-r16, layer 1 kint8v4-g16-r16";

    let mut perplexities = vec![];
    for (mode, policy) in [("parallel", &toml), ("parallel", &as_json), ("streaming", &toml)] {
        let out = space.path("report.json");
        let outcome = succeeds(&[
            "ppl",
            "--model",
            &model,
            "--text",
            &text,
            "--tokens",
            "120",
            "--mode",
            mode,
            "--json",
            &out,
            "--cache",
            policy,
            "--cache",
            "k4v4-g16-r16",
        ]);
        assert!(outcome.stderr.contains(note), "{}", outcome.stderr);
        assert!(outcome.stdout.contains("\nmine "), "{}", outcome.stdout);
        let report = json(&out);
        let of = |i: usize| report["runs"][i]["perplexity"].as_f64().unwrap();
        assert_ne!(of(1), of(2), "the keys of layer 1 are others");
        perplexities.push(of(1));
    }
    assert_eq!(perplexities[0], perplexities[1], "one policy in two files");
    let streamed = (perplexities[2] / perplexities[0] - 1.0).abs();
    assert!(streamed < 1e-2, "{perplexities:?}");

    let prompt = ["--prompt", "Hello", "--max-tokens", "3"];
    let generate = ["generate", "--model", &model, "--cache", &toml];
    let outcome = succeeds(&[&generate[..], &prompt].concat());
    assert!(outcome.stderr.contains(note) && outcome.stderr.contains("cache mine: "));

    // A cache saved with a policy loads only with that policy.
    let saved = space.path("saved.safetensors");
    let alone = ["--prompt", "Hello", "--max-tokens", "1", "--save-cache", &saved];
    succeeds(&[&generate[..], &alone].concat());
    let longer = ["--prompt", "Hello, world, how", "--max-tokens", "1", "--load-cache", &saved];
    succeeds(&[&generate[..], &longer].concat());
    let other = ["generate", "--model", &model, "--cache", "k4v4-g16-r16"];
    fails(
        &[&other[..], &longer].concat(),
        &["layers.1.cache = kint8v4-g16-r16", "k4v4-g16-r16 is"],
    );

    let outcome = succeeds(&["plan", "--model", &model, "--memory", "1G", "--cache", &toml]);
    assert!(outcome.stdout.contains("\nmine ") && outcome.stdout.contains(note));
    let outcome = succeeds(&[
        "bench",
        "decode",
        "--model",
        &model,
        "--cache",
        &toml,
        "--contexts",
        "40",
        "--samples",
        "1",
    ]);
    assert!(outcome.stdout.contains("mine") && outcome.stderr.contains(note), "{}", outcome.stderr);
    let outcome =
        succeeds(&["plan", "--model", "SmolLM2-135M", "--memory", "1G", "--cache", "small"]);
    assert!(outcome.stdout.contains("note: small: layer"), "{}", outcome.stdout);
}

/// Benchmarks of one layer time every cache that a policy gives to a layer; games use the policy in
/// all layers.
#[test]
fn a_policy_is_timed_and_played() {
    let space = Workspace::new();
    let (path, small) = (space.path("policy.toml"), ["--contexts", "64", "--samples", "1"]);
    let policy = |rest: &str| {
        let first = "name = \"mine\"\n[[rules]]\ncache = \"k8v8-r32\"\n";
        fs::write(&path, format!("{first}{rest}")).unwrap();
    };
    policy("[[rules]]\nlayers = \"-2,-1\"\ncache = \"kint8vint8\"\n");
    let attention = ["bench", "decode-attention", "--working-set", "1", "--cache", &path];
    let frames = ["bench", "frames", "--frames", "4", "--samples", "1", "--cache", &path];
    let flush = ["bench", "flush", "--cache", &path];
    for args in [[&attention[..], &small].concat(), [&flush[..], &small].concat(), frames.to_vec()]
    {
        let outcome = succeeds(&args);
        for cache in [" k8v8-r32 ", " kint8vint8 "] {
            let rows = format!(" {}", outcome.stdout.replace('\n', "\n "));
            assert!(rows.contains(cache), "{args:?}: {}", outcome.stdout);
        }
    }
    let json = space.path("world.json");
    let games = ["--frames", "3", "--seeds", "1", "--context", "2", "--json", &json];
    let world = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/world");
    let play = ["world", "--model", world, "--cache", &path, "--cache", "kint8vint8@2"];
    succeeds(&[&play[..], &games].concat());
    let found: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let points = found["points"].as_array().unwrap();
    let names: Vec<_> = points.iter().map(|point| point["cache"].as_str().unwrap()).collect();
    assert_eq!(names, ["float", "mine", "kint8vint8@2"]);
    // The policy has kint8vint8 in the last two layers, and less than float in the others.
    let bytes: Vec<u64> = points.iter().map(|point| point["bytes"].as_u64().unwrap()).collect();
    assert!(bytes[1] < bytes[2] && bytes[2] < bytes[0], "{bytes:?}");

    policy("[[rules]]\nlayers = 99\ncache = \"kint8vint8\"\n");
    fails(&[&play[..], &games].concat(), &["rules[1].layers = 99"]);
}

#[test]
fn errors_are_one_line() {
    let space = Workspace::new();
    let (model, text, path) = (space.model(), space.text(), space.path("policy.toml"));
    let ppl = ["ppl", "--model", &model, "--text", &text, "--cache"];
    let says = |content: &str, parts: &[&str]| {
        fs::write(&path, content).unwrap();
        fails(&[&ppl[..], &[&path]].concat(), parts);
    };
    says("[[rules]]\ncach = \"k4v4\"", &["policy.toml: rules[0].cache = missing"]);
    says("[[rules]]\nformat = 4\nbits = 4", &["policy.toml: rules[0].bits = 4: unknown field"]);
    says("[[rules]]\nformat = 5", &["rules[0].format = 5: ", "expected 2, 3, 4, 8"]);
    says("[[rules]]\nlayers = \"0..3\"\nformat = \"int8\"", &["rules[0].layers = 0..3", "0 to 1"]);
    says("[[rules]]\nlayers = \"1..1\"\nformat = 4", &["rules[0].layers = \"1..1\"", "no layer"]);
    says("[[rules]", &["policy.toml: not a readable toml file: ", "at line 1"]);
    says("", &["policy.toml: rules = missing"]);
    let beyond = "[[rules]]\ncache = \"k4v4-g16-r16\"\n[[rules]]\nlayers = 1\ncache = \"k4v4\"";
    says(beyond, &["rules[1] = k4v4: gives layer 1 the cache k4v4: ", "head_dim 16"]);
    fails(&[&ppl[..], &["nowhere.toml"]].concat(), &["nowhere.toml: not found"]);
    fails(&[&ppl[..], &["balance"]].concat(), &["balance", "did you mean balanced?"]);
    fails(
        &[&ppl[..], &["balanced"]].concat(),
        &["rules[0] = ", "gives layer 0 the cache", "head_dim 16"],
    );
}

/// The search for a policy of the repository's model.
fn search<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen/heldout.txt");
    let args = ["search", "--model", AUSTEN, "--text", text, "--context", "1024", "--out", out];
    let others =
        [["--base", "k4v4-r32-s4-gflush-f16"], ["--tokens", "1024"], ["--unseen-tokens", "2048"]];
    let others = others.into_iter().filter(|[name, _]| !more.contains(name));
    args.into_iter().chain(others.flatten()).chain(more.iter().copied()).collect()
}

#[test]
fn the_search_beats_caches_shared_by_all_layers() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (out, plot, measured) = (path("policy.toml"), path("front.svg"), path("found.json"));
    let more = ["--bytes", "195KiB", "--plot", &plot, "--json", &measured, "--name", "tight"];
    let outcome = succeeds(&search(&out, &more));
    let policy = ModelCacheConfig::read(&out).unwrap();
    assert_eq!(policy.name(), Some("tight"));
    assert!(outcome.stderr.contains("note: tight: layer"), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("keys as 2") && outcome.stdout.contains("\ntight "));
    assert!(fs::read_to_string(&plot).unwrap().starts_with("<svg"));

    let found = json(&measured);
    let rows = found["measured"].as_array().unwrap();
    let kl = |row: &Value, text: &str| row[text]["kl"].as_f64().unwrap();
    let bytes = |row: &Value| row["bytes"].as_u64().unwrap();
    assert!(rows.len() > 1 && rows.iter().all(|row| bytes(row) <= 195 * 1024), "{rows:?}");
    // The best other caches follow the ones with the settings of the search.
    let others = found["alike"].as_array().unwrap();
    let best = others.len().min(3);
    assert!(best > 0 && others.is_sorted_by(|a, b| kl(a, "seen") <= kl(b, "seen")), "{others:?}");
    assert!(others.iter().all(|row| bytes(row) <= 195 * 1024), "{others:?}");
    let (own, known) = rows.split_at(rows.len() - best);
    for (row, other) in known.iter().zip(others) {
        for field in ["cache", "bytes", "seen"] {
            assert_eq!(row[field], other[field]);
        }
    }
    assert!(own.iter().all(|row| others.iter().all(|other| other["cache"] != row["cache"])));
    assert!(outcome.stdout.contains("other caches of all layers alike"), "{}", outcome.stdout);
    // The last line names the cache of least divergence.
    let least =
        rows[1..].iter().min_by(|a, b| kl(a, "unseen").total_cmp(&kl(b, "unseen"))).unwrap();
    let named = format!("{} {:.6}", least["cache"].as_str().unwrap(), kl(least, "unseen"));
    assert!(outcome.stdout.trim_end().ends_with(&named), "{}", outcome.stdout);
    for uniform in &own[1..] {
        let better = kl(&rows[0], "unseen") < 0.8 * kl(uniform, "unseen");
        assert!(better, "{} and {uniform}", rows[0]);
    }
    // Three layers, two sides, two formats; 2 bits cost more than 4 on every side of every layer.
    let parts = found["sensitivities"].as_array().unwrap();
    assert_eq!(parts.len(), 12);
    for pair in parts.chunks(2) {
        let cost = |part: &Value| part["score"]["kl"].as_f64().unwrap();
        assert!(cost(&pair[0]) < cost(&pair[1]), "{pair:?}");
    }
    let front = found["front"].as_array().unwrap();
    assert!(front.len() > 4 && front.is_sorted_by(|a, b| bytes(a) > bytes(b)), "{front:?}");

    // ppl gives the same numbers for the policy on the same eval windows.
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen/heldout.txt");
    let report = path("report.json");
    let ppl = ["ppl", "--model", AUSTEN, "--text", text, "--tokens", "1024", "--window", "1024"];
    let other = others[0]["cache"].as_str().unwrap();
    succeeds(&[&ppl[..], &["--cache", &out, "--cache", other, "--json", &report]].concat());
    let runs = &json(&report)["runs"];
    for (row, run) in [(&rows[0], &runs[1]), (&others[0], &runs[2])] {
        let (here, there) = (kl(row, "seen"), run["kl_mean"].as_f64().unwrap());
        assert!((here - there).abs() < 1e-6 + 1e-4 * there, "{here} and {there}");
        assert_eq!(run["cache_bytes"].as_u64().unwrap(), bytes(row));
    }
}

#[test]
fn an_impossible_search_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let out = path("policy.toml");
    let says = |more: &[&str], parts: &[&str]| fails(&search(&out, more), parts);
    says(&["--bytes", "1K"], &["bytes 1000: a cache of 1024 tokens", "takes at least"]);
    says(&["--bytes", "much"], &["--bytes", "\"much\" is no size"]);
    says(&["--bytes", "1M", "--format", "5"], &["--format", "must be one of 2, 3, 4, 8, vn2"]);
    says(&["--bytes", "1M", "--name", "k4v4"], &["name = k4v4: is the name of the cache k4v4"]);
    says(
        &["--bytes", "1M", "--base", "k4v4-g64"],
        &["base k4v4-g64: with format 4, group_size 64", "change the base or the formats"],
    );
    says(
        &["--bytes", "1M", "--base", "k4v4-g8-r8"],
        &["base k4v4-g8-r8: format 2 gives layer 0 the cache k2v2-g8-r8: group_size 8"],
    );
    says(&["--bytes", "1M", "--tokens", "1"], &["the searched part of", "at least two tokens"]);
    says(
        &["--bytes", "1M", "--unseen-tokens", "0"],
        &["the unseen part of", "at least two tokens"],
    );
    let context = ["search", "--model", AUSTEN, "--text", "x", "--bytes", "1M", "--out", "a.txt"];
    fails(&context, &["out a.txt: must end in .toml or .json"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written");
}

/// The first Ctrl-C ends the search and leaves no file.
#[cfg(unix)]
#[test]
fn an_interrupted_search_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("policy.toml");
    let text = Path::new(AUSTEN).join("heldout.txt");
    let mut child = Command::new(env!("CARGO_BIN_EXE_kv-eval"))
        .args(["search", "--model", AUSTEN, "--base", "k4v4-r32-f16", "--bytes", "10M"])
        .args(["--tokens", "60000", "--window", "128", "--unseen-tokens", "10000"])
        .arg("--text")
        .arg(&text)
        .arg("--out")
        .arg(&out)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    sleep(Duration::from_secs(3));
    assert!(child.try_wait().unwrap().is_none(), "it should take minutes");
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("stopped after ") && stderr.contains("nothing was written"),
        "{stderr}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
