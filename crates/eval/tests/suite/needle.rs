//! Needles in a haystack.

use std::path::Path;

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Error, NeedlePlan, needles};
use kv_models::{ModelCacheConfig, ids_to_tensor, load};

use crate::common::{AUSTEN, assert_one_line, austen, kv_eval};

const PLAN: NeedlePlan = NeedlePlan { context: 512, needle: 40, cue: 16, chunks: 4 };

/// The model was trained on passages that recur soon, so it finds recent needles, and not without
/// them. The text has each passage once, so that nothing else tells how a needle goes on.
#[test]
fn a_model_that_copies_finds_recent_needles() {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let text = std::fs::read_to_string(Path::new(AUSTEN).join("heldout.txt")).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.dedup();
    let (model, tokenizer) = (loaded.model, loaded.tokenizer.unwrap());
    let ids = tokenizer.encode(&(lines[..100].join("\n") + "\n")).unwrap();
    let near = NeedlePlan { context: 200, chunks: 2, ..PLAN };
    let caches: Vec<ModelCacheConfig> =
        ["float", "k4v4-gflush"].map(|name| name.parse().unwrap()).into();
    let mut seen = 0;
    let found = needles(&device, &model, &ids, &caches, near, |_| seen += 1).unwrap();
    assert_eq!((found.rows.len(), seen), (4, 4));
    assert!(found.rows.iter().all(|row| row.of == 24), "{found}");
    for row in &found.rows {
        assert!(row.nll < 0.7 * row.nll_without && row.found > row.without, "{found}");
    }
    let places: Vec<_> = found.rows.iter().take(2).map(|row| row.at).collect();
    assert_eq!(places, [30, 90]);
}

/// The test writes the prompt itself and computes the loss of its last tokens.
#[test]
fn losses_are_those_of_the_prompt() {
    let (device, model, ids) = austen(PLAN.text());
    let float = ModelCacheConfig::from(KvCacheConfig::float());
    let found = needles(&device, &model, &ids, &[float], PLAN, |_| ()).unwrap();
    let row = &found.rows[1];
    let needle = &ids[552..592];
    let prompt = [&ids[..162], needle, &ids[162..432], needle].concat();
    assert_eq!(prompt.len(), PLAN.context);
    let ids = ids_to_tensor(&prompt, [1, prompt.len()], &device);
    let logits = model.forward(ids, KvCacheConfig::float()).unwrap();
    let log_p = burn::tensor::activation::log_softmax(logits, 2);
    let vocab = model.vocab_size();
    let log_p: Vec<f32> = log_p.into_data().iter::<f32>().collect();
    let losses = (488..512).map(|t| -f64::from(log_p[(t - 1) * vocab + prompt[t] as usize]));
    let nll = losses.sum::<f64>() / 24.0;
    // Both are f32; they differ in the order of sums.
    assert!((row.nll - nll).abs() < 1e-4, "{} and {nll}", row.nll);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (device, model, ids) = austen(PLAN.text());
    let float = [ModelCacheConfig::from(KvCacheConfig::float())];
    for (plan, parts) in [
        (NeedlePlan { cue: 0, ..PLAN }, ["cue 0", "below the 40"]),
        (NeedlePlan { cue: 40, ..PLAN }, ["cue 40", "below the 40"]),
        (NeedlePlan { chunks: 0, ..PLAN }, ["chunks 0", "at least 1"]),
        (NeedlePlan { context: 83, ..PLAN }, ["context 83", "84"]),
        (NeedlePlan { context: 1025, ..PLAN }, ["context 1025", "1024 positions"]),
        (NeedlePlan { chunks: 5, ..PLAN }, ["text 672", "712 tokens"]),
        (NeedlePlan { chunks: usize::MAX, ..PLAN }, ["context 512", "at least"]),
    ] {
        let error = needles(&device, &model, &ids, &float, plan, |_| ()).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{error:?}");
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let text = format!("{AUSTEN}/heldout.txt");
    let outcome = kv_eval(&["needle", "--model", AUSTEN, "--text", &text, "--cue", "48"]);
    assert_one_line(&outcome, &["cue 48", "must be at least 1"]);
}
