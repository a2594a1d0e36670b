//! SmolLM2-135M: compares with PyTorch, streaming with parallel, WGPU with the CPU.
//!
//! The model is in `target/models`, where `scripts/get-smollm2` writes it, or the file named by
//! `KV_SMOLLM2`. `KV_WIKITEXT` names the WikiText-2 raw test set for the published table. The tests
//! run with `--ignored smollm2` and `--ignored wikitext`, as in `scripts/check`.
use std::{
    env, fs,
    path::{Path, PathBuf},
};

use kv_cubecl::{Flex, KvCacheConfig, On, Target};
use kv_eval::{Mode, Plan, Run, evaluate};
use kv_models::{Loaded, load};

fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn smollm2() -> PathBuf {
    let default = || project().join("target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = env::var_os("KV_SMOLLM2").map_or_else(default, PathBuf::from);
    let hint = "run scripts/get-smollm2 or set KV_SMOLLM2";
    assert!(path.is_file(), "{} is not there; {hint}", path.display());
    path
}

#[derive(Clone, Copy)]
struct Case {
    mode: Mode,
    tokens: usize,
    window: usize,
    caches: &'static [&'static str],
}

/// Runs `case` on the project's English fixture.
fn run<T: Target>(case: Case) -> Vec<Run> {
    run_on::<T>(case, &project().join("crates/models/tests/fixtures/licenses.txt"))
}

fn run_on<T: Target>(case: Case, text: &Path) -> Vec<Run> {
    let device = On::<T>::open().unwrap();
    let Loaded { model, tokenizer, .. } = load(smollm2(), &device).unwrap();
    let ids = tokenizer.unwrap().encode(&fs::read_to_string(text).unwrap()).unwrap();
    let caches: Vec<KvCacheConfig> = case.caches.iter().map(|name| name.parse().unwrap()).collect();
    let tokens = Some(case.tokens);
    let plan = Plan::new(&model, case.mode, &caches, ids, case.window, tokens).unwrap();
    evaluate(&device, &model, &plan, |_| ()).unwrap()
}

fn assert_nll(a: &Run, b: &Run, bound: f64) {
    assert_eq!(a.cache, b.cache);
    let difference = (a.nll - b.nll).abs();
    assert!(difference < bound, "{}: {} against {}, {difference}", a.cache, a.nll, b.nll);
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_float_perplexity_equals_pytorch() {
    let case = Case { mode: Mode::Parallel, tokens: 1024, window: 1024, caches: &["k8v8"] };
    let runs = run::<Flex>(case);
    // scripts/pytorch-reference MODEL licenses.txt --tokens 1024 --window 1024, PyTorch 2.15, f32.
    let reference = 19.2787;
    for run in runs {
        let error = (run.perplexity / reference - 1.0).abs();
        // Another order of summation changes the loss by 1e-5; 8 bits by less than 1e-3.
        assert!(error < 1e-3, "{}: {} against {reference}", run.cache, run.perplexity);
    }
}

/// The device's allocator reserves what is planned for a model and its cache, to 10%.
#[cfg(feature = "wgpu")]
#[track_caller]
fn assert_planned(model: &Path, cache: &str) {
    let text = project().join("crates/models/tests/fixtures/licenses.txt");
    let [model, text] = [model, &text].map(|path| path.to_str().unwrap());
    let args = ["generate", "--backend", "wgpu", "--model", model, "--prompt-file", text];
    let more = ["--no-chat", "--prompt-tokens", "600", "--max-tokens", "2", "--cache", cache];
    let outcome = crate::common::kv_eval(&[&args[..], &more].concat());
    let line = outcome.stderr.lines().find_map(|line| line.strip_prefix("device memory: peak "));
    let (peak, planned) = line.unwrap().split_once(" MB, planned ").unwrap();
    let number = |text: &str| -> f64 { text.trim_end_matches(" MB").parse().unwrap() };
    let ratio = number(peak) / number(planned);
    assert!((0.9..1.1).contains(&ratio), "{line:?}: {ratio}");
}

#[cfg(feature = "wgpu")]
#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_uses_the_planned_memory_of_a_device() {
    for cache in ["k4v4", "float"] {
        assert_planned(&smollm2(), cache);
    }
}

