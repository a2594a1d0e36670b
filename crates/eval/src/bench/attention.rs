//! Benchmarks of one layer: decode attention, and appending tokens.

use std::{cell::RefCell, rc::Rc, time::Instant};

use burn::tensor::{DType, Distribution, Int, Slice, Tensor, capture};
use kv_cubecl::{
    CacheShape, Granularity, KvCache, KvCacheConfig, On, Side, Target,
    layout::{CacheLayout, Schedule},
};
use kv_models::spans::PHASE;
use serde::Serialize;
use tracing::trace_span;

use super::{Subject, Timing, no_graph_capture, size, time_in_turn, wait};
use crate::{Error, Result};

/// The shape of an attention layer, and the settings of its benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AttentionPlan {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; a divisor of `n_heads`.
    pub n_kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Tokens appended and attending at once: 1, or more in speculative decoding.
    pub tokens: usize,
    /// Minimum bytes that a timed sample reads, to exceed the processor's caches. A sample uses
    /// several KV caches in turn to reach it.
    pub working_set: usize,
    /// Number of samples; the median is reported.
    pub samples: usize,
    /// Capture the launches of a sample once and replay them; requires `tokens` to be 1.
    pub graph_capture: bool,
}

impl AttentionPlan {
    fn shape(&self) -> CacheShape {
        let Self { batch, n_kv_heads, head_dim, .. } = *self;
        CacheShape::new(batch, n_kv_heads, head_dim)
    }

    fn check(&self) -> Result<()> {
        let fields = [
            ("batch", self.batch),
            ("kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("tokens", self.tokens),
        ];
        size::check_samples("samples", self.samples)?;
        for (field, value) in fields {
            if value == 0 {
                return Err(Error::plan(field, value, "must be at least 1"));
            }
        }
        if self.n_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let rule = format!("must be a multiple of the {} kv heads", self.n_kv_heads);
            return Err(Error::plan("heads", self.n_heads, rule));
        }
        if self.graph_capture && self.tokens != 1 {
            return Err(Error::plan("tokens", self.tokens, "must be 1 for captured steps"));
        }
        Ok(())
    }

    /// Returns the bytes that [`time_decode_attention`] takes with all of `caches` at a context.
    ///
    /// # Errors
    /// Returns the errors that [`time_decode_attention`] finds before it allocates.
    pub fn attention_bytes<T: Target>(
        &self,
        caches: &[KvCacheConfig],
        context: usize,
    ) -> Result<u64> {
        self.check()?;
        if context == 0 {
            return Err(Error::plan("contexts", 0, "must be at least 1"));
        }
        let tokens = context.saturating_add(self.appended());
        let mut layers = vec![];
        for config in caches {
            let layout = size::layout(config, tokens, self.shape())?;
            layers.push((layout.memory_bytes().total() as u64, self.copies(&layout, context)));
        }
        let most = layers.iter().map(|&(_, copies)| copies).max().unwrap_or(0);
        let copies = |copies| if T::NAME == "flex" { copies } else { most };
        let all = layers.iter().map(|&(bytes, n)| bytes.saturating_mul(copies(n) as u64));
        let caches = all.fold(0, u64::saturating_add);
        Ok(caches.saturating_add(self.input_bytes(self.tokens)?))
    }

    /// Returns the bytes that [`time_append`] takes with a cache at a context.
    ///
    /// # Errors
    /// Returns the errors that [`time_append`] finds before it allocates.
    pub fn append_bytes(&self, config: &KvCacheConfig, context: usize) -> Result<u64> {
        self.check()?;
        let tokens = context.saturating_add(self.steps(config));
        let layout = size::layout(config, tokens, self.shape())?;
        Ok((layout.memory_bytes().total() as u64).saturating_add(self.input_bytes(1)?))
    }

    /// Returns the bytes of inputs for `tokens` tokens and for a chunk that fills a cache.
    fn input_bytes(&self, tokens: usize) -> Result<u64> {
        let Self { batch, n_heads, n_kv_heads, head_dim, .. } = *self;
        let of = |heads, tokens| size::tensor_bytes([batch, heads, tokens, head_dim]);
        // The output is as large as the queries, and both are copied once.
        Ok(4 * of(n_heads, tokens)? + 2 * of(n_kv_heads, tokens)? + 2 * of(n_kv_heads, FILL_CHUNK)?)
    }

