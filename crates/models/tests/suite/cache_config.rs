//! Caches that differ by layer, observers of attention, and models with random weights.

use std::fs;

use burn::tensor::{Int, Tensor, TensorData, activation};
use kv_models::{
    AttentionTrace, Error, KvTrace, LanguageModel, LayerRule, Layers, ModelCacheConfig, Stores,
    kv_cubecl::{FakeQuantOptions, KvCacheConfig, KvFormat, streaming_attention},
    llama::{Config, Llama},
    load,
    nn::{RopeScaling, init::seeded},
};
use serde_json::{Value as Json, json};

use crate::common::{device, expected, max_difference, tiny};

const NAMES: [&str; 3] = ["gpt2-tiny", "llama-tiny", "phi3-tiny"];

fn with_float_layers(name: &str, layers: impl IntoIterator<Item = usize>) -> ModelCacheConfig {
    name.parse::<ModelCacheConfig>().unwrap().with_float_layers(layers)
}

#[test]
fn float_layers_are_float() {
    let device = device();
    for name in NAMES {
        let ids = expected(&tiny(name), &device).ids;
        let model = load(tiny(name), &device).unwrap().model;
        let forward = |layers: &[usize]| {
            let config = with_float_layers("k2v2-g16-r32", layers.iter().copied());
            model.forward(ids.clone(), config).unwrap()
        };
        let float = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
        let all = forward(&[0, 1]);
        assert_eq!(all.to_data(), float.to_data(), "{name}");
        let quantized = forward(&[]);
        for layers in [[0], [1]] {
            let some = forward(&layers);
            assert!(max_difference(some.clone(), float.clone()) > 1e-4, "{name} {layers:?}");
            assert!(max_difference(some, quantized.clone()) > 1e-4, "{name} {layers:?}");
        }
    }
}

#[test]
fn streaming_with_float_layers_equals_parallel() {
    let device = device();
    let ids = expected(&tiny("llama-tiny"), &device).ids;
    let [batch, seq] = ids.dims();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    for layer in [0, 1] {
        let config = with_float_layers("k4v4-g16-r32", [layer]).with_capacity(seq);
        let forward = model.forward(ids.clone(), &config).unwrap();
        let mut cache = model.new_cache(&config, batch, &device).unwrap();
        let bytes = cache.memory_bytes();
        assert!(bytes.layers[layer].total() > bytes.layers[1 - layer].total());
        let steps = (0..seq).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap());
        let steps = Tensor::cat(steps.collect(), 1);
        // Single codes may change in rounding, but the mean difference stays small.
        let mean = (steps - forward).abs().mean().into_scalar::<f32>();
        assert!(mean < 2e-3, "mean difference {mean}");
    }
}

/// The second of two layers keeps half a tile more in float, and streaming follows the closed form.
#[test]
fn staggered_layers_flush_at_different_tokens() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let config: ModelCacheConfig = "kvn2v16-t64-r64-stagger".parse().unwrap();
    let layers: Vec<String> = config.layers(model.spec()).map(|it| it.to_string()).collect();
    assert_eq!(layers, ["kvn2v16-r64-gflush-t64", "kvn2v16-r96-gflush-t64"]);
    let json = serde_json::to_value(&config).unwrap();
    assert_eq!(json["stagger"], true);
    assert_eq!(serde_json::from_value::<ModelCacheConfig>(json).unwrap(), config);
    for other in ["k2v2-g16-stagger", "float-stagger"] {
        let other: ModelCacheConfig = other.parse().unwrap();
        let error = other.validate(&model).unwrap_err().to_string();
        assert!(error.contains("stagger true: needs keys or values in tiles"), "{error}");
    }

    let seq = 150;
    let ids: Vec<i32> = (0..seq).map(|i| (i * i * 31 + i * 7) % 250).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, seq as usize]), &device);
    let config = config.with_capacity(seq as usize);
    let forward = model.forward(ids.clone(), &config).unwrap();
    let mut cache = model.new_cache(&config, 1, &device).unwrap();
    let step = |t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap();
    let steps = Tensor::cat((0..seq as usize).map(step).collect(), 1);
    // Single codes may change in rounding, but the mean difference stays small.
    let mean = (steps - forward).abs().mean().into_scalar::<f32>();
    assert!(mean < 2e-3, "mean difference {mean}");
}

