//! Layer policies: their layers, and the caches of models.

use burn::tensor::Tensor;
use kv_models::{
    AttentionKind, Error, LayerRule, LayerSpec, Layers, ModelCacheConfig, ModelSpec, Stores,
    kv_cubecl::{KvCacheConfig, KvFormat, Side, layout::CacheLayout},
    load,
};
use proptest::prelude::*;

use crate::common::{device, expected, max_difference, tiny};

/// Describes a model of `n` layers with heads of 64 channels. Layer 1 has a sliding window of 512.
fn model(n: usize) -> ModelSpec {
    let layer = LayerSpec::new(9, 3, 64);
    let windowed = |i| if i == 1 { layer.with_sliding_window(Some(512)) } else { layer };
    ModelSpec::new(1000, 576, 8192, (0..n).map(windowed).collect())
}

fn names(policy: &ModelCacheConfig, n: usize) -> Vec<String> {
    policy.layers(&model(n)).map(|cache| cache.to_string()).collect()
}

fn layers(text: &str) -> Layers {
    text.parse().unwrap()
}

fn cache(name: &str) -> KvCacheConfig {
    name.parse().unwrap()
}

/// The expected caches are written by hand.
#[test]
fn later_rules_override_earlier_ones() {
    let both_ends = ModelCacheConfig::from(cache("k4v4-r64-s4"))
        .with_cache(Layers::first(2), KvCacheConfig::float())
        .with_format(Layers::last(1), None, KvFormat::Float);
    let expected = ["float", "float-w512", "k4v4-r64-s4", "k4v4-r64-s4", "float"];
    assert_eq!(names(&both_ends, 5), expected);

    // Only the last three layers have a rule; the others are in float.
    let last = ModelCacheConfig::new([]).with_cache(Layers::last(3), cache("k2v2-g64-r64"));
    assert_eq!(names(&last, 4), ["float", "k2v2-g64-r64-w512", "k2v2-g64-r64", "k2v2-g64-r64"]);

    // Formats by layer and side. The last rule overrides earlier ones for its side.
    let by_side = ModelCacheConfig::from(cache("k4v4-s4-f16"))
        .with_format(layers("2.."), Side::Values, KvFormat::Affine2)
        .with_format(layers("-1,0"), Side::Keys, KvFormat::Affine8)
        .with_format(3, Side::Values, KvFormat::Float);
    let expected = ["k8v4-s4-f16", "k4v4-w512-f16", "k4v2-s4-f16", "k8v16-s4-f16"];
    assert_eq!(names(&by_side, 4), expected);

    // Other formats get their own defaults, and lose the settings of KIVI's groups.
    let other = ModelCacheConfig::from(cache("k4v4-g64-r64-gflush"))
        .with_format(0, None, KvFormat::Int8)
        .with_format(2, Side::Keys, KvFormat::Int8);
    let expected = ["kint8vint8-r64", "k4v4-g64-r64-gflush-w512", "kint8v4-g64-r64"];
    assert_eq!(names(&other, 3), expected);
    // A residual of 64 has no whole tile.
    let tiles =
        ModelCacheConfig::from(cache("k4v4-g64-r64")).with_format(3, None, KvFormat::Normalized2);
    tiles.validate(model(4)).unwrap();
    assert_eq!(tiles.layer(&model(4), 3).residual_length, 128);
    let of_float = ModelCacheConfig::from(KvCacheConfig::float())
        .with_format(Layers::all(), None, KvFormat::Int8)
        .with_format(0, Side::Values, KvFormat::Affine4);
    assert_eq!(names(&of_float, 3), ["kint8v4", "kint8vint8-w512", "kint8vint8"]);

    let transformed =
        Stores::Format { side: Some(Side::Values), format: KvFormat::Affine2, hadamard: true };
    let transformed =
        ModelCacheConfig::from(cache("k4v4")).with_rule(LayerRule::new(2, transformed));
    assert_eq!(names(&transformed, 3), ["k4v4", "k4v4-w512", "k4v2-hadv"]);

    // Only layer 1 has a sliding window.
    let of_kind =
        |kind, name| LayerRule::new(Layers::all(), Stores::Cache(cache(name))).with_attention(kind);
    let by_kind = ModelCacheConfig::from(cache("k2v2"))
        .with_rule(of_kind(AttentionKind::Global, "k8v8-s4"))
        .with_rule(of_kind(AttentionKind::Sliding, "k4v4"))
        .with_format(0, Side::Keys, KvFormat::Affine4);
    let expected = ["k4v8-s4", "k4v4-w512", "k8v8-s4"];
    assert_eq!(names(&by_kind, 3), expected);
    assert_eq!(by_kind.uniform(), None);
    assert!(by_kind.validate(model(3)).is_ok());
    // No layer gets the caches of both kinds, and a model of one kind has neither.
    let caches: Vec<String> = by_kind.candidates().iter().map(|cache| cache.to_string()).collect();
    assert_eq!(caches, ["k2v2", "k4v2", "k8v8-s4", "k4v8-s4", "k4v4"]);
    // A rule for each of many layers gives few caches, not a power of two.
    let by_layer = (0..64).fold(ModelCacheConfig::from(cache("k2v2")), |policy, layer| {
        policy.with_cache(layer, cache(["k4v4", "k8v8"][layer % 2]))
    });
    assert_eq!(by_layer.candidates().len(), 3);
    let windowed = LayerSpec::new(9, 3, 64).with_sliding_window(Some(512));
    for layer in [LayerSpec::new(9, 3, 64), windowed] {
        let alike = ModelSpec::uniform(1000, 576, 8192, 2, layer);
        let caches: Vec<String> = by_kind.layers(&alike).map(|cache| cache.to_string()).collect();
        let window = layer.sliding_window.map_or("", |_| "-w512");
        assert_eq!(caches, [format!("k4v2{window}"), format!("k2v2{window}")]);
    }
    let text = "k2v2; global layers: k8v8-s4; sliding layers: k4v4; layers 0: keys as 4";
    assert_eq!(by_kind.to_string(), text);
    // Changes to what the rules store keep the layers that they are for.
    let kept = by_kind
        .clone()
        .with_rule(
            LayerRule::new(Layers::all(), Stores::FLOAT).with_attention(AttentionKind::Sliding),
        )
        .with_n_layers(6)
        .unwrap();
    assert_eq!(
        names(&kept.with_formats(KvFormat::Affine4, KvFormat::Affine4), 3),
        ["k4v4", "float-w512", "k4v4"]
    );
    assert_eq!(names(&kept.in_float(), 3), ["float", "float-w512", "float"]);
    assert_eq!(kept.to_string(), format!("{text}; sliding layers: float (layers of 6)"));

    // These rules are written for 6 layers. The layers of a model of 3 have the rules of layers 1,
    // 3 and 5. In a model of 12 layers, each rule is for twice as many.
    let scaled = ModelCacheConfig::from(cache("k2v2"))
        .with_cache(Layers::from(1..4), cache("k4v4"))
        .with_cache(5, cache("k8v8"));
    let of_six = scaled.clone().with_n_layers(6).unwrap();
    assert_eq!(names(&of_six, 3), ["k4v4", "k4v4-w512", "k8v8"]);
    assert_eq!(names(&of_six, 6), names(&scaled, 6));
    let caches: Vec<String> = of_six.of_layers(12).unwrap().iter().map(|c| c.to_string()).collect();
    let [k2, k4, k8] = ["k2v2", "k4v4", "k8v8"];
    assert_eq!(caches, [k2, k2, k4, k4, k4, k4, k4, k4, k2, k2, k8, k8]);
    let of_four =
        scaled.clone().with_n_layers(4).unwrap().validate(model(6)).unwrap_err().to_string();
    assert!(
        of_four.contains("rules[2].layers") && of_four.contains("n_layers = 4 has layers 0 to 3"),
        "{of_four}"
    );
    let error = scaled.with_n_layers(0).unwrap_err().to_string();
    assert!(error.contains("n_layers") && error.contains("1 to 10000"), "{error}");

    // A start keeps the other settings, a later cache overrides it, and layers with a sliding
    // window keep no sinks.
    let started = ModelCacheConfig::from(cache("k4v4-s4-gflush"))
        .with_start(layers("1..4"), 64)
        .with_format(2, Side::Values, KvFormat::Int8)
        .with_start(layers("-1"), 0)
        .with_cache(3, cache("k2v2"));
    let expected =
        ["k4v4-s4-gflush", "k4v4-gflush-w512", "k4vint8-s64-gflush", "k2v2", "k4v4-gflush"];
    assert_eq!(names(&started, 5), expected);
    assert!(started.validate(model(5)).is_ok());
}

