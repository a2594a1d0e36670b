//! The error type of this crate.

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Error caused by a caller's data or by the machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration field breaks a rule.
    #[error("{field} {value}: {rule}")]
    InvalidConfig {
        /// Name of the field.
        field: &'static str,
        /// Its offending value.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A cache description such as `k4v2-g64` could not be read.
    #[error("cache {text:?}: {why} ({expected})")]
    InvalidCacheName {
        /// The text as given.
        text: String,
        /// The part that could not be read, and why.
        why: String,
        /// The names that can be read.
        expected: String,
    },
    /// A tensor has a shape the operation does not accept.
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
    /// Appending would exceed the cache's capacity; the cache is unchanged.
    #[error("append: {added} tokens do not fit: the cache holds {len} of capacity {capacity}")]
    CapacityExceeded {
        /// Tokens held.
        len: usize,
        /// Tokens to add.
        added: usize,
        /// The capacity.
        capacity: usize,
    },
    /// Appending would exceed the cache's capacity for one sequence; nothing was appended to any.
    #[error(
        "append: {added} tokens do not fit: sequence {sequence} holds {len} of capacity {capacity}"
    )]
    SequenceFull {
        /// The first sequence that has no room.
        sequence: usize,
        /// Tokens it holds.
        len: usize,
        /// Tokens to add to it.
        added: usize,
        /// The capacity.
        capacity: usize,
    },
    /// A value is NaN or infinite where the quantizer's formula needs finite numbers.
    #[error("{op}: {tensor} holds a NaN or an infinite value")]
    NonFinite {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        tensor: &'static str,
    },
    /// The target's device could not be opened on this machine.
    #[error("{target}: no device: {why}")]
    NoDevice {
        /// The target's name.
        target: &'static str,
        /// The missing part, or the driver's message.
        why: String,
    },
    /// A device belongs to another target than the one asked for.
    #[error("device {device} is not a {target} device")]
    WrongTarget {
        /// The target's name.
        target: &'static str,
        /// The device, as Burn prints it.
        device: String,
    },
    /// A combination of inputs, configuration and device that this crate does not support.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The thing asked for.
        what: String,
        /// The reason.
        why: String,
    },
}

/// [`Error::InvalidConfig`].
pub(crate) fn invalid(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Error {
    Error::InvalidConfig { field, value: value.to_string(), rule: rule.into() }
}

/// [`Error::Shape`].
pub(crate) fn misfit(
    op: &'static str,
    tensor: &'static str,
    shape: [usize; 4],
    rule: String,
) -> Error {
    Error::Shape { op, tensor, shape: shape.to_vec(), rule }
}

impl From<kv_device::Unsupported> for Error {
    fn from(kv_device::Unsupported { what, why }: kv_device::Unsupported) -> Self {
        Self::Unsupported { what, why }
    }
}
