//! Guesses change the time of a text, and not its tokens.

use burn::tensor::Tensor;
use kv_models::{
    DraftModel, GenerateOptions, Generated, LanguageModel, ModelCacheConfig, Sampling, Speculate,
    generate,
    generate::Stop,
    ids_to_tensor,
    kv_cubecl::{KvCache, KvCacheConfig},
    kv_weights::{Activations, Quantize},
    load,
};
use rand::{Rng, RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::{
    common::{
        assert_contains, deepseek, device,
        saved::{bits, config, pass, text},
        tiny,
    },
    prompt_cache::caches,
    quantize,
};

const LEN: usize = 120;
/// The fewest float rows of a ring among the caches, unless they have none. Fewer tokens are
/// appended by a draft and removed again; others are not appended at first, in another order.
const LEAST_RING: usize = 8;

fn fits(model: &LanguageModel, cache: &str) -> bool {
    ModelCacheConfig::from(config(cache, LEN)).validate(model).is_ok()
}

/// Returns the next `n` tokens of a text as a draft: after the first, `right` are right.
fn draft(ids: &[u32], from: usize, n: usize, right: usize, rng: &mut impl Rng) -> Vec<u32> {
    let is_kept = |i: usize| i <= right;
    let id = |i: usize| if is_kept(i) { ids[from + i] } else { rng.random_range(0..250) };
    (0..n).map(id).collect()
}

/// Checks that drafts with some right tokens give the logits of tokens that are appended
/// (without a window to the last bit), and of the closed form after the right tokens, and leave a
/// cache that goes on with the text. Sums are in another order; in a quantized
/// cache that changes single codes, so there the mean difference is small.
fn check_drafts(model: &LanguageModel, name: &str, cache: &str, rng: &mut Xoshiro256PlusPlus) {
    let on = device();
    let ids = text(LEN, rng.random_range(0..1000));
    let whole = model.forward(ids_to_tensor(&ids, [1, LEN], &on), config(cache, LEN)).unwrap();
    let largest = whole.clone().abs().max().into_scalar::<f32>();
    let mut state = model.new_cache(config(cache, LEN), 1, &on).unwrap();
    let window = |kv: &KvCache| kv.layout().config().sliding_window;
    let slides = state.layers().iter().any(|it| it.kv().is_some_and(|kv| window(kv).is_some()));
    let mut control = state.clone();
    let (mut parts, mut controls, mut wrong) = (vec![], vec![], 0);
    while state.len() < LEN {
        let len = state.len();
        let n = rng.random_range(2..=12).min(LEN - len);
        if n < 2 {
            let last = ids_to_tensor(&ids[len..], [1, 1], &on);
            parts.push(model.step(last.clone(), &mut state).unwrap());
            controls.push(model.step(last, &mut control).unwrap());
            break;
        }
        let right = rng.random_range(0..n);
        wrong += n - 1 - right;
        let guesses = draft(&ids, len, n, right, rng);
        let appended = pass(model, &mut state.clone(), &guesses, &on);
        let guesses = ids_to_tensor(&guesses, [1, n], &on);
        let (logits, tokens) = model.draft(guesses, &[n], &mut state).unwrap();
        if n <= LEAST_RING && !slides {
            let found: Vec<f32> = logits.clone().into_data().try_into_vec().unwrap();
            assert_eq!(bits(&found), bits(&appended), "{name} {cache}: not as appended");
        }
        tokens.keep(&mut state, &[right + 1]).unwrap();
        assert_eq!(state.len(), len + right + 1);
        parts.push(logits.narrow(0, 0, right + 1).unsqueeze());
        let kept = ids_to_tensor(&ids[len..=len + right], [1, right + 1], &on);
        controls.push(model.step(kept, &mut control).unwrap());
    }
    assert!(wrong > 0, "{name} {cache}");
    let off = |parts| {
        let difference = (Tensor::cat(parts, 1) - whole.clone()).abs();
        let off = if cache.starts_with("float") { difference.max() } else { difference.mean() };
        off.into_scalar::<f32>() / largest
    };
    let (off, control) = (off(parts), off(controls));
    let least = if cache.starts_with("float") { 2e-4_f32 } else { 1e-3 };
    assert!(off <= least.max(2.0 * control), "{name} {cache}: {off}, by calls {control}");
}

fn check_all(name: &str, least: usize) {
    let model = load(tiny(name), &device()).unwrap().model;
    let caches: Vec<_> = caches().into_iter().filter(|cache| fits(&model, cache)).collect();
    assert!(caches.len() >= least, "{name} fits only {caches:?}");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    for cache in caches {
        check_drafts(&model, name, &cache, &mut rng);
    }
}

/// Makes a test over all caches out of each tiny model.
macro_rules! models {
    ($($test:ident: $name:literal, $least:literal;)+) => {
        $(
            #[test]
            fn $test() {
                check_all($name, $least);
            }
        )+
    };
}

models! {
    drafts_of_gpt2: "gpt2-tiny", 30;
    drafts_of_llama: "llama-tiny", 30;
    drafts_of_mistral: "mistral-swa-tiny", 25;
    drafts_of_gemma3: "gemma3-tiny", 25;
    drafts_of_gemma4: "gemma4-tiny", 25;
    drafts_of_gpt_oss: "gpt-oss-tiny", 25;
    drafts_of_deepseek_v3: "deepseek_v3-tiny", 20;
}

/// Sequences of a batch have drafts of different lengths, none, and different numbers of right
/// guesses.
#[test]
fn ragged_drafts_equal_single_ones() {
    const BATCH: usize = 3;
    let (on, model) = (device(), load(tiny("llama-tiny"), &device()).unwrap().model);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(8);
    for cache in ["float", "k4v4-g8-r16-gflush", "k2v2-g16-r16", "kint8vint8-r9-s3-after"] {
        let texts: Vec<_> = (0..BATCH).map(|i| text(LEN, i as u64)).collect();
        let mut state = model.new_cache(config(cache, LEN), BATCH, &on).unwrap();
        let mut alone: Vec<_> =
            texts.iter().map(|_| model.new_cache(config(cache, LEN), 1, &on).unwrap()).collect();
        for round in 0..60 {
            let lens = state.lens().to_vec();
            let mut tokens: Vec<usize> =
                lens.iter().map(|len| rng.random_range(0..6).min(LEN - len)).collect();
            // Once in a while all are of one length.
            if round % 5 == 0 {
                tokens = vec![3; BATCH];
            }
            let seq = *tokens.iter().max().unwrap();
            if seq < 2 || lens.iter().zip(&tokens).any(|(len, n)| len + n > LEN) {
                continue;
            }
            let kept: Vec<_> =
                tokens.iter().map(|&n| if n == 0 { 0 } else { rng.random_range(1..=n) }).collect();
            let mut rows = vec![];
            for ((ids, len), (&n, &kept)) in texts.iter().zip(&lens).zip(tokens.iter().zip(&kept)) {
                let mut row = draft(ids, *len, n, kept.saturating_sub(1), &mut rng);
                row.resize(seq, 0);
                rows.extend(row);
            }
            let ids = ids_to_tensor(&rows, [BATCH, seq], &on);
            let (logits, pending) = model.draft(ids, &tokens, &mut state).unwrap();
            assert_eq!(logits.dims()[0], tokens.iter().sum::<usize>(), "without padding");
            pending.keep(&mut state, &kept).unwrap();
            for (i, (alone, &kept)) in alone.iter_mut().zip(&kept).enumerate() {
                if kept == 0 {
                    continue;
                }
                let ids = &texts[i][lens[i]..lens[i] + kept];
                let expected = pass(&model, alone, ids, &on);
                let found = logits.clone().narrow(0, tokens[..i].iter().sum(), kept);
                let found: Vec<f32> = found.into_data().try_into_vec().unwrap();
                let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).sum::<f32>();
                let off = off / found.len() as f32;
                assert!(off < 1e-3, "{cache} round {round}, sequence {i}: {off}");
                assert_eq!(state.lens()[i], lens[i] + kept);
            }
        }
        assert!(state.lens().iter().all(|&len| len > 40), "{cache}: {:?}", state.lens());
    }
}

