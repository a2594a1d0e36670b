use std::{io, path::PathBuf};

/// An error of texts, their token cache or their windows. Each message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// No path was given.
    #[error("sources: none given; name at least one text or JSONL file")]
    NoSources,
    /// A file does not exist.
    #[error("{}: not found", path.display())]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// The operating system could not read a file.
    #[error("{}: cannot read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A text is not UTF-8.
    #[error("{}: byte {offset} is not UTF-8; convert the file to UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first offending byte, counted from 0.
        offset: u64,
    },
    /// A line of a JSONL file is not a JSON object.
    #[error("{}: line {line}: {}", path.display(), one_line(why))]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// The error.
        why: String,
    },
    /// The text field of a JSONL line is missing or not a string.
    #[error(
        "{}: line {line}: field `{}` is {found}, but must be a string",
        path.display(),
        one_line(field)
    )]
    Field {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// The field.
        field: String,
        /// `missing`, or the kind of value found.
        found: &'static str,
    },
    /// No source holds any text.
    #[error("{}: no text in {}", first.display(), it_or_any(*n))]
    Empty {
        /// The first source.
        first: PathBuf,
        /// Number of sources.
        n: usize,
    },
    /// The tokenizer refused a document.
    #[error("{}{}: {}", path.display(), at_line(*line), one_line(why))]
    Tokenizer {
        /// The source.
        path: PathBuf,
        /// Its line, for JSONL.
        line: Option<u64>,
        /// The tokenizer's message.
        why: String,
    },
    /// A source changed between its first and its second reading.
    #[error("{}: changed while being tokenized; run again when it is complete", path.display())]
    Changed {
        /// The first source; which one changed is not known.
        path: PathBuf,
    },
    /// The cache folder or file cannot be written; nothing is left behind.
    #[error(
        "{}: cannot write the token cache: {source}; free space or name another cache folder",
        path.display()
    )]
    Cache {
        /// The folder or file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A cache file reads back differently than it was written.
    #[error(
        "{}: written, but reading it back failed: {why}; the disk may be failing",
        path.display()
    )]
    ReadBack {
        /// The file.
        path: PathBuf,
        /// The difference.
        why: String,
    },
    /// A token id is outside the model's vocabulary.
    #[error(
        "{}: id {id} of token {index} must be below the vocabulary size {vocab_size}; use the \
         model's own tokenizer",
        path.display()
    )]
    Vocab {
        /// The cache file.
        path: PathBuf,
        /// Position of the first such token.
        index: usize,
        /// Its id.
        id: u32,
        /// Size of the model's vocabulary.
        vocab_size: usize,
    },
    /// The text has fewer windows than needed.
    #[error(
        "tokens = {tokens}: {windows} window(s) with seq_len = {seq_len} need at least {needed}; \
         use more text or a smaller seq_len"
    )]
    TooShort {
        /// Tokens available.
        tokens: usize,
        /// Ids predicted per window.
        seq_len: usize,
        /// Windows needed.
        windows: usize,
        /// Tokens needed.
        needed: usize,
    },
    /// An argument breaks a rule.
    #[error("{field} = {value}: {rule}")]
    Argument {
        /// The argument.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        rule: String,
    },
}

impl DataError {
    pub(super) fn argument(
        field: &'static str,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Self {
        Self::Argument { field, value: value.to_string(), rule: rule.into() }
    }

    pub(super) fn read(path: &std::path::Path, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::NotFound {
            Self::NotFound { path: path.into() }
        } else {
            Self::Read { path: path.into(), source }
        }
    }
}

fn it_or_any(n: usize) -> String {
    if n == 1 { "it".into() } else { format!("any of {n} files") }
}

fn at_line(line: Option<u64>) -> String {
    line.map(|line| format!(": line {line}")).unwrap_or_default()
}

/// Puts text from files or other crates on one line of bounded length.
fn one_line(text: &str) -> String {
    kv_models::one_line(text, 300)
}
