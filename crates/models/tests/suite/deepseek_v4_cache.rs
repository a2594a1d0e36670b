//! DeepSeek-V4 with a cache: logits of tiny checkpoints against the transformers library, however
//! tokens are divided into calls, and after a cache was saved, cut back, forked or captured.

use burn::tensor::{Int, Tensor};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use kv_models::kv_cubecl::{On, Target};
use kv_models::{
    AttentionTrace, Checkpoints, DecodeGraph, Error, ModelCache, PromptCache, SavedAs, SavedCache,
    ids_to_tensor, kv_cubecl::KvCacheConfig, kv_sampling::Draw,
};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::common::{
    assert_contains,
    deepseek::{Golden, TOLERANCE, furthest, golden, host},
    device,
    saved::{bits, config, pass},
};

/// Returns random numbers with this sum, most of them small.
fn partition(rng: &mut Xoshiro256PlusPlus, sum: usize) -> Vec<usize> {
    let (mut sizes, mut rest) = (vec![], sum);
    let largest = 1 << rng.random_range(2..8);
    while rest > 0 {
        let size = if rng.random_range(0..3) == 0 { 1 } else { rng.random_range(1..=largest) };
        sizes.push(size.min(rest));
        rest -= sizes[sizes.len() - 1];
    }
    sizes
}

#[test]
fn decoded_tokens_have_the_logits_of_the_fixtures() {
    let device = device();
    for folder in golden() {
        let golden = Golden::new(&folder);
        let seq = golden.texts[0].len();
        let decoded = golden.decoded.clone().unwrap();
        let steps = decoded.dims()[1];
        let ids = |start: usize, end: usize| -> Tensor<2, Int> {
            let ids: Vec<u32> =
                golden.texts.iter().flat_map(|ids| ids[start..end].to_vec()).collect();
            ids_to_tensor(&ids, [golden.texts.len(), end - start], &device)
        };
        let mut cache = golden.cache("float", seq, golden.texts.len());
        golden.model.hidden_step(ids(0, seq - steps), &mut cache).unwrap();
        let mut worst = 0f32;
        for t in 0..steps {
            let at = seq - steps + t;
            let logits = golden.model.step(ids(at, at + 1), &mut cache).unwrap();
            let wanted = decoded.clone().narrow(1, t, 1);
            worst = worst.max((logits - wanted).abs().max().into_scalar::<f32>());
        }
        assert!(worst <= TOLERANCE * golden.largest, "{}: {worst}", folder.display());
    }
}

#[test]
fn every_token_of_a_sequence_may_be_a_call() {
    let golden = Golden::tiny();
    for text in 0..2 {
        let seq = golden.texts[text].len();
        let logits = golden.one_by_one("float", text, seq).concat();
        golden.check(text, 0, &logits, "one by one");
    }
}

#[test]
fn any_partition_into_calls_has_the_same_logits() {
    let goldens: Vec<Golden> = golden().iter().map(|folder| Golden::new(folder)).collect();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    for case in 0..200 {
        let golden = &goldens[case % goldens.len()];
        let text = rng.random_range(0..golden.texts.len());
        let seq = rng.random_range(60..=200.min(golden.texts[text].len()));
        let mut cache = golden.cache("float", seq, 1);
        let sizes = partition(&mut rng, seq);
        let logits: Vec<f32> =
            sizes.iter().flat_map(|&size| golden.pass(&mut cache, text, size)).collect();
        golden.check(text, 0, &logits, format!("case {case}, {sizes:?}"));
    }
}

#[test]
fn batches_are_saved_and_restored() {
    let (golden, device) = (Golden::tiny(), device());
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("batch.safetensors");
    let lens = [37, 64, 5];
    let alone = lens.map(|len| {
        let mut cache = golden.cache("k4v4", 90, 1);
        golden.pass(&mut cache, 0, len);
        cache
    });
    let mut cache = ModelCache::join(&alone).unwrap();
    let texts = lens.map(|len| &golden.texts[0][..len]);
    cache.save(&path, &golden.model, "tiny", &texts).unwrap();
    let saved = SavedCache::open(&path).unwrap();
    let mut restored = saved.restore(&golden.model, config("k4v4", 90), &device).unwrap();
    assert_eq!(restored.lens(), lens);
    for t in 0..10 {
        let ids = lens.map(|len| golden.texts[0][len + t]);
        let step = |cache: &mut ModelCache| {
            host(golden.model.step(ids_to_tensor(&ids, [3, 1], &device), cache).unwrap())
        };
        assert_eq!(bits(&step(&mut restored)), bits(&step(&mut cache)), "{t}");
    }
}

