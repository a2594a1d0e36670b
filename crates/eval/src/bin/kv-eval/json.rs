//! The argument `--json` and its file.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use anyhow::Result;
use kv_cli::{OutFile, Screen};
use serde::Serialize;

/// The file for results as JSON.
#[derive(Debug, clap::Args)]
pub(crate) struct JsonArgs {
    /// Write all results to this file as JSON. With -, JSON goes to standard output and the printed
    /// tables go to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl JsonArgs {
    pub(crate) fn path(&self) -> Option<&Path> {
        self.json.as_deref()
    }

    /// Returns the stream to print to, and the file after checking that it is writable.
    pub(crate) fn open(&self) -> Result<(Screen, Option<OutFile>)> {
        let screen = Screen::beside([self.json.as_deref()]);
        let file = self.json.as_deref().map(|path| OutFile::open("json", path)).transpose()?;
        Ok((screen, file))
    }
}

/// Writes `value` as JSON if there is a file for it, and prints it. It is printed even if the file
/// cannot be written.
pub(crate) fn show(
    screen: Screen,
    json: Option<OutFile>,
    value: &(impl Display + Serialize),
) -> Result<()> {
    let json = json.map_or(Ok(()), |file| write_json(file, value));
    screen.print(value)?;
    json
}

pub(crate) fn write_json(file: OutFile, value: &impl Serialize) -> Result<()> {
    file.write((serde_json::to_string_pretty(value)? + "\n").as_bytes())
}