/// A start equals the sinks of a short name, in attention and in memory.
#[test]
fn a_start_equals_sinks() {
    let device = device();
    let ids = expected(&tiny("llama-tiny"), &device).ids;
    let [batch, seq] = ids.dims();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let base = || ModelCacheConfig::from(cache("k2v2-g16-r16")).with_capacity(seq);
    let started = base().with_start(1, 5);
    let named = base().with_cache(1, cache("k2v2-g16-r16-s5"));
    let run = |policy: &ModelCacheConfig| {
        let mut held = model.new_cache(policy, batch, &device).unwrap();
        let streamed = model.step(ids.clone(), &mut held).unwrap();
        (streamed, model.forward(ids.clone(), policy).unwrap(), held.memory_bytes().layers)
    };
    let (started, named, without) = (run(&started), run(&named), run(&base()));
    assert_eq!(started.0.to_data(), named.0.to_data());
    assert_eq!(started.1.to_data(), named.1.to_data());
    assert_eq!(started.2, named.2);
    assert!(max_difference(started.1, without.1) > 1e-4, "the first tokens count");
}

proptest! {
    /// Layers parse as they are displayed, and contain what the text means.
    #[test]
    fn layers_parse_as_displayed(
        spans in prop::collection::vec((-6i64..6, -6i64..7, 0..4u8), 1..4)
    ) {
        const N: i64 = 6;
        let mut parts = vec![];
        let mut expected = std::collections::BTreeSet::new();
        let mut fits = true;
        for (a, b, kind) in spans {
            let of = |at: i64| if at < 0 { N + at } else { at };
            let (text, start, end) = match kind {
                0 => (format!("{a}"), of(a), of(a) + 1),
                1 => (format!("{a}.."), of(a), N),
                2 => (format!("..{b}"), 0, of(b)),
                _ => (format!("{a}..{b}"), of(a), of(b)),
            };
            fits &= start < end && end <= N;
            parts.push(text);
            expected.extend(start..end);
        }
        let read = parts.join(",").parse::<Layers>();
        let policy = read.clone().map(|layers| {
            ModelCacheConfig::new([]).with_format(layers, None, KvFormat::Int8)
        });
        let valid = policy.is_ok_and(|policy| policy.validate(model(N as usize)).is_ok());
        prop_assert_eq!(valid, fits, "{:?}", parts);
        if let (true, Ok(layers)) = (fits, read) {
            prop_assert_eq!(&layers.to_string().parse::<Layers>().unwrap(), &layers);
            let found: Vec<i64> = (0..N).filter(|&i| layers.contains(i as usize, 6)).collect();
            prop_assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_policy_that_does_not_fit_the_model_names_the_rule() {
    let base = || ModelCacheConfig::from(cache("k4v4"));
    for (policy, message) in [
        (
            base().with_cache(layers("0..5"), cache("k2v2")),
            "rules[1].layers = 0..5: the model has layers 0 to 3",
        ),
        (base().with_cache(Layers::last(5), cache("k2v2")), "rules[1].layers = -5..: "),
        (
            base().with_cache(layers("3..-1"), cache("k2v2")),
            "rules[1].layers = 3..-1: 3..-1 has no layer in a model of 4",
        ),
        (base().with_cache(Layers::first(0), cache("k2v2")), "rules[1].layers = 0..0: "),
        (base().with_cache(Layers::last(0), cache("k2v2")), "rules[1].layers = -0..: "),
        (
            base().with_cache(Layers::runs([]), cache("k2v2")),
            "rules[1].layers = none: must have at least one layer",
        ),
        (base().with_cache(usize::MAX, cache("k2v2")), "the model has layers 0 to 3"),
        (
            base().with_cache(2, cache("k2v2-g128")),
            "rules[1] = k2v2-g128: gives layer 2 the cache k2v2-g128: ",
        ),
        (
            base().with_cache(1, cache("k4v4-r1024")),
            "rules[1] = k4v4-r1024: gives layer 1 the cache k4v4-r1024: ",
        ),
        (ModelCacheConfig::from(cache("k2v2-g128")), "group_size 128"),
        (base().with_start(4, 64), "rules[1].layers = 4: the model has layers 0 to 3"),
        (
            base().with_start(2, 1 << 21),
            "from token 2097152 on: gives layer 2 the cache k4v4-s2097152: ",
        ),
        // A format does not replace the group size or the residual length of earlier rules.
        (
            ModelCacheConfig::from(cache("k4v4-g8-r8")).with_format(
                2,
                Side::Values,
                KvFormat::Affine2,
            ),
            "rules[1] = values as 2: gives layer 2 the cache k4v2-g8-r8: group_size 8: ",
        ),
        (
            ModelCacheConfig::from(cache("kint8vint8-r5")).with_format(2, None, KvFormat::Affine4),
            "rules[1] = as 4: gives layer 2 the cache k4v4-r5: residual_length 5: ",
        ),
        // Layer 1 has its own sliding window.
        (
            base().with_start(1, 64),
            "rules[1] = layers 1: from token 64 on: all of its layers have their own sliding \
             window and keep no sinks",
        ),
        // Refused for every model, as it applies to no layer that keeps sinks.
        (
            base().with_rule(
                LayerRule::new(0, Stores::Start(64)).with_attention(AttentionKind::Sliding),
            ),
            "rules[1] = sliding layers 0: from token 64 on: all of its layers have",
        ),
    ] {
        let error = policy.validate(model(4)).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error:?} lacks {message:?}");
    }
    base().with_cache(layers("0..4,-4..,..,3"), cache("k2v2")).validate(model(4)).unwrap();
    // A note names layers with their own sliding window among others.
    let some = base().with_start(0..3, 64);
    some.validate(model(4)).unwrap();
    let note = "k4v4; layers 0..3: from token 64 on: 1 of 4 layers (1) have their own sliding \
                window and keep no sinks";
    assert_eq!(some.notes(&model(4)), [note]);
    let none = base().with_start(1, 0);
    none.validate(model(4)).unwrap();
    assert!(none.notes(&model(4)).is_empty());
}

/// A policy that mixes layers, sides and sliding windows gives the same logits streamed and in
/// parallel.
#[test]
fn streaming_with_a_mixed_policy_equals_parallel() {
    let device = device();
    for (name, policy) in [
        (
            "llama-tiny",
            ModelCacheConfig::from(cache("k4v4-g16-r16-s2"))
                .with_format(0, Side::Keys, KvFormat::Int8)
                .with_format(Layers::last(1), Side::Values, KvFormat::Affine8),
        ),
        (
            "gpt-oss-tiny",
            ModelCacheConfig::from(cache("k4v4-g16-r16-gflush"))
                .with_format(layers("1..3"), None, KvFormat::E4m3)
                .with_cache(0, cache("k16vint8-f16"))
                .with_format(Layers::last(1), Side::Values, KvFormat::Affine8),
        ),
        (
            "gemma3-tiny",
            ModelCacheConfig::from(cache("k8v4-g16-r16-hadv"))
                .with_cache(layers("0,-1"), cache("kmxfp4vmxfp4"))
                .with_float_layers([1]),
        ),
    ] {
        let ids = expected(&tiny(name), &device).ids;
        let [batch, seq] = ids.dims();
        let model = load(tiny(name), &device).unwrap().model;
        let policy = policy.with_capacity(seq);
        let parallel = model.forward(ids.clone(), &policy).unwrap();
        let mut held = model.new_cache(&policy, batch, &device).unwrap();
        for (i, (held, cache)) in held.layers().iter().zip(policy.layers(model.spec())).enumerate()
        {
            let layout =
                CacheLayout::new(&cache, model.spec().layers[i].cache_shape(batch)).unwrap();
            assert_eq!(held.memory_bytes(), layout.memory_bytes(), "{name}, layer {i}");
        }
        let steps = (0..seq).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut held).unwrap());
        let steps = Tensor::cat(steps.collect(), 1);
        // Single codes may change in rounding, but the mean difference stays small.
        let mean = |x: Tensor<3>| x.abs().mean().into_scalar::<f32>();
        let difference = mean(steps - parallel.clone());
        assert!(difference < 2e-3, "{name}: mean difference {difference}");
        // Every rule matters: without any rule after the first, the logits differ.
        for left_out in 1..policy.rules().len() {
            let others = policy.rules().iter().enumerate().filter(|(i, _)| *i != left_out);
            let other = ModelCacheConfig::new(others.map(|(_, rule)| rule.clone()));
            let other = model.forward(ids.clone(), other.with_capacity(seq)).unwrap();
            let moved = max_difference(other, parallel.clone());
            assert!(moved > 1e-4, "{name}: rule {left_out} moves logits by {moved}");
        }
    }
}

