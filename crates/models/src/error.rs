//! The errors of this crate.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::shortage::Shortage;

/// The result of this crate's functions.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// What can be wrong with a caller's file, text or request. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing at `path`.
    #[error("{}: not found{hint}", path.display())]
    NotFound {
        /// What was looked for.
        path: PathBuf,
        /// What would have been accepted, empty or starting with a comma.
        hint: String,
    },
    /// The operating system could not read `path`.
    #[error("{}: cannot read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The operating system could not write `path`; what was there before is unchanged.
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The file is not what its name or magic says: truncated, or not of that format.
    #[error("{}: not a readable {format} file: {}", path.display(), line(why))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The format it was read as.
        format: &'static str,
        /// What did not fit.
        why: String,
    },
    /// A field of the model's configuration breaks a rule.
    #[error("{}: {} = {}: {rule}", path.display(), line(field), line(value))]
    Config {
        /// The file.
        path: PathBuf,
        /// The field as the file spells it.
        field: String,
        /// The value found, or `missing`.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// The file is readable but none of its tensors belong to the model.
    #[error(
        "{}: foreign file: none of its {n_tensors} tensors belongs to a {family} model (expected {expected}, found {})",
        path.display(),
        line(found)
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// How many tensors it holds.
        n_tensors: usize,
        /// The model family of the configuration.
        family: String,
        /// A tensor that such a model has.
        expected: String,
        /// The first tensor of the file.
        found: String,
    },
    /// A tensor of the model is not in the file.
    #[error("{}: tensor {tensor} is missing", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor as the file would name it.
        tensor: String,
    },
    /// The file has tensors that the model has no place for: without them the model would not
    /// compute what was trained.
    #[error("{}: {}", path.display(), leftover(family, tensors))]
    Leftover {
        /// The file, or the folder of several.
        path: PathBuf,
        /// The model family of the configuration.
        family: String,
        /// The tensors as the file names them.
        tensors: Vec<String>,
    },
    /// A tensor's shape contradicts the configuration.
    #[error(
        "{}: tensor {tensor} has shape {actual:?}, the configuration needs {expected:?}",
        path.display()
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape found.
        actual: Vec<usize>,
        /// The shape the configuration asks for.
        expected: Vec<usize>,
    },
    /// A tensor holds NaN or an infinity.
    #[error("{}: tensor {tensor} holds {value} at element {index}, weights must be finite", path.display())]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// `NaN`, `inf` or `-inf`.
        value: f32,
        /// The first such element, in row-major order.
        index: usize,
    },
    /// A tensor's bytes cannot be read as numbers.
    #[error("{}: tensor {}: {}", path.display(), line(tensor), line(why))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        why: String,
    },
    /// The caller asked for an end of the work before it was done.
    #[error("interrupted, nothing is written")]
    Interrupted,
    /// A valid request that this crate does not serve.
    #[error("unsupported {}: {}", line(what), line(why))]
    Unsupported {
        /// The feature.
        what: String,
        /// The reason, naming the file where there is one.
        why: String,
    },
    /// More tokens than the model or the cache has room for; nothing was appended.
    #[error(
        "context of {requested} tokens ({cached} cached + {added} new) exceeds {limit_name} {limit}"
    )]
    ContextLength {
        /// Tokens after the call, had it gone through.
        requested: usize,
        /// Tokens already in the cache.
        cached: usize,
        /// Tokens of the call.
        added: usize,
        /// `max_positions` of the model or `capacity` of the cache.
        limit_name: &'static str,
        /// The value of that limit.
        limit: usize,
    },
    /// The arguments of a call contradict each other or the model.
    #[error("{field} = {value}: {rule}")]
    Argument {
        /// The argument.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A rule of a layer policy does not fit the model.
    #[error("{} = {}: {rule}", line(field), line(value))]
    Rule {
        /// The rule and its field, as `rules[1].layers`.
        field: String,
        /// Its value.
        value: String,
        /// What it breaks.
        rule: String,
    },
    /// A text is not UTF-8.
    #[error("{}: byte {offset} is not UTF-8; texts must be", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The offset of the first byte that is not UTF-8, from the start of the file.
        offset: u64,
    },
    /// A chat template is not valid, or rejected a conversation.
    #[error("chat template: {}", line(why))]
    ChatTemplate {
        /// What is wrong.
        why: String,
    },
    /// The tokenizer could not be built, or refused a text.
    #[error("tokenizer: {}", line(why))]
    Tokenizer {
        /// What is wrong, naming the file where there is one.
        why: String,
    },
    /// A model does not fit into the memory that there is; nothing was allocated.
    #[error("{0}")]
    Memory(Box<Shortage>),
    /// An error of the KV cache.
    #[error(transparent)]
    Cache(#[from] kv_cubecl::Error),

    /// A packed weight cannot do what is asked of it.
    #[error(transparent)]
    Weights(#[from] kv_weights::Error),
    /// What the next token cannot be picked from.
    #[error(transparent)]
    Sampling(#[from] kv_sampling::Error),
}

impl Error {
    /// [`Error::Config`]: the `field` of the file at `path` has a `value` that breaks `rule`.
    pub fn config(
        path: impl Into<PathBuf>,
        field: impl Into<String>,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Self {
        Self::Config {
            path: path.into(),
            field: field.into(),
            value: value.to_string(),
            rule: rule.into(),
        }
    }

    /// Turns an error about a value into one that also names the file it was read from.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Cache(kv_cubecl::Error::InvalidConfig { field, value, rule })
            | Self::Argument { field, value, rule } => Self::config(path, field, value, rule),
            Self::Rule { field, value, rule } => Self::config(path, field, value, rule),
            other => other,
        }
    }

    /// [`Error::Unsupported`].
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), why: why.into() }
    }

    pub(crate) fn argument(
        field: &'static str,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Self {
        Self::Argument { field, value: value.to_string(), rule: rule.into() }
    }

    pub(crate) fn tokenizer(why: impl ToString) -> Self {
        Self::Tokenizer { why: why.to_string() }
    }
}

fn leftover(family: &str, tensors: &[String]) -> String {
    /// How many tensors the message names; it only counts the others.
    const SHOWN: usize = 5;
    let have = if tensors.len() == 1 { "tensor has" } else { "tensors have" };
    let shown = line(&tensors[..tensors.len().min(SHOWN)].join(", "));
    let more = match tensors.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    let n = tensors.len();
    format!("{n} {have} no place in the {family} model of its configuration: {shown}{more}")
}

/// Names and values come from files, and some texts are messages of other crates: this makes any of
/// them one line of bounded length.
fn line(text: &str) -> String {
    one_line(text, 400)
}

/// `text` on one line: white space becomes single spaces, control characters are escaped, and what
/// follows the first `max` characters is replaced by ` ..`. For messages that quote files and other
/// crates.
pub fn one_line(text: &str, max: usize) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = String::new();
    for c in words.chars().take(max) {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    if words.chars().nth(max).is_some() {
        line.push_str(" ..");
    }
    line
}
