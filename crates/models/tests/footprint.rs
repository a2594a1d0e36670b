//! What a model takes is known before it is loaded, and a model that does not fit is refused then.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{cell::RefCell, path::Path, rc::Rc};

use candle_core::quantized::GgmlDType;
use common::{TINY, converted, device, fixture, tiny, write_gguf};
use kv_models::{
    Advice, ConfigJson, Error, Footprint, LoadObserver, LoadOptions, Loaded, MemoryLimit, Planned,
    Result, Shortage, Usage, WeightBytes, WeightDtype, kv_cubecl::KvCacheConfig,
    kv_weights::Activations, load_observed, outline, outline_config,
};
use safetensors::Dtype;

/// Records the events of a load.
#[derive(Default)]
struct Told {
    needed: Option<Footprint>,
    weights: WeightBytes,
    read: usize,
}

struct Watch {
    usage: Usage,
    limit: MemoryLimit,
    told: Rc<RefCell<Told>>,
}

impl LoadObserver for Watch {
    fn begin(&mut self, planned: &Planned<'_>) -> Result<()> {
        let mut told = self.told.borrow_mut();
        (told.needed, told.weights) =
            (Some(planned.footprint(&self.usage)?), planned.weights.clone());
        planned.check(&self.usage, &self.limit)
    }

    fn read(&mut self, bytes: usize) {
        self.told.borrow_mut().read += bytes;
    }
}

fn float(capacity: usize) -> Usage {
    Usage::new(KvCacheConfig::float().with_capacity(capacity))
}

fn watched(
    path: &Path,
    options: LoadOptions,
    usage: Usage,
    limit: MemoryLimit,
) -> (Result<Loaded>, Told) {
    let told = Rc::<RefCell<Told>>::default();
    let watch = Watch { usage, limit, told: told.clone() };
    let loaded = load_observed(path, &device(), options, watch);
    (loaded, Rc::into_inner(told).unwrap().into_inner())
}

/// Whatever the family, the file and the type that weights are kept in.
#[test]
fn what_is_planned_is_what_is_there() {
    let scratch = tempfile::tempdir().unwrap();
    let packed = LoadOptions::default().with_packed(Some(Activations::Int8));
    for name in TINY {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlDType::Q4_0, &[]);
        let halves = [Dtype::BF16, Dtype::F16].map(|dtype| converted(name, dtype, |_| true));
        let [bf16, f16] = halves.each_ref().map(|folder| folder.path().to_path_buf());
        for (path, options) in [
            (&bf16, packed),
            (&f16, packed),
            (&folder, LoadOptions::default()),
            (&folder, LoadOptions::default().with_dtype(WeightDtype::Bf16)),
            (&folder, packed),
            (&file, LoadOptions::default()),
            (&file, packed),
        ] {
            let at = format!("{} {options:?}", path.display());
            let usage = float(48).with_batch(3);
            let (loaded, told) = watched(path, options, usage.clone(), MemoryLimit::default());
            let model = loaded.unwrap().model;
            assert_eq!(told.weights.total(), model.weight_bytes(), "{at}: {:?}", told.weights);
            // The tables of the rotary encoding are no part of what a cache counts.
            let cache = model.new_cache(&usage.cache, 3, &device()).unwrap().memory_bytes().total();
            let tables: usize =
                model.spec().ropes.iter().map(|rope| 48 * 4 * rope.rotary_dim()).sum();
            let needed = told.needed.unwrap();
            assert_eq!(needed.cache, cache + tables, "{at}");
            assert!(needed.activations > 0);
            assert_eq!(
                told.read, told.weights.in_files,
                "{at}: all bytes of the files are reported as read"
            );
            let [rows, columns] = model.decoder().head_weight().dims();
            assert_eq!(told.weights.head.1, rows * columns, "{at}");
        }
    }
}