#[cfg(feature = "wgpu")]
#[test]
#[ignore = "needs Gemma 3: scripts/get-gemma3 or KV_GEMMA3"]
fn gemma3_uses_the_planned_memory_of_a_device() {
    let default = || project().join("target/models/gemma-3-270m-q4_k_m.gguf");
    assert_planned(&env::var_os("KV_GEMMA3").map_or_else(default, PathBuf::from), "balanced");
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_streaming_equals_parallel_on_the_first_512_tokens() {
    let caches: &[&str] = &["k4v4", "k2v2"];
    let case = |mode| Case { mode, tokens: 512, window: 512, caches };
    let streamed = run::<Flex>(case(Mode::Streaming));
    let parallel = run::<Flex>(case(Mode::Parallel));
    // The two modes sum in different orders. This float noise flips codes of 4 and 2 bits at
    // rounding edges, each by one step.
    for ((a, b), bound) in streamed.iter().zip(&parallel).zip([1e-4, 2e-3, 2e-2]) {
        assert_nll(a, b, bound);
        assert_eq!(a.cache_bytes, b.cache_bytes);
    }
}

#[cfg(feature = "wgpu")]
#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_on_wgpu_equals_flex() {
    use kv_cubecl::Wgpu;
    // Short texts, for a software driver: fewer tokens average less of the noise of flipped codes.
    let parallel =
        Case { mode: Mode::Parallel, tokens: 256, window: 256, caches: &["k4v4", "k2v2"] };
    let streaming = Case { mode: Mode::Streaming, tokens: 48, window: 48, caches: &["k8v8-r32"] };
    for (case, bounds) in [(parallel, [1e-4, 2e-3, 2e-2]), (streaming, [1e-4, 2e-3, 0.0])] {
        let (gpu, cpu) = (run::<Wgpu>(case), run::<Flex>(case));
        // The same bounds as between streaming and parallel.
        for ((a, b), bound) in gpu.iter().zip(&cpu).zip(bounds) {
            assert_nll(a, b, bound);
        }
    }
}

/// The published table: two eval windows of 2048 tokens of WikiText-2, and PyTorch in f32.
#[test]
#[ignore = "needs SmolLM2 and the WikiText-2 raw test set: KV_WIKITEXT"]
fn wikitext_perplexities_equal_the_published_ones() {
    let text = env::var_os("KV_WIKITEXT").expect("KV_WIKITEXT names the WikiText-2 raw test set");
    // Perplexity and relative tolerance: float noise for the first two. 2-bit codes flip at
    // rounding edges, which changes a run by 0.6%.
    let expected = [
        ("float", 18.9777, 1e-3),
        ("k8v8", 18.9762, 1e-3),
        ("k4v4", 19.0856, 5e-3),
        ("k2v2", 25.5631, 2e-2),
        ("k2v2-after", 25.0425, 2e-2),
        ("k2v2-s4", 22.2170, 2e-2),
        ("k4v4-s4", 19.0878, 5e-3),
    ];
    const CACHES: [&str; 6] = ["k8v8", "k4v4", "k2v2", "k2v2-after", "k2v2-s4", "k4v4-s4"];
    let case = Case { mode: Mode::Parallel, tokens: 4096, window: 2048, caches: &CACHES };
    let runs = run_on::<Flex>(case, Path::new(&text));
    for (run, (name, perplexity, tolerance)) in runs.iter().zip(expected) {
        assert_eq!(run.cache, name);
        let error = (run.perplexity / perplexity - 1.0).abs();
        assert!(error < tolerance, "{name}: {} against {perplexity}", run.perplexity);
    }
}