#[test]
fn ragged_batches_equal_single_sequences() {
    let (golden, device) = (Golden::tiny(), device());
    let mut cache = golden.cache("float", 120, 9);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
    for round in 0..12 {
        // Lengths of 1 to 9 in another order in each round; later, some sequences wait.
        let mut tokens: Vec<usize> = (1..=9).map(|i| (i + 4 * round) % 9 + 1).collect();
        if round > 3 {
            tokens[rng.random_range(0..9)] = 0;
        }
        let lens = cache.lens().to_vec();
        let mut all = vec![];
        for (i, &n) in tokens.iter().enumerate() {
            let text = &golden.texts[i % 2];
            all.extend((0..9).map(|t| if t < n { text[lens[i] + t] } else { 99 }));
        }
        let ids = ids_to_tensor(&all, [9, 9], &device);
        let logits = golden.model.step_ragged(ids, &tokens, &mut cache).unwrap();
        for (i, &n) in tokens.iter().enumerate().filter(|(_, n)| **n > 0) {
            let own = host(logits.clone().narrow(0, i, 1).narrow(1, 0, n));
            golden.check(i % 2, lens[i], &own, format!("round {round}: {n} of {i} after {lens:?}"));
        }
    }
}

#[test]
fn truncated_caches_continue_bit_for_bit() {
    let golden = Golden::tiny();
    for name in ["float", "k4v4"] {
        let all = golden.one_by_one(name, 0, 80);
        let mut cache = golden.cache(name, 80, 1);
        for len in 1..=70 {
            golden.pass(&mut cache, 0, 1);
            if len > 20 && len % 3 != 0 {
                continue;
            }
            let shortest = cache.shortest(0).unwrap();
            if shortest > 1 {
                let mut short = cache.clone();
                let error = short.truncate(0, shortest - 1).unwrap_err().to_string();
                assert_contains(&error, &["len", &shortest.to_string()]);
                assert!(short.layers().iter().all(|layer| layer.len() == len));
            }
            for to in (shortest..len).chain([0]).step_by(3) {
                let mut short = cache.clone();
                short.truncate(0, to).unwrap();
                assert_eq!(short.len(), to);
                for (t, wanted) in all.iter().enumerate().skip(to).take(6) {
                    let logits = golden.pass(&mut short, 0, 1);
                    assert_eq!(bits(&logits), bits(wanted), "{name}: {t}, {len} cut to {to}");
                }
            }
        }
    }
}

#[test]
fn caches_continue_from_checkpoints_bit_for_bit() {
    let (golden, device) = (Golden::tiny(), device());
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prompt.safetensors");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    for name in ["float", "k4v4", "float-f16"] {
        let (mut reused, mut held) =
            (0, PromptCache::new(golden.cache(name, 160, 1), Checkpoints::All).unwrap());
        let mut text = golden.texts[0][..70].to_vec();
        held.prefill(&golden.model, &text, 1, &device, || true).unwrap();
        for turn in 0..6 {
            if turn % 2 == 1 {
                held.save(&path, &golden.model, &SavedAs::default()).unwrap();
                let saved = SavedCache::open(&path).unwrap();
                let restored = saved.restore_prompt(
                    &golden.model,
                    config(name, 160),
                    &device,
                    Checkpoints::All,
                );
                held = restored.unwrap();
            }
            // The next prompt differs before the end of this one and is longer.
            let back = [1, 3, 10, 15, 20][rng.random_range(0..5)];
            text.truncate(text.len() - back);
            text.extend((0..back + 5).map(|_| rng.random_range(0..250)));
            reused += held.reuse(&text).unwrap();
            let logits = held.prefill(&golden.model, &text, 1, &device, || true).unwrap().unwrap();
            let mut fresh = golden.cache(name, 160, 1);
            let wanted =
                text.iter().fold(vec![], |_, id| pass(&golden.model, &mut fresh, &[*id], &device));
            assert_eq!(bits(&host(logits)), bits(&wanted), "{name}: turn {turn}, {back} back");
        }
        assert!(reused > 150, "{name}: {reused} tokens reused");
    }
}

