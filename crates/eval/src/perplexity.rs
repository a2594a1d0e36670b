//! Perplexity of a text, window by window, and the divergence of each cache from float.

use std::time::Instant;

use burn::tensor::Tensor;
use kv_cubecl::{
    CacheShape, KvCacheConfig, On, QuantizedCounts, Target,
    layout::{CacheLayout, Window},
};
use kv_models::{LanguageModel, ModelCacheConfig};

use crate::{
    Error, Mode, Plan, PositionNll, Result, Run, ids,
    score::{kl_divergence, mean_and_stderr, negative_log_likelihood, quantile},
};

/// Rows whose logits are in memory at once.
const HEAD_ROWS: usize = 256;
/// Positions of a window whose losses are reported as one mean: at least this many, and few enough
/// for [`POSITION_BUCKETS`].
const POSITION_BUCKET: usize = 16;
const POSITION_BUCKETS: usize = 64;

/// Running sums of one cache.
struct Tally {
    config: ModelCacheConfig,
    nll: Vec<f32>,
    kl: Vec<f32>,
    seconds: f64,
    cache_bytes: usize,
}

/// Evaluates every cache of `plan` and calls `progress` with the tokens done so far, of
/// `scored_tokens * caches`.
///
/// # Errors
/// [`Error::NonFinite`] naming the token when a loss is NaN or infinite, and the model's and the
/// cache's errors.
pub fn evaluate<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    plan: &Plan,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Run>> {
    let mut tallies: Vec<Tally> = plan
        .caches()
        .iter()
        .cloned()
        .map(|config| Tally { config, nll: vec![], kl: vec![], seconds: 0.0, cache_bytes: 0 })
        .collect();
    let mut done = 0;
    for window in plan.windows() {
        let first_token = window.start + 1;
        let ids = &plan.ids()[window];
        // Final hidden states of the float run; its logits are computed again a few rows at a time
        // rather than kept, which for a large vocabulary would not fit in memory.
        let mut float_hidden: Option<Tensor<2>> = None;
        for tally in &mut tallies {
            let before = done;
            let hidden = {
                let mut report = |tokens| progress(before + tokens);
                match plan.mode() {
                    Mode::Streaming => stream(device, model, tally, ids, &mut report)?,
                    Mode::Parallel => parallel(device, model, tally, ids)?,
                }
            };
            let scored = ids.len() - 1;
            let start = tally.nll.len() - scored;
            if let Some(at) = tally.nll[start..].iter().position(|nll| !nll.is_finite()) {
                let value = tally.nll[start + at];
                let cache = tally.config.to_string();
                return Err(Error::NonFinite { cache, token: first_token + at, value });
            }
            match &float_hidden {
                Some(float) => divergence(model, tally, float, &hidden)?,
                None => tally.kl.extend(core::iter::repeat_n(0.0, scored)),
            }
            float_hidden.get_or_insert(hidden);
            done += scored;
            progress(done);
        }
    }
    tallies.into_iter().map(|tally| finish(model, plan, tally)).collect()
}

/// Token by token from an empty cache; returns the hidden states `[tokens, hidden]`.
fn stream<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tally: &mut Tally,
    ids: &[u32],
    progress: &mut dyn FnMut(usize),
) -> Result<Tensor<2>> {
    let mut cache = model.new_cache(&tally.config, 1, device)?;
    let mut states = Vec::with_capacity(ids.len() - 1);
    for (i, pair) in ids.windows(2).enumerate() {
        let start = Instant::now();
        let hidden = model.hidden_step(ids::tensor(&pair[..1], device), &mut cache)?;
        let logits = read(tally, model.head(hidden.clone()))?;
        tally.nll.extend(negative_log_likelihood(&logits, &pair[1..]));
        tally.seconds += start.elapsed().as_secs_f64();
        states.push(hidden.squeeze_dim::<2>(0));
        if i % 16 == 0 {
            progress(i + 1);
        }
    }
    tally.cache_bytes = cache.memory_bytes().total();
    Ok(Tensor::cat(states, 0))
}

