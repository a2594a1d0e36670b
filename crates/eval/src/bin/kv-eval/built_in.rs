//! Models built into the program.

use std::{env, fs, path::Path};

use anyhow::{Context, Result};
use kv_cli::uninterrupted;
use kv_eval_models::BuiltIn;

/// Loads the given folder, or else a built-in model from a temporary folder, because loaders read
/// files.
pub(crate) fn load<T>(
    named: Option<&Path>,
    built_in: &BuiltIn,
    load: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let Some(named) = named else {
        return uninterrupted(|| {
            let folder = tempfile::Builder::new().prefix("kv-eval-").tempdir();
            let folder = folder.with_context(|| cannot(built_in))?;
            let path = folder.path().join(built_in.name);
            let written = fs::create_dir(&path).and_then(|()| built_in.write(&path));
            written.with_context(|| cannot(built_in))?;
            load(&path)
        });
    };
    load(named)
}

fn cannot(model: &BuiltIn) -> String {
    let (name, folder) = (model.name, env::temp_dir());
    format!(
        "built-in model {name}: cannot write to {}; TMPDIR names another folder",
        folder.display()
    )
}