fn run(
    model: &LanguageModel,
    cache: &str,
    prompt: &[u32],
    options: &GenerateOptions,
) -> (Generated, Vec<f32>) {
    let on = device();
    let mut state = model.new_cache(config(cache, 200), 1, &on).unwrap();
    let out = generate(model, &mut state, prompt, options, &on, |_| true).unwrap();
    let held = prompt.len() + out.ids.len() - usize::from(out.stop != Stop::Capacity);
    assert_eq!(state.len(), held.min(200), "all tokens but the last are in the cache");
    let room = state.remaining();
    let next = if room > 0 { pass(model, &mut state, &[7], &on) } else { vec![] };
    (out, next)
}

/// A prompt that repeats itself, and so does a random model after some time.
fn repeating() -> Vec<u32> {
    [text(25, 3), text(25, 3), vec![9, 9, 9, 9, 9, 9]].concat()
}

/// Greedy and random texts are the same with and without guesses, in every format.
#[test]
fn guesses_do_not_change_texts() {
    for name in ["llama-tiny", "gemma3-tiny", "gpt2-tiny"] {
        let model = load(tiny(name), &device()).unwrap().model;
        let mut right = 0;
        for cache in caches().iter().filter(|cache| fits(&model, cache)) {
            for temperature in [0.0, 0.4] {
                let sampling = Sampling { temperature, seed: 4, ..Sampling::GREEDY };
                let plain = GenerateOptions { max_tokens: 100, sampling, ..Default::default() };
                let guessed = GenerateOptions { speculate: Speculate::Lookup, ..plain.clone() };
                let (expected, next) = run(&model, cache, &repeating(), &plain);
                let (found, next_found) = run(&model, cache, &repeating(), &guessed);
                assert_eq!(found.ids, expected.ids, "{name} {cache}");
                assert_eq!(found.stop, expected.stop, "{name} {cache}");
                assert_eq!(found.decode_tokens, expected.decode_tokens);
                assert!(found.guesses.right <= found.guesses.verified);
                let off = next.iter().zip(&next_found).map(|(a, b)| (a - b).abs()).sum::<f32>();
                assert!(off <= 1e-3 * next.len() as f32, "{name} {cache}: {off}");
                right += found.guesses.right;
            }
        }
        assert!(right > 500, "{name}: {right} guesses were right");
    }
}

