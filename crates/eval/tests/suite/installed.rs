//! The program outside the repository: it contains its models, and prints the paths of its files.
#![cfg(unix)]
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

/// A copy of the program with empty folders.
struct Installed {
    root: TempDir,
    program: PathBuf,
}

impl Installed {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("kv-eval");
        fs::copy(env!("CARGO_BIN_EXE_kv-eval"), &program).unwrap();
        for folder in ["empty", "temporary"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        Self { root, program }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Runs it in a folder; only a folder for temporary files is in its environment.
    fn run(&self, folder: &Path, args: &[&str]) -> Output {
        let mut command = Command::new(&self.program);
        command.env_clear().env("TMPDIR", self.path("temporary"));
        command.args(args).current_dir(folder).output().unwrap()
    }

    #[track_caller]
    fn succeeds(&self, folder: &Path, args: &[&str]) -> (String, String) {
        let output = self.run(folder, args);
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(output.status.success(), "{stderr}");
        assert_eq!(self.names("temporary"), Vec::<String>::new(), "left behind");
        (stdout, stderr)
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn nlls(path: &Path) -> Vec<(String, String, f64)> {
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let runs = report["runs"].as_array().unwrap().iter();
    let text = |run: &serde_json::Value, field: &str| run[field].as_str().unwrap().to_string();
    runs.map(|run| (text(run, "model"), text(run, "cache"), run["nll"].as_f64().unwrap())).collect()
}

#[test]
fn the_comparison_runs_in_an_empty_folder() {
    let installed = Installed::new();
    let (empty, json) = (installed.path("empty"), installed.path("out.json"));
    let args = ["--tokens", "2048", "--json", json.to_str().unwrap()];
    let (stdout, stderr) = installed.succeeds(&empty, &args);
    assert!(
        stdout.contains("2048 tokens of models/austen/heldout.txt in windows of 1024"),
        "{stdout}"
    );
    assert!(stdout.contains("report: kv-eval-report/report.html"), "{stdout}");
    assert_eq!(stderr, "");
    assert_eq!(installed.names("empty"), ["kv-eval-report"]);
    assert!(installed.path("empty/kv-eval-report/report.html").exists());

    // The numbers equal those of the files in the repository.
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");
    let [base, tuned, text] = ["austen", "austen-k2v2-gflush", "austen/heldout.txt"]
        .map(|name| format!("{models}/{name}"));
    let of_files = installed.path("files.json");
    let paths = ["--base", &base, "--tuned", &tuned, "--text", &text, "--tokens", "2048"];
    let to = ["--json", of_files.to_str().unwrap()];
    installed.succeeds(&empty, &[&paths[..], &to].concat());
    assert_eq!(nlls(&json), nlls(&of_files));
    assert_eq!(nlls(&json).len(), 5);
}

/// Not even root can write into this folder.
#[cfg(target_os = "linux")]
#[test]
fn without_a_folder_for_the_report_the_table_is_printed() {
    let installed = Installed::new();
    let (stdout, stderr) = installed.succeeds(Path::new("/proc"), &["--tokens", "200"]);
    assert!(stdout.contains("perplexity") && !stdout.contains("report:"), "{stdout}");
    let note = "note: no report was written: report kv-eval-report: cannot write";
    assert!(
        stderr.starts_with(note) && stderr.contains("--report names another folder"),
        "{stderr}"
    );
    // A folder that the user names is required.
    let named = installed.run(Path::new("/proc"), &["--tokens", "200", "--report", "here"]);
    assert_eq!(named.status.code(), Some(1));
    let stderr = String::from_utf8(named.stderr).unwrap();
    assert!(stderr.starts_with("error: report here: cannot write"), "{stderr}");
}

#[test]
fn games_are_played_in_an_empty_folder() {
    let installed = Installed::new();
    let args = ["world", "--frames", "2", "--seeds", "1", "--context", "2", "--cache", "float-f16"];
    let (stdout, _) = installed.succeeds(&installed.path("empty"), &args);
    assert!(stdout.contains("1 games of 2 frames") && stdout.contains("float-f16"), "{stdout}");
}

#[test]
fn the_version_lists_paths() {
    let installed = Installed::new();
    let empty = installed.path("empty");
    let (short, _) = installed.succeeds(&empty, &["-V"]);
    let version = concat!("kv-eval ", env!("CARGO_PKG_VERSION"));
    assert_eq!(short.trim_end(), version);
    let (long, _) = installed.succeeds(&empty, &["--version"]);
    assert_eq!(long.lines().next(), Some(version));
    let temporary = installed.path("temporary").display().to_string();
    let program = installed.program.display().to_string();
    for part in ["backends: flex", "built in: austen (", "world (", &*program, &*temporary] {
        assert!(long.contains(part), "{part} in {long}");
    }
    // It does not look in the repository.
    let (help, _) = installed.succeeds(&empty, &["--help"]);
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    assert!(!help.contains(repository.to_str().unwrap()), "{help}");
}

#[test]
fn a_missing_folder_for_temporary_files_is_named() {
    let installed = Installed::new();
    fs::remove_dir(installed.path("temporary")).unwrap();
    let output = installed.run(&installed.path("empty"), &["--tokens", "200"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: built-in model austen: cannot write to "), "{stderr}");
    assert!(
        stderr.contains("TMPDIR names another folder") && stderr.lines().count() == 1,
        "{stderr}"
    );
}
