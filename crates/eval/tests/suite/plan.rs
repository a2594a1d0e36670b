//! Plans of memory: published numbers.

use burn::tensor::Device;
use kv_eval::planner::{MemoryPlan, Needs, Preset, Request, Row, Subject, formats, plan};
use kv_models::{LoadOptions, MemoryLimit, ModelOutline, Usage, WeightDtype, kv_weights};

use crate::common::Workspace;

fn device() -> Device {
    Device::flex()
}

fn preset(name: &str, options: LoadOptions) -> Subject {
    Preset::find(name).unwrap().subject(&device(), options).unwrap()
}

fn packed() -> LoadOptions {
    LoadOptions::default().with_packed(Some(kv_weights::Activations::Int16))
}

fn request(context: usize, batch: usize, caches: &[&str]) -> Request {
    let caches = caches.iter().map(ToString::to_string).collect();
    Request { context, batch, limit: MemoryLimit::new(Some(16_000_000_000), "a test"), caches }
}

fn planned(name: &str, context: usize, caches: &[&str]) -> MemoryPlan {
    plan(&preset(name, packed()), &request(context, 1, caches)).unwrap()
}

/// Returns the bytes of keys and values of one cache, without rope tables.
fn keys_and_values(needs: &Needs) -> u64 {
    let parts = needs.parts.iter().filter(|(name, _)| name != "rotary tables");
    parts.map(|(_, bytes)| bytes).sum()
}

fn bytes(name: &str, context: usize, cache: &str) -> u64 {
    keys_and_values(planned(name, context, &[cache]).caches[0].needs.as_ref().unwrap())
}

/// Returns the bytes of a float cache, without the minimum of four words per packed side.
fn floats(name: &str, context: usize, cache: &str) -> u64 {
    let plan = planned(name, context, &[cache]);
    let parts = &plan.caches[0].needs.as_ref().unwrap().parts;
    parts.iter().find(|(name, _)| name == "floats").unwrap().1
}

/// Presets have the number of parameters that the authors published, so their shapes are right.
#[test]
fn presets_have_the_published_number_of_parameters() {
    for preset in Preset::all() {
        let subject = preset.subject(&device(), LoadOptions::default()).unwrap();
        let plan = plan(&subject, &request(1, 1, &[])).unwrap();
        let Some(weights) = plan.weights else { continue };
        let found = weights.values().sum::<usize>() as u64 / 4;
        match preset.parameters {
            Some(published) => assert_eq!(found, published, "{}", preset.name()),
            // The report of Gemma 3 lists 675 M of embeddings and 3209 M of other parameters for
            // the text model.
            None => {
                assert_eq!(preset.name(), "Gemma-3-4B");
                assert_eq!((found as f64 / 1e7).round(), 388.0);
            }
        }
    }
}

/// DeepSeek-V3 stores a latent row of 512 numbers and a key of 64 for each token in each of 61
/// layers (DeepSeek, 2024, <https://arxiv.org/abs/2412.19437>). 128 heads of 192 and 128 channels
/// would have 71 times as many.
#[test]
fn a_latent_row_is_576_numbers() {
    let context = 4096;
    let plan = planned("DeepSeek-V3", context, &["float-f16", "k4v4-g64-r64-f16"]);
    let [f16, four_bits, all_heads] = &plan.caches[..] else { panic!("{plan}") };
    let cache = |row: &Row| keys_and_values(row.needs.as_ref().unwrap());
    let words = 2 * 16 * 61;
    assert_eq!(cache(f16), 61 * 576 * 2 * context as u64 + words);
    // 4 bits, a word for 64 tokens of a channel, and 64 tokens in f16.
    let codes = 576 * context as u64 / 2 + 576 * 4 * context as u64 / 64;
    assert_eq!(cache(four_bits), 61 * (codes + 64 * 576 * 2 + 16));
    assert_eq!(all_heads.cache, "float-f16, keys and values of all heads");
    assert_eq!(cache(all_heads), 61 * 128 * (192 + 128) * 2 * context as u64 + words);
    assert!(planned("SmolLM2-135M", 64, &["float"]).caches.len() == 1);
}

