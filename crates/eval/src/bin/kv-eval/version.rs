//! `kv-eval --version`: built-in backends and the paths of files.

use std::{env, path::Path, sync::LazyLock};

use git_version::git_version;
use kv_cli::hub_folder;
use kv_eval::Versions;
use kv_eval_models::{BuiltIn, HELDOUT};
use kv_models::decimal_size;

use crate::compare::REPORT;

/// The commit that the program was built from, with `-modified` if tracked files differed; empty
/// outside a Git repository. It is not in the library, which would be built again for each commit.
pub(crate) const COMMIT: &str = git_version!(
    args = ["--always", "--exclude=*", "--abbrev=12", "--dirty=-modified"],
    fallback = ""
);

/// Returns the version and the paths, one per line.
pub(crate) fn long() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(text);
    &TEXT
}

fn text() -> String {
    let Versions { kv_eval, burn, cubecl } = Versions::BUILT;
    let backends = [
        ("flex", cfg!(feature = "flex")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("cuda", cfg!(feature = "cuda")),
    ];
    let backends = backends.into_iter().filter(|(_, built)| *built).map(|(name, _)| name);
    let models = BuiltIn::ALL
        .map(|model| format!("{} ({})", model.name, decimal_size(model.bytes() as u64)));
    let program = env::current_exe().map_or("unknown".into(), |path| path.display().to_string());
    let hub = hub_folder().map_or("nowhere: HF_HOME names a folder".into(), shown);
    let lines = [
        kv_eval.to_string(),
        match COMMIT {
            "" => format!("burn {burn}, cubecl {cubecl}"),
            commit => format!("commit {commit}, burn {burn}, cubecl {cubecl}"),
        },
        format!("backends: {}", backends.collect::<Vec<_>>().join(", ")),
        format!("program: {program}"),
        format!("built in: {}, a text ({})", models.join(", "), decimal_size(HELDOUT.len() as u64)),
        format!("models of the hub: {hub}"),
        format!("temporary files: {}", env::temp_dir().display()),
        format!("report without --report: {REPORT} in the current folder"),
    ];
    lines.join("\n")
}

fn shown(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}
