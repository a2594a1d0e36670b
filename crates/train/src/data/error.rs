use std::{io, path::PathBuf};

/// What can be wrong with texts, their cache file or their windows; one line each.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// No path was given.
    #[error("sources: none given; name at least one text or JSONL file")]
    NoSources,
    /// There is no such file.
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
    #[error("{}: byte {offset} is not UTF-8; texts must be", path.display())]
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
        /// What is wrong with it.
        why: String,
    },
    /// A line of a JSONL file has no text where it should.
    #[error(
        "{}: line {line}: field `{}` is {found}, it must be a string",
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
        /// How many there are.
        n: usize,
    },
    /// The tokenizer refused a document.
    #[error("{}{}: {}", path.display(), at_line(*line), one_line(why))]
    Tokenizer {
        /// The source.
        path: PathBuf,
        /// Its line, for JSONL.
        line: Option<u64>,
        /// What the tokenizer said.
        why: String,
    },
    /// A source changed between its first and its second reading.
    #[error("{}: changed while being tokenized; run again when it is complete", path.display())]
    Changed {
        /// The first source; which one changed is not known.
        path: PathBuf,
    },
    /// The cache folder or file could not be written; nothing was left behind.
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
    /// A cache file that was just written reads back differently.
    #[error("{}: written, but {why}; the disk may be failing", path.display())]
    ReadBack {
        /// The file.
        path: PathBuf,
        /// The difference.
        why: String,
    },
    /// An id that the model does not have.
    #[error(
        "{}: id {id} of token {index} is not below the vocabulary's {vocab_size}; is this the \
         model's tokenizer?",
        path.display()
    )]
    Vocab {
        /// The cache file.
        path: PathBuf,
        /// Position of the first such token.
        index: usize,
        /// Its id.
        id: u32,
        /// Ids the model has.
        vocab_size: usize,
    },
    /// The text is shorter than what is asked of it.
    #[error(
        "tokens = {tokens}: {windows} window(s) with seq_len = {seq_len} need at least {needed}"
    )]
    TooShort {
        /// Tokens there are.
        tokens: usize,
        /// Ids predicted per window.
        seq_len: usize,
        /// Windows asked for.
        windows: usize,
        /// Tokens that take.
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

/// Words of files and of other crates on one line of bounded length.
fn one_line(text: &str) -> String {
    kv_models::one_line(text, 300)
}
