//! Generation is deterministic, stops where it should, and does not depend on the prefill chunk.

use burn::{
    module::Param,
    tensor::{Device, Int, Tensor},
};
use kv_models::{
    DecodeGraph, GenerateOptions, Generated, LanguageModel, LayerSpec, ModelCache, ModelSpec,
    Sampling, generate,
    generate::Stop,
    kv_cubecl::{KvCacheConfig, On, Target},
    kv_sampling::Draw,
    llama::Llama,
    load,
};

use crate::common::{TINY, device, smollm2, tiny};

// A replay is ordered only with the work of the thread that captured the graph.
static_assertions::assert_not_impl_any!(DecodeGraph<'static>: Send, Sync);

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
fn wide_models_prefill_in_shorter_chunks_on_the_cpu() {
    let chunk = |hidden| {
        let spec = ModelSpec::uniform(256, hidden, 512, 1, LayerSpec::new(1, 1, 32));
        GenerateOptions::prefill_chunk_for(&spec, &device())
    };
    assert_eq!([64, 2047, 2048, 4096].map(chunk), [512, 512, 256, 256]);
    let model = load(tiny("qwen2-tiny"), &device()).unwrap().model;
    let options = GenerateOptions::suiting(&model, &device());
    assert_eq!(options.prefill_chunk, GenerateOptions::prefill_chunk_for(model.spec(), &device()));
}

#[test]
fn sampling_repeats_with_its_seed() {
    let model = load(tiny("gpt2-tiny"), &device()).unwrap().model;
    let with = |seed| {
        let sampling = Sampling { temperature: 1.5, top_p: 0.95, seed, ..Sampling::GREEDY };
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
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_continues_a_sentence() {
    let device = device();
    let loaded = load(smollm2(), &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let config = KvCacheConfig::float().with_capacity(64);
    let mut cache = loaded.model.new_cache(config, 1, &device).unwrap();
    let prompt = tokenizer.encode("The capital of France is").unwrap();
    let options = GenerateOptions { max_tokens: 8, ..Default::default() };
    let out = generate(&loaded.model, &mut cache, &prompt, &options, &device, |_| true).unwrap();
    let text = tokenizer.decode(&out.ids).unwrap();
    assert!(text.contains("Paris"), "{text:?}");
}

/// Returns a cache that holds a prompt.
fn prompted(model: &LanguageModel, cache: &str, device: &Device) -> ModelCache {
    let config: KvCacheConfig = cache.parse().unwrap();
    let mut cache = model.new_cache(config.with_capacity(60), 1, device).unwrap();
    let prompt: Vec<i32> = (0..13).map(|i| i * 7 % 256).collect();
    let ids = Tensor::<2, Int>::from_data(
        [prompt.as_slice().try_into().unwrap()] as [[i32; 13]; 1],
        device,
    );
    model.step(ids, &mut cache).unwrap();
    cache
}

fn logits(model: &LanguageModel, cache: &mut ModelCache, id: u32, device: &Device) -> Vec<f32> {
    let ids = Tensor::<2, Int>::from_data([[id as i32]], device);
    model.step(ids, cache).unwrap().into_data().iter::<f32>().collect()
}

/// Captured steps give the same logits, greedy texts, ends of texts and cache contents as launched
/// ones.
fn captured_steps<T: Target>(device: &On<T>, models: &[&str]) {
    for name in models {
        let model = load(tiny(name), device).unwrap().model;
        for cache in ["k2v2-g16-r16", "k4v4-g16-r16-s4-after", "float"] {
            let mut expected = prompted(&model, cache, device);
            let mut captured = prompted(&model, cache, device);
            let none = Default::default();
            let mut graph =
                DecodeGraph::new(&model, &mut captured, &none, Draw::GREEDY, device).unwrap();
            assert_eq!(graph.is_captured(), T::NAME != "flex");
            assert_eq!(graph.is_captured(), DecodeGraph::is_supported(device));
            assert_eq!((graph.len(), graph.remaining()), (13, 47));
            for id in [3, 250, 17, 17] {
                let want = logits(&model, &mut expected, id, device);
                let got: Vec<f32> = graph.step(&[id]).unwrap().to_data().iter::<f32>().collect();
                close(&got, &want);
            }

            // Greedy decoding in calls of several lengths, until the cache is full.
            let mut text = vec![5];
            for n in [1, 20, 0, 22] {
                text.extend(graph.continued(text[text.len() - 1], n).unwrap());
            }
            let mut want = vec![5];
            while expected.remaining() > 0 {
                let logits = logits(&model, &mut expected, want[want.len() - 1], device);
                let best = logits.iter().copied().fold(f32::MIN, f32::max);
                want.push(logits.iter().position(|&x| x == best).unwrap() as u32);
            }
            assert_eq!(text, want, "{name} {cache}");
            assert_eq!((graph.len(), graph.remaining()), (60, 0));
            assert!(graph.continued(1, 1).unwrap_err().to_string().contains("capacity"));
            assert_eq!(graph.len(), 60);

            // After an end-of-text id inside a call, nothing more is in the cache, which works
            // without the graph.
            let end = text[9];
            let first = text[1..].iter().position(|&id| id == end).unwrap();
            let mut expected = prompted(&model, cache, device);
            for id in [3, 250, 17, 17].iter().chain(&text[..=first]) {
                logits(&model, &mut expected, *id, device);
            }
            let mut captured = prompted(&model, cache, device);
            let other = (0..).find(|id| !text.contains(id)).unwrap();
            let ends = [end, other].into();
            let mut graph =
                DecodeGraph::new(&model, &mut captured, &ends, Draw::GREEDY, device).unwrap();
            for id in [3, 250, 17, 17] {
                graph.step(&[id]).unwrap();
            }
            assert_eq!(graph.continued(5, 30).unwrap(), text[1..first + 2]);
            drop(graph);
            assert_eq!(captured.len(), expected.len());
            let want = logits(&model, &mut expected, 8, device);
            close(&logits(&model, &mut captured, 8, device), &want);
        }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
crate::common::stamp_gpus!(
    a_captured_text_is_the_same,
    logits_that_are_not_finite,
    some_captured_steps,
);

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn a_captured_text_is_the_same<T: Target>(device: &On<T>) {
    let model = load(tiny("gpt2-tiny"), device).unwrap().model;
    let config: KvCacheConfig = "k4v4-g16-r16".parse().unwrap();
    let texts = [false, true].map(|captured| {
        let mut cache = model.new_cache(config.with_capacity(60), 1, device).unwrap();
        let sampling = Sampling { temperature: 1.5, top_p: 0.95, seed: 3, ..Sampling::GREEDY };
        let options = GenerateOptions {
            max_tokens: 80,
            sampling,
            graph_capture: Some(captured),
            ..Default::default()
        };
        let out = generate(&model, &mut cache, &[5, 6, 7], &options, device, |_| true).unwrap();
        assert_eq!((out.stop, cache.len(), cache.remaining()), (Stop::Capacity, 60, 0));
        out.ids
    });
    assert_eq!(texts[0], texts[1]);
}

/// The host does not read logits between steps, but detects that some were not finite.
fn logits_that_are_not_finite<T: Target>(device: &On<T>) {
    let mut model = load(tiny("llama-tiny"), device).unwrap().model.downcast::<Llama>().unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        model.norm.gamma = Param::from_tensor(model.norm.gamma.val().ones_like() * bad);
        let model = LanguageModel::new(model.clone());
        let mut cache = prompted(&model, "k2v2-g16-r16", device);
        let none = Default::default();
        let mut graph = DecodeGraph::new(&model, &mut cache, &none, Draw::GREEDY, device).unwrap();
        let error = graph.continued(1, 5).unwrap_err().to_string();
        assert!(error.contains("logits = not finite in 5 steps"), "{bad}: {error}");
        assert_eq!(graph.len(), 18);
    }
}

#[test]
fn logits_that_are_not_finite_on_flex() {
    logits_that_are_not_finite(&On::<kv_models::kv_cubecl::Flex>::open().unwrap());
}

/// Allows for another summation order of f32 in a few layers.
#[track_caller]
fn close(got: &[f32], want: &[f32]) {
    let largest = want.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-4 * largest, "{got} for {want}, largest {largest}");
    }
}

#[test]
fn captured_steps_on_flex() {
    captured_steps(&On::<kv_models::kv_cubecl::Flex>::open().unwrap(), &TINY);
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn some_captured_steps<T: Target>(device: &On<T>) {
    captured_steps(device, &["gpt2-tiny", "llama-tiny"]);
}

#[test]
fn invalid_graphs_are_errors() {
    let device = device();
    let model = load(tiny("gpt2-tiny"), &device).unwrap().model;
    let other = load(tiny("llama-tiny"), &device).unwrap().model;
    let config = KvCacheConfig::float().with_capacity(10);
    let cache = |model: &LanguageModel, batch| model.new_cache(config, batch, &device).unwrap();
    let error = |mut cache: ModelCache, eos: &[u32]| {
        let (layers, eos) = (cache.layers().len(), eos.iter().copied().collect());
        let error = DecodeGraph::new(&model, &mut cache, &eos, Draw::GREEDY, &device).unwrap_err();
        assert_eq!((cache.layers().len(), cache.len()), (layers, 0), "the cache is whole");
        error.to_string()
    };
    assert!(error(cache(&model, 2), &[1]).contains("batch"));
    assert!(error(cache(&model, 1), &[1 << 30]).contains("vocabulary"));
    error(cache(&other, 1), &[]);

    let (mut two, none) = (cache(&model, 2), Default::default());
    let mut graph = DecodeGraph::new(&model, &mut two, &none, Draw::GREEDY, &device).unwrap();
    assert_eq!(graph.step(&[1, 2]).unwrap().dims(), [2, model.vocab_size()]);
    for ids in [&[1][..], &[1, 2, 3], &[1, 1 << 30], &[]] {
        assert!(graph.step(ids).is_err(), "{ids:?}");
    }
    assert!(graph.continued(1, 1).unwrap_err().to_string().contains("batch"));
    assert_eq!(graph.len(), 1);
    drop(graph);

    let mut cache = cache(&model, 1);
    let options = GenerateOptions { graph_capture: Some(true), ..Default::default() };
    let error = generate(&model, &mut cache, &[1], &options, &device, |_| true).unwrap_err();
    assert!(error.to_string().contains("graph_capture = true"), "{error}");
    assert!(cache.is_empty());
}