/// A configuration alone gives what its files give: the importers ask for the tensors that are
/// there.
#[test]
fn an_outline_by_the_configuration_alone_is_that_of_the_files() {
    let packed = LoadOptions::default().with_packed(Some(Activations::Int8));
    let bf16 = LoadOptions::default().with_dtype(WeightDtype::Bf16);
    let alone = tempfile::tempdir().unwrap();
    let config = alone.path().join("config.json");
    for name in TINY {
        for (dtype, stored) in [(Dtype::BF16, WeightDtype::Bf16), (Dtype::F32, WeightDtype::F32)] {
            let folder = converted(name, dtype, |_| true);
            let text = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
            std::fs::write(&config, &text).unwrap();
            for options in [LoadOptions::default(), packed, bf16] {
                let whole = outline(folder.path(), &device(), options).unwrap();
                let read = ConfigJson { text: &text, path: &config };
                let found = outline_config(&read, Some(stored), &device(), options).unwrap();
                assert_eq!(found.spec, whole.spec, "{name}");
                assert_eq!(found.weights.by_type, whole.weights.by_type, "{name} {options:?}");
                assert_eq!(found.weights.in_files, whole.weights.in_files, "{name}");
                assert_eq!(found.weights.head, whole.weights.head, "{name}");
            }
        }
        // The file says the type; a folder without weights is its configuration.
        let found = outline(alone.path(), &device(), packed).unwrap();
        assert_eq!(found.weights, outline(&config, &device(), packed).unwrap().weights);
    }
}

/// A pass has no more tokens than the caches hold and no fewer than a step, for one usage as in the
/// search for others.
#[test]
fn a_pass_is_bounded_by_the_caches_and_by_a_step() {
    let outline = outline(tiny("llama-tiny"), &device(), LoadOptions::default()).unwrap();
    let planned = outline.planned();
    let activations = |usage: &Usage| planned.footprint(usage).unwrap().activations;
    assert_eq!(activations(&float(8)), activations(&float(8).with_pass(8)));
    assert!(activations(&float(8)) < activations(&float(9)));
    let three = || float(8).with_batch(3);
    assert_eq!(activations(&three()), activations(&three().with_pass(24)));
    assert_eq!(activations(&three().with_pass(1)), activations(&three().with_pass(3)));
    assert_eq!(activations(&three().with_pass(0)), 0);
    for usage in [float(8), three(), three().with_pass(0), three().with_pass(2)] {
        let just = planned.footprint(&usage).unwrap().total() as u64;
        for (missing, context, batch) in [(0, 8, usage.batch), (1, 7, usage.batch - 1)] {
            let limit = MemoryLimit::new(Some(just - missing), "a test");
            assert_eq!(planned.longest_context(&usage, &limit), Some(context), "{usage:?}");
            let batch = (batch > 0).then_some(batch);
            assert_eq!(planned.largest_batch(&usage, &limit), batch, "{usage:?}");
        }
    }
}