#[test]
fn a_configuration_that_does_not_fit_the_model_is_an_error() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let ids = Tensor::<2, Int>::zeros([1, 4], &device);
    for (config, message) in [
        (
            with_float_layers("k2v2-g16", [0, 2]),
            "rules[1].layers = 0,2: the model has layers 0 to 1",
        ),
        (with_float_layers("k2v2-g16", [usize::MAX]), "the model has layers 0 to 1"),
        (with_float_layers("k2v2", [0]), "group_size 32: does not divide head_dim 16"),
    ] {
        for error in [
            config.validate(&model).unwrap_err(),
            model.forward(ids.clone(), &config).unwrap_err(),
            model.new_cache(&config, 1, &device).unwrap_err(),
        ] {
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}

#[test]
fn files_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv_cache.json");
    for (name, layers, text) in [
        ("k2v2-s4", vec![29, 0], "k2v2-s4 float layers 0,29"),
        ("k4v2-g64-r64-after-f16", vec![], "k4v2-g64-r64-after-f16"),
        ("float", vec![3], "float float layers 3"),
    ] {
        let config = with_float_layers(name, layers);
        assert_eq!(config.to_string(), text);
        config.write(&path).unwrap();
        assert_eq!(ModelCacheConfig::read(&path).unwrap(), config);
        let json: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let sinks = if name.contains("-s4") { 4 } else { 0 };
        assert_eq!(json["sink_tokens"], sinks);
        assert_eq!(serde_json::from_value::<ModelCacheConfig>(json).unwrap(), config);
    }
    let cache: KvCacheConfig = "k8v4".parse().unwrap();
    fs::write(&path, serde_json::to_string(&cache).unwrap()).unwrap();
    assert_eq!(
        ModelCacheConfig::read(&path).unwrap(),
        cache.into(),
        "float_layers may be left out"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn wrong_files_name_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv_cache.json");
    let good = serde_json::to_value(with_float_layers("k2v2", [1])).unwrap();
    let fails = |text: &[u8], parts: &[&str]| {
        fs::write(&path, text).unwrap();
        let message = ModelCacheConfig::read(&path).unwrap_err().to_string();
        assert!(message.contains("kv_cache.json: ") && !message.contains('\n'), "{message}");
        for part in parts {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    };
    for (field, value, rule) in [
        ("key_format", json!(5), "expected 2, 3, 4, 8, or 16 for float"),
        ("value_format", json!(258), "expected 2, 3, 4, 8, or 16 for float"),
        ("value_format", json!("2"), "or one of \"vn2\""),
        ("group_size", json!(-1), "expected usize"),
        ("residual_length", json!(1.5), "expected usize"),
        ("flush", json!("later"), "expected one of `before`, `after`, `group`, `group-after`"),
        ("capacity", json!(null), "expected usize"),
        ("float", json!("f64"), "expected one of `f32`, `f16`, `bf16`"),
        ("float_layers", json!(0), "expected a sequence"),
        ("float_layers", json!([-1]), "expected usize"),
        ("float_layer", json!([0]), "unknown field"),
    ] {
        let mut wrong = good.clone();
        wrong[field] = value.clone();
        fails(wrong.to_string().as_bytes(), &[&format!("{field} = {value}: "), rule]);
    }
    for field in good.as_object().unwrap().keys().filter(|field| *field != "float_layers") {
        let mut wrong = good.clone();
        wrong.as_object_mut().unwrap().remove(field);
        fails(wrong.to_string().as_bytes(), &[&format!("{field} = missing: ")]);
    }
    let text = serde_json::to_vec_pretty(&good).unwrap();
    for len in 0..text.len() {
        fails(&text[..len], &[]);
    }
    for text in [&b"[]"[..], b"\xff", b"null", b"{}"] {
        fails(text, &[]);
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(ModelCacheConfig::read(&path), Err(Error::NotFound { .. })));
}

#[test]
fn the_observer_sees_every_layer() {
    let device = device();
    for name in NAMES {
        let ids = expected(&tiny(name), &device).ids;
        let model = load(tiny(name), &device).unwrap().model;
        let config = with_float_layers("k2v4-g16-r32", [1]);
        let mut traces: Vec<AttentionTrace> = vec![];
        let mut observe = |trace| traces.push(trace);
        let options = FakeQuantOptions::default();
        let hidden = model.hidden_with(ids.clone(), &config, options, Some(&mut observe)).unwrap();
        let unobserved = model.hidden(ids.clone(), &config).unwrap();
        assert_eq!(hidden.to_data(), unobserved.to_data());

        assert_eq!(traces.len(), model.n_layers());
        let [batch, seq] = ids.dims();
        for (i, trace) in traces.into_iter().enumerate() {
            let (layer, KvTrace { query, key, value, output, .. }) =
                (trace.layer, trace.kv().unwrap().clone());
            assert_eq!(layer, i);
            let spec = model.spec().layers[i];
            assert_eq!(query.dims(), [batch, spec.n_heads, seq, spec.head_dim.keys]);
            assert_eq!(key.dims(), [batch, spec.n_kv_heads, seq, spec.head_dim.keys]);
            let attention = streaming_attention(query, key, value, &config.layer(model.spec(), i))
                .unwrap()
                .output;
            assert_eq!(attention.to_data(), output.to_data());
        }

        let options = FakeQuantOptions { quantize_everything: true, ..options };
        let everything = model.hidden_with(ids, &config, options, None).unwrap();
        assert!(max_difference(everything, unobserved) > 1e-4);
    }
}

fn small() -> Config {
    let base = crate::common::small();
    Config { vocab_size: 300, intermediate_size: 160, n_layers: 3, max_positions: 128, ..base }
}

/// Returns the cross entropy of some ids.
fn loss(model: &LanguageModel, device: &burn::tensor::Device) -> Tensor<1> {
    let ids = |start: i32| {
        let values: Vec<i32> = (start..start + 128).map(|i| (i * i * 31 + i * 7) % 300).collect();
        Tensor::<2, Int>::from_data(TensorData::new(values, [2, 64]), device)
    };
    let config: KvCacheConfig = "k2v2-g16-r32".parse().unwrap();
    let logits = model.forward(ids(0), config).unwrap();
    let targets = ids(1).unsqueeze_dim::<3>(2);
    -activation::log_softmax(logits, 2).gather(2, targets).mean()
}

#[test]
fn a_model_from_scratch_has_the_loss_of_random_logits() {
    let device = device();
    for tied_head in [true, false] {
        let draw = || Llama::init(Config { tied_head, ..small() }, &device);
        let model = seeded(&device, 7, draw);
        let std = |t: Tensor<2>| t.powf_scalar(2.0).mean().sqrt().into_scalar::<f32>();
        let layer = &model.layers[1];
        // With thousands of draws, the deviation is within 3% of 1 / sqrt(d_input), with gain 1 /
        // sqrt(2 n_layers) in some.
        let near = |got: f32, d_input: usize, gain: f32| {
            let expected = gain / (d_input as f32).sqrt();
            assert!((got / expected - 1.0).abs() < 0.03, "{got} is not {expected}");
        };
        let Config { hidden_size, intermediate_size, n_layers, .. } = small();
        let residual = 1.0 / (2.0 * n_layers as f32).sqrt();
        near(std(model.embedding.weight.val()), hidden_size, 1.0);
        near(std(layer.qkv.weight.val()), hidden_size, 1.0);
        near(std(layer.output.weight.val()), layer.output.weight.dims()[1], residual);
        near(std(layer.mlp.down.weight.val()), intermediate_size, residual);
        assert!(layer.qkv.bias.is_none() && model.head.is_none() == tied_head);

        let model = LanguageModel::new(model);
        let first = loss(&model, &device).into_scalar::<f32>();
        // Random logits of variance 1 have a loss 0.5 nats above that of uniform logits.
        assert!((first - 300f32.ln() - 0.5).abs() < 0.2, "loss {first}");
        let again = LanguageModel::new(seeded(&device, 7, draw));
        assert_eq!(loss(&again, &device).into_scalar::<f32>(), first, "the seed decides");
    }
}

#[cfg(feature = "autodiff")]
#[test]
fn every_weight_from_scratch_has_a_gradient() {
    let device = device().autodiff();
    let config = Config { tied_head: false, qkv_bias: true, ..small() };
    let model = LanguageModel::new(seeded(&device, 8, || Llama::init(config, &device)));
    let grads = loss(&model, &device).backward();
    let model = model.downcast::<Llama>().unwrap();
    let mut weights = vec![model.embedding.weight.val()];
    weights.extend(model.head.map(|head| head.weight.val()));
    let mut vectors = vec![model.norm.gamma.val()];
    for layer in model.layers {
        weights.extend([layer.qkv.weight.val(), layer.output.weight.val()]);
        weights.extend([layer.mlp.gate_up.weight.val(), layer.mlp.down.weight.val()]);
        vectors.extend([layer.attention_norm.gamma.val(), layer.mlp_norm.gamma.val()]);
        vectors.extend(layer.qkv.bias.map(|bias| bias.val()));
    }
    for weight in weights {
        assert!(weight.grad(&grads).unwrap().abs().max().into_scalar::<f32>() > 0.0);
    }
    for vector in vectors {
        assert!(vector.grad(&grads).unwrap().abs().max().into_scalar::<f32>() > 0.0);
    }
}

/// A change to a configuration.
type Change = fn(&mut Config);

#[test]
fn a_configuration_from_code_is_checked() {
    small().validate().unwrap();
    let cases: [(Change, &str); 6] = [
        (|c| c.vocab_size = 0, "vocab_size = 0"),
        (|c| c.attention.n_kv_heads = 3, "num_key_value_heads = 3: does not divide"),
        (|c| c.rotary_dim = 18, "rotary_dim = 18: must be even and at most head_dim 16"),
        (|c| c.norm_epsilon = f64::NAN, "rms_norm_eps = NaN"),
        (|c| c.rope_scaling = RopeScaling::Linear { factor: 0.0 }, "rope_scaling.factor = 0"),
        (
            |c| c.rope_scaling = RopeScaling::Divisors(vec![1.0; 7]),
            "number of rope_scaling divisors = 7",
        ),
    ];
    for (change, message) in cases {
        let mut config = small();
        change(&mut config);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.starts_with("llama config: ") && error.contains(message), "{error}");
    }
}

#[test]
fn notes_name_layers_that_a_cache_does_not_suit() {
    let notes = |model: &str, cache: &str| {
        let model = load(tiny(model), &device()).unwrap().model;
        ModelCacheConfig::from(cache.parse::<KvCacheConfig>().unwrap()).notes(model.spec())
    };
    let said = |model, cache, rest: &str| {
        assert_eq!(notes(model, cache), [format!("{cache}: {rest}")]);
    };
    let rule = "2 of 4 layers (0,2) have their own sliding window and keep no sinks";
    said("gpt-oss-tiny", "k4v4-s4", rule);
    said(
        "mistral-swa-tiny",
        "k4v4-g16-r16-w100",
        "2 of 2 layers (0..2) have their own sliding window and keep no more tokens",
    );
    for cache in ["ktq2v2-hadv", "k2v2-hadk"] {
        said(
            "qwen2-tiny",
            cache,
            "2 of 2 layers (0..2) have a bias in the projection of keys, which the Hadamard \
             transform of keys spreads over all channels; keys without it (k2, k3, k4) lose far \
             less",
        );
        assert!(notes("qwen3-tiny", cache).is_empty());
    }
    assert_eq!(notes("gpt-oss-tiny", "k4v4-s4-hadk").len(), 2);
    for (model, cache) in [
        ("gpt-oss-tiny", "k4v4-g16-r16-w20"),
        ("gpt-oss-tiny", "k4v4"),
        ("llama-tiny", "k4v4-s4-w200"),
        ("qwen2-tiny", "k2v2-hadv"),
        ("qwen2-tiny", "kint8vint8-hadk"),
    ] {
        assert!(notes(model, cache).is_empty(), "{model}, {cache}");
    }
}

/// A Hadamard transform folded into the weights gives the same outputs as one in the cache, except
/// for rounding, streamed and in parallel. Without it in the cache, the model is another one.
#[test]
fn hadamard_values_are_folded_into_the_weights() {
    let device = device();
    for name in ["gpt2-tiny", "llama-tiny", "qwen2-tiny"] {
        let ids = expected(&tiny(name), &device).ids;
        let model = load(tiny(name), &device).unwrap().model;
        let config = with_float_layers("k4v2-g16-r32-hadv", [1]);
        if config.validate(model.spec()).is_err() {
            continue;
        }
        let transformed = model.forward(ids.clone(), &config).unwrap();
        let float = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
        let (folded, plain) = model.clone().fold_hadamard(config.clone());
        assert_eq!(plain.to_string(), "k4v2-g16-r32 float layers 1", "{name}");
        let largest = |x: Tensor<3>| x.abs().max().into_scalar::<f32>();
        let bound = 1e-4 * largest(float.clone());
        let same = folded.forward(ids.clone(), KvCacheConfig::float()).unwrap();
        assert!(max_difference(same, float) < bound, "{name}: a float cache");
        // A value at the border of two codes may change its code, which is rare.
        let same = folded.forward(ids.clone(), &plain).unwrap();
        assert!(max_difference(same, transformed.clone()) < 20.0 * bound, "{name}: {plain}");
        let plain_output = model.forward(ids, &plain).unwrap();
        assert!(
            max_difference(plain_output, transformed) > 20.0 * bound,
            "{name}: nothing was transformed"
        );

        // A rule for both sides becomes one for each, because keys stay transformed in the cache.
        let ids = expected(&tiny(name), &device).ids;
        let both = Stores::Format { side: None, format: KvFormat::Int8, hadamard: true };
        let config = ModelCacheConfig::new([LayerRule::new(Layers::all(), both)]);
        let transformed = model.forward(ids.clone(), &config).unwrap();
        let (folded, plain) = model.clone().fold_hadamard(config);
        let shown = "float; all: keys as int8 hadamard; all: values as int8";
        assert_eq!(plain.to_string(), shown, "{name}");
        for cache in plain.layers(model.spec()) {
            assert_eq!(cache.to_string(), "kint8vint8-hadk", "{name}");
        }
        let same = folded.forward(ids, &plain).unwrap();
        assert!(max_difference(same, transformed) < 20.0 * bound, "{name}: {plain}");
    }
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let config = with_float_layers("k4v4-g16-r32", []);
    assert_eq!(model.fold_hadamard(config.clone()).1, config);
}
