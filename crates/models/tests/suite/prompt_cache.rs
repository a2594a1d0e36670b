//! A prompt that reuses a common prefix gets the logits of a new cache.

use burn::tensor::Device;
use kv_models::{
    Checkpoints, GenerateOptions, LanguageModel, ModelCacheConfig, PromptCache, SavedAs,
    SavedCache, kv_cubecl::KvFormat, load,
};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::common::{
    assert_contains, device,
    saved::{Saved, bits, config, pass, text},
    tiny,
};

/// Returns caches with every format for keys and for values, flushes before and after attention, by
/// groups and by blocks, sinks, and sliding windows.
pub(crate) fn caches() -> Vec<String> {
    let named = |format: &KvFormat| match (format, format.is_grouped()) {
        // 16 codes of 3 bits do not fill whole words.
        (KvFormat::Affine3, _) => (format.to_string(), "-g32-r32"),
        (_, true) => (format.to_string(), "-g16-r16"),
        _ if format.is_tiled() => (format.to_string(), "-t64-r64"),
        (_, false) => (format.to_string(), "-r16"),
    };
    let quantized = KvFormat::ALL.iter().filter(|format| format.is_quantized()).map(named);
    let mut names: Vec<String> = quantized
        .flat_map(|(side, group)| {
            [format!("k{side}v16{group}-s2"), format!("k{side}v{side}{group}")]
        })
        .collect();
    let more = [
        "float",
        "float-f16",
        "float-w12-s2",
        "k4v2-g16-r16-s3-after",
        "k4v4-g8-r16-gflush",
        "k2v2-g16-r16-w16",
        "k4v4-g8-r16-w24-after",
        "kint8vint8-r9-s3-after",
        "kint8vint8-w16",
        "k16v4-g8-r64",
        "kvn2v16-t64-r64-s2-stagger",
    ];
    names.extend(more.map(String::from));
    names
}

/// Returns the logits after the last of `ids`, appended one at a time.
fn one_by_one(model: &LanguageModel, cache: &str, ids: &[u32], on: &Device) -> Vec<f32> {
    let mut cache = model.new_cache(config(cache, 96), 1, on).unwrap();
    ids.iter().fold(vec![], |_, id| pass(model, &mut cache, &[*id], on))
}

fn named<'a>(model: &'a str, cache: &'a str) -> SavedAs<'a> {
    SavedAs { model, cache: Some(cache), ..SavedAs::default() }
}

fn prefill(
    model: &LanguageModel,
    held: &mut PromptCache,
    ids: &[u32],
    chunk: usize,
    on: &Device,
) -> Vec<f32> {
    let logits = held.prefill(model, ids, chunk, on, || true).unwrap().unwrap();
    logits.into_data().convert::<f32>().try_into_vec().unwrap()
}

/// Splits 40 texts at random into a saved part and the rest, with every cache that fits the model
/// (all but `n_unfit`). A saved part is a prompt, often with its reply; the next prompt shares all
/// of it or less.
///
/// Tokens are appended one at a time, so sums have the same order and all logits are equal bit for
/// bit.
fn resumed_texts_have_the_logits_of_one_run(name: &str, n_unfit: usize) {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let path = scratch.path().join("prompt.safetensors");
    let model = &load(tiny(name), &on).unwrap().model;
    let mut caches = caches();
    let all = caches.len();
    // These have blocks or groups of 32 or 64 channels, or a residual longer than the sliding
    // window.
    caches.retain(|cache| ModelCacheConfig::from(config(cache, 96)).validate(model).is_ok());
    assert_eq!(all - caches.len(), n_unfit, "{caches:?}");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(name.len() as u64);
    let (mut reused, mut cut) = (0, 0);
    for seed in 0..40 {
        let (ids, other) = (text(64, seed), text(96, 1000 + seed));
        let split = rng.random_range(1..60);
        let with_reply: bool = rng.random();
        // Half of the prompts share all of it.
        let shared = if rng.random() { usize::MAX } else { rng.random_range(0..=split) };
        let more = rng.random_range(0..12);
        for cache in &caches {
            let own = config(cache, 96);
            let what = format!("{name} {cache} seed {seed}: {split} tokens, {shared} of them");
            let empty = model.new_cache(own, 1, &on).unwrap();
            let mut held = PromptCache::new(empty, Checkpoints::All).unwrap();
            let prompt = &ids[..split];
            let logits = held.prefill(model, prompt, 1, &on, || true).unwrap().unwrap();
            let options = GenerateOptions { max_tokens: 5, ..GenerateOptions::default() };
            held.generate(model, logits, &options, &on, |_| true).unwrap();
            assert_eq!(held.tokens().len(), split + 4, "{what}: the last token is not appended");
            if !with_reply {
                assert_eq!(held.cut_back(split).unwrap(), split, "{what}: the end of the prompt");
            }
            let saved = held.tokens().to_vec();
            held.save(&path, model, &named(name, cache)).unwrap();
            drop(held);

            let file = SavedCache::open(&path).unwrap();
            assert_eq!((file.tokens(), file.cache()), (&[saved.clone()][..], Some(&**cache)));
            let mut held = file.restore_prompt(model, own, &on, Checkpoints::All).unwrap();
            // The first token after the shared ones differs.
            let shared = shared.min(saved.len());
            let mut prompt = [&saved[..shared], &other[shared..shared + more]].concat();
            if let (Some(id), Some(saved)) = (prompt.get_mut(shared), saved.get(shared)) {
                *id = (saved + 1) % 250;
            }
            if prompt.is_empty() {
                prompt.push(7);
            }
            let n = held.reuse(&prompt).unwrap();
            let most = shared.min(prompt.len() - 1);
            assert!(n <= most && held.tokens() == &prompt[..n], "{what}: {n} are reused");
            // A checkpoint is near the end of the saved prompt, wherever the next one differs.
            let distance = split.saturating_sub(most).max(1);
            assert!(n + 16 * distance >= split.min(most), "{what}: only {n} of {most} are reused");
            reused += n;
            cut += usize::from(n < saved.len() && n > 0);

            let got = prefill(model, &mut held, &prompt, 1, &on);
            let want = one_by_one(model, cache, &prompt, &on);
            assert!(bits(&got) == bits(&want), "{what}: other logits");
        }
    }
    let n = 40 * caches.len();
    let counts = format!("{reused} tokens reused and {cut} caches cut back in {n}");
    assert!(reused > 5 * n && cut > n / 10, "{counts}: too few");
}