/// gpt-oss-20b is published with MXFP4 experts in files of 13.76 GB.
#[test]
fn weights_are_counted_by_their_stored_type() {
    let plan = planned("gpt-oss-20b", 128, &["float"]);
    let weights = plan.weights.unwrap();
    let total: usize = weights.values().sum();
    // Vectors are f32 in memory and bf16 in the files, a difference far below 1%.
    assert!((total as f64 / 13.76e9 - 1.0).abs() < 0.01, "{weights:?}");
    let keys: Vec<&str> = weights.keys().map(String::as_str).collect();
    assert!(keys.contains(&"MXFP4") && keys.contains(&"BF16"), "{weights:?}");
    let bf16 = LoadOptions::default().with_dtype(WeightDtype::Bf16);
    let subject = preset("SmolLM2-135M", bf16);
    let plan = plan_of(&subject);
    assert_eq!(
        plan.weights.unwrap().into_iter().collect::<Vec<_>>(),
        [("bf16".to_string(), 2 * 134_515_008)]
    );
}

fn plan_of(subject: &Subject) -> MemoryPlan {
    plan(subject, &request(64, 1, &[])).unwrap()
}

/// Published sizes of float caches are for keys and values of one layer, in KiB and MiB.
#[test]
fn sixteen_bits_halve_a_float_cache() {
    const LAYERS: u64 = 24;
    for context in [1, 512] {
        let float = floats("Qwen2.5-0.5B", context, "float");
        assert_eq!(float, LAYERS * 1024 * context as u64, "1024 bytes a token and layer");
        assert_eq!(floats("Qwen2.5-0.5B", context, "float-f16") * 2, float);
        assert_eq!(floats("Qwen2.5-0.5B", context, "float-bf16") * 2, float);
    }
    assert_eq!(floats("Qwen2.5-0.5B", 512, "float"), LAYERS * (512 << 10));
    assert_eq!(floats("Qwen2.5-0.5B", 8192, "float-f16"), LAYERS * (4 << 20));
    let phi = Preset::find("phi-3-mini").unwrap();
    assert_eq!(phi.name(), "Phi-3-mini");
    assert_eq!(floats("Phi-3-mini", 512, "float"), 32 * (12 << 20));
    assert_eq!(floats("Phi-3-mini", 512, "float-f16"), 32 * (6 << 20));
}

/// A model, a cache, and the ratio of a token's bytes in 16 bits to its bytes in this cache. The
/// ratio is published or follows from the bits of a group and its parameters.
const RATIOS: [(&str, &str, f64); 5] = [
    // 32 codes of 2 bits have two parameters of 16 bits: 16 / 3.
    ("Llama-3.1-8B", "k2v2-f16", 5.33),
    ("Llama-3.1-8B", "k4v4-f16", 3.2),
    ("Llama-3.1-8B", "k8v8-f16", 1.78),
    // 8 bits and a scale of 16 bits per token and head: 256 to 130 bytes, and 128 to 66 for heads
    // of 64.
    ("Llama-3.1-8B", "kint8vint8-f16", 1.97),
    ("Qwen2.5-0.5B", "kint8vint8-f16", 1.94),
];

#[test]
fn packed_caches_take_the_published_share_of_one_of_16_bits() {
    for (model, cache, ratio) in RATIOS {
        let added = |cache: &str| bytes(model, 32_768, cache) - bytes(model, 16_384, cache);
        let found = added("float-f16") as f64 / added(cache) as f64;
        assert!((found - ratio).abs() < 0.005, "{model} {cache}: {found}, published {ratio}");
    }
    // KIVI's residual reduces the ratio at 4096 tokens.
    let at = |cache| bytes("Llama-3.1-8B", 4096, cache) as f64;
    assert!((at("float-f16") / at("k2v2-f16") - 4.6).abs() < 0.1);
}

/// 566 MB for 60 frames of 64 tokens.
#[test]
fn the_world_models_ring() {
    assert_eq!(floats("GameRFT", 60 * 64, "float-bf16"), 566_231_040);
    assert_eq!(floats("gamerft", 64, "float-bf16"), 9_437_184);
    let plan = planned("GameRFT", 60 * 64, &["float-bf16"]);
    assert_eq!(plan.caches[0].needs.as_ref().unwrap().total / 1_000_000, 566);
    assert!(plan.weights.is_none() && plan.notes.iter().any(|note| note.contains("not counted")));
}

