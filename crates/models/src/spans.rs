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
//! [`LanguageModel::operation_names`] gives, and its [`Pass`](crate::Pass) knows when a layer begins.

use std::collections::HashMap;

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::Tensor,
};
use tracing::{span::EnteredSpan, trace_span};

use crate::{LanguageModel, nn::PACKED};

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

impl LanguageModel {
    /// What the operations that read each parameter are called: `L3/qkv` for the module `qkv` of layer 3, `norm`
    /// for one outside of the layers.
    pub fn operation_names(&self) -> HashMap<ParamId, String> {
        let mut names = Names::default();
        self.visit(&mut names);
        names.found
    }
}

/// The modules that a visitor is in, and what was found there.
#[derive(Default)]
struct Names {
    path: Vec<String>,
    found: HashMap<ParamId, String>,
}

impl Names {
    /// The path without the model's name in front and the parameter's at the end.
    fn operation(&self) -> String {
        let modules = self.path.get(1..self.path.len().saturating_sub(1)).unwrap_or_default();
        match modules {
            [layers, number, rest @ ..] if layers == "layers" => {
                format!("L{number}/{}", rest.join("."))
            }
            // A parameter of the model itself.
            [] => self.path.last().cloned().unwrap_or_default(),
            modules => modules.join("."),
        }
    }
}

impl ModuleVisitor for Names {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.insert(param.id, self.operation());
    }

    fn enter_module(&mut self, name: &str, kind: &str) {
        if let Some(id) = (kind == PACKED).then(|| name.parse().ok()).flatten() {
            self.found.insert(id, self.operation());
        }
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}
