//! Compiles kernels before they are needed.

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;
use tracing::trace_span;

use super::{DecodeGraph, GenerateOptions, generate};
use crate::{model::LanguageModel, spans::PHASE, spec::LayerSpec};

/// The length of a short prompt. Prefill and decode use different kernels for matrix products.
const PROMPT: usize = 48;
/// The generated tokens. The second is the first decode step.
const TOKENS: usize = 3;

/// Compiles the kernels of prefill and decode on a device while the host does something else:
/// those of launched steps, and of captured ones where the device supports graph capture.
///
/// A device compiles a kernel on its first launch, which for a model takes as long as many tokens.
/// Layers of the same shapes with the same cache use the same kernels. So a model of one layer,
/// from [`LoadObserver::layer`](crate::LoadObserver::layer), compiles them for all layers like it
/// while other layers load. Dropping the value waits for the end.
#[derive(Debug)]
pub struct CompileAhead {
    /// The kinds of layers whose kernels are compiled or about to be.
    known: Vec<(LayerSpec, KvCacheConfig)>,
    /// `None` if there is no thread.
    layers: Option<Sender<(LanguageModel, KvCacheConfig)>>,
    thread: Option<JoinHandle<()>>,
}

impl CompileAhead {
    /// Starts a thread that compiles for `device`. `prefill_chunk` is the number of tokens per
    /// [chunk](GenerateOptions::prefill_chunk) of later prompts.
    pub fn new(device: &Device, prefill_chunk: usize) -> Self {
        let device = device.clone();
        let (layers, received) = channel();
        let compile = move || compile(&received, prefill_chunk, &device);
        let thread = thread::Builder::new().name("compile".into()).spawn(compile).ok();
        Self { known: vec![], layers: thread.is_some().then_some(layers), thread }
    }

    /// Generates a few tokens with `model`, which has one layer, unless it has done so for a layer
    /// of the same shapes with the same cache. Errors are ignored, because the model itself reports
    /// them when it is used.
    pub fn layer(&mut self, model: LanguageModel, cache: KvCacheConfig) {
        let (Some(layers), [layer]) = (&self.layers, &model.spec().layers[..]) else { return };
        let kind = (*layer, cache);
        if !self.known.contains(&kind) {
            self.known.push(kind);
            // The thread has ended if a launch panicked, and its message has been printed.
            let _ = layers.send((model, cache));
        }
    }
}

/// Generates after every length of prompt that has kernels of its own. A short prompt stays in
/// float. One of a whole chunk is quantized in part, and later chunks attend to quantized tokens.
/// The lengths of these are a multiple of 4, a multiple of 2 and odd, because elementwise kernels
/// process 4, 2 or 1 numbers at a time.
fn compile(
    layers: &Receiver<(LanguageModel, KvCacheConfig)>,
    prefill_chunk: usize,
    device: &Device,
) {
    for (model, config) in layers {
        // The profile must not count this as a prefill or decode step of the run.
        let _phase = trace_span!(target: PHASE, "compile").entered();
        let captures = model.decoder().captures() && DecodeGraph::is_supported(device);
        let long = match config.capacity > prefill_chunk {
            true => vec![prefill_chunk, PROMPT, PROMPT + 2, PROMPT + 1],
            false => vec![config.capacity],
        };
        for prompts in [vec![PROMPT, 1], long] {
            // Kernels do not depend on the capacity.
            let room: usize = prompts.iter().map(|tokens| tokens + TOKENS).sum();
            let config = config.with_capacity(room.max(config.capacity));
            let Ok(mut cache) = model.new_cache(config, 1, device) else { break };
            for (i, &tokens) in prompts.iter().enumerate() {
                let options = GenerateOptions {
                    max_tokens: TOKENS,
                    graph_capture: Some(captures && i + 1 == prompts.len()),
                    prefill_chunk,
                    ..GenerateOptions::default()
                };
                let _ = generate(&model, &mut cache, &vec![0; tokens], &options, device, |_| true);
            }
        }
    }
    // Buffers are kept by thread, and no other launch of this thread would reuse them.
    device.memory_cleanup();
}

impl Drop for CompileAhead {
    fn drop(&mut self) {
        self.layers = None;
        if let Some(thread) = self.thread.take() {
            // The panic message has been printed.
            let _ = thread.join();
        }
    }
}
