//! Compiles kernels before they are needed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
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

/// Compiles the kernels of prefill and decode on a device while the host does something else, for
/// launched steps and, where the device supports graph capture, for captured ones.
///
/// A device compiles a kernel on its first launch, which for a model takes as long as many tokens.
/// Layers with the same shapes, types of weights and cache use the same kernels. So a model of one
/// layer, from [`LoadObserver::layer`](crate::LoadObserver::layer), compiles them for all layers
/// like it while other layers load. Dropping the value skips the layers that wait.
#[derive(Debug)]
pub struct CompileAhead {
    /// The kinds of layers whose kernels are compiled or about to be.
    known: Vec<Kind>,
    /// Set to skip what waits.
    skips: Arc<AtomicBool>,
    /// The thread and the layers it is to compile for; `None` if the system starts no thread.
    thread: Option<(Sender<Layer>, JoinHandle<Option<u64>>)>,
}

/// A model of one layer, and its cache.
type Layer = (LanguageModel, KvCacheConfig);

/// Layers of one kind use the same kernels.
#[derive(Debug, PartialEq)]
struct Kind {
    layer: LayerSpec,
    cache: KvCacheConfig,
    /// Bytes by type.
    weights: Vec<(String, usize)>,
}

impl CompileAhead {
    /// Starts a thread that compiles for `device`. `prefill_chunk` is the number of tokens per
    /// [chunk](GenerateOptions::prefill_chunk) of later prompts.
    pub fn new(device: &Device, prefill_chunk: usize) -> Self {
        let (sender, layers) = channel();
        let skips = Arc::<AtomicBool>::default();
        let (device, skip) = (device.clone(), skips.clone());
        let compile = move || compile(&layers, prefill_chunk, &skip, &device);
        let thread = thread::Builder::new().name("compile".into()).spawn(compile).ok();
        Self { known: vec![], skips, thread: thread.map(|thread| (sender, thread)) }
    }

    /// Compiles for `model`, which has one layer, unless a layer of the same kind was given before.
    /// Errors are ignored, because the model itself reports them when it is used.
    pub fn layer(&mut self, model: LanguageModel, cache: KvCacheConfig) {
        let (Some((sender, _)), [layer]) = (&self.thread, &model.spec().layers[..]) else { return };
        // Kernels read the residual length, which can differ by layer, at run time.
        let of_kind = cache.with_residual_length(0);
        let kind = Kind { layer: *layer, cache: of_kind, weights: model.weight_types() };
        if !self.known.contains(&kind) {
            self.known.push(kind);
            // The thread has ended if a launch panicked, and its message has been printed.
            let _ = sender.send((model, cache));
        }
    }

    /// Waits for the end. Returns the bytes that the device's allocator had reserved by then,
    /// including buffers that are released now; `None` if it does not say.
    pub fn finish(mut self) -> Option<u64> {
        self.wait()
    }

    fn wait(&mut self) -> Option<u64> {
        let (sender, thread) = self.thread.take()?;
        drop(sender);
        // The message of a panic has been printed.
        thread.join().ok()?
    }
}

impl Drop for CompileAhead {
    fn drop(&mut self) {
        self.skips.store(true, Relaxed);
        self.wait();
    }
}

fn compile(
    layers: &Receiver<Layer>,
    prefill_chunk: usize,
    skips: &AtomicBool,
    device: &Device,
) -> Option<u64> {
    // The profile must not count this as prefill and decode steps of the run.
    let phase = || trace_span!(target: PHASE, "compile").entered();
    let goes_on = || !skips.load(Relaxed);
    let mut given = vec![];
    for (model, cache) in layers.iter().take_while(|_| goes_on()) {
        let _phase = phase();
        // Kernels depend on the length of a prompt. All tokens of a short one stay in float. A
        // whole chunk is quantized in part, and the prompts after it attend to quantized tokens:
        // 48, 50 and 49 of them, because elementwise kernels process 4, 2 or 1 numbers at a time.
        let long = match cache.capacity > prefill_chunk {
            true => vec![prefill_chunk, PROMPT, PROMPT + 2, PROMPT + 1],
            false => vec![cache.capacity],
        };
        for prompts in [vec![PROMPT], long] {
            continue_prompts(&model, cache, &prompts, prefill_chunk, false, device);
        }
        given.push((model, cache));
    }
    // While a device captures, CUDA lets no thread allocate memory. By now everything is loaded.
    let _phase = phase();
    given.retain(|(model, _)| model.decoder().captures());
    if !given.is_empty() && goes_on() && DecodeGraph::is_supported(device) {
        for (model, cache) in given.into_iter().take_while(|_| goes_on()) {
            // A captured step uses the same kernels after every prompt.
            continue_prompts(&model, cache, &[PROMPT], prefill_chunk, true, device);
        }
    }
    // Buffers are kept by thread, and no other launch of this thread would reuse them.
    let _ = device.sync();
    let reserved = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    device.memory_cleanup();
    reserved
}

/// Generates after prompts of these lengths, each after what the one before generated.
fn continue_prompts(
    model: &LanguageModel,
    cache: KvCacheConfig,
    prompts: &[usize],
    prefill_chunk: usize,
    graph_capture: bool,
    device: &Device,
) {
    let room: usize = prompts.iter().map(|tokens| tokens + TOKENS).sum();
    // The capacity decides how many workgroups share the tokens, so it must not be smaller.
    let cache = cache.with_capacity(room.max(cache.capacity));
    let Ok(mut cache) = model.new_cache(cache, 1, device) else { return };
    for &tokens in prompts {
        let options = GenerateOptions {
            max_tokens: TOKENS,
            graph_capture: Some(graph_capture),
            prefill_chunk,
            ..GenerateOptions::default()
        };
        let _ = generate(model, &mut cache, &vec![0; tokens], &options, device, |_| true);
    }
}
