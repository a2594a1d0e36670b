//! [`LanguageModel`] as a Burn [`Module`].

use std::fmt;

use burn::{
    module::{
        Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor,
    },
    tensor::Device,
};

use super::LanguageModel;
use crate::erased::{self, Change};

impl LanguageModel {
    fn change(self, change: Change<'_>) -> Self {
        Self { decoder: self.decoder.changed(change), ..self }
    }
}

/// The module type that visitors and mappers get when they enter a decoder.
const CONTAINER: &str = "Struct:LanguageModel";

impl Module for LanguageModel {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.decoder.add_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.change(Change::Fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.change(Change::ToDevice(device))
    }

    fn train(self) -> Self {
        self.change(Change::Train)
    }

    fn valid(&self) -> Self {
        Self { decoder: self.decoder.validation(), packed: self.packed }
    }

    fn materialize(mut self) -> Self {
        if self.is_adapted() {
            for projection in self.decoder.decoder_mut().projections() {
                self.packed.subtract(&projection.weight.merge());
            }
        }
        self.change(Change::Materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let name = self.decoder().name();
        visitor.enter_module(name, CONTAINER);
        self.decoder.accept(&mut |met| erased::visit(visitor, met));
        visitor.exit_module(name, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let name = self.decoder().name();
        mapper.enter_module(name, CONTAINER);
        let mapped = self.change(Change::Map(&mut |given| erased::map(mapper, given)));
        mapper.exit_module(name, CONTAINER);
        mapped
    }
}

impl fmt::Debug for LanguageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LanguageModel").field(&self.decoder()).finish()
    }
}

impl fmt::Display for LanguageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(DisplaySettings::default()))
    }
}

impl ModuleDisplayDefault for LanguageModel {
    fn content(&self, content: Content) -> Option<Content> {
        let text = self.decoder.display(content.display_settings.clone());
        content.add_formatted(&text).optional()
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }
}

impl ModuleDisplay for LanguageModel {
    fn format(&self, settings: DisplaySettings) -> String {
        self.decoder.display(settings)
    }
}