/// These 200 splits cover learned positions, rope, learned sinks, and sliding windows in some
/// layers and in all.
#[test]
fn resumed_texts_of_gpt2() {
    resumed_texts_have_the_logits_of_one_run("gpt2-tiny", 2);
}

#[test]
fn resumed_texts_of_llama() {
    resumed_texts_have_the_logits_of_one_run("llama-tiny", 13);
}

#[test]
fn resumed_texts_of_gemma3() {
    resumed_texts_have_the_logits_of_one_run("gemma3-tiny", 12);
}

#[test]
fn resumed_texts_of_gpt_oss() {
    resumed_texts_have_the_logits_of_one_run("gpt-oss-tiny", 12);
}

#[test]
fn resumed_texts_of_mistral() {
    resumed_texts_have_the_logits_of_one_run("mistral-swa-tiny", 20);
}

/// Prefill in chunks gives the same bits as a cache with the same chunks up to a checkpoint.
#[test]
fn checkpoints_of_chunks_are_exact() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let path = scratch.path().join("prompt.safetensors");
    let ids = text(200, 3);
    // Checkpoints are 0, 16 and 128 tokens before the end. With a sliding window, each is as large
    // as the cache, so the last is left out.
    let far = &[
        (150, 150, &[22, 122, 134, 150][..]),
        (148, 134, &[22, 122, 134]),
        (30, 22, &[22]),
        (21, 0, &[]),
    ];
    let near = &[(150, 150, &[100, 134, 150][..]), (148, 134, &[100, 134]), (133, 0, &[])];
    for (name, cache, cuts) in [
        ("llama-tiny", "k4v4-g8-r16", &far[..]),
        ("llama-tiny", "k2v2-g16-r16-gflush", far),
        ("llama-tiny", "k16v4-g8-r16-after", far),
        ("llama-tiny", "kint8v4-g8-r8", far),
        ("llama-tiny", "k4v4-g8-r16-w24", near),
        ("mistral-swa-tiny", "float", near),
        ("mistral-swa-tiny", "k2v2-g16-r16", near),
    ] {
        let model = load(tiny(name), &on).unwrap().model;
        let own = config(cache, 200);
        let empty = || model.new_cache(own, 1, &on).unwrap();
        let mut held = PromptCache::new(empty(), Checkpoints::All).unwrap();
        prefill(&model, &mut held, &ids[..150], 100, &on);
        held.save(&path, &model, &named(name, cache)).unwrap();
        for &(shared, reused, passes) in cuts {
            let mut prompt = ids[..shared + 20].to_vec();
            prompt[shared] = (ids[shared] + 1) % 250;
            let file = SavedCache::open(&path).unwrap();
            for mut held in
                [held.clone(), file.restore_prompt(&model, own, &on, Checkpoints::None).unwrap()]
            {
                let what = format!("{name} {cache}: {shared} tokens");
                assert_eq!(held.reuse(&prompt).unwrap(), reused, "{what}");
                let mut fresh = empty();
                let mut start = 0;
                for &end in passes {
                    pass(&model, &mut fresh, &ids[start..end], &on);
                    start = end;
                }
                let got = prefill(&model, &mut held, &prompt[..reused + 1], 100, &on);
                let want = pass(&model, &mut fresh, &prompt[reused..reused + 1], &on);
                assert!(bits(&got) == bits(&want), "{what}: other logits");
            }
        }
    }
}

