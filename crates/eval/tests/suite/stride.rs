//! Overlapping eval windows, differences from the float cache, and progress, compared with a plain
//! computation from the model's logits.
use std::path::Path;

use burn::tensor::{Int, Tensor, TensorData};
use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Mode, Plan, Run, evaluate};
use kv_models::{LanguageModel, ModelCacheConfig};

fn model(device: &On<Flex>) -> LanguageModel {
    let path = "../models/tests/golden/models/llama-tiny";
    kv_models::load(Path::new(env!("CARGO_MANIFEST_DIR")).join(path), device).unwrap().model
}

fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7) % 251).collect()
}

/// Returns the loss and the most likely token for each scored token, by the loop that the
/// documentation of transformers gives for the perplexity of fixed-length models.
fn by_hand(
    device: &On<Flex>,
    model: &LanguageModel,
    ids: &[u32],
    cache: &KvCacheConfig,
    window: usize,
    stride: usize,
) -> Vec<(f64, usize)> {
    let mut scored = Vec::new();
    let mut previous_end = 0;
    for begin in (0..ids.len()).step_by(stride) {
        let end = (begin + window).min(ids.len());
        let inputs: Vec<i32> = ids[begin..end].iter().map(|&id| id as i32).collect();
        let inputs = TensorData::new(inputs, [1, end - begin]);
        let inputs = Tensor::<2, Int>::from_data(inputs, &**device);
        let hidden = model.hidden(inputs, ModelCacheConfig::from(*cache)).unwrap();
        let logits = model.head(hidden).into_data().try_to_vec::<f32>().unwrap();
        let rows: Vec<&[f32]> = logits.chunks_exact(model.vocab_size()).collect();
        let target_length = end - previous_end;
        // The loss shifts: row i predicts token i + 1, so the first of a window has no prediction.
        let first = (end - begin - target_length).max(1);
        for at in first..end - begin {
            let row: Vec<f64> = rows[at - 1].iter().map(|&x| f64::from(x)).collect();
            let total: f64 = row.iter().map(|x| x.exp()).sum();
            let loss = total.ln() - row[ids[begin + at] as usize];
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            scored.push((loss, best));
        }
        previous_end = end;
        if end == ids.len() {
            break;
        }
    }
    scored
}

fn runs(device: &On<Flex>, plan: &Plan, model: &LanguageModel) -> Vec<Run> {
    evaluate(device, model, plan, |_| ()).unwrap()
}

#[test]
fn strides_have_the_scores_of_the_transformers_library() {
    let device = On::<Flex>::open().unwrap();
    let (model, ids) = (model(&device), ids(150));
    let cache: KvCacheConfig = "k4v4-g16-r16".parse().unwrap();
    for (window, stride) in [(64, 64), (64, 16), (64, 50), (40, 1), (150, 150), (149, 148)] {
        let float = by_hand(&device, &model, &ids, &KvCacheConfig::float(), window, stride);
        let quantized = by_hand(&device, &model, &ids, &cache, window, stride);
        for mode in [Mode::Parallel, Mode::Streaming] {
            if mode == Mode::Streaming && stride == 1 {
                continue;
            }
            let plan = Plan::new(&model, mode, [cache], ids.clone(), window, None).unwrap();
            let plan = plan.with_stride(stride).unwrap();
            assert_eq!(plan.scored_tokens(), float.len(), "{window} {stride}");
            let runs = runs(&device, &plan, &model);
            // In streaming mode, 4-bit codes that flip at rounding edges change single losses.
            for (run, by_hand, bound) in [(&runs[0], &float, 1e-5), (&runs[1], &quantized, 2e-3)] {
                let mean = by_hand.iter().map(|x| x.0).sum::<f64>() / by_hand.len() as f64;
                assert_eq!(run.tokens, by_hand.len());
                let difference = (run.nll - mean).abs();
                assert!(difference < bound, "{window} {stride} {mode}: {difference}");
                assert_eq!(
                    run.position_nll.iter().map(|at| at.tokens).sum::<usize>(),
                    by_hand.len()
                );
                assert!(run.position_nll.iter().all(|at| at.tokens > 0 && at.nll.is_finite()));
            }
        }
    }
    // Overlapping windows predict from more text.
    assert_eq!(by_hand(&device, &model, &ids, &cache, 64, 16).len(), 149);
    let plan = Plan::new(&model, Mode::Parallel, [cache], ids, 64, None).unwrap();
    for stride in [0, 65] {
        let error = plan.clone().with_stride(stride).unwrap_err().to_string();
        assert!(error.starts_with(&format!("stride {stride}: must be")), "{error}");
    }
}

