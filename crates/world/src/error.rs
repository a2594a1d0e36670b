//! The errors of this crate.

use std::path::PathBuf;

/// Errors of this crate. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument breaks a rule.
    #[error("{field} {value}: {rule}")]
    Argument {
        /// The argument.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        rule: String,
    },
    /// A file that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file with unexpected contents.
    #[error("{}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A picture that cannot be encoded.
    #[error("picture: {0}")]
    Encode(#[from] png::EncodingError),
}

impl Error {
    pub(crate) fn argument(
        field: &'static str,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Self {
        Self::Argument { field, value: value.to_string(), rule: rule.into() }
    }
}

/// Results of this crate.
pub type Result<T> = core::result::Result<T, Error>;
