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
        let mut names = Names::default();
        self.visit(&mut names);
        names.found
    }
}

/// The path of a visitor, and the names found.
#[derive(Default)]
struct Names {
    path: Vec<String>,
    found: HashMap<ParamId, String>,
}

impl Names {
    /// Returns the path without the model's name and the parameter's.
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
