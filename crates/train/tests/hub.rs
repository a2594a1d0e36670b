//! Models of the hub are asked for there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Command;

#[test]
fn a_model_id_is_looked_up() {
    let home = tempfile::tempdir().unwrap();
    let run = home.path().join("run");
    for (model, part) in [
        ("someone/model", "model someone/model: no such path here, and the hub did not give it"),
        ("no-such-model", "model no-such-model: no such file or folder"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv-train"));
        command.args(["qat", "--model", model, "--text", "text.txt", "--cache", "k2v2", "--out"]);
        // A port that nothing listens on.
        command.arg(&run).env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HOME", home.path());
        let output = command.env("NO_PROXY", "127.0.0.1").output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && errors.lines().count() == 1, "{errors}");
        assert!(errors.contains(part), "{errors}");
        assert!(!run.exists());
    }
}
