//! The names of the operations that read a model's parameters.

use std::collections::HashMap;

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::Tensor,
};

use crate::{model::LanguageModel, nn::PACKED};

impl LanguageModel {
    /// Returns the name of the operation that reads each parameter: `L3/qkv` for the module `qkv`
    /// of layer 3, or `norm` for a module outside of the layers.
    pub fn operation_names(&self) -> HashMap<ParamId, String> {
        // The first name is the family's.
        operation_names(self, 1)
    }
}

/// Returns the name of the operation that reads each parameter of a module, as
/// [`LanguageModel::operation_names`] does. The first `skipped` names of a parameter's path are
/// left out.
pub fn operation_names(module: &impl Module, skipped: usize) -> HashMap<ParamId, String> {
    let mut names = Names { skipped, path: vec![], found: HashMap::new() };
    module.visit(&mut names);
    names.found
}

/// The path of a visitor, and the names found.
struct Names {
    skipped: usize,
    path: Vec<String>,
    found: HashMap<ParamId, String>,
}

impl Names {
    /// Returns the path without the skipped names and the parameter's.
    fn operation(&self) -> String {
        let end = self.path.len().saturating_sub(1);
        let modules = self.path.get(self.skipped..end).unwrap_or_default();
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
