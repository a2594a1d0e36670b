//! Arguments shared by several commands: the text and the caches.

use std::{num::ParseIntError, path::PathBuf, str::FromStr};

use anyhow::{Result, bail};
use kv_cli::NamedFiles;
use kv_cubecl::{KvCacheConfig, KvFormat, RunningScale, Side, Sides};
use kv_models::{ModelCacheConfig, Tokenizer};

use crate::common::{BosArgs, note_short_text, read_ids};

/// The text, and whether it starts with a begin-of-text token.
#[derive(Debug, clap::Args)]
pub(crate) struct TextArgs {
    #[command(flatten)]
    pub(crate) bos: BosArgs,
    /// A UTF-8 text file, or - for standard input.
    #[arg(id = "text", long = "text", short = 'f', value_name = "TEXT")]
    pub(crate) path: PathBuf,
}

pub(crate) struct TextIds {
    /// The first tokens of the text.
    pub(crate) ids: Vec<u32>,
    /// Bytes of text that the tokens encode.
    pub(crate) bytes: usize,
    /// The token to start with, if any.
    pub(crate) bos: Option<u32>,
}

impl TextArgs {
    /// Reads the first `tokens` of the text, or all of it; prints a note if it has fewer.
    pub(crate) fn read(&self, tokenizer: &Tokenizer, tokens: Option<usize>) -> Result<TextIds> {
        let bos = self.bos.choose(tokenizer)?;
        let (ids, bytes) = read_ids(&self.path, tokenizer, tokens)?;
        note_short_text(&ids, tokens);
        Ok(TextIds { ids, bytes, bos })
    }
}

/// The value of an argument, with its text. The text may name a file that no output may overwrite.
#[derive(Clone, Debug)]
pub(crate) struct Named<T> {
    pub(crate) name: String,
    pub(crate) value: T,
}

/// Parses a number that is at least `N`.
pub(crate) fn at_least<const N: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number < N => Err(format!("must be at least {N}")),
        parsed => parsed.map_err(|error: ParseIntError| error.to_string()),
    }
}

/// Parses the name of a format other than float.
pub(crate) fn quantized_format(name: &str) -> Result<KvFormat, String> {
    let found = KvFormat::named(name).filter(|format| format.is_quantized());
    found.ok_or_else(|| {
        let all = KvFormat::ALL.iter().filter(|format| format.is_quantized());
        let names: Vec<_> = all.map(|format| format.name()).collect();
        format!("must be one of {}", names.join(", "))
    })
}

/// A cache or a per-layer policy.
pub(crate) type NamedCache = Named<ModelCacheConfig>;

impl FromStr for NamedCache {
    type Err = kv_models::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Ok(Self { name: name.to_string(), value: ModelCacheConfig::find(name)? })
    }
}

/// Lists each cache that `caches` give to some layer, without repetition.
pub(crate) fn layer_caches(caches: &[NamedCache]) -> Vec<KvCacheConfig> {
    let mut all = vec![];
    for config in caches.iter().flat_map(|named| named.value.candidates()) {
        // A single layer is not staggered.
        let config = config.in_layer(0, 1);
        if !all.contains(&config) {
            all.push(config);
        }
    }
    all
}

/// Rules for the running scales of frames.
#[derive(Debug, clap::Args)]
pub(crate) struct RunningArgs {
    /// Rule for the running scales of formats that take their scales from frames (int8f, int8p): a
    /// list of momentum, warm-up (in frames), growth, floor, ceiling and percentile, such as
    /// momentum=0.95,warm-up=8 [default:
    /// momentum=0.9,warm-up=4,growth=2,floor=0.001,percentile=99.5].
    #[arg(long, value_name = "SETTINGS")]
    running: Option<RunningScale>,
    /// The rule for keys alone.
    #[arg(long, value_name = "SETTINGS")]
    key_running: Option<RunningScale>,
    /// The rule for values alone.
    #[arg(long, value_name = "SETTINGS")]
    value_running: Option<RunningScale>,
}

impl RunningArgs {
    /// Returns the rule of each side.
    pub(crate) fn rules(&self) -> Sides<RunningScale> {
        let both = self.running.unwrap_or_default();
        Sides { keys: self.key_running.unwrap_or(both), values: self.value_running.unwrap_or(both) }
    }

    /// Refuses a rule that none of `caches` uses.
    pub(crate) fn check(&self, caches: &[KvCacheConfig]) -> Result<()> {
        let [keys, values] = Side::BOTH.map(|side| has_frame_scales(caches, side));
        if let (Some(_), Some(_), Some(_)) = (self.running, self.key_running, self.value_running) {
            bail!("running: both sides have a rule of their own; leave it out");
        }
        for (name, given, used, what) in [
            ("running", self.running, keys || values, "scales"),
            ("key-running", self.key_running, keys, "scales of keys"),
            ("value-running", self.value_running, values, "scales of values"),
        ] {
            if given.is_some() && !used {
                bail!("{name}: no cache takes {what} from frames; add --cache kint8fvint8f");
            }
        }
        Ok(())
    }
}

/// Returns whether a cache takes the scales of a side from frames.
pub(crate) fn has_frame_scales(caches: &[KvCacheConfig], side: Side) -> bool {
    caches.iter().any(|cache| KvFormat::FRAME_ONLY.contains(&cache.format(side)))
}

pub(crate) fn configs<T: Clone>(caches: &[Named<T>]) -> Vec<T> {
    caches.iter().map(|named| named.value.clone()).collect()
}

/// Returns the float cache and `caches`, without repetition.
pub(crate) fn with_float(caches: &[NamedCache]) -> Vec<ModelCacheConfig> {
    let mut all = vec![ModelCacheConfig::from(KvCacheConfig::float())];
    for cache in configs(caches) {
        if !all.contains(&cache) {
            all.push(cache);
        }
    }
    all
}

/// Adds the files that policies of `caches` are read from.
pub(crate) fn policies<'a, T>(files: NamedFiles<'a>, caches: &'a [Named<T>]) -> NamedFiles<'a> {
    // A world model's cache may name layers after its file.
    let file = |name: &'a str| name.split_once('@').map_or(name, |(file, _)| file);
    caches.iter().fold(files, |files, named| files.reads("cache", file(&named.name)))
}