#[test]
fn deepseeks_compressed_caches() {
    let total = |name: &str, tokens: usize, format: &str| {
        planned(name, tokens, &[format]).caches[0].needs.as_ref().unwrap().total as f64
    };
    let close = |found: f64, published: f64| {
        assert!((found / published - 1.0).abs() < 6e-4, "{found}, published {published}");
    };
    let gib = f64::from(1 << 30);
    close(total("DeepSeek-V4-Pro", 1_000_000, "bf16"), 9.86e9);
    for (model, format, published) in [
        ("DeepSeek-V4-Pro", "bf16", 9.62),
        ("DeepSeek-V4-Pro", "fp8", 5.39),
        ("DeepSeek-V4-Pro", "fp8-fp4", 4.92),
        ("DeepSeek-V4-Pro", "f32", 19.25),
        ("DeepSeek-V4-Flash", "bf16", 6.72),
        ("DeepSeek-V4-Flash", "fp8", 3.76),
        ("DeepSeek-V4-Flash", "fp8-fp4", 3.43),
    ] {
        let found = total(model, 1 << 20, format) / gib;
        assert!((found - published).abs() < 0.006, "{model} {format}: {found}, not {published}");
    }
    // bytes = a + b n: without tokens, only the sliding window is counted.
    let [one, more] = [128, 256].map(|n| total("DeepSeek-V4-Pro", n, "bf16"));
    assert_eq!(2.0 * one - more, 61.0 * 128.0 * 1024.0);
}

/// The longest context and the largest batch fit; one more does not.
#[test]
fn the_longest_context_and_the_largest_batch_are_the_last_that_fit() {
    let memory = |bytes| MemoryLimit::new(Some(bytes), "a test");
    for (name, bytes) in [
        ("SmolLM2-135M", 500_000_000),
        ("Gemma-3-270M", 900_000_000),
        ("gpt-oss-20b", 20_000_000_000),
    ] {
        let subject = preset(name, packed());
        let ask = |context, batch, cache: &str| {
            let request = Request { limit: memory(bytes), ..request(context, batch, &[cache]) };
            plan(&subject, &request).unwrap().caches.remove(0)
        };
        for cache in formats() {
            let cache = &cache.to_string();
            let row = ask(1000, 2, cache);
            let (context, batch) = (row.longest_context.unwrap(), row.largest_batch.unwrap());
            let fits = |context, batch| {
                let row = ask(context, batch, cache);
                let total = row.needs.map(|needs| needs.total);
                assert_eq!(row.fits, total.is_some_and(|total| total <= bytes), "{name} {cache}");
                row.fits
            };
            assert!(fits(context, 2), "{name} {cache} {context}");
            assert!(context == subject.max_context() || !fits(context + 1, 2), "{cache}");
            assert!(fits(1000, batch) && !fits(1000, batch + 1), "{name} {cache} {batch}");
        }
    }
    // The same for a formula.
    let plan = planned("DeepSeek-V4-Flash", 1000, &["bf16"]);
    let batch = plan.caches[0].largest_batch.unwrap() as u64;
    let one = plan.caches[0].needs.as_ref().unwrap().total;
    assert!(batch * one <= 16_000_000_000 && (batch + 1) * one > 16_000_000_000);
}

/// A prompt shorter than a chunk takes one forward pass, in rows and in searches.
#[test]
fn a_forward_pass_is_not_longer_than_the_context() {
    let subject = preset("SmolLM2-135M", packed());
    let ask = |context, batch, bytes| {
        let limit = MemoryLimit::new(Some(bytes), "a test");
        let request = Request { limit, ..request(context, batch, &["float"]) };
        plan(&subject, &request).unwrap().caches.remove(0)
    };
    for (context, batch) in [(64, 1), (64, 3), (1, 1), (1, 600), (511, 1)] {
        let total = ask(context, batch, 16_000_000_000).needs.unwrap().total;
        let row = ask(context, batch, total);
        let found = (row.fits, row.longest_context, row.largest_batch);
        assert_eq!(found, (true, Some(context), Some(batch)), "{context} {batch}");
        let row = ask(context, batch, total - 1);
        assert!(!row.fits, "{context} {batch}");
        assert!(row.longest_context < Some(context), "{context} {batch}: {row:?}");
        assert!(row.largest_batch < Some(batch), "{context} {batch}: {row:?}");
    }
    // Plans of caches alone count no activations.
    let cache = |batch| {
        let request = request(64, batch, &["float-bf16"]);
        plan(&preset("GameRFT", packed()), &request).unwrap().caches.remove(0)
    };
    let row = cache(1);
    let one = row.needs.unwrap();
    assert_eq!((one.total, one.activations), (one.cache, None));
    let most = row.largest_batch.unwrap();
    assert!(cache(most).fits && !cache(most + 1).fits);
}