/// A text ends in the middle of right guesses, by its end token, by a limit, or by the caller.
#[test]
fn a_text_ends_within_its_guesses() {
    let model = load(tiny("llama-tiny"), &device()).unwrap().model;
    let same = DraftModel::new(model.clone(), &model);
    let plain = GenerateOptions { max_tokens: 60, ..Default::default() };
    let (all, _) = run(&model, "k4v4-g8-r16", &text(40, 1), &plain);
    for n in [1, 2, 7, 30] {
        for speculate in [Speculate::Lookup, Speculate::Model(same.clone())] {
            let options = GenerateOptions { max_tokens: n, speculate, ..plain.clone() };
            let (found, _) = run(&model, "k4v4-g8-r16", &text(40, 1), &options);
            assert_eq!(found.ids, all.ids[..n]);
            let first = all.ids.iter().position(|id| *id == all.ids[n]).unwrap();
            let options = GenerateOptions { max_tokens: 60, eos: [all.ids[n]].into(), ..options };
            let (found, _) = run(&model, "k4v4-g8-r16", &text(40, 1), &options);
            assert_eq!((found.ids.as_slice(), found.stop), (&all.ids[..=first], Stop::Eos));
        }
    }
    let on = device();
    let mut state = model.new_cache(config("k4v4-g8-r16", 200), 1, &on).unwrap();
    let options = GenerateOptions { speculate: Speculate::Model(same), ..plain };
    let mut n = 0;
    let out = generate(&model, &mut state, &text(40, 1), &options, &on, |_| {
        n += 1;
        n < 9
    })
    .unwrap();
    assert_eq!((out.ids.as_slice(), out.stop, state.len()), (&all.ids[..9], Stop::Callback, 48));

    // The cache is full in the middle of guesses.
    let mut state = model.new_cache(config("k4v4-g8-r16", 50), 1, &on).unwrap();
    let out = generate(&model, &mut state, &text(40, 1), &options, &on, |_| true).unwrap();
    assert_eq!((out.ids.as_slice(), out.stop, state.len()), (&all.ids[..11], Stop::Capacity, 50));
}