/// A part of a layer's cache that no buffer holds is refused with the context that one does.
#[test]
fn a_cache_that_no_buffer_holds_is_refused() {
    let path = tiny("llama-tiny");
    let load = |capacity, most| {
        let limit = MemoryLimit::new(None, "").with_buffer(Some(most));
        watched(&path, LoadOptions::default(), float(capacity), limit)
    };
    let spec = load(8, u64::MAX).0.unwrap().model.spec().clone();
    let layer = spec.layers[0];
    let row = layer.n_kv_heads * (layer.head_dim.keys + layer.head_dim.values) * 4;
    // Larger than every matrix.
    let most = 500 * row as u64;
    let (_, told) = load(8, most);
    assert!(told.weights.largest.1 as u64 <= most, "{:?}", told.weights.largest);
    assert!(load(500, most).0.is_ok());
    let (refused, told) = load(501, most);
    let text = refused.unwrap_err().to_string();
    for part in
        ["float cache of 501 tokens", "the device allows at most", "a context of 500 tokens"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(told.read, 0);
}

fn shortage(error: Error) -> Shortage {
    match error {
        Error::Memory(shortage) => *shortage,
        other => panic!("{other}"),
    }
}

/// Refused before the first tensor is read, with everything that would help and nothing that would
/// not.
#[test]
fn a_model_that_does_not_fit_is_refused_with_advice_that_holds() {
    let path = tiny("llama-tiny");
    let load = |usage: &Usage, bytes: usize| {
        let limit = MemoryLimit::new(Some(bytes as u64), "a test");
        let (loaded, told) = watched(&path, LoadOptions::default(), usage.clone(), limit);
        assert!(loaded.is_ok() || told.read == 0, "nothing may be read of a model that is refused");
        (loaded.map(drop), told.needed.unwrap())
    };
    let config = "float-g16-r32".parse::<KvCacheConfig>().unwrap().with_capacity(512);
    // With prompts passed token by token, nearly all that depends on the length is the cache.
    let usage = Usage::new(config).with_pass(1);
    let (_, needed) = load(&usage, usize::MAX);
    assert!(load(&usage, needed.total()).0.is_ok(), "exactly as much as is needed");

    // A little is missing: fewer tokens fit, and so do cheaper caches.
    let short = needed.total() - needed.cache / 8;
    let found = shortage(load(&usage, short).0.unwrap_err());
    let [Advice::Context(tokens), Advice::Cache(cache), ..] = &found.advice[..] else {
        panic!("{:?}", found.advice)
    };
    assert_eq!(cache, "k8v8-g16-r32");
    let advised: KvCacheConfig = cache.parse().unwrap();
    assert!(load(&Usage::new(advised.with_capacity(512)).with_pass(1), short).0.is_ok());
    let of = |tokens| Usage::new(usage.cache.clone().with_capacity(tokens)).with_pass(1);
    assert!(load(&of(*tokens), short).0.is_ok(), "{tokens} tokens do not fit");
    assert!(load(&of(tokens + 1), short).0.is_err(), "more than {tokens} tokens fit");

    // Room for the cheapest cache alone: those that are dearer are not advised.
    let config = "k2v2-g16-r32".parse::<KvCacheConfig>().unwrap().with_capacity(512);
    let (_, cheapest) = load(&Usage::new(config).with_pass(1), usize::MAX);
    let found = shortage(load(&usage, cheapest.total()).0.unwrap_err());
    let cheapest = Advice::Cache("k2v2-g16-r32".into());
    assert!(found.advice.contains(&cheapest), "{:?}", found.advice);

    // Not even the weights fit, but for the head in fewer bits.
    let head = load(&usage, usize::MAX).1;
    let found = shortage(load(&float(1), head.weights - 1000).0.unwrap_err());
    assert!(matches!(found.advice[..], [Advice::Int4Head(_)]), "{:?}", found.advice);
    let found = shortage(load(&usage, 1000).0.unwrap_err());
    assert_eq!(found.advice, []);

    let text = found.to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in [
        "memory: ",
        "but a test allows 0.0 MB: ",
        "weights ",
        "(f32 ",
        "the float cache of 512 tokens",
        "activations",
        "no shorter context, cheaper cache or head in 4 bits fits",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let text = shortage(load(&usage, short).0.unwrap_err()).to_string();
    assert!(
        text.contains(&format!(
            "try a context of {tokens} tokens, or a k8v8-g16-r32 cache of 512 tokens"
        )),
        "{text}"
    );
}

#[test]
fn a_tensor_that_no_buffer_holds_is_named() {
    let limit = MemoryLimit::new(None, "").with_buffer(Some(1 << 10));
    let (loaded, told) =
        watched(&fixture("gguf-types").join("types.gguf"), LoadOptions::default(), float(8), limit);
    let text = loaded.unwrap_err().to_string();
    let (name, _) = &told.weights.largest;
    assert!(
        text.contains(&format!("tensor {name} of ")) && text.contains("at most 0.0 MB"),
        "{text}"
    );
    assert_eq!(told.read, 0);
}

/// Packed matrices become several buffers; a row of them has to fit one.
#[test]
fn what_can_be_split_is_no_tensor_that_no_buffer_holds() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlDType::Q4_0, &[]);
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let load = |options: LoadOptions, most| {
        let limit = MemoryLimit::new(None, "").with_buffer(Some(most));
        watched(&file, options.with_largest_buffer(Some(most)), float(1), limit).0
    };
    // The vectors are 96 numbers in f32.
    assert!(load(options, 4 * 96).is_ok());
    let text = load(options, 4 * 95).unwrap_err().to_string();
    assert!(text.contains("norm.weight of 0.0 MB: the device allows buffers"), "{text}");
    let text = load(LoadOptions::default(), 4 * 96).unwrap_err().to_string();
    assert!(text.contains("tensor token_embd.weight of"), "{text}");
}

/// A cache that does not fit the model is that error, not one of memory.
#[test]
fn a_cache_that_does_not_fit_the_model_is_refused_before_the_load() {
    let usage = Usage::new("k4v4-g64".parse::<KvCacheConfig>().unwrap().with_capacity(512));
    let limit = MemoryLimit::new(Some(1), "a test");
    let (loaded, told) = watched(&tiny("llama-tiny"), LoadOptions::default(), usage, limit);
    let text = loaded.unwrap_err().to_string();
    assert!(text.contains("group_size"), "{text}");
    assert_eq!(told.read, 0);
}
