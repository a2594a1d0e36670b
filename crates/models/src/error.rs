//! The errors of this crate.

use std::{
    io,
    path::{Path, PathBuf},
};

use safetensors::SafeTensorError;

use crate::shortage::Shortage;

/// The result of this crate's functions.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// An error in a caller's file, text or request. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `path` does not exist.
    #[error("{}: not found{hint}", path.display())]
    NotFound {
        /// The missing path.
        path: PathBuf,
        /// Accepted alternatives; empty, or begins with a comma.
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
    /// The operating system could not write `path`; an existing file is unchanged.
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The file is truncated, or is not of the format that its name or magic indicates.
    #[error("{}: not a readable {format} file: {}", path.display(), line(why))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected format.
        format: &'static str,
        /// The reason.
        why: String,
    },
    /// A field of the model's configuration breaks a rule.
    #[error("{}: {} = {}: {rule}", path.display(), line(field), line(value))]
    Config {
        /// The file.
        path: PathBuf,
        /// The field as spelled in the file.
        field: String,
        /// The value found, or `missing`.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// The file is readable, but none of its tensors belongs to the model.
    #[error(
        "{}: foreign file: none of its {n_tensors} tensors belongs to a {family} model \
         (expected {expected}, found {})",
        path.display(),
        line(found)
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The number of tensors in the file.
        n_tensors: usize,
        /// The model family of the configuration.
        family: String,
        /// The name of a tensor that such a model has.
        expected: String,
        /// The name of the first tensor of the file.
        found: String,
    },
    /// A tensor of the model is not in the file.
    #[error("{}: tensor {tensor} is missing", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
    },
    /// The file has tensors that the model does not use. Without them it would not compute what was
    /// trained.
    #[error("{}: {}", path.display(), leftover(family, tensors))]
    Leftover {
        /// The file, or the folder of several files.
        path: PathBuf,
        /// The model family of the configuration.
        family: String,
        /// The tensors' names in the file.
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
        /// The shape that the configuration requires.
        expected: Vec<usize>,
    },
    /// A tensor holds NaN or an infinity.
    #[error(
        "{}: tensor {tensor} holds {value} at element {index}, weights must be finite",
        path.display()
    )]
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
        /// The reason.
        why: String,
    },
    /// The caller interrupted the work before it was done.
    #[error("interrupted, nothing is written")]
    Interrupted,
    /// The request is valid, but this crate does not support it.
    #[error("unsupported {}: {}", line(what), line(why))]
    Unsupported {
        /// The feature.
        what: String,
        /// The reason, which names the file if there is one.
        why: String,
    },
    /// The tokens exceed the limit of the model or of the cache; nothing was appended.
    #[error(
        "context of {requested} tokens ({cached} cached + {added} new) exceeds {limit_name} {limit}"
    )]
    ContextLength {
        /// Tokens that the cache would have after the call.
        requested: usize,
        /// Tokens already in the cache.
        cached: usize,
        /// Tokens added by the call.
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
        /// The rule it breaks.
        rule: String,
    },
    /// A text is not UTF-8.
    #[error("{}: byte {offset} is not UTF-8; texts must be UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The offset of the first byte that is not UTF-8, from the start of the file.
        offset: u64,
    },
    /// A chat template is not valid, or it rejected a conversation.
    #[error("chat template: {}", line(why))]
    ChatTemplate {
        /// The reason.
        why: String,
    },
    /// The tokenizer could not be built, or it rejected a text.
    #[error("tokenizer: {}", line(why))]
    Tokenizer {
        /// The reason, which names the file if there is one.
        why: String,
    },
    /// The model does not fit into the available memory; nothing was allocated.
    #[error("{0}")]
    Memory(Box<Shortage>),
    /// An error of the KV cache.
    #[error(transparent)]
    Cache(#[from] kv_cubecl::Error),

    /// An error of packed weights.
    #[error(transparent)]
    Weights(#[from] kv_weights::Error),
    /// An error of sampling.
    #[error(transparent)]
    Sampling(#[from] kv_sampling::Error),
}

impl Error {
    /// Creates an [`Error::Config`]: `field` of the file at `path` has a `value` that breaks
    /// `rule`.
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

    /// Adds the name of the file that the value was read from.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Cache(kv_cubecl::Error::InvalidConfig { field, value, rule })
            | Self::Argument { field, value, rule } => Self::config(path, field, value, rule),
            Self::Rule { field, value, rule } => Self::config(path, field, value, rule),
            other => other,
        }
    }

    /// Creates an [`Error::Unsupported`].
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), why: why.into() }
    }

    /// Creates an [`Error::Argument`].
    pub fn argument(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Argument { field, value: value.to_string(), rule: rule.into() }
    }

    pub(crate) fn tokenizer(why: impl ToString) -> Self {
        Self::Tokenizer { why: why.to_string() }
    }
}

fn leftover(family: &str, tensors: &[String]) -> String {
    /// The number of tensors that the message names.
    const SHOWN: usize = 5;
    let are = if tensors.len() == 1 { "tensor is" } else { "tensors are" };
    let shown = line(&tensors[..tensors.len().min(SHOWN)].join(", "));
    let more = match tensors.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    let n = tensors.len();
    format!("{n} {are} not part of the {family} model in its configuration: {shown}{more}")
}

/// Returns why a safetensors file cannot be read.
pub(crate) fn unreadable(error: &SafeTensorError) -> String {
    let part = match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            "header does not end inside the file"
        }
        SafeTensorError::MetadataIncompleteBuffer => "tensors do not end where the file ends",
        other => return other.to_string(),
    };
    format!("truncated or damaged: its {part}; copy or download it again")
}

/// Limits a text to one line of bounded length. Names and values come from files, and some texts
/// are messages of other crates.
fn line(text: &str) -> String {
    one_line(text, 400)
}

/// Returns `text` on one line, for messages that quote files and other crates. White space becomes
/// single spaces, control characters are escaped, and ` ..` replaces everything after the first
/// `max` characters.
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
