//! Kernels that are compiled before they are needed.

use std::thread::{self, JoinHandle};

use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;
use tracing::trace_span;

use super::{DecodeGraph, GenerateOptions, generate};
use crate::{LanguageModel, spans::PHASE};

/// Tokens of the prompt: of few and of many tokens at once, products are kernels of their own.
const PROMPT: usize = 48;
/// Tokens that are generated: the second is by a step alone.
const TOKENS: usize = 3;

/// A device that compiles kernels while the host does something else: those of a prompt and of decode steps, recorded
/// where the device can.
///
/// A device compiles a kernel when it is launched for the first time, which for those of a model takes as long as many
/// tokens. The kernels of all layers are the same, so that a model of one layer, as
/// [`LoadObserver::first_layer`](crate::LoadObserver::first_layer) gives it, compiles them while the others are read.
/// Dropping it waits for the end.
#[derive(Debug)]
pub struct CompileAhead(Option<JoinHandle<()>>);

impl CompileAhead {
    /// Generates some tokens with `model` on a thread of its own. What goes wrong is not told: it goes wrong again where
    /// the model itself is used.
    pub fn start(model: LanguageModel, cache: KvCacheConfig, device: &Device) -> Self {
        let device = device.clone();
        let compile = move || {
            // What is generated here is no prompt and no step of the run.
            let _phase = trace_span!(target: PHASE, "compile").entered();
            let Ok(mut cache) = model.new_cache(cache, 1, &device) else { return };
            let recorded = model.decoder().captures() && DecodeGraph::is_supported(&device);
            let options = GenerateOptions {
                max_tokens: TOKENS,
                recorded: Some(recorded),
                ..GenerateOptions::default()
            };
            let _ = generate(&model, &mut cache, &[0; PROMPT], &options, &device, |_| true);
        };
        Self(thread::Builder::new().name("compile".into()).spawn(compile).ok())
    }
}

impl Drop for CompileAhead {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}
