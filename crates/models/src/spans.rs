//! Spans of the `tracing` crate for the phases, passes and operations of a model. Without a
//! subscriber, a span costs one load and one branch.
//!
//! | target | span | fields |
//! |---|---|---|
//! | [`PHASE`] | a phase of a run, such as `prefill`; phases can nest | `n`, its number; `cache` |
//! | [`PASS`] | one pass through a model's layers | `tokens` of all sequences |
//! | [`LAYER`] | an event: a layer begins, until the next one or the end of the pass | `layer` |
//! | [`OPERATION`] | a projection, a norm, attention, the head | `parameter`, an id; `bytes` |
//! | [`OPERATION`] | [`REPLAY`] | `tokens` of all sequences |
//! | [`OPERATION`] | [`LAUNCHED`], with the operations of the step in it | |
//!
//! `bytes` counts the weights or the cache that an operation reads, each byte once.
//!
//! Families emit no spans. Their modules know their parameters, whose names
//! [`LanguageModel::operation_names`](crate::LanguageModel::operation_names) returns, and
//! [`Pass`](crate::Pass) knows when a layer begins.

use burn::module::ParamId;
use tracing::{span::EnteredSpan, trace_span};

/// The target of phases of a run.
pub const PHASE: &str = "kv::phase";
/// The target of passes.
pub const PASS: &str = "kv::pass";
/// The target of the events at the begin of a layer.
pub const LAYER: &str = "kv::layer";
/// The target of operations.
pub const OPERATION: &str = "kv::operation";

/// The operation of a graph replay, whose launches have no names of their own.
pub const REPLAY: &str = "replay";

/// The operation of a captured step that is launched instead of replayed, so that its launches have
/// names: the first step of a graph, if there is a subscriber.
pub const LAUNCHED: &str = "launched_step";

/// Enters the operation that reads `bytes` of this parameter, until the end of the scope. The bytes
/// are not counted without a subscriber.
pub(crate) fn reading(param: ParamId, bytes: impl FnOnce() -> usize) -> EnteredSpan {
    let parameter = param.val();
    trace_span!(target: OPERATION, "module", parameter, bytes = bytes() as u64).entered()
}