    /// Returns the number of tokens that samples and warm-up rounds append to a context.
    fn appended(&self) -> usize {
        self.tokens.saturating_mul(size::rounds(self.samples))
    }

    /// Returns the number of caches that a sample uses in turn.
    fn copies(&self, layout: &CacheLayout, context: usize) -> usize {
        self.working_set.div_ceil(layout.bytes_read(context).max(1)).max(1)
    }

    /// Returns the steps of [`time_append`]: a flush period for each sample and one to warm up.
    fn steps(&self, config: &KvCacheConfig) -> usize {
        self.samples.saturating_add(1).saturating_mul(period(config))
    }

    fn random<T: Target>(&self, heads: usize, tokens: usize, device: &On<T>) -> Tensor<4> {
        let shape = [self.batch, heads, tokens, self.head_dim];
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &**device)
    }

    /// Creates a cache of `context` random tokens with room for `room` more.
    fn filled<T: Target>(
        &self,
        config: &KvCacheConfig,
        context: usize,
        room: usize,
        device: &On<T>,
    ) -> Result<KvCache> {
        let config = config.with_capacity(context.saturating_add(room));
        let mut cache = KvCache::new(&config, self.shape(), device)?;
        while cache.len() < context {
            let tokens = FILL_CHUNK.min(context - cache.len());
            let side = || self.random(self.n_kv_heads, tokens, device);
            cache.append(side(), side())?;
        }
        Ok(cache)
    }
}

/// Tokens appended at once to fill a cache.
const FILL_CHUNK: usize = 8192;

/// Returns the steps from one flush of the keys to the next; 1 without a residual, or if keys leave
/// it one at a time.
fn period(config: &KvCacheConfig) -> usize {
    Schedule::new(config).sides.keys.step.max(1)
}

/// Attention over one kind of cache at one context length.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionPoint {
    /// The cache's short name.
    pub cache: String,
    /// Tokens in the cache.
    pub context: usize,
    /// Seconds to append and attend, one layer.
    pub seconds: Timing,
    /// Bytes of the cache that are read.
    pub bytes_read: usize,
}

impl AttentionPoint {
    /// Returns the bytes read per second.
    pub fn bandwidth(&self) -> f64 {
        self.bytes_read as f64 / self.seconds.median
    }
}

/// Times appending `plan.tokens` tokens to caches of `context` tokens and attending, with each of
/// `caches` in turn.
///
/// # Errors
/// [`Error::Plan`] naming the field, the errors of the caches, and [`Error::Device`].
pub fn time_decode_attention<T: Target>(
    device: &On<T>,
    plan: &AttentionPlan,
    caches: &[KvCacheConfig],
    context: usize,
) -> Result<Vec<AttentionPoint>> {
    plan.attention_bytes::<T>(caches, context)?;
    let room = plan.appended();
    let mut layers = Vec::with_capacity(caches.len());
    for config in caches {
        let cache = plan.filled(config, context, room, device)?;
        let n = plan.copies(cache.layout(), context);
        layers.push(vec![cache; n]);
    }
    // A launch takes longer in a longer queue, so there are equal numbers for each cache.
    let most = layers.iter().map(Vec::len).max().unwrap_or(0);
    for layers in layers.iter_mut().filter(|_| T::NAME != "flex") {
        // The clones share memory until each is first written, which happens in the warm-up.
        let cache = layers[0].clone();
        layers.resize(most, cache);
    }
    let bytes_read: Vec<usize> =
        layers.iter().map(|layers| layers[0].layout().bytes_read(context)).collect();
    let counts: Vec<usize> = layers.iter().map(Vec::len).collect();
    let q = plan.random(plan.n_heads, plan.tokens, device);
    let (k, v) = (
        plan.random(plan.n_kv_heads, plan.tokens, device),
        plan.random(plan.n_kv_heads, plan.tokens, device),
    );
    let subjects = layers.iter_mut().zip(caches).map(|(layers, name)| -> Result<Subject<'_>> {
        let inputs = (q.clone(), k.clone(), v.clone());
        match plan.graph_capture {
            true => captured(device, layers, inputs, context),
            false => Ok(Box::new(move || {
                let _phase = trace_span!(target: PHASE, "attend", cache = %name).entered();
                for cache in layers.iter_mut() {
                    let (q, k, v) = inputs.clone();
                    cache.attend(q, k, v)?;
                }
                wait(device)
            })),
        }
    });
    let timings = time_in_turn(plan.samples, subjects.collect::<Result<_>>()?)?;
    let points = caches.iter().zip(timings).zip(counts).zip(bytes_read);
    Ok(points
        .map(|(((config, timing), count), bytes_read)| AttentionPoint {
            cache: config.to_string(),
            context,
            seconds: timing.divided_by(count as f64),
            bytes_read,
        })
        .collect())
}