#[test]
fn forked_and_admitted_sequences_continue_alone() {
    let (golden, device) = (Golden::tiny(), device());
    let mut one = golden.cache("float", 100, 1);
    golden.pass(&mut one, 0, 45);
    let mut all = golden.cache("float", 100, 3);
    all.admit(1, &one).unwrap();
    all.fork(1, 0).unwrap();
    assert_eq!(all.lens(), [45, 45, 0]);
    // The fork gets other tokens, which do not change the original.
    for t in 45..65 {
        let ids = [golden.texts[1][t], golden.texts[0][t], 0];
        let ids = ids_to_tensor(&ids, [3, 1], &device);
        let logits = golden.model.step_ragged(ids, &[1, 1, 0], &mut all).unwrap();
        golden.check(0, t, &host(logits.narrow(0, 1, 1)), t);
    }
    all.remove(0).unwrap();
    all.fork(1, 0).unwrap();
    let mut both = all.select(&[0, 1]).unwrap();
    for t in 65..75 {
        let ids = ids_to_tensor(&[golden.texts[0][t]; 2], [2, 1], &device);
        let logits = golden.model.step(ids, &mut both).unwrap();
        for i in 0..2 {
            golden.check(0, t, &host(logits.clone().narrow(0, i, 1)), t);
        }
    }
}

/// The position is on the device. On a device without graph capture, a replay launches the same
/// steps.
#[test]
fn graph_capture_has_the_same_logits() {
    let (golden, device) = (Golden::tiny(), device());
    for start in [1, 18, 30, 63] {
        let mut cache = golden.cache("float", 120, 1);
        golden.pass(&mut cache, 0, start);
        let (none, greedy) = ([].into(), Draw::GREEDY);
        let mut graph =
            DecodeGraph::new(&golden.model, &mut cache, &none, greedy, &device).unwrap();
        for t in start..start + 40 {
            let logits = graph.step(&[golden.texts[0][t]]).unwrap().clone();
            golden.check(0, t, &host(logits), format!("{t} from {start}"));
        }
        drop(graph);
        assert_eq!(cache.len(), start + 40);
        let logits = golden.pass(&mut cache, 0, 9);
        golden.check(0, start + 40, &logits, "after the graph");
    }
}

/// Steps after an end-of-text id have a position past the capacity and write nothing.
#[test]
fn graphs_write_nothing_after_an_end_of_text() {
    let (golden, device) = (Golden::tiny(), device());
    let mut cache = golden.cache("float", 120, 1);
    let logits = golden.pass(&mut cache, 0, 50);
    let (vocab, draw) = (golden.model.spec().vocab_size, Draw::GREEDY);
    let last = &logits[49 * vocab..];
    let first = (0..vocab).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as u32;
    let mut other = cache.clone();
    let ids = {
        let mut graph =
            DecodeGraph::new(&golden.model, &mut other, &[].into(), draw, &device).unwrap();
        graph.continued(first, 20).unwrap()
    };
    // The first id that has not been picked before ends the text.
    let at = (3..20).find(|&i| !ids[..i].contains(&ids[i]) && ids[i] != first).unwrap();
    let mut graph =
        DecodeGraph::new(&golden.model, &mut cache, &[ids[at]].into(), draw, &device).unwrap();
    assert_eq!(graph.continued(first, 20).unwrap(), ids[..=at]);
    drop(graph);
    assert_eq!(cache.len(), 51 + at);
    let text = [&golden.texts[0][..50], &[first], &ids[..at]].concat();
    let mut fresh = golden.cache("float", 120, 1);
    pass(&golden.model, &mut fresh, &text, &device);
    for id in [5, 9, 200, 31] {
        let [got, wanted] =
            [&mut cache, &mut fresh].map(|cache| pass(&golden.model, cache, &[id], &device));
        assert!(furthest(&got, &wanted) <= TOLERANCE * golden.largest);
    }
}

