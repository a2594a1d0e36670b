//! Arguments that several commands have: the text, the caches, and where results go as JSON.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::Result;
use kv_cli::{NamedFiles, OutFile, Screen};
use kv_cubecl::KvCacheConfig;
use kv_models::{ModelCacheConfig, Tokenizer};

use crate::common::{BosArgs, note_short_text, read_ids};

/// The text, and what it starts with.
#[derive(Debug, clap::Args)]
pub(crate) struct TextArgs {
    #[command(flatten)]
    bos: BosArgs,
    /// A UTF-8 text file, or - for standard input.
    #[arg(id = "text", long = "text", short = 'f', value_name = "TEXT")]
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
    /// The file, if one is named.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.json.as_deref()
    }

    /// The terminal's part, and the file, of which it is known that it can be written.
    pub(crate) fn open(&self) -> Result<(Screen, Option<OutFile>)> {
        let screen = Screen::beside([self.json.as_deref()]);
        let file = self.json.as_deref().map(|path| OutFile::open("json", path)).transpose()?;
        Ok((screen, file))
    }
}

/// What an argument stands for, with its text: that may be a file, which no output may overwrite.
#[derive(Clone, Debug)]
pub(crate) struct Named<T> {
    pub(crate) name: String,
    pub(crate) value: T,
}

/// A cache or a policy.
pub(crate) type NamedCache = Named<ModelCacheConfig>;

impl FromStr for NamedCache {
    type Err = kv_models::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Ok(Self { name: name.to_string(), value: ModelCacheConfig::find(name)? })
    }
}

/// Every cache that a layer has by one of `caches`, once.
pub(crate) fn layer_caches(caches: &[NamedCache]) -> Vec<KvCacheConfig> {
    let mut all = vec![];
    for config in caches.iter().flat_map(|named| named.value.candidates()) {
        if !all.contains(&config) {
            all.push(config);
        }
    }
    all
}

/// The values of `caches`.
pub(crate) fn configs<T: Clone>(caches: &[Named<T>]) -> Vec<T> {
    caches.iter().map(|named| named.value.clone()).collect()
}

/// Adds the files that policies of `caches` are read from.
pub(crate) fn policies<'a, T>(files: NamedFiles<'a>, caches: &'a [Named<T>]) -> NamedFiles<'a> {
    caches.iter().fold(files, |files, named| files.reads("cache", &named.name))
}