#[test]
fn differences_from_float_are_paired() {
    let device = On::<Flex>::open().unwrap();
    let (model, ids) = (model(&device), ids(200));
    let cache: KvCacheConfig = "k2v2-g16-r16".parse().unwrap();
    let plan = Plan::new(&model, Mode::Parallel, [cache], ids.clone(), 100, None).unwrap();
    let runs = runs(&device, &plan, &model);
    let float = by_hand(&device, &model, &ids, &KvCacheConfig::float(), 100, 100);
    let quantized = by_hand(&device, &model, &ids, &cache, 100, 100);

    let n = float.len() as f64;
    let excess: Vec<f64> = quantized.iter().zip(&float).map(|(q, f)| q.0 - f.0).collect();
    let mean = excess.iter().sum::<f64>() / n;
    assert!((runs[1].nll_excess - mean).abs() < 1e-4, "{} {mean}", runs[1].nll_excess);
    assert!((runs[1].nll_excess - (runs[1].nll - runs[0].nll)).abs() < 1e-9);
    // 198 tokens in 14 blocks of 14 or 15.
    let blocks: Vec<f64> = (0..14)
        .map(|i| &excess[i * 198 / 14..(i + 1) * 198 / 14])
        .map(|block| block.iter().map(|x| x - mean).sum::<f64>())
        .collect();
    let variance = blocks.iter().map(|sum| sum * sum).sum::<f64>() / 13.0;
    let stderr = (14.0 * variance).sqrt() / n;
    assert!((runs[1].nll_excess_stderr - stderr).abs() < 1e-3 * stderr);
    // Differences between paired losses vary less than the losses themselves.
    assert!(stderr > 0.0 && stderr < runs[1].nll_stderr);

    let same = quantized.iter().zip(&float).filter(|(q, f)| q.1 == f.1).count() as f64 / n;
    assert!((runs[1].same_top - same).abs() < 1.5 / n, "{} {same}", runs[1].same_top);
    assert!(same < 1.0, "two bits change some choices");
    assert_eq!((runs[0].nll_excess, runs[0].nll_excess_stderr, runs[0].same_top), (0.0, 0.0, 1.0));
}

#[test]
fn perplexities_in_progress_end_at_the_final_ones() {
    let device = On::<Flex>::open().unwrap();
    let model = model(&device);
    let cache: KvCacheConfig = "k2v2-g16-r16".parse().unwrap();
    for mode in [Mode::Parallel, Mode::Streaming] {
        let plan = Plan::new(&model, mode, [cache], ids(90), 30, None).unwrap();
        let mut reports: Vec<(usize, Vec<(String, f64)>)> = Vec::new();
        let runs = evaluate(&device, &model, &plan, |progress| {
            reports.push((progress.done, progress.perplexities.to_vec()));
        });
        let finals = runs.unwrap().into_iter().map(|run| (run.cache, run.perplexity));
        let (done, last) = reports.last().unwrap();
        assert_eq!((*done, last), (2 * 87, &finals.collect::<Vec<_>>()));
        assert!(reports.is_sorted_by(|a, b| a.0 <= b.0));
        // The float cache's perplexity is known before the first window of the other cache is done.
        let first = reports.iter().find(|(_, figures)| !figures.is_empty()).unwrap();
        assert_eq!((first.0, first.1[0].0.as_str()), (29, "float"));
    }
}