/// A model's own weights in 8 bits mostly guess right, though their cache is in float. Wrong
/// guesses of another model leave the text as it is. A model of the same size is not asked at all.
#[test]
fn a_draft_model_guesses() {
    let on = device();
    let model = load(tiny("llama-tiny"), &on).unwrap().model;
    let folder = tempfile::tempdir().unwrap();
    let small = |model: &LanguageModel, name: &str| {
        let folder = folder.path().join(name);
        quantize::write(model, &folder, [Some(quantize::INT8); 3], Quantize::default());
        quantize::packed(&folder, Activations::Exact).model
    };
    let other = load(tiny("qwen2-tiny"), &on).unwrap().model;
    let [same, other] = [small(&model, "same"), small(&other, "other")];
    let plain = GenerateOptions { max_tokens: 60, ..Default::default() };
    let prompt = text(40, 2);
    let (expected, _) = run(&model, "k4v4-g8-r16", &prompt, &plain);
    let with = |speculate| {
        let options = GenerateOptions { speculate, ..plain.clone() };
        let (found, _) = run(&model, "k4v4-g8-r16", &prompt, &options);
        assert_eq!(found.ids, expected.ids);
        found.guesses
    };
    let lookup = with(Speculate::Lookup);
    let drafts = |draft: &LanguageModel| Speculate::Model(DraftModel::new(draft.clone(), &model));
    assert_eq!(with(drafts(&model)), lookup);
    let same = with(drafts(&same));
    assert!(same.right > lookup.right, "{same:?}, with lookup alone {lookup:?}");
    // A model whose guesses are wrong is not asked again for a while.
    let other = with(drafts(&other));
    let more = other.verified - lookup.verified;
    assert!((1..20).contains(&more), "{other:?}, with lookup alone {lookup:?}");
}

#[test]
fn what_takes_no_drafts_says_why() {
    let on = device();
    let generated = |name: &std::path::Path, options: GenerateOptions, batch: usize| {
        let model = load(name, &on).unwrap().model;
        let mut cache =
            model.new_cache(KvCacheConfig::float().with_capacity(64), batch, &on).unwrap();
        let ids: Vec<u32> = (0..20).collect();
        let result = generate(&model, &mut cache, &ids, &options, &on, |_| true);
        (result.map(|out| out.ids), cache.len())
    };
    let lookup = GenerateOptions { speculate: Speculate::Lookup, ..Default::default() };
    let auto = GenerateOptions { speculate: Speculate::Auto, max_tokens: 4, ..lookup.clone() };
    for folder in [tiny("qwen3_5-tiny"), deepseek::tiny()] {
        let (result, _) = generated(&folder, lookup.clone(), 1);
        assert_contains(
            &result.unwrap_err().to_string(),
            &["speculate = lookup", "recurrent", "never"],
        );
        let (result, len) = generated(&folder, auto.clone(), 1);
        assert_eq!((result.unwrap().len(), len), (4, 23));
    }

    let model = load(tiny("llama-tiny"), &on).unwrap().model;
    let mut cache = model.new_cache(config("k4v4-g8-r16", 10), 1, &on).unwrap();
    let mut refuse = |ids: &[u32], tokens: &[usize], part: &str| {
        let ids = ids_to_tensor(ids, [1, ids.len()], &on);
        let error = model.draft(ids, tokens, &mut cache).map(drop).unwrap_err();
        assert_contains(&error.to_string(), &["tokens", part]);
        assert!(cache.is_empty());
    };
    refuse(&[1], &[1], "at least 2");
    refuse(&[1, 2, 3], &[2], "must be seq of one sequence, 3");
    refuse(&[1; 11], &[11], "capacity is 10");
}