/// The whole window at once; returns the hidden states `[tokens, hidden]`.
fn parallel<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    tally: &mut Tally,
    ids: &[u32],
) -> Result<Tensor<2>> {
    let start = Instant::now();
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    let hidden = model.hidden(ids::tensor(inputs, device), &tally.config)?;
    let hidden: Tensor<2> = hidden.squeeze_dim(0);
    for (block, targets) in targets.chunks(HEAD_ROWS).enumerate() {
        let logits = read(tally, head(model, &hidden, block * HEAD_ROWS, targets.len()))?;
        tally.nll.extend(negative_log_likelihood(&logits, targets));
    }
    tally.seconds += start.elapsed().as_secs_f64();
    Ok(hidden)
}

/// Adds the divergence of `hidden` from the float run's.
fn divergence(
    model: &LanguageModel,
    tally: &mut Tally,
    float: &Tensor<2>,
    hidden: &Tensor<2>,
) -> Result<()> {
    let [n, _] = hidden.dims();
    for start in (0..n).step_by(HEAD_ROWS) {
        let rows = HEAD_ROWS.min(n - start);
        let float = read(tally, head(model, float, start, rows))?;
        let logits = read(tally, head(model, hidden, start, rows))?;
        tally.kl.extend(kl_divergence(&float, &logits, model.vocab_size()));
    }
    Ok(())
}

/// Logits `[1, rows, vocab]` of some rows of `hidden`.
fn head(model: &LanguageModel, hidden: &Tensor<2>, start: usize, rows: usize) -> Tensor<3> {
    model.head(hidden.clone().narrow(0, start, rows).unsqueeze_dim(0))
}

/// Copies logits to the host, which waits for the device.
fn read(tally: &Tally, tensor: Tensor<3>) -> Result<Vec<f32>> {
    let fail = |why: String| Error::Device { cache: tally.config.to_string(), why };
    let data = tensor.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    data.try_into_vec().map_err(|error| fail(format!("{error:?}")))
}

fn finish(model: &LanguageModel, plan: &Plan, tally: Tally) -> Result<Run> {
    let (nll, nll_stderr) = mean_and_stderr(&tally.nll);
    let (kl_mean, _) = mean_and_stderr(&tally.kl);
    let bytes = |config: &ModelCacheConfig| -> Result<usize> {
        let (n_kv_heads, head_dim) = (model.n_kv_heads(), model.head_dim());
        let shape = CacheShape { batch: 1, n_kv_heads, head_dim };
        (0..model.n_layers())
            .map(|i| Ok(CacheLayout::new(&config.layer(i), shape)?.memory_bytes().total()))
            .sum()
    };
    let KvCacheConfig { float, capacity, .. } = tally.config.cache;
    let float = KvCacheConfig::float().with_float(float).with_capacity(capacity);
    let cache_bytes = match plan.mode() {
        Mode::Streaming => tally.cache_bytes,
        Mode::Parallel => bytes(&tally.config)?,
    };
    let mut layers = (0..model.n_layers()).map(|i| tally.config.layer(i));
    let first_quantized = layers.find(KvCacheConfig::is_quantized).and_then(|cache| {
        let window = Window::new(&cache);
        (1..plan.window()).find(|&len| window.counts(len) != QuantizedCounts::default())
    });
    Ok(Run {
        model: String::new(),
        cache: tally.config.to_string(),
        mode: plan.mode(),
        perplexity: nll.exp(),
        nll,
        nll_stderr,
        kl_mean,
        kl_p999: quantile(&tally.kl, 999),
        tokens: tally.nll.len(),
        seconds: tally.seconds,
        cache_bytes,
        float_cache_bytes: bytes(&float.into())?,
        first_quantized,
        position_nll: by_position(plan, &tally.nll),
        layers: vec![],
    })
}

/// Means of `nll`, one loss per scored token of `plan`, over buckets of positions.
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
    let positions = plan.windows().flat_map(|window| 1..window.len());
    for (position, &nll) in positions.zip(nll) {
        let bucket = &mut buckets[position / per_bucket];
        bucket.nll += f64::from(nll);
        bucket.tokens += 1;
    }
    // The first window is a whole one: no bucket is empty.
    for bucket in &mut buckets {
        bucket.nll /= bucket.tokens as f64;
    }
    buckets
}
