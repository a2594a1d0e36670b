//! Perplexity of a text, window by window, and the divergence of each cache from float.

use std::time::Instant;

use burn::tensor::Tensor;
use kv_cubecl::{On, QuantizedCounts, Target, layout::Schedule};
use kv_models::{
    LanguageModel, LayerSpec, ModelCacheConfig, ids_to_tensor,
    spans::{OPERATION, PHASE},
};
use tracing::trace_span;

use crate::{
    Devices, Error, Mode, Plan, PositionKl, PositionNll, Result, Run,
    plan::Span,
    score::{
        Divergence, bootstrap_interval, divergence, mean_and_block_stderr, mean_and_stderr,
        negative_log_likelihood, quantiles,
    },
};

/// Rows whose logits are in memory at once.
pub const HEAD_ROWS: usize = 256;
/// Positions of an eval window per mean loss, or a multiple of them that gives at most
/// [`POSITION_BUCKETS`] means.
const POSITION_BUCKET: usize = 16;
const POSITION_BUCKETS: usize = 64;
/// Parts of an eval window with quantiles of the divergence, which take many tokens each.
const POSITION_PARTS: usize = 8;

/// Warm-up tokens for every cache in parallel mode: the first pass allocates memory, starts threads
/// and, on a GPU, compiles kernels.
const WARM_UP: usize = 256;

/// Progress of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Tokens scored so far, of `plan.scored_tokens() * plan.caches().len()`.
    pub done: usize,
    /// The caches that have scored any tokens, in the order of the plan, each with its perplexity
    /// so far.
    pub perplexities: &'a [(String, f64)],
}

struct Tally {
    config: ModelCacheConfig,
    nll: Vec<f32>,
    divergence: Vec<Divergence>,
    seconds: f64,
    cache_bytes: usize,
}

impl Tally {
    fn new(config: ModelCacheConfig) -> Self {
        Self { config, nll: vec![], divergence: vec![], seconds: 0.0, cache_bytes: 0 }
    }

    /// Adds the next eval window.
    fn add(&mut self, window: Self) {
        self.nll.extend(window.nll);
        self.divergence.extend(window.divergence);
        self.seconds += window.seconds;
        self.cache_bytes = window.cache_bytes;
    }
}

/// An event of an eval window.
enum Event {
    /// Tokens that the current cache has scored so far.
    Tokens(usize),
    /// The results of the cache with this index.
    Cache(usize, Tally),
}

/// Evaluates every cache of `plan` on one or several devices, and reports to `progress`.
///
/// # Errors
/// [`Error::NonFinite`] naming the token when a loss is NaN or infinite, and the model's and the
/// cache's errors.
pub fn evaluate<'a, T: Target>(
    devices: impl Into<Devices<'a, T>>,
    model: &LanguageModel,
    plan: &Plan,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Vec<Run>> {
    let mut tallies: Vec<Tally> = plan.caches().iter().cloned().map(Tally::new).collect();
    let mut perplexities: Vec<(String, f64)> = Vec::new();
    let mut done = 0;
    let spans: Vec<Span> = plan.spans().collect();
    let receive = |event| {
        match event {
            Event::Tokens(tokens) => {
                progress(Progress { done: done + tokens, perplexities: &perplexities });
            }
            Event::Cache(i, window) => {
                done += window.nll.len();
                tallies[i].add(window);
                let perplexity = mean_and_stderr(&tallies[i].nll).0.exp();
                match perplexities.get_mut(i) {
                    Some(of_cache) => of_cache.1 = perplexity,
                    None => perplexities.push((tallies[i].config.to_string(), perplexity)),
                }
                progress(Progress { done, perplexities: &perplexities });
            }
        }
        Ok(())
    };
    let devices = devices.into();
    devices.share_out(
        model,
        spans.len(),
        |device, model| warm_up(device, model, plan),
        |device, model, i, send| window(device, model, plan, (i + 1, &spans[i]), send),
        receive,
    )?;
    let at_work = devices.at_work(spans.len()) as f64;
    tallies.iter_mut().for_each(|tally| tally.seconds /= at_work);
    let float = tallies.first().map(|tally| tally.nll.clone()).unwrap_or_default();
    tallies.into_iter().map(|tally| finish(model, plan, tally, &float)).collect()
}

