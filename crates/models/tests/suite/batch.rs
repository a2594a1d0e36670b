//! Sequences of different lengths in one cache give the same results as each alone.

use burn::tensor::{Device, Tensor};
use kv_models::{
    Batch, DecodeGraph, GenerateOptions, Generated, LanguageModel, ModelCache, ModelCacheConfig,
    Sampling, generate,
    generate::{Event, Stop},
    ids_to_tensor,
    kv_cubecl::{Flex, KvCacheConfig, On, Target},
    kv_sampling::Draw,
    load,
};

use crate::common::{TINY, device, smollm2, tiny};

/// The number of sequences.
const BATCH: usize = 8;

/// The caches of the tests with tiny models. Another summation order changes the last bits of a
/// number, and in rare cases a code by one. A larger model has too many codes for this.
const CACHES: [&str; 2] = ["float", "k4v4-g16-r16-gflush"];

/// Returns ids that differ from text to text.
pub(crate) fn text(model: &LanguageModel, number: usize, len: usize) -> Vec<u32> {
    let id = |i: usize| ((i * (2 * number + 7) + 31 * number) % model.vocab_size()) as u32;
    (0..len).map(id).collect()
}

pub(crate) fn cache(
    model: &LanguageModel,
    name: &str,
    batch: usize,
    device: &Device,
) -> ModelCache {
    let config: KvCacheConfig = name.parse().unwrap();
    model.new_cache(config.with_capacity(100), batch, device).unwrap()
}

fn step(model: &LanguageModel, cache: &mut ModelCache, ids: &[u32], device: &Device) -> Vec<f32> {
    let logits = model.step(ids_to_tensor(ids, [1, ids.len()], device), cache).unwrap();
    logits.into_data().iter::<f32>().collect()
}

/// Pads the ids of every sequence to one length.
fn padded(ids: &[&[u32]], device: &Device) -> Tensor<2, burn::tensor::Int> {
    let seq = ids.iter().map(|ids| ids.len()).max().unwrap();
    let padded: Vec<u32> =
        ids.iter().flat_map(|ids| ids.iter().copied().chain([0; 64]).take(seq)).collect();
    ids_to_tensor(&padded, [ids.len(), seq], device)
}

/// Checks logits within 1e-5 of the largest, and within 1e-3 for a quantized cache: products of
/// several rows are summed in another order than products of one, which can change a code.
#[track_caller]
fn close(what: &str, name: &str, got: &[f32], want: &[f32]) {
    // The sharp attention of gemma4-tiny amplifies rounding.
    let tolerance = if name == "float" { 3e-5 } else { 1e-3 };
    let largest = want.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance * largest, "{what}: off by {:e} of the largest", worst / largest);
}

/// Prefills prompts alone and admits them, then steps: one token for all, one for some, chunks for
/// some.
fn batched_sequences_equal_single_ones<T: Target>(
    device: &On<T>,
    model: &LanguageModel,
    caches: &[&str],
    what: &str,
) {
    let vocab = model.vocab_size();
    for name in caches {
        let what = format!("{what} {name}");
        let mut together = cache(model, name, BATCH, device);
        let texts: Vec<Vec<u32>> = (0..BATCH).map(|i| text(model, i, 90)).collect();
        let mut alone = Vec::new();
        for (i, text) in texts.iter().enumerate() {
            let mut one = cache(model, name, 1, device);
            step(model, &mut one, &text[..5 + 6 * i], device);
            together.admit(i, &one).unwrap();
            alone.push(one);
        }
        let rounds: [[usize; BATCH]; 5] = [
            [1; BATCH],
            [1, 0, 1, 1, 0, 0, 1, 1],
            [0, 3, 1, 0, 2, 1, 1, 2],
            [12, 0, 1, 20, 0, 0, 9, 1],
            [1; BATCH],
        ];
        for (round, tokens) in rounds.iter().enumerate() {
            let lens = together.lens().to_vec();
            let ids: Vec<&[u32]> =
                (0..BATCH).map(|i| &texts[i][lens[i]..lens[i] + tokens[i]]).collect();
            let ids_of_all = padded(&ids, device);
            let seq = ids_of_all.dims()[1];
            // One round uses the call for equal numbers of tokens.
            let logits = match round {
                0 => model.step(ids_of_all, &mut together),
                _ => model.step_ragged(ids_of_all, tokens, &mut together),
            };
            let logits: Vec<f32> = logits.unwrap().into_data().iter::<f32>().collect();
            for (i, ids) in ids.iter().enumerate().filter(|(_, ids)| !ids.is_empty()) {
                let got = &logits[i * seq * vocab..][..ids.len() * vocab];
                let want = step(model, &mut alone[i], ids, device);
                close(&format!("{what} round {round} sequence {i}"), name, got, &want);
            }
            let lens: Vec<usize> = alone.iter().map(ModelCache::len).collect();
            assert_eq!(together.lens(), lens, "{what}");
        }
    }
}