/// On the CPU, prefill chunks have 256 tokens for wide models and 512 for others.
#[test]
fn activations_are_those_of_the_chunks_of_generation() {
    let activations = |name: &str| {
        [256, 512, 1024].map(|context| {
            let row = planned(name, context, &["float"]).caches.remove(0);
            row.needs.unwrap().activations.unwrap()
        })
    };
    let [short, chunk, long] = activations("Llama-3.1-8B");
    assert!(short == chunk && chunk == long, "{short} {chunk} {long}");
    let [short, chunk, long] = activations("SmolLM2-135M");
    assert!(short < chunk && chunk == long, "{short} {chunk} {long}");
}

/// The device's largest buffer limits the cache as memory does.
#[test]
fn a_devices_largest_buffer_bounds_context_and_batch() {
    let subject = preset("SmolLM2-135M", packed());
    // A token of a float cache takes 2 * 3 * 64 * 4 bytes per layer.
    let buffer = 1000 * 2 * 3 * 64 * 4;
    let limit = MemoryLimit::new(Some(16_000_000_000), "a test").with_buffer(Some(buffer));
    let ask = |context| {
        plan(&subject, &Request { limit: limit.clone(), ..request(context, 1, &["float"]) })
    };
    let row = &ask(1000).unwrap().caches[0];
    assert_eq!((row.fits, row.longest_context, row.largest_batch), (true, Some(1000), Some(1)));
    let row = &ask(1001).unwrap().caches[0];
    assert_eq!((row.fits, row.longest_context, row.largest_batch), (false, Some(1000), None));
    assert!(row.why.as_ref().unwrap().contains("a buffer of the device has at most 1.5 MB"));
}

#[test]
fn overflows_are_named() {
    let fails = |name: &str, context, batch, caches: &[&str]| {
        plan(&preset(name, packed()), &request(context, batch, caches)).unwrap_err().to_string()
    };
    let text = fails("SmolLM2-135M", 1 << 60, 1, &[]);
    assert_eq!(
        text,
        "context 1152921504606846976: must be 1 to 8192, the most tokens of SmolLM2-135M"
    );
    for name in ["GameRFT", "DeepSeek-V4-Pro", "SmolLM2-135M"] {
        assert!(
            fails(name, 1 << 60, 1, &[]).starts_with("context 1152921504606846976: must be 1 to ")
        );
        assert!(fails(name, 0, 1, &[]).starts_with("context 0: "));
        let text = fails(name, 64, 1_000_000_000_000, &[]);
        assert!(text.starts_with("batch 1000000000000: must be 1 to 4294967295"), "{text}");
        assert!(fails(name, 64, 0, &[]).starts_with("batch 0: "));
    }
    assert!(fails("DeepSeek-V4-Pro", 64, 1, &["k2v2"]).contains("the formula has bf16, f32, fp8"));
    assert!(fails("GPT-2", 64, 1, &["k5v5"]).contains("k5v5"));
    // A batch that exceeds every buffer has a row with the reason.
    let plan = plan(&preset("GPT-2", packed()), &request(1024, 1 << 30, &["float"])).unwrap();
    let why = plan.caches[0].why.as_ref().unwrap();
    assert!(why.contains("batch = 1073741824: ") && why.contains("2^32 elements"), "{why}");
    assert!(!plan.caches[0].fits);
}

/// The plan of a model's files equals the loader's, for each source.
#[test]
fn plans_of_files_equal_the_loaders() {
    let space = Workspace::new();
    let model = space.model();
    let outline: ModelOutline = kv_models::outline(&model, &device(), packed()).unwrap();
    let subject = Subject::of_files("model", outline.clone());
    let plan = plan(&subject, &request(100, 3, &["k4v4-g16-r32"])).unwrap();
    let config: kv_cubecl::KvCacheConfig = "k4v4-g16-r32".parse().unwrap();
    let loaded = kv_models::load_with(&model, &device(), packed()).unwrap().model;
    let cache = loaded.new_cache(config.with_capacity(100), 3, &device()).unwrap();
    let needs = plan.caches[0].needs.as_ref().unwrap();
    assert_eq!(keys_and_values(needs), cache.memory_bytes().total() as u64);
    assert_eq!(plan.weights.unwrap().values().sum::<usize>(), loaded.weight_bytes());
    let usage = Usage::new(config.with_capacity(100)).with_batch(3);
    let footprint = outline.planned().footprint(&usage.with_pass(512)).unwrap();
    assert_eq!(needs.total, footprint.total() as u64);
}
