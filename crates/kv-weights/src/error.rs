//! The error type of this crate.

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// An invalid input, or a request that the machine does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field breaks a rule.
    #[error("{field} {value}: {rule}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// The invalid value.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A tensor has a shape that the operation does not accept.
    #[error("{op}: {tensor} has shape {shape:?}: {rule}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// The rule it breaks.
        rule: String,
    },
    /// A combination of inputs, format and device that this crate does not support.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The request.
        what: String,
        /// The reason.
        why: String,
    },
}

/// Creates an [`Error::Invalid`].
pub(crate) fn invalid(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Error {
    Error::Invalid { field, value: value.to_string(), rule: rule.into() }
}

impl From<kv_device::Unsupported> for Error {
    fn from(kv_device::Unsupported { what, why }: kv_device::Unsupported) -> Self {
        Self::Unsupported { what, why }
    }
}
