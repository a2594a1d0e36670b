//! What a pass does, as spans of the `tracing` crate, for whoever subscribes; without a subscriber a span is one load
//! and one branch.
//!
//! | target | what | fields |
//! |---|---|---|
//! | [`PHASE`] | a part of a run: `prefill`, `decode`; one within another is part of that | `n`, which of several |
//! | [`PASS`] | one pass through a model's layers | |
//! | [`LAYER`] | an event: the pass goes on with a layer, until the next one or its end | `layer` |
//! | [`OPERATION`] | a projection, a norm, attention, the head; [`REPLAY`] | `parameter`, the id of one it reads |
//!
//! A family says nothing of this: its modules know their parameters, whose names
//! [`LanguageModel::operation_names`](crate::LanguageModel::operation_names) gives, and its [`Pass`](crate::Pass) knows when a layer begins.

use burn::module::ParamId;
use tracing::{span::EnteredSpan, trace_span};

/// The target of parts of a run.
pub const PHASE: &str = "kv::phase";
/// The target of passes.
pub const PASS: &str = "kv::pass";
/// The target of the events with which a pass begins a layer.
pub const LAYER: &str = "kv::layer";
/// The target of operations.
pub const OPERATION: &str = "kv::operation";

/// The operation in which a recorded step runs on the device, its launches without names of their own.
pub const REPLAY: &str = "replay";

/// The operation that reads this parameter, until the end of the scope.
pub(crate) fn reading(param: ParamId) -> EnteredSpan {
    trace_span!(target: OPERATION, "module", parameter = param.val()).entered()
}
