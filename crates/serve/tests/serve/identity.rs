//! An answer does not depend on other requests, stored prefixes, guesses or a restart.

use std::{
    collections::BTreeSet,
    io::Read,
    path::Path,
    sync::{Mutex, PoisonError},
};

use kv_cubecl::{Flex, KvCacheConfig, KvFormat, On};
use kv_models::{GenerateOptions, LanguageModel, ModelCacheConfig, Speculate, Tokenizer, generate};
use kv_serve::{EngineOptions, Outcome};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::json;

use super::client::{Response, Server, Settings, austen, model};

/// The tokens of a chunk of a prefill. A prompt then has the same sums with and without a prefix.
const CHUNK: usize = 64;
const CONTEXT: usize = 512;

/// Returns caches of every format, with all orders of flushes, sinks, and 16-bit floats.
fn caches(model: &LanguageModel) -> Vec<String> {
    let of_format = |format: &KvFormat| match format {
        format if format.is_tiled() => format!("k{format}v{format}-t64-r64"),
        format => format!("k{format}v{format}-r32"),
    };
    let quantized = KvFormat::ALL.iter().filter(|format| format.is_quantized());
    let more = ["float", "float-f16", "k4v2-g16-r32-s4-gflush-hadv", "k4v4-g32-r64-s3-after"];
    let all = quantized.map(of_format).chain(more.map(String::from));
    let fits = |cache: &String| {
        let config = cache.parse::<KvCacheConfig>().map(|config| config.with_capacity(CONTEXT));
        config.is_ok_and(|config| ModelCacheConfig::from(config).validate(model).is_ok())
    };
    all.filter(fits).collect()
}

struct Request {
    prompt: Vec<u32>,
    max_tokens: usize,
    /// The bytes of the answer after which the client goes away.
    leaves_after: Option<usize>,
}

/// Returns requests that share prefixes of any length with others. Some repeat a passage, and some
/// end the repetition with other words.
fn requests(n: usize, ids: &[u32], rng: &mut StdRng) -> Vec<Request> {
    let mut request = || {
        let start = 1000 * rng.random_range(0..4);
        let shared = rng.random_range(1..300);
        let other = rng.random_range(0..ids.len() - 60);
        let mut prompt = ids[start..start + shared].to_vec();
        prompt.extend(&ids[other..other + rng.random_range(0..50)]);
        if rng.random_range(0..3) == 0 {
            let copied = rng.random_range(0..prompt.len().min(60));
            prompt.extend(prompt[..copied].to_vec());
        }
        let leaves = rng.random_range(0..5) == 0;
        // A client that takes nothing may leave before its text starts, which is then not counted.
        let leaves_after = leaves.then(|| rng.random_range(1..400));
        Request { prompt, max_tokens: rng.random_range(1..40), leaves_after }
    };
    (0..n).map(|_| request()).collect()
}

/// Returns what the library gives for a request alone.
fn alone(
    (model, tokenizer, device): &(LanguageModel, Tokenizer, On<Flex>),
    config: &ModelCacheConfig,
    request: &Request,
) -> String {
    let mut cache = model.new_cache(config.clone(), 1, device).unwrap();
    let options = GenerateOptions {
        max_tokens: request.max_tokens,
        prefill_chunk: CHUNK,
        eos: BTreeSet::new(),
        ..GenerateOptions::default()
    };
    let reply = generate(model, &mut cache, &request.prompt, &options, device, |_| true).unwrap();
    tokenizer.decode(&reply.ids).unwrap()
}

/// Sends requests from several clients at once, and compares the answers.
fn serve(cache: &str, folder: &Path, requests: &[Request], expected: &[String]) -> u64 {
    let engine = EngineOptions {
        slots: 3,
        queue: 64,
        // Too small for all prefixes.
        prefix_bytes: 2_000_000,
        prefix_folder: Some(folder.join("prefixes")),
        prefill_chunk: Some(CHUNK),
        speculate: Speculate::Auto,
    };
    let cache = cache.to_string().leak();
    let server = Server::new(Settings { cache, context: CONTEXT, engine, ..Settings::default() });
    let next = Mutex::new(requests.iter().zip(expected));
    std::thread::scope(|scope| {
        for _ in 0..5 {
            scope.spawn(|| {
                loop {
                    let taken = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((request, expected)) = taken else { break };
                    let stream = request.leaves_after.is_some();
                    let body = json!({"prompt": request.prompt, "temperature": 0,
                        "max_tokens": request.max_tokens, "ignore_eos": true, "stream": stream});
                    let body = body.to_string();
                    let mut stream = server.start("/v1/completions", body.as_bytes());
                    if let Some(bytes) = request.leaves_after {
                        // The answer may be shorter.
                        let _ = stream.read_exact(&mut vec![0; bytes]);
                        continue;
                    }
                    let answer = Response::read(&mut stream).ok();
                    let text = answer["choices"][0]["text"].as_str().unwrap();
                    assert_eq!(text, expected, "{cache}: {body}");
                }
            });
        }
    });
    server.wait_until_idle();
    let left = requests.iter().filter(|request| request.leaves_after.is_some()).count() as u64;
    let [finished, cancelled] =
        [Outcome::Finished, Outcome::Cancelled].map(|it| server.counted(it));
    assert_eq!(finished + cancelled, requests.len() as u64, "{cache}");
    assert!(cancelled <= left, "{cache}: {cancelled} of {left}");
    let metrics = server.get("/metrics", "").body;
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<u64>().ok())
            .unwrap_or_else(|| panic!("{metrics}"))
    };
    assert!(value("kv_serve_prefix_hits_total") > 0, "{cache}: {metrics}");
    let right = value("kv_serve_right_guesses_total");
    let mut ended = server.app.engine.ended();
    server.app.engine.stop();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(ended.wait_for(|&ended| ended)).unwrap();
    right
}

/// 500 requests with random shared prefixes, of clients that may go away, on all cache formats
/// together, or with `KV_ALL_CASES=1` on each of them; the server restarts in between.
#[test]
fn mixed_requests_get_the_answers_of_generate() {
    let (model, tokenizer, device) = model();
    let text = std::fs::read_to_string(austen().join("heldout.txt")).unwrap();
    let ids = tokenizer.encode(&text[..40_000]).unwrap();
    let caches = caches(&model);
    assert!(caches.len() >= 16, "{caches:?}");
    let all = std::env::var_os("KV_ALL_CASES").is_some_and(|all| all == "1");
    let n = if all { 500 } else { 500usize.div_ceil(caches.len()) };
    let mut rng = StdRng::seed_from_u64(11);
    let mut right = 0;
    for cache in &caches {
        let config = cache.parse::<KvCacheConfig>().unwrap().with_capacity(CONTEXT);
        let (folded, config) = model.clone().fold_hadamard(config.into());
        let folded = (folded, tokenizer.clone(), device.clone());
        let requests = requests(n, &ids, &mut rng);
        let expected: Vec<_> =
            requests.iter().map(|request| alone(&folded, &config, request)).collect();
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = requests.split_at(n / 2);
        let (expected, rest) = expected.split_at(n / 2);
        right += serve(cache, folder.path(), first, expected);
        right += serve(cache, folder.path(), second, rest);
    }
    assert!(right > 100, "{right} guesses were right");
}
