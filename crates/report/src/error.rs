use std::{io, path::PathBuf};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Errors of drawing and writing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A chart cannot be drawn.
    #[error("chart {title:?}: {why}")]
    Chart {
        /// Its title.
        title: String,
        /// The reason.
        why: String,
    },
    /// A file or folder cannot be written.
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}
