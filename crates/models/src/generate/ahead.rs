//! Compiles kernels before they are needed.

use std::thread::{self, JoinHandle};

use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;
use tracing::trace_span;

use super::{DecodeGraph, GenerateOptions, generate};
use crate::{model::LanguageModel, spans::PHASE};

/// The prompt length. Prefill and decode use different kernels for matrix products.
const PROMPT: usize = 48;
/// The generated tokens. The second is the first decode step.
const TOKENS: usize = 3;

/// Compiles the kernels of prefill and decode on a device while the host does something else.
/// Decode steps use graph capture where the device supports it.
///
/// A device compiles a kernel on its first launch, which for a model takes as long as many tokens.
/// All layers use the same kernels, so a model of one layer, from
/// [`LoadObserver::first_layer`](crate::LoadObserver::first_layer), compiles them while the other
/// layers load. Dropping the value waits for the end.
#[derive(Debug)]
pub struct CompileAhead(Option<JoinHandle<()>>);

impl CompileAhead {
    /// Generates a few tokens with `model` on a new thread. Errors are ignored, because the model
    /// itself reports them when it is used.
    pub fn start(model: LanguageModel, cache: KvCacheConfig, device: &Device) -> Self {
        let device = device.clone();
        let compile = move || {
            // The profile must not count this as a prefill or decode step of the run.
            let _phase = trace_span!(target: PHASE, "compile").entered();
            let Ok(mut cache) = model.new_cache(cache, 1, &device) else { return };
            let graph_capture = model.decoder().captures() && DecodeGraph::is_supported(&device);
            let options = GenerateOptions {
                max_tokens: TOKENS,
                graph_capture: Some(graph_capture),
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
            // The panic message has been printed.
            let _ = thread.join();
        }
    }
}
