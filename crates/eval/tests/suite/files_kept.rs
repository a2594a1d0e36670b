//! Files of the user: inputs are not overwritten, existing policies are not replaced, and Ctrl-C
//! leaves no unfinished file.

use std::fs;
#[cfg(unix)]
use std::path::Path;

use crate::common::{Workspace, kv_eval};

#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let outcome = kv_eval(args);
    let lines = outcome.error_lines();
    assert!(outcome.code != 0 && lines.len() == 1, "{args:?}: {}", outcome.stderr);
    assert!(parts.iter().all(|part| lines[0].contains(part)), "{parts:?} in {}", lines[0]);
}

/// Every command that reads and writes files refuses an input as an output.
#[test]
fn no_command_overwrites_its_inputs() {
    let space = Workspace::new();
    let (model, text, policy) = (space.model(), space.text(), space.path("policy.toml"));
    fs::write(&policy, "[[rules]]\ncache = \"k8v8-g16-r16\"\n").unwrap();
    let config = format!("{model}/config.json");
    let read = [&text, &policy, &config].map(|path| (path.clone(), fs::read(path).unwrap()));
    let (with_model, with_text) = (["--model", &*model], ["--text", &*text]);
    let on_text = |command: &'static str| [&[command][..], &with_model, &with_text].concat();
    let bench = |name: &'static str| [&["bench", name][..], &with_model].concat();
    let cache = ["--cache", &*policy];
    let small = ["--tokens", "40"];
    let generate = [&["generate", "--prompt", "a"][..], &with_model].concat();
    let with_prompt = ["generate", "--prompt-file", &*text];
    let search = ["--bytes", "1M", "--base", "k4v4-g16-r16"];
    for (args, output, option) in [
        ([&on_text("ppl")[..], &small].concat(), ["--json", &text], "--text"),
        ([&on_text("ppl")[..], &small, &cache].concat(), ["--json", &policy], "--cache"),
        ([&on_text("ppl")[..], &small].concat(), ["--json", &config], "--model"),
        ([&on_text("ppl")[..], &small].concat(), ["--profile", &text], "--text"),
        ([&on_text("twin")[..], &small, &cache].concat(), ["--json", &text], "--text"),
        ([&on_text("twin")[..], &small, &cache].concat(), ["--json", &policy], "--cache"),
        ([&on_text("search")[..], &search].concat(), ["--json", &text], "--text"),
        ([&on_text("search")[..], &search].concat(), ["--plot", &text], "--text"),
        ([&["plan"][..], &with_model].concat(), ["--json", &config], "--model"),
        ([&["plan"][..], &with_model, &cache].concat(), ["--json", &policy], "--cache"),
        (bench("decode"), ["--json", &config], "--model"),
        ([&bench("prefill")[..], &cache].concat(), ["--plot", &policy], "--cache"),
        (bench("llm"), ["--json", &config], "--model"),
        (vec!["--text", &text], ["--json", &text], "--text"),
        ([&generate[..], &cache].concat(), ["--json", &policy], "--cache"),
        (generate.clone(), ["--save-cache", &config], "--model"),
        (generate.clone(), ["--profile", &config], "--model"),
        ([&with_prompt[..], &with_model].concat(), ["--save-cache", &text], "--prompt-file"),
        (
            [&["generate", "--prompts", &text][..], &with_model].concat(),
            ["--json", &text],
            "--prompts",
        ),
        ([&generate[..], &["--load-cache", &text]].concat(), ["--json", &text], "--load-cache"),
    ] {
        let parts = [output[0].trim_start_matches('-'), option, "would overwrite"];
        refused(&[&args[..], &output].concat(), &parts);
        for (path, bytes) in &read {
            assert!(fs::read(path).unwrap() == *bytes, "{args:?} changed {path}");
        }
    }
    // Another path of the same file.
    let detour = format!("{model}/../text.txt");
    refused(&[&on_text("ppl")[..], &["--json", &detour]].concat(), &["json", "--text"]);
    let twice = space.path("both");
    let both = ["--json", &*twice, "--plot", &twice];
    refused(&[&bench("decode")[..], &both].concat(), &["plot", "--json writes that file too"]);
    let both = ["--save-cache", &*twice, "--json", &twice];
    refused(&[&generate[..], &both].concat(), &["json", "--save-cache writes that file too"]);
}

#[test]
fn a_search_does_not_replace_a_policy() {
    let space = Workspace::new();
    let (model, text, out) = (space.model(), space.text(), space.path("policy.toml"));
    fs::write(&out, "# by hand\n").unwrap();
    let args = ["search", "--model", &model, "--text", &text, "--bytes", "1M", "--out", &out];
    refused(&args, &["out ", "policy.toml", "already exists"]);
    assert_eq!(fs::read_to_string(&out).unwrap(), "# by hand\n");
}

/// Ctrl-C ends commands that take minutes with code 130; they leave no unfinished file.
#[cfg(unix)]
#[test]
fn an_interrupted_command_leaves_no_file_and_exits_with_130() {
    use std::{
        process::{Command, Stdio},
        thread::sleep,
        time::Duration,
    };

    const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");
    let text = format!("{AUSTEN}/northanger_abbey.txt");
    let streaming = ["ppl", "--model", AUSTEN, "--text", &text, "--mode", "streaming"];
    let streaming = [&streaming[..], &["--report", "new/report"]].concat();
    let twin = ["twin", "--model", AUSTEN, "--text", "-", "--cache", "k4v4"];
    let bench = ["bench", "quantize", "--samples", "1000000"];
    let compare = ["--tokens", "4000000", "--text", &text];
    let commands: [&[&str]; 4] = [&streaming, &twin, &bench, &compare];
    for args in commands {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_kv-eval"))
            .args(args)
            .arg("--json")
            .arg(folder.path().join("out.json"))
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        sleep(Duration::from_secs(2));
        assert!(child.try_wait().unwrap().is_none(), "{args:?} should take longer");
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        // Waiting closes standard input, whose end is an error that comes before the interrupt.
        let input = child.stdin.take();
        let output = child.wait_with_output().unwrap();
        drop(input);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{args:?}: {errors}");
        assert_eq!(names(folder.path()), [""; 0], "{args:?}");
    }
}

/// A report that does not fit on the disk leaves nothing, and an earlier one as it was.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_no_part_of_a_report() {
    use std::process::Command;

    let space = Workspace::new();
    let (model, text, report) = (space.model(), space.text(), space.path("report"));
    // The limit on the size of a file, as a full disk, makes a write fail after some bytes.
    let shell = "trap '' XFSZ; ulimit -f 8; exec \"$@\"";
    let write = || {
        let output = Command::new("sh")
            .args(["-c", shell, "sh", env!("CARGO_BIN_EXE_kv-eval"), "ppl", "--model", &model])
            .args(["--text", &text, "--tokens", "40", "--report", &report])
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let named = stderr.contains(": cannot write: File too large");
        assert!(named && !stderr.contains("unfinished"), "{stderr}");
    };
    write();
    assert!(!fs::exists(&report).unwrap());
    fs::create_dir(&report).unwrap();
    fs::write(space.path("report/quality.svg"), "before").unwrap();
    write();
    assert_eq!(names(Path::new(&report)), ["quality.svg"]);
    assert_eq!(fs::read_to_string(space.path("report/quality.svg")).unwrap(), "before");
}

/// Returns the names in a folder.
#[cfg(unix)]
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}
