//! Arguments that several commands have: the text, and where results go as JSON.

use std::path::PathBuf;

use anyhow::Result;
use kv_cli::{OutFile, Screen};
use kv_models::Tokenizer;

use crate::common::{BosArgs, note_short_text, read_ids};

/// The text, and what it starts with.
#[derive(Debug, clap::Args)]
pub(crate) struct TextArgs {
    #[command(flatten)]
    bos: BosArgs,
    /// A UTF-8 text file, or - for standard input.
    #[arg(id = "text", long = "text", value_name = "TEXT")]
    pub(crate) path: PathBuf,
}

/// A text that was read.
pub(crate) struct TextIds {
    /// The first tokens of the text.
    pub(crate) ids: Vec<u32>,
    /// Bytes that they stand for.
    pub(crate) bytes: usize,
    /// The token to start with.
    pub(crate) bos: Option<u32>,
}

impl TextArgs {
    /// The text's first `tokens`, or all; says so if it has fewer.
    pub(crate) fn read(&self, tokenizer: &Tokenizer, tokens: Option<usize>) -> Result<TextIds> {
        let bos = self.bos.choose(tokenizer)?;
        let (ids, bytes) = read_ids(&self.path, tokenizer, tokens)?;
        note_short_text(&ids, tokens);
        Ok(TextIds { ids, bytes, bos })
    }
}

/// Where results go beside the terminal.
#[derive(Debug, clap::Args)]
pub(crate) struct JsonArgs {
    /// Write all results here as JSON; with -, to standard output, and what is printed to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl JsonArgs {
    /// The terminal's part, and the file, of which it is known that it can be written.
    pub(crate) fn open(&self) -> Result<(Screen, Option<OutFile>)> {
        let screen = Screen::beside([self.json.as_deref()]);
        let file = self.json.as_deref().map(|path| OutFile::open("json", path)).transpose()?;
        Ok((screen, file))
    }
}