/// Quantized entries and keys equal the parallel form's. Single codes may change in rounding,
/// and with them a selection, but the mean difference stays small.
#[test]
fn quantized_caches_approximate_the_float_cache() {
    let (golden, device) = (Golden::tiny(), device());
    let ids = &golden.texts[0][..120];
    let mean = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32
    };
    let float = &golden.logits[0][..120 * golden.model.spec().vocab_size];
    for name in ["kint8vint8", "k8v8", "k4v4", "kint8v3"] {
        let policy = config(name, 120);
        let ids_on = ids_to_tensor(ids, [1, 120], &device);
        let parallel = host(golden.model.forward(ids_on, policy).unwrap());
        let streamed = golden.one_by_one(name, 0, 120).concat();
        let (noise, difference) = (mean(&parallel, float), mean(&parallel, &streamed));
        assert!(noise > 1e-4 && difference < 0.2 * noise, "{name}: {difference} of {noise}");
    }
}

/// Entries are stored as values, and the keys of the indexer as keys.
#[test]
fn bytes_are_those_of_the_plan() {
    let golden = Golden::tiny();
    let float = golden.cache("float", 512, 1).memory_bytes();
    let window = 4 * 16 * 64;
    assert_eq!((float.layers[0].keys, float.layers[0].values), (0, 0));
    assert_eq!(float.layers[0].floats - 16, window);
    // 128 entries of 64 channels, and as many keys of 32. Each store has 16 bytes of codes.
    assert_eq!(float.layers[1].values - 16, 4 * 128 * 64);
    assert_eq!(float.layers[1].keys - 16, 4 * 128 * 32);
    assert_eq!((float.layers[2].keys, float.layers[2].values - 16), (0, 4 * 16 * 64));
    for name in ["float", "float-f16", "k4v4", "k2vint8"] {
        for batch in [1, 3] {
            let cache = golden.cache(name, 512, batch);
            let layers = golden.model.spec().layers.iter();
            let planned = layers.map(|layer| {
                let own = config(name, 512).with_sliding_window(layer.sliding_window);
                layer.cache_bytes(&own, batch).unwrap()
            });
            assert_eq!(planned.collect::<Vec<_>>(), cache.memory_bytes().layers, "{name}");
        }
    }
    let quantized = golden.cache("k4v4", 512, 1).memory_bytes();
    assert!(quantized.layers[1].values < float.layers[1].values / 6);
    assert!(quantized.layers[1].keys < float.layers[1].keys / 6);
    assert_eq!(quantized.layers[1].floats, float.layers[1].floats);
}

#[test]
fn caches_of_another_policy_or_width_are_refused() {
    let (golden, device) = (Golden::tiny(), device());
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prefix.safetensors");
    let mut cache = golden.cache("k4v4", 60, 1);
    golden.pass(&mut cache, 0, 30);
    cache.save(&path, &golden.model, "tiny", &[&golden.texts[0][..30]]).unwrap();
    let saved = SavedCache::open(&path).unwrap();
    let refused = |config: KvCacheConfig, parts: &[&str]| {
        let error = saved.restore(&golden.model, config, &device).unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{error:?}");
        assert_contains(&error.to_string(), &["prefix.safetensors", "same --cache"]);
        assert_contains(&error.to_string(), parts);
    };
    refused(config("float", 60), &["layers.0.cache", "entries in"]);
    refused(config("k4v2", 60), &["layers.0.cache", "entries in 4", "entries in 2"]);
    refused(config("k2v4", 60), &["layers.1.cache", "index keys in 4", "index keys in 2"]);
    refused(config("k4v4-f16", 60), &["layers.0.cache", "f32", "f16"]);
    // Blocks of 64 channels do not fit keys of 32.
    let error = golden.model.new_cache(config("ke4m3b64v16", 60), 1, &device).unwrap_err();
    assert_contains(&error.to_string(), &["head_dim", "32", "multiple of 64", "e4m3b64"]);
    for name in ["kint8vint8-hadv", "kint8vint8-hadk"] {
        let error = golden.model.new_cache(config(name, 60), 1, &device).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert_contains(&error.to_string(), &[name, "layer 0", "sparse", "Hadamard"]);
    }
    let error = golden.model.new_cache(config("float", 1 << 24), 64, &device).unwrap_err();
    assert_contains(&error.to_string(), &["capacity", "buffer of 2^32 elements"]);
    assert_eq!(cache.len(), 30);
}

