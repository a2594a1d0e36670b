//! What spans are called, and of what they are one of several.

use std::collections::HashMap;

use kv_models::spans::LAUNCHED;
use kv_report::timeline::{Kind, Label};

/// Identifies a span until it has its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    /// The operation that reads a parameter.
    Parameter(u64),
    /// An operation, in a layer or outside of them.
    Operation(&'static str, Option<usize>),
    Pass,
    Layer(usize),
    /// A part of the run, one of several of its name.
    Phase(String, Option<u64>),
}

/// The number of a label, and of its group: all labels that differ only in the layer or the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) label: u32,
    pub(crate) group: u32,
    /// Set for spans within a layer.
    pub(crate) in_layer: bool,
    /// Set for a captured step that is launched.
    pub(crate) is_step: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Labels {
    /// Names of the operations that read parameters.
    operations: HashMap<u64, String>,
    known: HashMap<Key, Named>,
    pub(crate) list: Vec<Label>,
    groups: HashMap<String, u32>,
    pub(crate) group_names: Vec<String>,
}

/// The group of passes.
pub(crate) const PASSES: &str = "(rest of the pass)";

/// The group of time that no span covers.
pub(crate) const OUTSIDE: &str = "(outside)";

impl Labels {
    /// Names an operation from now on.
    pub(crate) fn name_operation(&mut self, parameter: u64, name: String) {
        self.operations.insert(parameter, name);
        self.known.remove(&Key::Parameter(parameter));
    }

    pub(crate) fn get(&mut self, key: Key) -> Named {
        if let Some(named) = self.known.get(&key) {
            return *named;
        }
        let label = self.label(&key);
        let in_layer = label.kind == Kind::Operation && label.name.contains('/');
        let is_step = label.name == LAUNCHED;
        let group = self.group(&label.group);
        let named = Named { label: self.list.len() as u32, group, in_layer, is_step };
        self.list.push(label);
        self.known.insert(key, named);
        named
    }

    pub(crate) fn group(&mut self, name: &str) -> u32 {
        if let Some(&group) = self.groups.get(name) {
            return group;
        }
        let group = self.group_names.len() as u32;
        self.group_names.push(name.into());
        self.groups.insert(name.into(), group);
        group
    }

    fn label(&self, key: &Key) -> Label {
        let label =
            |name: String, group: &str, kind| Label { name, group: group.to_string(), kind };
        match key {
            Key::Parameter(id) => match self.operations.get(id) {
                Some(name) => label(name.clone(), &group_of(name), Kind::Operation),
                None => label("module".into(), "module", Kind::Operation),
            },
            Key::Operation(name, Some(layer)) => {
                label(format!("L{layer}/{name}"), name, Kind::Operation)
            }
            Key::Operation(name, None) => label(name.to_string(), name, Kind::Operation),
            Key::Pass => label("pass".into(), PASSES, Kind::Group),
            Key::Layer(layer) => label(format!("L{layer}"), "(rest of the layer)", Kind::Group),
            Key::Phase(name, Some(n)) => label(numbered(name, *n), name, Kind::Phase),
            Key::Phase(name, None) => label(name.clone(), name, Kind::Phase),
        }
    }
}

/// `decode_3`, or with a cache `decode_3 k4v4`.
fn numbered(name: &str, n: u64) -> String {
    match name.split_once(' ') {
        Some((name, cache)) => format!("{name}_{n} {cache}"),
        None => format!("{name}_{n}"),
    }
}

/// A name without the layer's number, and with `*` for the number of one of several modules.
fn group_of(name: &str) -> String {
    let (layer, path) = name.split_once('/').unwrap_or(("", name));
    let path = if layer.is_empty() { name } else { path };
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = path.split('.').map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_numbers_are_summed() {
        assert_eq!(group_of("L12/qkv"), "qkv");
        assert_eq!(group_of("L3/experts.experts.17.down"), "experts.experts.*.down");
        assert_eq!(group_of("norm"), "norm");
    }

    #[test]
    fn keys_have_one_label_each() {
        let mut labels = Labels::default();
        labels.name_operation(7, "L2/mlp.down".into());
        let first = labels.get(Key::Parameter(7));
        assert_eq!(labels.get(Key::Parameter(7)), first);
        let attend = [Some(0), Some(1)].map(|layer| labels.get(Key::Operation("attend", layer)));
        assert_eq!(attend[0].group, attend[1].group);
        assert_ne!(attend[0].label, attend[1].label);
        let names: Vec<_> = labels.list.iter().map(|label| label.name.as_str()).collect();
        assert_eq!(names, ["L2/mlp.down", "L0/attend", "L1/attend"]);
        // A module that ran before it had a name is called by it from then on.
        let unnamed = labels.get(Key::Parameter(8));
        labels.name_operation(8, "L0/qkv".into());
        let named = labels.get(Key::Parameter(8));
        let names = [unnamed, named].map(|named| &*labels.list[named.label as usize].name);
        assert_eq!(names, ["module", "L0/qkv"]);
        let decode = labels.get(Key::Phase("decode".into(), Some(3)));
        assert_eq!(labels.list[decode.label as usize].name, "decode_3");
        assert_eq!(labels.group_names[decode.group as usize], "decode");
    }
}
