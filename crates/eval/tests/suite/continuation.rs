//! Free generation, compared with the float cache.

use std::path::Path;

use kv_cubecl::{Flex, On};
use kv_eval::{ContinuationPlan, Error, continuations};
use kv_models::{LanguageModel, ModelCacheConfig, ids_to_tensor, load};

use crate::common::{assert_one_line, kv_eval};

const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");
const PLAN: ContinuationPlan =
    ContinuationPlan { prompts: 3, context: 200, generate: 40, bos: None };

fn austen() -> (On<Flex>, LanguageModel, Vec<u32>) {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let text = std::fs::read_to_string(Path::new(AUSTEN).join("heldout.txt")).unwrap();
    let mut ids = loaded.tokenizer.unwrap().encode(&text).unwrap();
    ids.truncate(PLAN.text());
    (device, loaded.model, ids)
}

fn caches(names: &[&str]) -> Vec<ModelCacheConfig> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

/// The test generates with a step for each token and compares the texts itself.
#[test]
fn tokens_are_counted_until_the_first_difference() {
    let (device, model, ids) = austen();
    let names = ["float", "k16v16", "k2v2-g16-r16"];
    let mut texts = vec![];
    for name in names {
        for prompt in ids.chunks(PLAN.context) {
            let config = name.parse::<ModelCacheConfig>().unwrap().with_capacity(240);
            let mut cache = model.new_cache(&config, 1, &device).unwrap();
            let (mut input, mut text) = (prompt.to_vec(), vec![]);
            while text.len() < PLAN.generate {
                let tensor = ids_to_tensor(&input, [1, input.len()], &device);
                let logits = model.step(tensor, &mut cache).unwrap();
                let last = logits.narrow(1, input.len() - 1, 1);
                let next = last.argmax(2).into_data().iter::<u32>().next().unwrap();
                text.push(next);
                input = vec![next];
            }
            texts.push(text);
        }
    }
    let agreed = |cache: usize, prompt: usize| {
        let (first, other) = (&texts[prompt], &texts[3 * cache + prompt]);
        first.iter().zip(other).take_while(|(a, b)| a == b).count()
    };
    let expected: Vec<Vec<usize>> =
        (0..3).map(|cache| (0..3).map(|prompt| agreed(cache, prompt)).collect()).collect();
    let mut seen = 0;
    let found = continuations(&device, &model, &ids, &caches(&names), PLAN, || seen += 1).unwrap();
    assert_eq!((found.agreed, seen), (expected.clone(), 9));
    assert_eq!(expected[..2], [[40; 3], [40; 3]]);
    assert!(expected[2].iter().any(|&tokens| tokens < 40), "{expected:?}");
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (device, model, ids) = austen();
    for (plan, parts) in [
        (ContinuationPlan { prompts: 0, ..PLAN }, ["prompts 0", "at least 1"]),
        (ContinuationPlan { generate: 0, ..PLAN }, ["generate 0", "at least 1"]),
        (ContinuationPlan { context: 0, ..PLAN }, ["context 0", "no token of text"]),
        (ContinuationPlan { context: 1, bos: Some(0), ..PLAN }, ["context 1", "no token"]),
        (ContinuationPlan { context: 985, ..PLAN }, ["context 985", "1024 positions"]),
        (ContinuationPlan { generate: usize::MAX, ..PLAN }, ["context 200", "positions"]),
        (ContinuationPlan { prompts: 4, ..PLAN }, ["text 600", "800 tokens"]),
        (ContinuationPlan { prompts: usize::MAX, ..PLAN }, ["text 600", "tokens"]),
    ] {
        let error = continuations(&device, &model, &ids, &caches(&["float"]), plan, || ());
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Plan { .. }));
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn the_program_prints_a_line_for_each_cache() {
    let text = format!("{AUSTEN}/heldout.txt");
    let args =
        ["continue", "--model", AUSTEN, "--text", &text, "--prompts", "2", "--context", "64"];
    let args =
        [&args[..], &["--generate", "8", "--cache", "float", "--cache", "k2v2-g16-r16"]].concat();
    let outcome = kv_eval(&args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let lines: Vec<Vec<&str>> =
        outcome.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["cache", "mean", "median", "least", "identical"]);
    assert_eq!(lines[2], ["float", "8.0", "8", "8", "2/2"]);
    assert_eq!((lines[3][0], lines.len()), ("k2v2-g16-r16", 5), "{}", outcome.stdout);
    let outcome = kv_eval(&["continue", "--model", AUSTEN, "--text", &text, "--context", "900"]);
    assert_one_line(&outcome, &["context 900", "1024 positions"]);
}
