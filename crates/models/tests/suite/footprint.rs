//! The sizes of a model are known before it is loaded, and a model that does not fit is rejected
//! then.

use std::{cell::RefCell, path::Path, rc::Rc};

use kv_models::{
    Advice, ConfigJson, Error, Footprint, LoadObserver, LoadOptions, Loaded, MemoryLimit, Planned,
    Result, Shortage, Usage, WeightBytes, WeightDtype,
    kv_cubecl::KvCacheConfig,
    kv_weights::{Activations, GroupSize, WeightFormat},
    load_observed, outline, outline_config,
};
use safetensors::Dtype;

use crate::common::{GgmlType, TINY, converted, device, fixture, tiny, write_gguf};

/// Records the events of a load.
#[derive(Default)]
struct Events {
    needed: Option<Footprint>,
    weights: WeightBytes,
    read: usize,
}

struct Watch {
    usage: Usage,
    limit: MemoryLimit,
    events: Rc<RefCell<Events>>,
}

impl LoadObserver for Watch {
    fn begin(&mut self, planned: &Planned<'_>) -> Result<()> {
        let mut events = self.events.borrow_mut();
        (events.needed, events.weights) =
            (Some(planned.footprint(&self.usage)?), planned.weights.clone());
        planned.check(&self.usage, &self.limit)
    }

    fn read(&mut self, bytes: usize) {
        self.events.borrow_mut().read += bytes;
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
) -> (Result<Loaded>, Events) {
    let events = Rc::<RefCell<Events>>::default();
    let watch = Watch { usage, limit, events: events.clone() };
    let loaded = load_observed(path, &device(), options, watch);
    (loaded, Rc::into_inner(events).unwrap().into_inner())
}

/// Covers all families, files and types of weights.
#[test]
fn planned_sizes_match_allocated_ones() {
    let scratch = tempfile::tempdir().unwrap();
    let packed = LoadOptions::default().with_packed(Some(Activations::Int8));
    for name in TINY {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlType::Q4_0, &[]);
        let halves = [Dtype::BF16, Dtype::F16].map(|dtype| converted(name, dtype, |_| true));
        let [bf16, f16] = halves.each_ref().map(|folder| folder.path().to_path_buf());
        for (path, options) in [
            (&bf16, packed),
            (&f16, packed),
            (&folder, LoadOptions::default()),
            (&folder, LoadOptions::default().with_dtype(WeightDtype::Bf16)),
            (&folder, packed),
            (&folder, packed.with_head(Some(WeightFormat::Int4(GroupSize::G32)))),
            (&file, LoadOptions::default()),
            (&file, packed),
        ] {
            let at = format!("{} {options:?}", path.display());
            let usage = float(48).with_batch(3);
            let (loaded, events) = watched(path, options, usage.clone(), MemoryLimit::default());
            let model = loaded.unwrap().model;
            assert_eq!(events.weights.total(), model.weight_bytes(), "{at}: {:?}", events.weights);
            // A cache does not count its rope tables.
            let cache = model.new_cache(&usage.cache, 3, &device()).unwrap().memory_bytes().total();
            let tables: usize =
                model.spec().ropes.iter().map(|rope| 48 * 4 * rope.rotary_dim()).sum();
            let needed = events.needed.unwrap();
            assert_eq!(needed.cache, cache + tables, "{at}");
            assert!(needed.activations > 0);
            assert_eq!(
                events.read, events.weights.in_files,
                "{at}: all bytes of the files are reported as read"
            );
            let [rows, columns] = model.decoder().head_weight().dims();
            // Groups of 32 codes have 16 bytes of them and 4 of scale and zero.
            let floats = options.dtype == WeightDtype::F32 && path != &file;
            let floats = floats && options.head.is_none();
            let int4 = floats.then_some(rows * columns / 32 * 20);
            assert_eq!(events.weights.head.1, int4, "{at}");
        }
    }
}

/// A configuration alone gives the same sizes as the files, because importers request exactly the
/// existing tensors.
#[test]
fn a_configuration_alone_gives_the_outline_of_its_files() {
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
        // The file names the type; a folder without weights is its configuration.
        let found = outline(alone.path(), &device(), packed).unwrap();
        assert_eq!(found.weights, outline(&config, &device(), packed).unwrap().weights);
    }
}

/// A pass has at most as many tokens as the caches and at least as many as a step, for one use as
/// well as in searches for others.
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

