//! A matrix as a Burn module.

use burn::{
    module::{
        Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor,
    },
    tensor::Device,
};

use super::{Matrix, Packed, Stored};

/// The kind of module that visitors see for packed weights; its name is [`Matrix::id`].
pub(crate) const PACKED: &str = "PackedMatrix";

/// The name and the kind of module that visitors see for an adapter.
const ADAPTER: &str = "adapter";
const ADAPTER_KIND: &str = "Struct:LowRank";

impl Module for Matrix {
    fn collect_devices(&self, devices: Devices) -> Devices {
        match &self.0 {
            Stored::Dense(param) => param.collect_devices(devices),
            Stored::Packed(packed) => packed.parts.collect_devices(devices),
            Stored::Heads(heads) => heads.parts.collect_devices(devices),
        }
    }

    fn fork(self, device: &Device) -> Self {
        Self(match self.0 {
            Stored::Dense(param) => Stored::Dense(param.fork(device)),
            Stored::Packed(packed) => {
                Stored::Packed(packed.map(|part| part.fork(device), |adapter| adapter.fork(device)))
            }
            Stored::Heads(heads) => Stored::Heads(Box::new(heads.map(|part| part.fork(device)))),
        })
    }

    fn to_device(self, device: &Device) -> Self {
        Self(match self.0 {
            Stored::Dense(param) => Stored::Dense(Module::to_device(param, device)),
            Stored::Packed(packed) => Stored::Packed(packed.map(
                |part| Module::to_device(part, device),
                |adapter| Module::to_device(adapter, device),
            )),
            Stored::Heads(heads) => {
                Stored::Heads(Box::new(heads.map(|part| Module::to_device(part, device))))
            }
        })
    }

    fn train(self) -> Self {
        Self(match self.0 {
            Stored::Dense(param) => Stored::Dense(param.train()),
            Stored::Packed(packed) => Stored::Packed(packed.map(Module::train, Module::train)),
            heads @ Stored::Heads(_) => heads,
        })
    }

    fn valid(&self) -> Self {
        Self(match &self.0 {
            Stored::Dense(param) => Stored::Dense(param.valid()),
            Stored::Packed(packed) => {
                Stored::Packed(packed.clone().map(|part| part.valid(), |adapter| adapter.valid()))
            }
            heads @ Stored::Heads(_) => heads.clone(),
        })
    }

    fn materialize(self) -> Self {
        Self(match self.0 {
            Stored::Dense(param) => Stored::Dense(param.materialize()),
            packed @ (Stored::Packed(_) | Stored::Heads(_)) => packed,
        })
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        match &self.0 {
            Stored::Dense(param) => param.visit(visitor),
            // Packed weights are not a parameter, but visitors find them by their id.
            packed => {
                let id = self.id().to_string();
                visitor.enter_module(&id, PACKED);
                visitor.exit_module(&id, PACKED);
                if let Stored::Packed(Packed { adapter: Some(adapter), .. }) = packed {
                    visitor.enter_module(ADAPTER, ADAPTER_KIND);
                    adapter.visit(visitor);
                    visitor.exit_module(ADAPTER, ADAPTER_KIND);
                }
            }
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self(match self.0 {
            Stored::Dense(param) => Stored::Dense(Module::map(param, mapper)),
            Stored::Packed(packed) => Stored::Packed(packed.map(
                |part| part,
                |adapter| {
                    mapper.enter_module(ADAPTER, ADAPTER_KIND);
                    let adapter = Module::map(adapter, mapper);
                    mapper.exit_module(ADAPTER, ADAPTER_KIND);
                    adapter
                },
            )),
            heads @ Stored::Heads(_) => heads,
        })
    }
}

impl ModuleDisplayDefault for Matrix {
    fn content(&self, content: Content) -> Option<Content> {
        match &self.0 {
            Stored::Dense(param) => param.content(content),
            Stored::Packed(packed) => packed.parts.content(content),
            Stored::Heads(heads) => heads.parts.content(content),
        }
    }
}

impl ModuleDisplay for Matrix {
    fn format(&self, settings: DisplaySettings) -> String {
        match &self.0 {
            Stored::Dense(param) => param.format(settings),
            Stored::Packed(packed) => packed.parts.format(settings),
            Stored::Heads(heads) => heads.parts.format(settings),
        }
    }
}
