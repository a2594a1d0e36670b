//! Generation: deterministic, stops where it should, equal for every prefill chunk.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{device, smollm2, tiny};
use kv_models::{
    GenerateOptions, Generated, LanguageModel, Sampling, generate, generate::Stop,
    kv_cubecl::KvCacheConfig, load,
};

fn run(model: &LanguageModel, capacity: usize, options: &GenerateOptions) -> Generated {
    let device = device();
    let config = KvCacheConfig::float().with_capacity(capacity);
    let mut cache = model.new_cache(config, 1, &device).unwrap();
    let prompt: Vec<u32> = (0..30).map(|i| i * 7 % 256).collect();
    let mut streamed = vec![];
    let out = generate(model, &mut cache, &prompt, options, &device, |id| {
        streamed.push(id);
        true
    })
    .unwrap();
    assert_eq!(out.prefill_tokens, 30);
    assert!(out.ids.starts_with(&streamed));
    assert_eq!(cache.len(), 30 + out.decode_tokens);
    out
}

#[test]
fn chunks_do_not_change_the_text_and_limits_stop_it() {
    let model = load(tiny("qwen2-tiny"), &device()).unwrap().model;
    let options = GenerateOptions { max_tokens: 12, ..Default::default() };
    let whole = run(&model, 100, &options);
    assert_eq!((whole.ids.len(), whole.stop, whole.decode_tokens), (12, Stop::MaxTokens, 11));
    for prefill_chunk in [1, 7, 30] {
        let chunked = run(&model, 100, &GenerateOptions { prefill_chunk, ..options.clone() });
        assert_eq!(chunked.ids, whole.ids);
    }

    let full = run(&model, 35, &options);
    assert_eq!((full.ids.len(), full.stop), (6, Stop::Capacity));
    assert_eq!(full.ids, whole.ids[..6]);

    let eos = [whole.ids[3]].into();
    let first = whole.ids.iter().position(|&id| id == whole.ids[3]).unwrap();
    let ended = run(&model, 100, &GenerateOptions { eos, ..options.clone() });
    assert_eq!((ended.ids.len(), ended.stop), (first + 1, Stop::Eos));
}

#[test]
fn sampling_repeats_with_its_seed() {
    let model = load(tiny("gpt2-tiny"), &device()).unwrap().model;
    let with = |seed| {
        let sampling = Sampling::TopP { temperature: 1.5, top_p: 0.95, seed };
        run(&model, 100, &GenerateOptions { max_tokens: 20, sampling, ..Default::default() }).ids
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}

#[test]
fn an_empty_or_too_long_prompt_is_an_error() {
    let device = device();
    let model = load(tiny("gpt2-tiny"), &device).unwrap().model;
    let config = KvCacheConfig::float().with_capacity(10);
    let mut cache = model.new_cache(config, 1, &device).unwrap();
    for prompt in [vec![], vec![1; 11]] {
        let options = GenerateOptions::default();
        assert!(generate(&model, &mut cache, &prompt, &options, &device, |_| true).is_err());
        assert!(cache.is_empty());
    }
}

#[test]
fn smollm2_continues_a_sentence() {
    let Some(path) = smollm2() else { return };
    let device = device();
    let loaded = load(path, &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let config = KvCacheConfig::float().with_capacity(64);
    let mut cache = loaded.model.new_cache(config, 1, &device).unwrap();
    let prompt = tokenizer.encode("The capital of France is").unwrap();
    let options = GenerateOptions { max_tokens: 8, ..Default::default() };
    let out = generate(&loaded.model, &mut cache, &prompt, &options, &device, |_| true).unwrap();
    let text = tokenizer.decode(&out.ids).unwrap();
    assert!(text.contains("Paris"), "{text:?}");
}
