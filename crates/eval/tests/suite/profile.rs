//! `--profile`: the times on the page agree with the clock.

use std::{collections::HashMap, fs, time::Instant};

use serde_json::Value;

use crate::common::{Outcome, Workspace, kv_eval};

/// The tables and the script's data of a page.
pub(crate) struct Page {
    pub(crate) html: String,
    data: Value,
}

/// A bar of a lane, in milliseconds.
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) depth: usize,
    #[cfg_attr(not(feature = "wgpu"), expect(dead_code, reason = "read of launches alone"))]
    pub(crate) detail: String,
    pub(crate) start: f64,
    pub(crate) end: f64,
}

impl Page {
    pub(crate) fn read(path: &str) -> Self {
        let html = fs::read_to_string(path).unwrap();
        let start = html.find("id=\"timeline\">").unwrap() + "id=\"timeline\">".len();
        let end = start + html[start..].find("</script>").unwrap();
        let data = serde_json::from_str(&html[start..end]).unwrap();
        Self { html, data }
    }

    /// Returns the rows of the table under a heading, by their first cell.
    #[track_caller]
    pub(crate) fn table(&self, heading: &str) -> HashMap<String, Vec<String>> {
        let heading = format!("<h2>{heading}</h2>");
        let from = self.html.find(&heading).unwrap_or_else(|| panic!("no {heading}"));
        let table = &self.html[from..from + self.html[from..].find("</table>").unwrap()];
        table
            .split("<tr>")
            .skip(2)
            .map(|row| {
                let cell = |cell: &str| cell.split_once('>').unwrap().1.replace("</td>", "");
                let cells = row.trim().trim_end_matches("</tr>").split("<td").skip(1).map(cell);
                let mut cells = cells.collect::<Vec<_>>().into_iter();
                (cells.next().unwrap(), cells.collect())
            })
            .collect()
    }

    /// Returns the bars of a thread or queue.
    pub(crate) fn lane(&self, name: &str) -> Vec<Bar> {
        let lanes = self.data["lanes"].as_array().unwrap();
        let lane = lanes.iter().find(|lane| lane["name"] == name);
        let lane = lane.unwrap_or_else(|| panic!("no {name} among the lanes"));
        let number = |list: &Value, i: usize| list[i].as_u64().unwrap();
        let mut bars = vec![];
        for (depth, row) in lane["rows"].as_array().unwrap().iter().enumerate() {
            let mut at = 0;
            for i in 0..row["starts"].as_array().unwrap().len() {
                at += number(&row["starts"], i);
                let label = &self.data["labels"][number(&row["labels"], i) as usize];
                let detail = match number(&row["details"], i) {
                    0 => String::new(),
                    n => self.data["details"][n as usize - 1].as_str().unwrap().into(),
                };
                bars.push(Bar {
                    depth,
                    name: label["name"].as_str().unwrap().into(),
                    detail,
                    start: at as f64 / 1e6,
                    end: (at + number(&row["lengths"], i)) as f64 / 1e6,
                });
            }
        }
        bars
    }
}

/// Returns the start of the prompt.
fn prompt(bars: &[Bar]) -> f64 {
    bars.iter().find(|bar| bar.name == "prefill").unwrap().start
}

pub(crate) fn number(cell: &str) -> f64 {
    cell.trim_end_matches('%').parse().unwrap()
}

/// Returns the seconds of prefill and decode that the program prints.
pub(crate) fn printed_speeds(outcome: &Outcome) -> (f64, f64) {
    let line = outcome.stderr.lines().find(|line| line.contains("; prefill ")).unwrap();
    let seconds = |what: &str| {
        let rest = line.split_once(&format!("; {what} ")).unwrap().1;
        let (tokens, rest) = rest.split_once(" tokens, ").unwrap();
        number(tokens) / number(rest.split_once(" tokens/s").unwrap().0)
    };
    (seconds("prefill"), seconds("decode"))
}

