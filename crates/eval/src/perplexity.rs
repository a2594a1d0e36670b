//! Perplexity of a text, window by window, and the divergence of each cache from float.

use std::time::Instant;

use burn::tensor::{Int, Tensor, TensorData};
use kv_cubecl::{CacheShape, KvCacheConfig, On, Target, layout::CacheLayout};
use kv_models::LanguageModel;

use crate::{
    Error, Mode, Plan, Result, Run,
    score::{kl_divergence, log_sum_exp, mean_and_stderr, negative_log_likelihood, quantile},
};

/// Rows whose logits are in memory at once.
const HEAD_ROWS: usize = 256;

/// Running sums of one cache.
struct Tally {
    config: KvCacheConfig,
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
        .map(|&config| Tally { config, nll: vec![], kl: vec![], seconds: 0.0, cache_bytes: 0 })
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
    let mut losses = Vec::with_capacity(ids.len() - 1);
    for (i, pair) in ids.windows(2).enumerate() {
        let start = Instant::now();
        let hidden =
            model.hidden_step(id_tensor(&pair[..1], device).unsqueeze_dim(0), &mut cache)?;
        let logits: Tensor<2> = model.head(hidden.clone()).squeeze_dim(0); // [1, vocab]
        let lse = log_sum_exp(logits.clone());
        losses.push(negative_log_likelihood(logits, lse, id_tensor(&pair[1..], device)));
        states.push(hidden.squeeze_dim::<2>(0));
        if i + 2 == ids.len() || i % 64 == 63 {
            // Wait now and then: the time of asynchronous work belongs to this run.
            tally.nll.extend(read(tally, Tensor::cat(core::mem::take(&mut losses), 0))?);
            progress(i + 1);
        }
        tally.seconds += start.elapsed().as_secs_f64();
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
    let hidden = model.hidden(id_tensor(inputs, device).unsqueeze_dim(0), &tally.config)?;
    let hidden: Tensor<2> = hidden.squeeze_dim(0);
    for (block, targets) in targets.chunks(HEAD_ROWS).enumerate() {
        let logits = head(model, &hidden, block * HEAD_ROWS, targets.len());
        let lse = log_sum_exp(logits.clone());
        let nll = negative_log_likelihood(logits, lse, id_tensor(targets, device));
        tally.nll.extend(read(tally, nll)?);
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
        let [float, logits] = [float, hidden].map(|hidden| head(model, hidden, start, rows));
        let [float_lse, lse] = [&float, &logits].map(|logits| log_sum_exp(logits.clone()));
        tally.kl.extend(read(tally, kl_divergence(float, float_lse, logits, lse))?);
    }
    Ok(())
}

/// Logits `[rows, vocab]` of some rows of `hidden`.
fn head(model: &LanguageModel, hidden: &Tensor<2>, start: usize, rows: usize) -> Tensor<2> {
    let part = hidden.clone().narrow(0, start, rows);
    model.head(part.unsqueeze_dim(0)).squeeze_dim(0)
}

fn id_tensor<T: Target>(ids: &[u32], device: &On<T>) -> Tensor<1, Int> {
    let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let shape = [ids.len()];
    Tensor::from_data(TensorData::new(ids, shape), &**device)
}

fn read(tally: &Tally, tensor: Tensor<1>) -> Result<Vec<f32>> {
    let fail = |why: String| Error::Device { cache: tally.config.to_string(), why };
    let data = tensor.try_into_data().map_err(|error| fail(format!("{error:?}")))?;
    Ok(data.iter::<f32>().collect())
}

fn finish(model: &LanguageModel, plan: &Plan, tally: Tally) -> Result<Run> {
    let (nll, nll_stderr) = mean_and_stderr(&tally.nll);
    let (kl_mean, _) = mean_and_stderr(&tally.kl);
    let bytes = |config: &KvCacheConfig| -> Result<usize> {
        let (n_kv_heads, head_dim) = (model.n_kv_heads(), model.head_dim());
        let layout = CacheLayout::new(config, CacheShape { batch: 1, n_kv_heads, head_dim })?;
        Ok(layout.memory_bytes().total() * model.n_layers())
    };
    let float =
        KvCacheConfig::float().with_float(tally.config.float).with_capacity(tally.config.capacity);
    let cache_bytes = match plan.mode() {
        Mode::Streaming => tally.cache_bytes,
        Mode::Parallel => bytes(&tally.config)?,
    };
    Ok(Run {
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
        float_cache_bytes: bytes(&float)?,
    })
}