#[test]
fn presets_are_listed_in_full() {
    assert_eq!(ModelCacheConfig::PRESETS, ["safe", "balanced", "small"]);
    let mut bytes = vec![];
    for name in ModelCacheConfig::PRESETS {
        let preset = ModelCacheConfig::preset(name).unwrap().unwrap();
        assert_eq!((preset.name(), preset.to_string().as_str()), (Some(name), name));
        assert_eq!(name.parse::<ModelCacheConfig>().unwrap(), preset);
        assert_eq!(ModelCacheConfig::find(name).unwrap(), preset);
        let spec = ModelSpec::uniform(1000, 576, 8192, 30, LayerSpec::new(9, 3, 64));
        preset.validate(&spec).unwrap();
        let shown = preset.in_full(&spec).unwrap();
        assert!(shown.starts_with(&format!("{name}: layer")) && !shown.contains('\n'), "{shown}");
        for cache in preset.layers(&spec) {
            assert!(shown.contains(&cache.to_string()), "{shown} lacks {cache}");
        }
        let layout = |(layer, cache): (&LayerSpec, KvCacheConfig)| {
            CacheLayout::new(&cache, layer.cache_shape(1)).unwrap().memory_bytes().total()
        };
        bytes.push(spec.layers.iter().zip(preset.layers(&spec)).map(layout).sum::<usize>());
    }
    assert!(bytes.is_sorted_by(|a, b| a > b), "{bytes:?}");
    // Presets fit models of any number of layers. Of Gemma-3-270M's 18 layers, every sixth is
    // global; the three are at the relative depth of layers 9, 19 and 29 of 30.
    let (global, window) = (LayerSpec::new(4, 1, 256), Some(512));
    let layer = |i| if i % 6 == 5 { global } else { global.with_sliding_window(window) };
    let gemma = ModelSpec::new(1000, 640, 32_768, (0..18).map(layer).collect());
    let (eight, clipped) = ("kint8vint8-f16", "k2v2-g64-r64-s4-gflush-hadv-clip-f16");
    let k3 = "k3v2-g64-r64-s4-gflush-hadv-vc215-f16";
    let [vn2, vn3] = [2, 3].map(|bits| format!("k4vvn{bits}-g128-s4-hadv-f16"));
    for (name, windowed, globals) in [
        ("safe", eight, [eight; 3]),
        ("balanced", "k4v4-r32-gflush-hadv-f16", [&*vn2, &*vn3, &*vn2]),
        ("small", "k4v3-r32-gflush-hadv-f16", [clipped, k3, clipped]),
    ] {
        let preset = ModelCacheConfig::preset(name).unwrap().unwrap();
        (1..40).for_each(|n| preset.validate(model(n)).unwrap());
        preset.validate(&gemma).unwrap();
        let caches: Vec<String> = preset.layers(&gemma).map(|cache| cache.to_string()).collect();
        assert_eq!([&caches[5], &caches[11], &caches[17]], globals, "{name}");
        assert!(preset.notes(&gemma).is_empty());
        for i in (0..18).filter(|i| i % 6 != 5) {
            let mut expected = windowed.to_string();
            if name == "balanced" && i < 2 {
                expected = expected.replace("v4", "v3");
            }
            assert_eq!(caches[i].replace("-w512", ""), expected, "{name}, layer {i}");
        }
    }
    // Qwen2.5-0.5B: no Hadamard transform or tile meets keys with a large bias.
    let biased = LayerSpec::new(14, 2, 64).with_key_bias(true);
    let qwen = ModelSpec::uniform(1000, 896, 32_768, 24, biased);
    let small = ModelCacheConfig::preset("small").unwrap().unwrap();
    for (i, cache) in small.layers(&qwen).enumerate() {
        let expected = if (3..9).contains(&i) { clipped } else { k3 };
        assert_eq!(cache.to_string(), expected, "layer {i}");
    }
    assert!(small.notes(&qwen).is_empty());
    assert!(ModelCacheConfig::preset("Safe").is_none());
    let error = ModelCacheConfig::find("saf").unwrap_err().to_string();
    assert!(error.contains("did you mean safe?") && !error.contains('\n'), "{error}");
    let error = ModelCacheConfig::find("nowhere/policy.toml").unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
}

