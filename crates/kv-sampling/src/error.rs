//! Errors of this crate.

/// An error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that breaks a rule.
    #[error("{field} = {value}: {rule}")]
    Invalid {
        /// The argument or field.
        field: &'static str,
        /// The value.
        value: String,
        /// The rule that it breaks.
        rule: String,
    },
}

/// A result with this crate's error.
pub type Result<T> = core::result::Result<T, Error>;

pub(crate) fn invalid(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Error {
    Error::Invalid { field, value: value.to_string(), rule: rule.into() }
}