/// Evaluates every cache on the `n`-th eval window.
fn window<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    plan: &Plan,
    (n, span): (usize, &Span),
    send: &mut dyn FnMut(Event),
) -> Result<()> {
    let (ids, context) = plan.input(span);
    // Final hidden states of the float run. Its logits are computed again a few rows at a time,
    // because all of them may not fit into memory.
    let mut float_hidden: Option<Tensor<2>> = None;
    for (i, config) in plan.caches().iter().enumerate() {
        let mut tally = Tally::new(config.clone());
        let mut report = |tokens| send(Event::Tokens(tokens));
        let phase = trace_span!(target: PHASE, "window", n, cache = %config);
        let hidden = phase.in_scope(|| {
            pass(device, model, plan.mode(), &mut tally, &ids, context, &mut report)
        })?;
        if let Some(at) = tally.nll.iter().position(|nll| !nll.is_finite()) {
            let (cache, value) = (config.to_string(), tally.nll[at]);
            return Err(Error::NonFinite { cache, token: span.scored.start + at, value });
        }
        match &float_hidden {
            Some(float) => diverge(model, &mut tally, float, &hidden)?,
            None => {
                let none = Divergence { kl: 0.0, same_top: true };
                tally.divergence = vec![none; span.scored.len()];
            }
        }
        float_hidden.get_or_insert(hidden);
        send(Event::Cache(i, tally));
    }
    Ok(())
}

/// Processes the first tokens with every cache and drops the results.
fn warm_up<T: Target>(device: &On<T>, model: &LanguageModel, plan: &Plan) -> Result<()> {
    let Some(span) = plan.spans().next() else { return Ok(()) };
    // A streaming step processes one token, so a few steps are enough.
    let n = match plan.mode() {
        Mode::Streaming => 4,
        Mode::Parallel => WARM_UP,
    };
    let (mut ids, _) = plan.input(&span);
    ids.truncate(n);
    for config in plan.caches() {
        let _phase = trace_span!(target: PHASE, "warm_up", cache = %config).entered();
        let mut tally = Tally::new(config.clone());
        pass(device, model, plan.mode(), &mut tally, &ids, 1, &mut |_| ())?;
    }
    Ok(())
}

/// Processes `ids` from an empty cache and scores them from `context` on, which is at least 1.
/// Returns the hidden states `[scored, hidden]` that predict them.
fn pass<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    mode: Mode,
    tally: &mut Tally,
    ids: &[u32],
    context: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Tensor<2>> {
    match mode {
        Mode::Streaming => stream(device, model, tally, ids, context, progress),
        Mode::Parallel => parallel(device, model, tally, ids, context),
    }
}

/// Computes [`pass`] token by token.
fn stream<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tally: &mut Tally,
    ids: &[u32],
    context: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Tensor<2>> {
    let mut cache = model.new_cache(&tally.config, 1, device)?;
    let (before, scored) = ids.split_at(context - 1);
    if !before.is_empty() {
        let start = Instant::now();
        model.hidden_step(ids_to_tensor(before, [1, before.len()], device), &mut cache)?;
        tally.seconds += start.elapsed().as_secs_f64();
    }
    let mut states = Vec::with_capacity(scored.len() - 1);
    for (i, pair) in scored.windows(2).enumerate() {
        let start = Instant::now();
        let hidden = model.hidden_step(ids_to_tensor(&pair[..1], [1, 1], device), &mut cache)?;
        let logits = read(tally, model.head(hidden.clone()))?;
        score(tally, &logits, &pair[1..]);
        tally.seconds += start.elapsed().as_secs_f64();
        states.push(hidden.squeeze_dim::<2>(0));
        if i % 16 == 0 {
            progress(i + 1);
        }
    }
    tally.cache_bytes = cache.memory_bytes().total();
    Ok(Tensor::cat(states, 0))
}

