//! Texts of a batch with settings of their own, and prompts beside decode steps.

use kv_models::{
    Batch, BatchText, DraftModel, GenerateOptions, Guesses, Sampler, Sampling, Speculate,
    generate::{Event, Pick},
    load,
};

use crate::{
    batch::{cache, text},
    common::{device, tiny},
};

/// Picks the most likely tokens, and fails at a number of them.
#[derive(Debug)]
struct FailsAt(usize);

impl Pick for FailsAt {
    fn pick(&mut self, logits: &[f32], text: &[u32]) -> kv_models::Result<u32> {
        match self.0.checked_sub(1) {
            Some(left) => self.0 = left,
            None => return Err(kv_models::Error::argument("pick", 0, "fails here")),
        }
        Sampler::new(Sampling::GREEDY)?.sample(logits, text)
    }
}

fn push(batch: &mut Batch<'_>, prompt: Vec<u32>, max_tokens: usize, pick: FailsAt) {
    let (eos, salt, pick) = (Default::default(), None, Box::new(pick));
    batch.push_text(BatchText { prompt, max_tokens, eos, salt, pick }).unwrap();
}

/// A text whose token cannot be picked ends alone, at its first token or later, and frees its slot.
#[test]
fn texts_fail_alone() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let mut cache = cache(&model, "k4v4-g16-r16", 2, &device);
    let mut batch = Batch::new(&model, &mut cache, Default::default(), &device).unwrap();
    let fails = [9, 0, 3, 5];
    for (i, fails) in fails.into_iter().enumerate() {
        push(&mut batch, text(&model, i, 9), 6, FailsAt(fails));
    }
    let (mut tokens, mut ended) = ([0; 4], [None; 4]);
    while let Some(event) = batch.next_event().unwrap() {
        match event {
            Event::Token { text, .. } => tokens[text] += 1,
            Event::End { text, .. } => ended[text] = Some(true),
            Event::Failed { text, error } => {
                assert_eq!(error.to_string(), "pick = 0: fails here");
                ended[text] = Some(false);
            }
        }
    }
    assert_eq!((tokens, ended), ([6, 0, 3, 5], [true, false, false, false].map(Some)));
    drop(batch);
    assert!(cache.is_empty());
}

/// While a long prompt is prefilled, the other texts get a token after each chunk.
#[test]
fn prompts_are_prefilled_between_steps() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let mut cache = cache(&model, "k4v4-g16-r16", 2, &device);
    let options = GenerateOptions { prefill_chunk: 4, max_tokens: 30, ..Default::default() };
    let mut batch = Batch::new(&model, &mut cache, options, &device).unwrap();
    batch.push(&text(&model, 0, 3)).unwrap();
    batch.push(&text(&model, 1, 22)).unwrap();
    let mut before = 0;
    while let Some(event) = batch.next_event().unwrap() {
        match event {
            Event::Token { text: 0, .. } => before += 1,
            Event::Token { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    // The first token, the step that it has delayed, and one after each of the five chunks before
    // the last.
    assert_eq!(before, 1 + 1 + 5);
}

/// Prompts whose texts end at once let the other texts go on: with 12 of them, a longer text gets a
/// token after each.
#[test]
fn short_texts_do_not_stop_the_others() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let mut cache = cache(&model, "k4v4-g16-r16", 4, &device);
    let mut batch = Batch::new(&model, &mut cache, Default::default(), &device).unwrap();
    push(&mut batch, text(&model, 0, 5), 60, FailsAt(usize::MAX));
    for i in 1..=12 {
        push(&mut batch, text(&model, i, 5), i % 2, FailsAt(usize::MAX));
    }
    let (mut tokens, mut ended) = (0, 0);
    while let Some(event) = batch.next_event().unwrap() {
        match event {
            Event::Token { text: 0, .. } => tokens += 1,
            Event::End { text: 0, .. } => break,
            Event::End { .. } => {
                ended += 1;
                assert!(tokens + 1 >= ended, "{tokens} tokens while {ended} texts have ended");
            }
            Event::Token { .. } => {}
            Event::Failed { text, error } => panic!("{text}: {error}"),
        }
    }
    assert_eq!((tokens, ended), (60, 12));
}

/// In a batch, all guesses of a pass are counted, and those after the end of a text are no tokens
/// of it.
#[test]
fn guesses_of_a_batch_are_counted() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let options = |speculate| GenerateOptions { max_tokens: 70, speculate, ..Default::default() };
    let run = |prompt: &[u32], speculate, stop_at| {
        let mut cache = cache(&model, "k4v4-g16-r16", 3, &device);
        let mut batch = Batch::new(&model, &mut cache, options(speculate), &device).unwrap();
        batch.push(prompt).unwrap();
        let mut n = 0;
        let out = loop {
            match batch.next_event().unwrap().unwrap() {
                Event::Token { .. } => n += 1,
                Event::End { generated, .. } => break generated,
                Event::Failed { error, .. } => panic!("{error}"),
            }
            if n == stop_at {
                assert!(batch.stop(0));
            }
        };
        assert_eq!(batch.totals().decode_tokens, out.decode_tokens);
        assert_eq!(out.decode_tokens, out.ids.len() - 1);
        out
    };
    let repeating = [3, 1, 4].repeat(9);
    let plain = run(&repeating, Speculate::Never, usize::MAX);
    let lookup = run(&repeating, Speculate::Lookup, usize::MAX);
    assert_eq!(lookup.ids, plain.ids);
    assert!(lookup.guesses.right > 10, "{:?}", lookup.guesses);
    // Another model guesses wrong until the text repeats itself.
    let other = load(tiny("qwen2-tiny"), &device).unwrap().model;
    let other = Speculate::Model(DraftModel::new(other, &model));
    let other = run(&text(&model, 2, 27), other, usize::MAX);
    let Guesses { verified, right } = other.guesses;
    assert!(verified > right, "{:?}", other.guesses);
    for n in 1..40 {
        assert_eq!(run(&repeating, Speculate::Lookup, n).ids, plain.ids[..n]);
    }
}
