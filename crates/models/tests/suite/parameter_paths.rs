//! Checkpoints of training runs name parameters by their paths, which must not change.

use std::fmt::Write;

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::Tensor,
};
use kv_models::load;

use crate::common::{device, tiny};

#[derive(Default)]
struct Paths {
    entered: Vec<String>,
    found: String,
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.entered.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.entered.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        writeln!(self.found, "{} {:?}", self.entered.join("."), param.dims()).unwrap();
    }
}

/// Paths, shapes and their order equal those of the first release in every family.
#[test]
fn parameters_of_all_families_keep_their_paths() {
    let mut paths = Paths::default();
    for name in [
        "gpt2-tiny",
        "llama-tiny",
        "gemma3-tiny",
        "gpt-oss-tiny",
        "../deepseek/deepseek-v4-tiny",
        "qwen3_moe-tiny",
        "mixtral-tiny",
        "qwen3_5-tiny",
        "deepseek_v3-tiny",
        "gemma4-tiny",
    ] {
        load(tiny(name), &device()).unwrap().model.visit(&mut paths);
    }
    assert_eq!(paths.found, include_str!("../fixtures/parameter_paths.txt"));
}
