/// Shorthand for results of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why nothing can be recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Spans go to another subscriber of this process.
    #[error("profile: the process has a subscriber of spans already")]
    Subscribed,
    /// The device failed.
    #[error("profile: the device's clock cannot be read: {why}")]
    Device {
        /// The message.
        why: String,
    },
}
