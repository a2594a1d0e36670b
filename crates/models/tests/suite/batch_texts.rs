//! Texts of a batch with settings of their own, and prompts beside decode steps.

use kv_models::{
    Batch, BatchText, GenerateOptions, Sampler, Sampling,
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

/// A text whose token cannot be picked ends alone, at its first token or later, and frees its slot.
#[test]
fn texts_fail_alone() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let mut cache = cache(&model, "k4v4-g16-r16", 2, &device);
    let mut batch = Batch::new(&model, &mut cache, Default::default(), &device).unwrap();
    let fails = [9, 0, 3, 5];
    for (i, fails) in fails.into_iter().enumerate() {
        let (prompt, pick) = (text(&model, i, 9), Box::new(FailsAt(fails)));
        let (max_tokens, eos, salt) = (6, Default::default(), None);
        batch.push_text(BatchText { prompt, max_tokens, eos, salt, pick }).unwrap();
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
    // The first token, and one after each of the five chunks before the last.
    assert_eq!(before, 1 + 5);
}
