//! Models are looked up on the hub only after all other checks passed.
use std::{fs, process::Command};

/// Runs a command that must fail, and returns its single line on standard error.
fn refused(args: &[&str]) -> String {
    let home = tempfile::tempdir().unwrap();
    let (run, text) = (home.path().join("run"), home.path().join("text.txt"));
    fs::write(&text, "a text").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-train"));
    command.current_dir(home.path()).args(args);
    // A port that nothing listens on.
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HOME", home.path());
    let output = command.env("NO_PROXY", "127.0.0.1").output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && errors.lines().count() == 1, "{errors}");
    assert!(!run.exists());
    errors
}

fn qat<'a>(model: &'a str, text: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = ["qat", "--model", model, "--text", text, "--cache", "k2v2", "--out", "run"];
    [&args[..], more].concat()
}

#[test]
fn a_model_id_is_looked_up() {
    const UNKNOWN: &str =
        "error: model someone/model: no such path here, and the hub did not give it";
    for (args, part) in [
        (qat("someone/model", "text.txt", &[]), UNKNOWN),
        (qat("someone/model", "text.txt", &["--revision", "main"]), UNKNOWN),
        (
            qat("no-such-model", "text.txt", &[]),
            "error: model no-such-model: no such file or folder",
        ),
        (qat(".", "text.txt", &["--revision", "main"]), "error: revision main: model . lies here"),
        (vec!["bench", "--model", "someone/model"], UNKNOWN),
    ] {
        let errors = refused(&args);
        assert!(errors.starts_with(part), "{errors}");
    }
}

#[test]
fn mistakes_are_reported_before_a_model_is_downloaded() {
    for (args, part) in [
        (qat("someone/model", "nothing.txt", &[]), "nothing.txt"),
        (qat("someone/model", "text.txt", &["--valid-text", "."]), "directory"),
        (qat("someone/model", "text.txt", &["--seq-len", "64"]), "residual"),
        (vec!["bench", "--model", "someone/model", "--seq-len", "64"], "residual"),
    ] {
        let errors = refused(&args);
        assert!(errors.contains(part) && !errors.contains("hub"), "{errors}");
    }
}