/// Computes [`pass`] in one forward pass.
fn parallel<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tally: &mut Tally,
    ids: &[u32],
    context: usize,
) -> Result<Tensor<2>> {
    let start = Instant::now();
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[context..]);
    let hidden = model.hidden(ids_to_tensor(inputs, [1, inputs.len()], device), &tally.config)?;
    let hidden: Tensor<2> = hidden.squeeze_dim(0);
    let hidden = match context {
        1 => hidden,
        _ => hidden.narrow(0, context - 1, targets.len()),
    };
    for (block, targets) in targets.chunks(HEAD_ROWS).enumerate() {
        let logits = read(tally, head(model, &hidden, block * HEAD_ROWS, targets.len()))?;
        score(tally, &logits, targets);
    }
    tally.seconds += start.elapsed().as_secs_f64();
    Ok(hidden)
}

/// Adds the divergence of `hidden` from the hidden states of the float run.
fn diverge(
    model: &LanguageModel,
    tally: &mut Tally,
    float: &Tensor<2>,
    hidden: &Tensor<2>,
) -> Result<()> {
    let _phase = trace_span!(target: PHASE, "divergence", cache = %tally.config).entered();
    let [n, _] = hidden.dims();
    for start in (0..n).step_by(HEAD_ROWS) {
        let rows = HEAD_ROWS.min(n - start);
        let float = read(tally, head(model, float, start, rows))?;
        let logits = read(tally, head(model, hidden, start, rows))?;
        let _span = trace_span!(target: OPERATION, "divergence").entered();
        tally.divergence.extend(divergence(&float, &logits, model.vocab_size()));
    }
    Ok(())
}

/// Returns the logits `[1, rows, vocab]` of some rows of `hidden`.
fn head(model: &LanguageModel, hidden: &Tensor<2>, start: usize, rows: usize) -> Tensor<3> {
    model.head(hidden.clone().narrow(0, start, rows).unsqueeze_dim(0))
}

fn score(tally: &mut Tally, logits: &[f32], targets: &[u32]) {
    let _span = trace_span!(target: OPERATION, "score").entered();
    tally.nll.extend(negative_log_likelihood(logits, targets));
}

/// Copies logits to the host, which waits for the device.
fn read(tally: &Tally, tensor: Tensor<3>) -> Result<Vec<f32>> {
    let _span = trace_span!(target: OPERATION, "read").entered();
    let fail = |why: String| Error::Device { cache: tally.config.to_string(), why };
    let data = tensor.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    data.try_into_vec().map_err(|error| fail(format!("{error:?}")))
}