#[test]
fn batched_sequences_equal_single_ones_on_flex() {
    let device = On::<Flex>::open().unwrap();
    for name in TINY {
        batched_sequences_equal_single_ones(
            &device,
            &load(tiny(name), &device).unwrap().model,
            &CACHES,
            name,
        );
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
crate::common::stamp_gpus!(batches);

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn batches<T: Target>(gpu: &On<T>) {
    for name in ["gpt2-tiny", "llama-tiny", "gemma3-tiny", "gpt-oss-tiny"] {
        batched_sequences_equal_single_ones(
            gpu,
            &load(tiny(name), gpu).unwrap().model,
            &CACHES,
            name,
        );
    }
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_in_a_batch_equals_single_sequences() {
    let device = On::<Flex>::open().unwrap();
    batched_sequences_equal_single_ones(
        &device,
        &load(smollm2(), &device).unwrap().model,
        &["float"],
        "SmolLM2",
    );
}

/// Continues prompts as a batch and returns the result of each text.
fn continued(
    model: &LanguageModel,
    slots: usize,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Vec<Generated> {
    let device = device();
    let mut cache = cache(model, "k4v4-g16-r16", slots, &device);
    let mut batch = Batch::new(model, &mut cache, options.clone(), &device).unwrap();
    for (i, prompt) in prompts.iter().enumerate() {
        assert_eq!(batch.push(prompt).unwrap(), i);
    }
    let (mut received, mut ended) = (vec![vec![]; prompts.len()], vec![None; prompts.len()]);
    let mut going = 0;
    while let Some(event) = batch.next_event().unwrap() {
        match event {
            Event::Token { text, id } => {
                assert!(ended[text].is_none(), "a token after the end of text {text}");
                going += usize::from(received[text].is_empty());
                received[text].push(id);
            }
            Event::End { text, generated } => {
                going -= usize::from(!received[text].is_empty());
                assert!(generated.ids.starts_with(&received[text]));
                ended[text] = Some(generated);
            }
            Event::Failed { text, error } => panic!("text {text}: {error}"),
        }
        assert!(going <= slots, "{going} texts in {slots} slots");
    }
    let ended: Vec<Generated> = ended.into_iter().map(Option::unwrap).collect();
    let totals = batch.totals();
    let sum = |part: fn(&Generated) -> usize| ended.iter().map(part).sum::<usize>();
    assert_eq!(totals.prefill_tokens, sum(|text| text.prefill_tokens));
    assert_eq!(totals.decode_tokens, sum(|text| text.decode_tokens));
    assert!(cache.is_empty(), "all slots are free: {:?}", cache.lens());
    ended
}

/// Compares with [`generate`] on each prompt alone, with fewer slots than prompts.
#[test]
fn texts_do_not_depend_on_their_neighbors() {
    let device = device();
    for (name, sampling) in [
        ("llama-tiny", Sampling::GREEDY),
        ("mistral-swa-tiny", Sampling::GREEDY),
        ("gpt2-tiny", Sampling { temperature: 1.2, top_p: 0.9, seed: 5, ..Sampling::GREEDY }),
    ] {
        let model = load(tiny(name), &device).unwrap().model;
        let prompts: Vec<Vec<u32>> = [20, 3, 95, 40, 1, 33, 100]
            .into_iter()
            .enumerate()
            .map(|(i, n)| text(&model, i, n))
            .collect();
        let plain = GenerateOptions { max_tokens: 25, sampling, ..Default::default() };
        // This id ends some of the texts.
        let first = continued(&model, 1, &prompts[..1], &plain);
        let options = GenerateOptions { eos: [first[0].ids[7]].into(), ..plain };
        let alone: Vec<Generated> = prompts
            .iter()
            .zip(0..)
            .map(|(prompt, number)| {
                let mut cache = cache(&model, "k4v4-g16-r16", 1, &device);
                let sampling = Sampling { seed: sampling.seed + number, ..sampling };
                let options = GenerateOptions { sampling, ..options.clone() };
                generate(&model, &mut cache, prompt, &options, &device, |_| true).unwrap()
            })
            .collect();
        let stops: Vec<Stop> = alone.iter().map(|text| text.stop).collect();
        for stop in [Stop::Eos, Stop::Capacity, Stop::MaxTokens] {
            assert!(stops.contains(&stop), "{name}: {stops:?}");
        }
        for slots in [1, 3, 8] {
            let together = continued(&model, slots, &prompts, &options);
            for (i, (got, want)) in together.iter().zip(&alone).enumerate() {
                assert_eq!(got.ids, want.ids, "{name}: text {i} in {slots} slots");
                assert_eq!(
                    (got.stop, got.prefill_tokens, got.decode_tokens),
                    (want.stop, want.prefill_tokens, want.decode_tokens),
                    "{name}: text {i} in {slots} slots"
                );
            }
        }
    }
}

#[test]
fn texts_can_be_added_and_stopped_at_any_time() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let mut cache = cache(&model, "float", 2, &device);
    let options = GenerateOptions { max_tokens: 20, ..Default::default() };
    let expected = continued(&model, 1, &[text(&model, 3, 9)], &options)[0].ids.clone();
    let mut batch = Batch::new(&model, &mut cache, options, &device).unwrap();
    assert!(batch.next_event().unwrap().is_none());
    for i in 0..3 {
        batch.push(&text(&model, i, 9)).unwrap();
    }
    let mut ended = vec![];
    while let Some(event) = batch.next_event().unwrap() {
        match event {
            // Stops one text in a slot and one that waits, then adds another.
            Event::Token { text: 0, .. } => {
                assert!(batch.stop(0) && batch.stop(2) && !batch.stop(2) && !batch.stop(9));
                batch.push(&text(&model, 3, 9)).unwrap();
            }
            Event::Token { .. } => {}
            Event::End { text, generated } => ended.push((text, generated)),
            Event::Failed { text, error } => panic!("text {text}: {error}"),
        }
    }
    ended.sort_by_key(|(text, _)| *text);
    let stops: Vec<Stop> = ended.iter().map(|(_, text)| text.stop).collect();
    assert_eq!(stops, [Stop::Callback, Stop::MaxTokens, Stop::Callback, Stop::MaxTokens]);
    let n: Vec<usize> = ended.iter().map(|(_, text)| text.ids.len()).collect();
    assert_eq!(n, [1, 20, 0, 20]);
    assert_eq!(ended[3].1.ids.len(), expected.len());
    drop(batch);
    assert!(cache.is_empty());
}

#[test]
fn zero_max_tokens_end_every_text() {
    let model = load(tiny("llama-tiny"), &device()).unwrap().model;
    let options = GenerateOptions { max_tokens: 0, ..Default::default() };
    let ended = continued(&model, 2, &[vec![1, 2], vec![3], vec![4]], &options);
    assert!(ended.iter().all(|text| text.ids.is_empty() && text.stop == Stop::MaxTokens));
}

/// Operations on sequences change all layers, some of them quantized, or none.
#[test]
fn sequence_operations_change_all_layers() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let config: KvCacheConfig = "k2v2-g16-r16".parse().unwrap();
    let config = ModelCacheConfig::from(config.with_capacity(60)).with_float_layers([0]);
    let new = |batch| model.new_cache(&config, batch, &device).unwrap();
    let ids = text(&model, 1, 60);
    let mut one = new(1);
    step(&model, &mut one, &ids[..40], &device);
    let mut all = new(3);
    all.admit(1, &one).unwrap();
    all.fork(1, 2).unwrap();
    assert_eq!((all.lens(), all.len(), all.remaining()), (&[0, 40, 40][..], 40, 20));
    let lens = |cache: &ModelCache| -> Vec<Vec<usize>> {
        cache.layers().iter().map(|layer| layer.lens().to_vec()).collect()
    };
    let before = lens(&all);

    // Layer 0 can be cut back to nothing, the others cannot.
    assert_eq!(all.shortest(1).unwrap(), 32);
    let error = all.truncate(1, 31).unwrap_err().to_string();
    assert!(error.starts_with("len 31: must be at least 32 for sequence 1"), "{error}");
    for (error, message) in [
        (all.truncate(3, 1).unwrap_err(), "sequence 3: must be below batch 3"),
        (all.truncate(1, 41).unwrap_err(), "len 41: must be at most the 40 tokens of sequence 1"),
        (all.remove(0).unwrap_err(), "sequence 0: holds no token, its slot is free"),
        (all.admit(1, &one).unwrap_err(), "sequence 1: its slot is not free, it holds 40 tokens"),
        (all.fork(1, 2).unwrap_err(), "to 2: its slot is not free, it holds 40 tokens"),
        (all.fork(0, 0).unwrap_err(), "sequence 0: holds no token, its slot is free"),
    ] {
        assert_eq!(error.to_string(), message);
    }
    // The configuration differs in a layer that is not the first.
    let other = config.clone().with_float_layers([1]);
    let mut other = model.new_cache(&other, 1, &device).unwrap();
    step(&model, &mut other, &ids[..5], &device);
    let error = all.admit(0, &other).unwrap_err().to_string();
    assert!(error.contains("admit: configuration"), "{error}");
    let short = KvCacheConfig::float().with_capacity(9);
    let short = model.new_cache(short, 1, &device).unwrap();
    let error = all.admit(0, &short).unwrap_err().to_string();
    assert!(error.contains("capacity 9") && !error.contains('\n'), "{error}");
    assert!(ModelCache::join(&[all.clone(), short]).is_err());
    assert!(ModelCache::join(&[]).is_err());
    assert_eq!(lens(&all), before, "a refused call changed a layer");

    // After truncation and the same tokens, the results are as before.
    all.truncate(1, 33).unwrap();
    all.remove(2).unwrap();
    assert_eq!(all.lens(), [0, 33, 0]);
    let rest =
        ids_to_tensor(&[[0; 7], ids[33..40].try_into().unwrap(), [0; 7]].concat(), [3, 7], &device);
    let logits = model.step_ragged(rest, &[0, 7, 0], &mut all).unwrap();
    // On the CPU, padding is not computed: it has the logits of the first token.
    let row = |i, at| logits.clone().narrow(0, i, 1).narrow(1, at, 1).into_data();
    assert_eq!(row(0, 3), row(1, 0));
    assert_ne!(row(1, 1), row(1, 0));
    let mut joined = ModelCache::join(&[all.select(&[1]).unwrap(), one.clone()]).unwrap();
    assert_eq!((joined.batch(), joined.lens()), (2, &[40, 40][..]));
    let next = ids_to_tensor(&[ids[40]; 2], [2, 1], &device);
    let logits = model.step(next, &mut joined).unwrap();
    let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
    let (again, straight) = logits.split_at(model.vocab_size());
    let largest = straight.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let worst = again.iter().zip(straight).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // The seven tokens saw restored values instead of floats, so their keys and values differ.
    assert!(worst < 0.05 * largest, "{worst} of {largest}");
}

#[test]
fn errors_name_the_value() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let config = KvCacheConfig::float().with_capacity(10);
    let mut cache = model.new_cache(config, 2, &device).unwrap();
    let ids = |seq: usize| ids_to_tensor(&vec![1; 2 * seq], [2, seq], &device);
    model.step_ragged(ids(8), &[8, 3], &mut cache).unwrap();
    for (seq, tokens, message) in [
        (5, &[2, 5][..], None),
        (5, &[3, 0], Some("tokens = 3 of sequence 0: it holds 8 tokens, and capacity is 10")),
        (5, &[1, 6], Some("tokens = 6 of sequence 1: must be at most seq 5")),
        (5, &[1], Some("tokens = 1: the cache has 2 sequences")),
        (5, &[1, 1, 1], Some("tokens = 3: the cache has 2 sequences")),
    ] {
        let mut cache = cache.clone();
        let result = model.step_ragged(ids(seq), tokens, &mut cache);
        match message {
            None => assert_eq!(cache.lens(), [10, 8]),
            Some(message) => {
                assert_eq!(result.unwrap_err().to_string(), message);
                assert_eq!(cache.lens(), [8, 3]);
            }
        }
    }
    assert!(model.step_ragged(ids(0), &[0, 0], &mut cache).is_err());

    let error =
        DecodeGraph::new(&model, &mut cache, &[].into(), Draw::GREEDY, &device).unwrap_err();
    assert!(
        error.to_string().contains("[8, 3] tokens: sequences must have equal lengths"),
        "{error}"
    );
    let options = GenerateOptions::default();
    let error = Batch::new(&model, &mut cache, options.clone(), &device).unwrap_err();
    assert!(error.to_string().contains("must be empty for a new batch"), "{error}");
    cache.reset();
    let captured = GenerateOptions { graph_capture: Some(true), ..options.clone() };
    let error = Batch::new(&model, &mut cache, captured, &device).unwrap_err();
    assert!(error.to_string().contains("graph_capture = true"), "{error}");
    let mut batch = Batch::new(&model, &mut cache, options, &device).unwrap();
    assert!(batch.push(&[]).is_err());
    let error = batch.push(&[1; 11]).unwrap_err().to_string();
    assert!(error.contains("exceeds capacity 10"), "{error}");
    assert!(batch.next_event().unwrap().is_none());
}
