/// Shorthand for results of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Errors of an evaluation and its report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of the plan breaks a rule.
    #[error("{field} {value}: {rule}")]
    Plan {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        rule: String,
    },
    /// A line of a task file breaks a rule.
    #[error("{file}:{line}: {field} = {value}: {rule}")]
    TaskLine {
        /// The name of the file.
        file: String,
        /// The line, counted from 1.
        line: usize,
        /// The field.
        field: String,
        /// Its value, or the beginning of it.
        value: String,
        /// The rule.
        rule: String,
    },
    /// A run produced a loss that is not a number.
    #[error("run {cache}: token {token} has negative log-likelihood {value}, which is not finite")]
    NonFinite {
        /// The run.
        cache: String,
        /// Position in the text.
        token: usize,
        /// The value.
        value: f32,
    },
    /// The caller stopped the evaluation.
    #[error("stopped")]
    Stopped,
    /// The device failed while computing or copying back.
    #[error("run {cache}: {why}")]
    Device {
        /// The run.
        cache: String,
        /// The device's message.
        why: String,
    },
    /// The report cannot be drawn or written.
    #[error(transparent)]
    Report(#[from] kv_report::Error),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] kv_models::Error),
    /// An error of the game, its codec or its pictures.
    #[error(transparent)]
    World(#[from] kv_world::Error),
    /// An error of the KV cache.
    #[error(transparent)]
    Cache(#[from] kv_cubecl::Error),
}

impl Error {
    pub(crate) fn plan(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Plan { field, value: value.to_string(), rule: rule.into() }
    }
}