#[track_caller]
pub(crate) fn assert_near(found: f64, expected: f64, what: &str) {
    assert!((found / expected - 1.0).abs() < 0.05, "{what}: {found}, not {expected}");
}

/// Returns the repository's model and a text.
pub(crate) const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");

pub(crate) fn generate(model: &str, page: &str, more: &[&str]) -> Outcome {
    let text = format!("{AUSTEN}/northanger_abbey.txt");
    let mut args = vec!["generate", "--model", model, "--prompt-file", &text, "--no-chat"];
    // Without guesses, each token is one step.
    args.extend(["--cache", "k4v4-r32", "--profile", page, "--speculate", "never"]);
    args.extend(more);
    let outcome = kv_eval(&args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    outcome
}

/// Runs `model` and compares the page with the clocks of the program and of this test. At least the
/// share `named` of the time in phases must be in named operations.
#[track_caller]
fn assert_agrees(model: &str, layers: f64, named: f64) -> Page {
    let space = Workspace::new();
    let path = space.path("profile.html");
    let start = Instant::now();
    let outcome = generate(model, &path, &["--prompt-tokens", "700", "--max-tokens", "60"]);
    let process = start.elapsed().as_secs_f64();
    let (prefill, decode) = printed_speeds(&outcome);
    let page = Page::read(&path);
    let phases = page.table("Phases");
    assert_near(number(&phases["prefill"][1]) / 1e3, prefill, "prefill");
    assert_near(number(&phases["decode"][1]) / 1e3, decode, "decode");
    // The rates are the printed ones. A step follows each token but the last.
    assert_eq!((&*phases["prefill"][4], &*phases["decode"][4]), ("700", "59"));
    for (phase, tokens, seconds) in [("prefill", 700.0, prefill), ("decode", 59.0, decode)] {
        let [rate, forward, of_forward] = [5, 6, 7].map(|i| number(&phases[phase][i]));
        let near = (rate * seconds / tokens - 1.0).abs();
        assert!(near < 0.03, "{phase}: {rate} tokens/s, printed {}", tokens / seconds);
        assert!(forward <= number(&phases[phase][1]) && of_forward >= rate, "{phase}");
        assert_near(of_forward * forward / 1e3, tokens, phase);
    }
    let tokens = number(&phases["decode"][0]);
    let whole = number(&phases["total"][1]) / 1e3;
    assert!(whole < process && whole > prefill + decode, "{whole} of {process}");
    // The parts add up to the time of the main thread, and nearly all of it has a name.
    let bars = page.lane("main");
    let of_phases: f64 = ["prefill", "decode"].map(|phase| number(&phases[phase][1])).iter().sum();
    let in_parts = bars.iter().filter(|bar| bar.depth == 1 && bar.start > prompt(&bars));
    let in_parts: f64 = in_parts.map(|bar| bar.end - bar.start).sum();
    assert!(in_parts > named * of_phases && in_parts <= of_phases, "{in_parts} of {of_phases} ms");
    for phase in ["prefill", "decode"] {
        let operations = page.table(&format!("Operations in {phase}"));
        let sum: f64 = operations
            .iter()
            .filter(|(name, _)| *name != "total")
            .map(|(_, cells)| number(&cells[1]))
            .sum();
        assert_near(sum, number(&operations["total"][1]), phase);
        for operation in ["attention_norm", "qkv", "attend", "output", "mlp_norm", "mlp.gate_up"] {
            assert!(operations.contains_key(operation), "{operation} in {phase}");
        }
        // Attention to one token includes rope.
        assert_eq!(operations.contains_key("rope"), phase == "prefill");
    }
    // On one thread this is the time of the phase; prompts use more threads.
    let operations = page.table("Operations in decode");
    assert_near(number(&operations["total"][1]) / 1e3, decode, "operations of decoding");
    // One head per token except the last, and one operation per layer.
    assert_eq!(number(&operations["head"][0]), tokens - 1.0);
    assert_eq!(number(&operations["qkv"][0]), layers * (tokens - 1.0));
    assert_eq!(number(&operations["sample"][0]), tokens);
    for name in ["load", "prefill", "decode_1", "decode_2", "pass", "L0", "L1/qkv", "L0/attend"] {
        assert!(bars.iter().any(|bar| bar.name == name), "{name}");
    }
    let facts = ["date", "version", "commit", "command", "backend", "adapter", "model", "cache"];
    for fact in facts {
        assert!(page.html.contains(&format!("<td>{fact}</td>")), "{fact}");
    }
    assert!(page.html.contains("kv-eval 0.") && page.html.contains("k4v4-r32"));
    page
}

#[test]
fn a_profile_agrees_with_the_clock() {
    // Other load of the machine may fall between two operations of such a small model.
    let page = assert_agrees(AUSTEN, 3.0, 0.8);
    // Other threads compute rows of a long prompt within the same operations.
    let lanes = page.data["lanes"].as_array().unwrap();
    let others =
        lanes.iter().filter_map(|lane| lane["name"].as_str()).filter(|name| *name != "main");
    let bars: Vec<Bar> = others.flat_map(|lane| page.lane(lane)).collect();
    assert!(bars.iter().any(|bar| bar.name == "L2/qkv"), "no rows on other threads");
    assert!(bars.iter().all(|bar| bar.name != "module"), "an operation without a name");
}

#[test]
#[ignore = "needs SmolLM2: KV_SMOLLM2 names its GGUF file, see scripts/get-smollm2"]
fn smollm2_profile_agrees_with_the_clock() {
    let model = std::env::var("KV_SMOLLM2").expect("KV_SMOLLM2 names the GGUF file");
    assert_agrees(&model, 30.0, 0.95);
}

#[test]
fn every_command_that_runs_a_model_has_a_profile() {
    let space = Workspace::new();
    let (model, text) = (space.model(), space.text());
    let path = space.path("profile.html");
    let of = |args: &[&str]| {
        let outcome = kv_eval(&[args, &["--profile", &path]].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        Page::read(&path)
    };
    let caches = ["--cache", "k4v4-g16-r32"];
    let ppl = ["ppl", "--model", &model, "--text", &text, "--window", "90", "--tokens", "200"];
    let page = of(&[&ppl[..], &caches].concat());
    let phases = page.table("Phases");
    assert_eq!(phases["window float"][0], "3");
    assert_eq!(phases["window k4v4-g16-r32"][0], "3");
    assert_eq!(phases["divergence k4v4-g16-r32"][0], "3");
    let operations = page.table("Operations in window k4v4-g16-r32");
    assert!(operations.contains_key("qkv") && operations.contains_key("score"));

    let bench = ["--model", &model, "--contexts", "64", "--samples", "2"];
    let page = of(&[&["bench", "decode"], &bench[..], &caches].concat());
    let phases = page.table("Phases");
    assert_eq!(phases["decode k4v4-g16-r32"][0], "4", "two samples after two that do not count");
    assert!(phases.contains_key("fill k4v4-g16-r32") && phases.contains_key("copy"));
    let page = of(&[&["bench", "prefill"], &bench[..], &caches].concat());
    assert_eq!(page.table("Phases")["prefill k4v4-g16-r32"][0], "3");
    let shape = ["--contexts", "128", "--samples", "2", "--working-set", "1"];
    let page = of(&[&["bench", "decode-attention"], &shape[..], &caches].concat());
    assert_eq!(page.table("Phases")["attend k4v4-g16-r32"][0], "4");
}

#[test]
fn a_page_that_cannot_be_written_is_refused_before_the_run() {
    let space = Workspace::new();
    let folder = space.path("folder");
    fs::create_dir(&folder).unwrap();
    let nowhere = space.path("no/such/folder/page.html");
    // The model is not there either, which would be said if it were looked for first.
    for (path, why) in [
        (&*nowhere, "cannot write"),
        (&*folder, "is a folder"),
        ("-", "is written to a file, not to standard output"),
    ] {
        for command in [
            &["generate", "--model", "/no/model", "--prompt", "x"][..],
            &["ppl", "--model", "/no/model", "--text", "/no/text"],
            &["bench", "decode", "--model", "/no/model"],
            &["world", "--model", "/no/model"],
        ] {
            let outcome = kv_eval(&[command, &["--profile", path]].concat());
            assert_eq!(outcome.code, 1);
            let lines = outcome.error_lines();
            assert_eq!(lines.len(), 1, "{}", outcome.stderr);
            assert!(lines[0].starts_with(&format!("error: profile {path}: ")), "{}", lines[0]);
            assert!(lines[0].contains(why), "{}", lines[0]);
        }
    }
}

#[test]
fn a_run_that_fails_leaves_the_page_as_it_was() {
    let space = Workspace::new();
    let path = space.path("page.html");
    fs::write(&path, "what was there").unwrap();
    let outcome =
        kv_eval(&["generate", "--model", "/no/model", "--prompt", "x", "--profile", &path]);
    assert_eq!(outcome.code, 1);
    assert_eq!(fs::read_to_string(&path).unwrap(), "what was there");
}

/// Ends a run by a signal as soon as it has written `before` its text, after `meanwhile`; the exit
/// code, and what it said on standard error.
#[cfg(unix)]
fn interrupted(page: &str, meanwhile: impl FnOnce()) -> (Option<i32>, String) {
    use std::{
        io::Read,
        process::{Command, Stdio},
    };
    let mut run = Command::new(env!("CARGO_BIN_EXE_kv-eval"))
        .args(["generate", "--model", AUSTEN, "--prompt", "It is a truth", "--no-chat"])
        .args(["--max-tokens", "1000000", "--capacity", "1024", "--profile", page])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Its first token has been written by now.
    run.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    meanwhile();
    let id = run.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let mut stderr = String::new();
    run.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (run.wait().unwrap().code(), stderr)
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_has_its_page_or_says_why_not() {
    let space = Workspace::new();
    let folder = space.path("pages");
    fs::create_dir(&folder).unwrap();
    let path = format!("{folder}/page.html");
    let (code, stderr) = interrupted(&path, || {});
    assert_eq!(code, Some(130), "{stderr}");
    assert!(stderr.contains(&format!("the profile is in {path}")), "{stderr}");
    let page = Page::read(&path);
    assert!(page.html.contains("<td>by Ctrl-C or SIGTERM</td>"));
    assert!(number(&page.table("Phases")["decode"][0]) >= 1.0);

    let (code, stderr) = interrupted(&path, || fs::remove_dir_all(&folder).unwrap());
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains(&format!("error: profile {path}: cannot write")), "{stderr}");
}

/// Weights that stay packed are called by their format, and not by the type that they are computed
/// with in.
#[test]
fn packed_weights_have_the_name_of_their_format() {
    let device = burn::tensor::Device::flex();
    let loaded = kv_models::load(AUSTEN, &device).unwrap();
    let space = Workspace::new();
    let (model, path) = (space.path("int8"), space.path("profile.html"));
    let int8 = Some("int8-g32".parse().unwrap());
    let options = kv_models::QuantizeOptions::new([int8; 3]);
    let tokenizer = loaded.tokenizer.unwrap();
    kv_models::save_quantized(&model, &loaded.model, &tokenizer, options).unwrap();
    let more = ["--prompt-tokens", "8", "--max-tokens", "2", "--weights"];
    generate(&model, &path, &[&more[..], &["packed"]].concat());
    let page = Page::read(&path).html;
    // The norms stay floats: what is called f32 is far less than what is packed.
    assert!(page.contains(" MB of int8-g32, 0.0 MB of f32"), "{:?}", page.find(" MB of "));
    generate(&model, &path, &[&more[..], &["restored"]].concat());
    let page = Page::read(&path).html;
    assert!(page.contains(" MB of f32") && !page.contains("int8-g32"));
}