/// A float cache is cut back to any length without a checkpoint, and its file has none.
#[test]
fn float_caches_need_no_checkpoints() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let path = scratch.path().join("prompt.safetensors");
    let model = load(tiny("llama-tiny"), &on).unwrap().model;
    let ids = text(60, 4);
    for (cache, checkpoints) in [("float", false), ("kint8vint8", false), ("k4v4-g8-r16", true)] {
        let empty = model.new_cache(config(cache, 64), 1, &on).unwrap();
        let mut held = PromptCache::new(empty, Checkpoints::All).unwrap();
        prefill(&model, &mut held, &ids, 64, &on);
        held.save(&path, &model, &named("it", cache)).unwrap();
        let file = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
        assert_eq!(file.contains("checkpoints.0.layers.0.floats"), checkpoints, "{cache}");
        // A checkpoint is 16 tokens before the end.
        for len in [44, 33, 1, 0] {
            assert_eq!(held.cut_back(len).unwrap() == len, !checkpoints || [44, 0].contains(&len));
        }
    }
}

/// The tokens of a stopped prefill form a valid cache.
#[test]
fn a_stopped_prefill_keeps_its_tokens() {
    let on = device();
    let model = load(tiny("llama-tiny"), &on).unwrap().model;
    let ids = text(60, 5);
    let cache = "k4v4-g8-r16";
    let empty = model.new_cache(config(cache, 96), 1, &on).unwrap();
    let mut held = PromptCache::new(empty, Checkpoints::None).unwrap();
    let mut passes = 0;
    let stopped = held.prefill(&model, &ids, 1, &on, || {
        passes += 1;
        passes <= 23
    });
    assert!(stopped.unwrap().is_none());
    assert_eq!(held.tokens(), &ids[..23]);
    assert_eq!(held.reuse(&ids).unwrap(), 23);
    let got = prefill(&model, &mut held, &ids, 1, &on);
    assert!(bits(&got) == bits(&one_by_one(&model, cache, &ids, &on)));
}

#[test]
fn prompts_and_caches_that_do_not_fit_are_refused() {
    let on = device();
    let model = load(tiny("llama-tiny"), &on).unwrap().model;
    let new = |batch| model.new_cache(config("float", 20), batch, &on).unwrap();
    let error = PromptCache::new(new(2), Checkpoints::None).unwrap_err().to_string();
    assert_contains(&error, &["batch = 2", "must be 1"]);
    let mut filled = new(1);
    pass(&model, &mut filled, &[1, 2], &on);
    let error = PromptCache::new(filled, Checkpoints::None).unwrap_err().to_string();
    assert_contains(&error, &["2 tokens", "must be empty"]);

    let mut held = PromptCache::new(new(1), Checkpoints::None).unwrap();
    prefill(&model, &mut held, &[1, 2, 3], 8, &on);
    for (prompt, chunk, part) in [
        (&[1, 2][..], 8, "must begin with the 3 tokens"),
        (&[1, 2, 4, 5], 8, "must begin with the 3 tokens"),
        (&[1, 2, 3], 8, "seq = 0: must be at least 1"),
        (&[1, 2, 3, 4], 0, "prefill_chunk = 0"),
        (&[1; 21][..], 8, "must begin with"),
    ] {
        let error = held.prefill(&model, prompt, chunk, &on, || true).unwrap_err().to_string();
        assert_contains(&error, &[part]);
        assert_eq!(held.tokens(), [1, 2, 3]);
    }
    let long = [&[1, 2][..], &[4; 19]].concat();
    let error = held.reuse(&long).unwrap_err().to_string();
    assert_contains(&error, &["context of 21 tokens", "capacity 20"]);
    assert_eq!(held.tokens(), [1, 2, 3], "it is not cut back for a prompt that does not fit");
    let long = [&[1, 2, 3][..], &[4; 18]].concat();
    let error = held.prefill(&model, &long, 8, &on, || true).unwrap_err().to_string();
    assert_contains(&error, &["context of 21 tokens", "capacity 20"]);
    assert_eq!(held.tokens(), [1, 2, 3]);
}

/// Files of version 1 have no checkpoints and no storage of weights.
#[test]
fn files_of_version_1_restore_prompt_caches() {
    let saved = Saved::new("llama-tiny");
    let file = SavedCache::open(saved.path()).unwrap();
    let on = device();
    let mut held = file.restore_prompt(&saved.model, saved.config, &on, Checkpoints::All).unwrap();
    assert_eq!(held.tokens(), saved.text);
    assert_eq!(file.cache(), None);
    let longer = [&saved.text[..], &[1]].concat();
    assert_eq!(held.reuse(&longer).unwrap(), 30);
    // The residual cannot be restored, but sinks can.
    assert_eq!(held.reuse(&saved.text[..20]).unwrap(), 3);
}