fn finish(model: &LanguageModel, plan: &Plan, tally: Tally, float: &[f32]) -> Result<Run> {
    let (nll, nll_stderr) = mean_and_stderr(&tally.nll);
    let pairs = tally.nll.iter().zip(float);
    let excess: Vec<f64> = pairs.map(|(&nll, &float)| f64::from(nll) - f64::from(float)).collect();
    let (nll_excess, nll_excess_stderr) = mean_and_block_stderr(&excess);
    let kl: Vec<f32> = tally.divergence.iter().map(|row| row.kl).collect();
    let (kl_mean, _) = mean_and_stderr(&kl);
    let [kl_median, kl_p99, kl_p999] = quantiles(&kl, [500, 990, 999]);
    let same_top = tally.divergence.iter().filter(|row| row.same_top).count();
    let bytes = |config: &ModelCacheConfig| -> Result<usize> {
        let bytes = |(i, layer): (usize, &LayerSpec)| {
            Ok(layer.cache_bytes(&config.layer(model.spec(), i), 1)?.total())
        };
        model.spec().layers.iter().enumerate().map(bytes).sum()
    };
    let cache_bytes = match plan.mode() {
        Mode::Streaming => tally.cache_bytes,
        Mode::Parallel => bytes(&tally.config)?,
    };
    let first_quantized = tally.config.caches(model.spec()).filter_map(|cache| {
        let schedule = Schedule::new(&cache);
        (1..plan.window()).find(|&len| schedule.counts(len) != QuantizedCounts::default())
    });
    let first_quantized = first_quantized.min();
    Ok(Run {
        model: String::new(),
        cache: tally.config.to_string(),
        mode: plan.mode(),
        dtype: model.weight_dtype(),
        weight_bytes: model.weight_bytes(),
        perplexity: nll.exp(),
        nll,
        nll_stderr,
        nll_excess,
        nll_excess_stderr,
        bits_per_byte: None,
        kl_mean,
        kl_interval: bootstrap_interval(&by_window(plan, &kl)),
        kl_median,
        kl_p99,
        kl_p999,
        same_top: same_top as f64 / tally.nll.len() as f64,
        tokens: tally.nll.len(),
        seconds: tally.seconds,
        cache_bytes,
        float_cache_bytes: bytes(&tally.config.in_float())?,
        first_quantized,
        position_nll: by_position(plan, &tally.nll),
        position_kl: kl_by_position(plan, &kl),
        layers: vec![],
    })
}

/// Returns the position of each scored token in its eval window.
fn positions(plan: &Plan) -> impl Iterator<Item = usize> {
    let begun = usize::from(plan.bos().is_some());
    plan.spans()
        .flat_map(move |Span { tokens, scored }| scored.map(move |it| begun + it - tokens.start))
}

/// Returns the sum and the number of the scored tokens of each eval window.
fn by_window(plan: &Plan, kl: &[f32]) -> Vec<(f64, usize)> {
    let mut rest = kl;
    let window = |span: Span| {
        let (own, others) = rest.split_at(span.scored.len());
        rest = others;
        (own.iter().map(|&kl| f64::from(kl)).sum(), own.len())
    };
    plan.spans().map(window).collect()
}

/// Returns quantiles of `kl`, one divergence per scored token of `plan`, in equal parts of the
/// window.
fn kl_by_position(plan: &Plan, kl: &[f32]) -> Vec<PositionKl> {
    let width = plan.window().div_ceil(POSITION_PARTS);
    let mut parts = vec![vec![]; plan.window().div_ceil(width)];
    for (position, &kl) in positions(plan).zip(kl) {
        parts[position / width].push(kl);
    }
    let part = |(i, kl): (usize, Vec<f32>)| {
        let ([median, p99, p999], tokens) = (quantiles(&kl, [500, 990, 999]), kl.len());
        PositionKl {
            start: (i * width).max(1),
            end: ((i + 1) * width).min(plan.window()),
            median,
            p99: (tokens >= 100).then_some(p99),
            p999: (tokens >= 1000).then_some(p999),
            tokens,
        }
    };
    parts.into_iter().enumerate().map(part).filter(|part| part.tokens > 0).collect()
}

/// Returns the means of `nll`, one loss per scored token of `plan`, over buckets of positions.
fn by_position(plan: &Plan, nll: &[f32]) -> Vec<PositionNll> {
    let per_bucket = plan.window().div_ceil(POSITION_BUCKETS);
    let per_bucket = per_bucket.next_multiple_of(POSITION_BUCKET);
    let mut buckets: Vec<PositionNll> = (0..plan.window())
        .step_by(per_bucket)
        .map(|start| PositionNll {
            start: start.max(1),
            end: (start + per_bucket).min(plan.window()),
            nll: 0.0,
            tokens: 0,
        })
        .collect();
    for (position, &nll) in positions(plan).zip(nll) {
        let bucket = &mut buckets[position / per_bucket];
        bucket.nll += f64::from(nll);
        bucket.tokens += 1;
    }
    for bucket in &mut buckets {
        bucket.nll /= bucket.tokens as f64;
    }
    buckets
}
