//! Errors of this crate.

/// What cannot be done, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that breaks a rule.
    #[error("{field} = {value}: {rule}")]
    Invalid {
        /// What has the value.
        field: &'static str,
        /// The value.
        value: String,
        /// What it must be.
        rule: String,
    },
}

/// A result with this crate's error.
pub type Result<T> = core::result::Result<T, Error>;

pub(crate) fn invalid(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Error {
    Error::Invalid { field, value: value.to_string(), rule: rule.into() }
}