/// Observers receive the same outputs of a cache, token by token, as of a whole sequence.
#[test]
fn observers_receive_the_outputs_of_a_cache() {
    let device = device();
    let golden = Golden::tiny();
    let text = &golden.texts[0][..40];
    let float = KvCacheConfig::float();
    let mut whole: Vec<Tensor<4>> = vec![];
    let mut observe = |trace: AttentionTrace| whole.push(trace.output().clone());
    let ids = ids_to_tensor(text, [1, 40], &device);
    let model = &golden.model;
    model.hidden_with(ids, &float.into(), Default::default(), Some(&mut observe)).unwrap();
    let mut cache = model.new_cache(float.with_capacity(40), 1, &device).unwrap();
    for (t, &id) in text.iter().enumerate() {
        let mut shown = vec![];
        let mut observe = |trace: AttentionTrace| shown.push(trace.output().clone());
        let ids = ids_to_tensor(&[id], [1, 1], &device);
        model.hidden_step_with(ids, &mut cache, &mut observe).unwrap();
        for (layer, (shown, whole)) in shown.into_iter().zip(&whole).enumerate() {
            let expected = whole.clone().narrow(2, t, 1);
            let largest = whole.clone().abs().max().into_scalar::<f32>();
            let error = (shown - expected).abs().max().into_scalar::<f32>();
            // Rounding of sums in another order, through the layers before.
            assert!(error <= 1e-4 * largest, "layer {layer}, token {t}: {error} of {largest}");
        }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
crate::common::stamp_gpus!(golden_logits);

/// Whole sequences, the last tokens one by one, a random partition into calls, and `KV_PARTITIONS`
/// random partitions of prefixes.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn golden_logits<T: Target>(device: &On<T>) {
    use crate::common::expected;
    use kv_models::load;

    let rng = &mut Xoshiro256PlusPlus::seed_from_u64(3);
    let prefixes = std::env::var("KV_PARTITIONS").map_or(0, |n| n.parse().expect("a number"));
    for folder in golden() {
        let expected = expected(&folder, device);
        let model = load(&folder, device).unwrap().model;
        let largest = expected.logits.clone().abs().max().into_scalar::<f32>();
        let check = |logits: Tensor<3>, first: usize, what: &str| {
            let wanted = expected.logits.clone().narrow(1, first, logits.dims()[1]);
            let worst = (logits - wanted).abs().max().into_scalar::<f32>() / largest;
            assert!(worst <= TOLERANCE, "{}, {what}: {worst}", folder.display());
        };
        let [batch, seq] = expected.ids.dims();
        check(model.forward(expected.ids.clone(), config("float", seq)).unwrap(), 0, "at once");
        // A step of this model takes seconds on a software driver.
        let one_by_one = [vec![seq - 9], vec![1; 9]].concat();
        let whole = partition(rng, seq);
        let random = (0..prefixes).map(|_| {
            let tokens = rng.random_range(60..=200.min(seq));
            partition(rng, tokens)
        });
        for sizes in [one_by_one, whole].into_iter().chain(random) {
            let mut cache = model.new_cache(config("float", seq), batch, device).unwrap();
            for size in &sizes {
                let first = cache.len();
                let ids = expected.ids.clone().narrow(1, first, *size);
                check(model.step(ids, &mut cache).unwrap(), first, &format!("in {sizes:?}"));
            }
        }
    }
}
