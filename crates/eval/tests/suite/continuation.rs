//! Free generation, compared with the float cache.

use kv_cubecl::{Flex, On};
use kv_eval::{ContinuationPlan, Error, continuations};
use kv_models::{LanguageModel, ModelCacheConfig, ids_to_tensor};

use crate::common::{AUSTEN, assert_one_line, austen, kv_eval};

const PLAN: ContinuationPlan =
    ContinuationPlan { prompts: 3, context: 200, generate: 40, bos: None };

fn caches(names: &[&str]) -> Vec<ModelCacheConfig> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

/// Generates with one step for each token, and counts what [`continuations`] counts.
fn agreed(
    device: &On<Flex>,
    model: &LanguageModel,
    prompts: &[Vec<u32>],
    names: &[&str],
) -> Vec<Vec<usize>> {
    let text = |name: &str, prompt: &[u32]| {
        let config = name.parse::<ModelCacheConfig>().unwrap().with_capacity(240);
        let mut cache = model.new_cache(&config, 1, device).unwrap();
        let (mut input, mut text) = (prompt.to_vec(), vec![]);
        while text.len() < PLAN.generate {
            let tensor = ids_to_tensor(&input, [1, input.len()], device);
            let logits = model.step(tensor, &mut cache).unwrap();
            let last = logits.narrow(1, input.len() - 1, 1);
            let next = last.argmax(2).into_data().iter::<u32>().next().unwrap();
            text.push(next);
            input = vec![next];
        }
        text
    };
    let same = |name: &str, prompt: &Vec<u32>| {
        let (first, other) = (text(names[0], prompt), text(name, prompt));
        first.iter().zip(other).take_while(|(a, b)| **a == *b).count()
    };
    names.iter().map(|name| prompts.iter().map(|prompt| same(name, prompt)).collect()).collect()
}

#[test]
fn tokens_are_counted_until_the_first_difference() {
    let (device, model, ids) = austen(PLAN.text());
    let names = ["float", "k16v16", "k2v2-g16-r16"];
    let prompts: Vec<Vec<u32>> = ids.chunks(PLAN.context).map(<[u32]>::to_vec).collect();
    let expected = agreed(&device, &model, &prompts, &names);
    let mut seen = 0;
    let found = continuations(&device, &model, &ids, &caches(&names), PLAN, || seen += 1).unwrap();
    assert_eq!((found.agreed, seen), (expected.clone(), 9));
    assert_eq!(expected[..2], [[40; 3], [40; 3]]);
    assert!(expected[2].iter().any(|&tokens| tokens < 40), "{expected:?}");
    // Prompts that start with a token are as long.
    let passages = ids.chunks(PLAN.context - 1).take(3);
    let prompts: Vec<Vec<u32>> = passages.map(|passage| [&[7], passage].concat()).collect();
    let plan = ContinuationPlan { bos: Some(7), ..PLAN };
    let found = continuations(&device, &model, &ids, &caches(&names), plan, || ()).unwrap();
    assert_eq!(found.agreed, agreed(&device, &model, &prompts, &names));
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (device, model, ids) = austen(PLAN.text());
    for (plan, parts) in [
        (ContinuationPlan { prompts: 0, ..PLAN }, ["prompts 0", "at least 1"]),
        (ContinuationPlan { generate: 0, ..PLAN }, ["generate 0", "at least 1"]),
        (ContinuationPlan { context: 0, ..PLAN }, ["context 0", "at least 1"]),
        (ContinuationPlan { context: 1, bos: Some(0), ..PLAN }, ["context 1", "at least 2"]),
        (ContinuationPlan { context: 985, ..PLAN }, ["context 985", "1024 positions"]),
        (ContinuationPlan { generate: usize::MAX, ..PLAN }, ["context 200", "positions"]),
        (ContinuationPlan { prompts: 4, ..PLAN }, ["text 600", "800 tokens"]),
        (ContinuationPlan { bos: Some(9999), ..PLAN }, ["token id 9999", "the model knows"]),
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
    let (device, model, ids) = austen(PLAN.text());
    let plan = ContinuationPlan { prompts: 2, context: 64, generate: 8, bos: None };
    let names = ["float", "k2v2-g16-r16"];
    let agreed = continuations(&device, &model, &ids, &caches(&names), plan, || ()).unwrap().agreed;
    let text = format!("{AUSTEN}/heldout.txt");
    let start = ["continue", "--model", AUSTEN, "--text", &text];
    let more = ["--prompts", "2", "--context", "64", "--generate", "8", "--dtype", "f32"];
    let outcome =
        kv_eval(&[&start[..], &more, &["--cache", "float", "--cache", names[1]]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let lines: Vec<Vec<&str>> =
        outcome.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["cache", "mean", "least", "identical"]);
    assert_eq!(lines[2], ["float", "8.0", "8", "2/2"]);
    let [a, b] = agreed[1][..] else { panic!("{agreed:?}") };
    let [mean, least] = [format!("{:.1}", (a + b) as f64 / 2.0), a.min(b).to_string()];
    let identical = format!("{}/2", [a, b].iter().filter(|&&tokens| tokens == 8).count());
    assert_eq!(lines[3], [names[1], &mean, &least, &identical]);
    assert_eq!(lines.len(), 5, "{}", outcome.stdout);
    let outcome = kv_eval(&[&start[..], &["--context", "900", "--cache", "k4v4"]].concat());
    assert_one_line(&outcome, &["context 900", "1024 positions"]);
}