/// A part of a layer's cache that exceeds a buffer is rejected, with advice for a context that
/// fits.
#[test]
fn a_cache_beyond_a_buffer_is_rejected() {
    let path = tiny("llama-tiny");
    let load = |capacity, most| {
        let limit = MemoryLimit::new(None, "").with_buffer(Some(most));
        watched(&path, LoadOptions::default(), float(capacity), limit)
    };
    let spec = load(8, u64::MAX).0.unwrap().model.spec().clone();
    let layer = spec.layers[0];
    let row = layer.n_kv_heads * (layer.head_dim.keys + layer.head_dim.values) * 4;
    // The cache is larger than every matrix.
    let most = 500 * row as u64;
    let (_, events) = load(8, most);
    assert!(events.weights.largest.1 as u64 <= most, "{:?}", events.weights.largest);
    assert!(load(500, most).0.is_ok());
    let (refused, events) = load(501, most);
    let text = refused.unwrap_err().to_string();
    for part in
        ["float cache of 501 tokens", "the device allows at most", "a context of 500 tokens"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(events.read, 0);
}

fn shortage(error: Error) -> Shortage {
    match error {
        Error::Memory(shortage) => *shortage,
        other => panic!("{other}"),
    }
}

/// The model is rejected before the first tensor is read, with all advice that helps and no other.
#[test]
fn a_model_that_does_not_fit_is_rejected_with_valid_advice() {
    let path = tiny("llama-tiny");
    let load = |usage: &Usage, bytes: usize| {
        let limit = MemoryLimit::new(Some(bytes as u64), "a test");
        let (loaded, events) = watched(&path, LoadOptions::default(), usage.clone(), limit);
        assert!(
            loaded.is_ok() || events.read == 0,
            "nothing may be read of a model that is refused"
        );
        (loaded.map(drop), events.needed.unwrap())
    };
    let config = "float-g16-r32".parse::<KvCacheConfig>().unwrap().with_capacity(512);
    // With one token per pass, nearly everything that depends on the length is the cache.
    let usage = Usage::new(config).with_pass(1);
    let (_, needed) = load(&usage, usize::MAX);
    assert!(load(&usage, needed.total()).0.is_ok(), "exactly as much as is needed");

    // A little memory is missing, so fewer tokens and cheaper caches fit.
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

    // Only the cheapest cache fits, so larger ones are not advised.
    let config = "k2v2-g16-r32".parse::<KvCacheConfig>().unwrap().with_capacity(512);
    let (_, cheapest) = load(&Usage::new(config).with_pass(1), usize::MAX);
    let found = shortage(load(&usage, cheapest.total()).0.unwrap_err());
    let cheapest = Advice::Cache("k2v2-g16-r32".into());
    assert!(found.advice.contains(&cheapest), "{:?}", found.advice);

    // The weights fit only with a smaller head.
    let head = load(&usage, usize::MAX).1;
    let found = shortage(load(&float(1), head.weights - 1000).0.unwrap_err());
    let [Advice::Int4Head(saved)] = found.advice[..] else { panic!("{:?}", found.advice) };
    assert!(found.to_string().contains("try --head int4 ("), "{found}");
    // With it, the model fits into what is advised, and not into a byte less.
    let int4 = LoadOptions::default().with_head(Some(WeightFormat::Int4(GroupSize::G32)));
    let with_head = |limit: usize| {
        let limit = MemoryLimit::new(Some(limit as u64), "a test");
        watched(&path, int4, float(1), limit).0
    };
    let (_, needed) = load(&float(1), usize::MAX);
    assert!(with_head(needed.total() - saved).is_ok());
    assert!(with_head(needed.total() - saved - 1).is_err());
    let small = with_head(usize::MAX).unwrap().model;
    let whole = kv_models::load(&path, &device()).unwrap().model;
    assert_eq!(whole.weight_bytes() - small.weight_bytes(), saved);
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
        "no shorter context, cheaper cache or --head int4 fits",
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
fn a_tensor_beyond_a_buffer_is_named() {
    let limit = MemoryLimit::new(None, "").with_buffer(Some(1 << 10));
    let (loaded, events) =
        watched(&fixture("gguf-types").join("types.gguf"), LoadOptions::default(), float(8), limit);
    let text = loaded.unwrap_err().to_string();
    let (name, _) = &events.weights.largest;
    assert!(
        text.contains(&format!("tensor {name} of ")) && text.contains("at most 0.0 MB"),
        "{text}"
    );
    assert_eq!(events.read, 0);
}

/// Packed matrices are divided into several buffers, but each row must fit one.
#[test]
fn divisible_tensors_may_exceed_a_buffer() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::Q4_0, &[]);
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let load = |options: LoadOptions, most| {
        let limit = MemoryLimit::new(None, "").with_buffer(Some(most));
        watched(&file, options.with_largest_buffer(Some(most)), float(1), limit).0
    };
    // The vectors have 96 numbers in f32.
    assert!(load(options, 4 * 96).is_ok());
    let text = load(options, 4 * 95).unwrap_err().to_string();
    assert!(text.contains("norm.weight of 0.0 MB: the device allows buffers"), "{text}");
    let text = load(LoadOptions::default(), 4 * 96).unwrap_err().to_string();
    assert!(text.contains("tensor token_embd.weight of"), "{text}");
}

/// A cache that does not fit the model gives that error, not one about memory.
#[test]
fn a_cache_that_does_not_fit_the_model_is_rejected_before_the_load() {
    let usage = Usage::new("k4v4-g64".parse::<KvCacheConfig>().unwrap().with_capacity(512));
    let limit = MemoryLimit::new(Some(1), "a test");
    let (loaded, events) = watched(&tiny("llama-tiny"), LoadOptions::default(), usage, limit);
    let text = loaded.unwrap_err().to_string();
    assert!(text.contains("group_size"), "{text}");
    assert_eq!(events.read, 0);
}