#[test]
fn queries_of_a_policy() {
    let mixed = ModelCacheConfig::from(cache("k4v2-g64-r64-s4-f16")).with_float_layers([0, 3]);
    assert_eq!(mixed.to_string(), "k4v2-g64-r64-s4-f16 float layers 0,3");
    assert_eq!(
        names(&mixed.in_float(), 4),
        ["float-f16", "float-w512-f16", "float-f16", "float-f16"]
    );
    // Settings of other formats, which KIVI's formats refuse, are reset.
    for (name, four) in
        [("kint8vint8-hadk", "k4v4"), ("kint8vint8-r5", "k4v4"), ("kint8vint8-w64", "k4v4-r64-w64")]
    {
        let four_bits =
            ModelCacheConfig::from(cache(name)).with_formats(KvFormat::Affine4, KvFormat::Affine4);
        assert_eq!(four_bits.to_string(), four, "{name}");
        four_bits.validate(model(1)).unwrap();
    }
    let four = mixed.with_formats(KvFormat::Affine4, KvFormat::Affine4);
    assert_eq!(four.to_string(), "k4v4-g64-r64-s4-f16 float layers 0,3");
    assert!(mixed.is_quantized(&model(4)) && !mixed.is_float(&model(4)));
    let float = ModelCacheConfig::from(cache("k4v4")).with_float_layers([0, 1]);
    assert!(float.is_float(&model(2)) && !float.is_float(&model(3)));
    assert_eq!(
        cache("k4v4").with_capacity(9),
        ModelCacheConfig::from(cache("k4v4").with_capacity(9)).uniform().unwrap()
    );
    assert_eq!(mixed.uniform(), None);
    let several = mixed.with_format(Layers::last(2), Side::Keys, KvFormat::Int8);
    let shown = "k4v2-g64-r64-s4-f16 float layers 0,3; layers -2..: keys as int8";
    assert_eq!(several.to_string(), shown);
    let in_full = "caches by layer: layer 0 float-f16, layer 1 k4v2-g64-r64-s4-f16, \
                   layer 2 kint8v2-g64-r64-s4-f16, layer 3 kint8v16-r64-s4-f16";
    assert_eq!(several.in_full(&model(4)).unwrap(), in_full);
    let started = several.clone().with_start(layers("-2.."), 64);
    assert_eq!(started.to_string(), format!("{shown}; layers -2..: from token 64 on"));
    let two = started.with_formats(KvFormat::Affine2, KvFormat::Affine2);
    let expected = ["float-f16", "k2v2-g64-r64-w512-f16", "k2v2-g64-r64-s64-f16", "float-f16"];
    assert_eq!(names(&two, 4), expected);
    assert_eq!(names(&two.in_float(), 3), ["float-f16", "float-w512-f16", "float-f16"]);
    let called = several.with_name("mine").unwrap();
    assert_eq!(called.to_string(), "mine");
    for name in ["", "k2v2", "two words", "a\nb"] {
        let error = called.clone().with_name(name).unwrap_err().to_string();
        assert!(error.starts_with("name = "), "{error}");
    }
}