/// Captures one step of each of `layers`, which hold `context` tokens each.
fn captured<'a, T: Target>(
    device: &'a On<T>,
    layers: &'a mut [KvCache],
    (q, k, v): (Tensor<4>, Tensor<4>, Tensor<4>),
    context: usize,
) -> Result<Subject<'a>> {
    let position = |at: usize| Tensor::<1, Int>::from_data([at as i32], (&**device, DType::I32));
    // Capturing runs the step, so it starts past the capacity, where nothing is written.
    let at = Rc::new(RefCell::new(position(layers[0].capacity())));
    let held = at.clone();
    let mut graph = capture(device, move || -> kv_cubecl::Result<()> {
        let mut at = held.borrow_mut();
        for cache in layers.iter_mut() {
            cache.attend_at(q.clone(), k.clone(), v.clone(), &at)?;
        }
        at.inplace(|at| at + 1);
        Ok(())
    });
    if !graph.is_hardware() {
        return Err(no_graph_capture::<T>());
    }
    at.borrow_mut().inplace(|at| at.slice_assign([Slice::full()], position(context)));
    Ok(Box::new(move || {
        let _phase = trace_span!(target: PHASE, "replay").entered();
        // SAFETY: the closure of the graph owns or borrows everything that the step reads and
        // writes, so it stays alive. Only this thread uses it.
        unsafe { graph.replay() }.clone()?;
        wait(device)
    }))
}

/// Steps of one cache at one context length. Steps that flush keys, which quantizes them, are timed
/// separately.
#[derive(Clone, Debug, Serialize)]
pub struct AppendPoint {
    /// The cache's short name.
    pub cache: String,
    /// Tokens in the cache.
    pub context: usize,
    /// Seconds to append one token.
    pub append: Timing,
    /// Seconds to append one token in a step that flushes keys; `None` for caches that never flush.
    pub append_flush: Option<Timing>,
    /// Seconds to append one token and attend.
    pub step: Timing,
    /// Seconds of a step that flushes keys; `None` for caches that never flush.
    pub step_flush: Option<Timing>,
}

/// Times steps of one token: appending alone, and appending and attending. Times `plan.samples`
/// steps that flush keys, and the steps between them.
///
/// # Errors
/// Fails as [`time_decode_attention`] does.
pub fn time_append<T: Target>(
    device: &On<T>,
    plan: &AttentionPlan,
    config: &KvCacheConfig,
    context: usize,
) -> Result<AppendPoint> {
    plan.append_bytes(config, context)?;
    let in_groups = config.keys.granularity(Side::Keys) == Some(Granularity::PerChannel);
    let (period, steps) = (period(config), plan.steps(config));
    let q = plan.random(plan.n_heads, 1, device);
    let (k, v) = (plan.random(plan.n_kv_heads, 1, device), plan.random(plan.n_kv_heads, 1, device));
    let time = |attend: bool| -> Result<_> {
        let mut cache = plan.filled(config, context, steps, device)?;
        let (mut plain, mut flushes) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let _phase = trace_span!(target: PHASE, "step", n = step, cache = %config).entered();
            let keys = cache.quantized_counts().keys;
            let start = Instant::now();
            match attend {
                true => drop(cache.attend(q.clone(), k.clone(), v.clone())?),
                false => cache.append(k.clone(), v.clone())?,
            }
            wait(device)?;
            let seconds = start.elapsed().as_secs_f64();
            let flushed = in_groups && cache.quantized_counts().keys > keys;
            // The first period warms up.
            if step >= period {
                if flushed { &mut flushes } else { &mut plain }.push(seconds);
            }
        }
        let flushes = if flushes.is_empty() { None } else { Some(Timing::of(flushes)?) };
        Ok((Timing::of(plain)?, flushes))
    };
    let ((append, append_flush), (step, step_flush)) = (time(false)?, time(true)?);
    Ok(AppendPoint { cache: config.to_string(), context, append, append_flush, step, step_flush })
}
