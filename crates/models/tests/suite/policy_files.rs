//! Files of layer policies: written, read, refused, and of earlier versions.
use std::fs;

use kv_models::{
    AttentionKind, Error, LayerRule, Layers, ModelCacheConfig, Stores,
    kv_cubecl::{CacheFloat, Flush, KvCacheConfig, KvFormat, Side},
    load,
};
use proptest::prelude::*;
use serde_json::{Value as Json, json};

use crate::common::{device, tiny};

fn layers(text: &str) -> Layers {
    text.parse().unwrap()
}

fn cache(name: &str) -> KvCacheConfig {
    name.parse().unwrap()
}

proptest! {
    /// A policy is equal after any conversion between files.
    #[test]
    fn files_round_trip(policy in policies()) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["policy.json", "policy.toml"] {
            let path = folder.path().join(name);
            policy.write(&path).unwrap();
            prop_assert_eq!(&ModelCacheConfig::read(&path).unwrap(), &policy, "{}", name);
            prop_assert_eq!(&ModelCacheConfig::find(path.to_str().unwrap()).unwrap(), &policy);
        }
        prop_assert_eq!(&ModelCacheConfig::from_toml(&policy.to_toml()).unwrap(), &policy);
        let json = serde_json::to_value(&policy).unwrap();
        let read: ModelCacheConfig = serde_json::from_value(json.clone()).unwrap();
        prop_assert_eq!(&read, &policy);
        // Converts JSON to TOML.
        let toml = toml::to_string(&json).unwrap();
        prop_assert_eq!(&ModelCacheConfig::from_toml(&toml).unwrap(), &policy);
        prop_assert!(!policy.to_string().contains('\n'));
    }

    /// A changed text is read or refused in one line, without a panic.
    #[test]
    fn mutated_files_are_read_or_refused(
        policy in policies(),
        at in any::<prop::sample::Index>(),
        with in "[ -~\n]{0,3}",
        cut in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("policy.json", serde_json::to_string_pretty(&policy).unwrap()),
            ("policy.toml", policy.to_toml()),
        ] {
            let path = folder.path().join(name);
            let at = at.index(text.len());
            let end = (at + cut).min(text.len());
            fs::write(&path, [&text[..at], &with, &text[end..]].concat()).unwrap();
            if let Err(error) = ModelCacheConfig::read(&path) {
                let message = error.to_string();
                prop_assert!(message.contains(name) && !message.contains('\n'), "{}", message);
            }
        }
    }
}

/// Generates random policies from all fields of their files.
fn policies() -> impl Strategy<Value = ModelCacheConfig> {
    let format = || prop::sample::select(KvFormat::ALL.to_vec());
    let cache = (format(), format(), 0..3usize, 0..200usize, any::<[bool; 4]>(), 0..3usize)
        .prop_map(|(keys, values, group, sinks, [by_group, stagger, hadamard, window], float)| {
            KvCacheConfig::new(keys, values)
                .with_group_size(16 << group)
                .with_sink_tokens(sinks)
                .with_flush(Flush::new(false, by_group))
                .with_stagger(stagger)
                .with_hadamard_values(hadamard)
                .with_sliding_window(window.then_some(777))
                .with_float(CacheFloat::ALL[float])
        });
    let format = (format(), 0..3u8, any::<bool>()).prop_map(|(format, side, hadamard)| {
        let side = [None, Some(Side::Keys), Some(Side::Values)][usize::from(side)];
        Stores::Format { side, format, hadamard: hadamard && format.is_quantized() }
    });
    let start = (0..200_000usize).prop_map(Stores::Start);
    let stores = prop_oneof![cache.prop_map(Stores::Cache), format, start];
    let texts = ["..", "0", "0,29", "3,1", "-1", "..4", "-4..", "2..-2", "7..9,0"];
    let layers = prop::sample::select(texts.to_vec()).prop_map(layers);
    let kinds = [None, Some(AttentionKind::Global), Some(AttentionKind::Sliding)];
    let rule = (layers, prop::sample::select(kinds.to_vec()), any::<Option<bool>>(), stores)
        .prop_map(|(layers, attention, key_bias, stores)| LayerRule {
            layers,
            attention,
            key_bias,
            stores,
        });
    let name = prop_oneof![Just(None), "[a-z][a-z0-9._-]{0,12}".prop_map(Some)];
    let n_layers = prop::option::of(1..100usize);
    (prop::collection::vec(rule, 1..5), name, n_layers, 1..100_000usize).prop_filter_map(
        "the name of a cache",
        |(rules, name, n_layers, capacity)| {
            let mut policy = ModelCacheConfig::new(rules).with_capacity(capacity);
            if let Some(n_layers) = n_layers {
                policy = policy.with_n_layers(n_layers).unwrap();
            }
            match name {
                Some(name) => policy.with_name(&name).ok(),
                None => Some(policy),
            }
        },
    )
}

/// Policies that look like one cache, or like one cache with layers in float, and are not.
#[test]
fn fields_of_rules_are_not_lost() {
    let k4v4 = || LayerRule::new(Layers::all(), Stores::Cache(cache("k4v4")));
    for policy in [
        ModelCacheConfig::new([k4v4()]).with_n_layers(7).unwrap(),
        ModelCacheConfig::new([k4v4().with_attention(AttentionKind::Sliding)]),
        ModelCacheConfig::new([
            k4v4(),
            LayerRule::new(0, Stores::FLOAT).with_attention(AttentionKind::Global),
        ]),
    ] {
        assert_eq!(ModelCacheConfig::from_toml(&policy.to_toml()).unwrap(), policy);
    }
}

/// Rules without a layer are not written, and their text never parses as other layers.
#[test]
fn rules_without_a_layer_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let (ones, [four, two]): ([usize; 0], _) = ([], [4, 2]);
    for (none, rule) in [
        (Layers::last(0), "-0..: -0.. has no layer"),
        (Layers::first(0), "0..0: 0..0 has no layer"),
        (Layers::from(four..two), "4..2: 4..2 has no layer"),
        (Layers::runs([]), "none: must have at least one layer"),
        (ones.into_iter().collect(), "none: must have at least one layer"),
    ] {
        assert!(!none.is_all() && !none.contains(0, 4) && !none.contains(3, 4), "{none}");
        none.to_string().parse::<Layers>().unwrap_err();
        for policy in [
            ModelCacheConfig::from(cache("k4v4")).with_cache(none.clone(), cache("k2v2")),
            ModelCacheConfig::from(cache("k4v4")).with_format(none, None, KvFormat::Float),
        ] {
            for name in ["policy.json", "policy.toml"] {
                let path = folder.path().join(name);
                let error = policy.write(&path).unwrap_err().to_string();
                let named = format!("{name}: rules[1].layers = {rule}");
                assert!(error.contains(&named) && !error.contains('\n'), "{error}");
                assert!(!path.exists());
            }
        }
    }
    let text = ModelCacheConfig::new([]).with_cache(Layers::last(0), cache("k2v2")).to_toml();
    let error = ModelCacheConfig::from_toml(&text).unwrap_err().to_string();
    assert!(error.contains("rules[0].layers = \"-0..\": \"-0\" is not a layer"), "{error}");
}

#[test]
fn file_extensions_ignore_case() {
    let folder = tempfile::tempdir().unwrap();
    let policy = ModelCacheConfig::from(cache("k4v4")).with_cache(1, cache("k2v2"));
    for name in ["POLICY.TOML", "Policy.Json"] {
        let path = folder.path().join(name);
        policy.write(&path).unwrap();
        assert_eq!(ModelCacheConfig::find(path.to_str().unwrap()).unwrap(), policy, "{name}");
    }
    let text = fs::read_to_string(folder.path().join("POLICY.TOML")).unwrap();
    assert_eq!(ModelCacheConfig::from_toml(&text).unwrap(), policy);
}

#[test]
fn wrong_files_name_the_rule_and_its_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.json");
    let fails = |json: &Json, parts: &[&str]| {
        fs::write(&path, json.to_string()).unwrap();
        let message = ModelCacheConfig::read(&path).unwrap_err().to_string();
        assert!(message.contains("policy.json: ") && !message.contains('\n'), "{message}");
        for part in parts {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    };
    let good = json!({"rules": [{"cache": "k4v4"}, {"layers": "0..2", "format": 16}]});
    let with = |rule: Json| json!({"rules": [{"cache": "k4v4"}, rule]});
    for (field, value, rule) in [
        ("layers", json!("4..4"), "4..4 has no layer"),
        ("layers", json!("-2..-4"), "-2..-4 has no layer"),
        ("layers", json!("0..2,"), "\"\" is not a layer: 0 is the first, -1 the last"),
        ("layers", json!("first"), "\"first\" is not a layer"),
        ("layers", json!("-0"), "is not a layer"),
        ("layers", json!("99999999999999999999"), "is not a layer"),
        ("layers", json!(1.5), "\"1.5\" is not a layer"),
        ("layers", json!({}), "must be a layer, a range such as \"0..4\", or a list of these"),
        ("layers", json!([[0]]), "must be a layer, a range such as"),
        ("layers", json!([]), "is not a layer"),
        ("format", json!(5), "expected 2, 3, 4, 8, or 16 for float, or one of \"vn2\""),
        ("format", json!("k4v4"), "expected 2, 3, 4, 8"),
        ("side", json!("key"), "must be keys or values"),
        ("attention", json!(["sliding"]), "expected"),
        ("attention", json!("local"), "expected `global` or `sliding`"),
        ("side", json!(1), "expected a string"),
        ("hadamard", json!(true), "only quantized sides have a Hadamard transform"),
        ("hadamard", json!("yes"), "expected a boolean"),
        ("cache", json!("k4v4"), "a rule can have only one of cache, format and start"),
        ("bits", json!(4), "unknown field"),
        ("start_after", json!(100), "unknown field"),
    ] {
        let mut rule_of = json!({"layers": 0, "format": 16});
        rule_of[field] = value.clone();
        let shown = value.as_str().map_or(value.to_string(), |text| {
            if field == "layers" { value.to_string() } else { text.to_string() }
        });
        let shown = if field == "format" || field == "cache" { value.to_string() } else { shown };
        let named = format!("rules[1].{field} = ");
        fails(&with(rule_of), &[&named, &shown, rule]);
    }
    fails(
        &with(json!({"layers": 0})),
        &["rules[1].cache = missing: ", "a cache, a format or a start"],
    );
    for (field, value, rule) in [
        ("start", json!(-1), "expected usize"),
        ("start", json!("64"), "expected usize"),
        ("start", json!(1.5), "expected usize"),
        ("side", json!("keys"), "start applies to both sides"),
        ("hadamard", json!(true), "only quantized sides have a Hadamard transform"),
        ("format", json!(4), "only one of cache, format and start"),
        ("cache", json!("k4v4"), "only one of cache, format and start"),
        ("end", json!(64), "unknown field"),
    ] {
        let mut rule_of = json!({"layers": 0, "start": 64});
        rule_of[field] = value.clone();
        fails(&with(rule_of), &[&format!("rules[1].{field} = {value}: "), rule]);
    }
    fails(&with(json!({"cache": "k5v5"})), &["rules[1].cache = k5v5: ", "\"5\" in \"k5v5\""]);
    fails(&with(json!({"cache": 4})), &["rules[1].cache = 4: must be the name of a cache"]);
    fails(&with(json!({"cache": {"key_format": 2}})), &["rules[1].cache.value_format = missing: "]);
    fails(&with(json!({"cache": "k4v4", "side": "keys"})), &["rules[1].side = ", "both sides"]);
    fails(
        &with(json!({"cache": "k4v4", "hadamard": true})),
        &["rules[1].hadamard = true", "-hadv"],
    );
    fails(&with(json!("k4v4")), &["rules[1] = \"k4v4\": must be a table"]);
    fails(&json!({"rules": []}), &["rules = []: must have at least one rule"]);
    fails(&json!({"rules": {}}), &["rules = {}: ", "expected a sequence"]);
    fails(&json!({}), &["rules = missing: "]);
    fails(&json!({"name": "x"}), &["rules = missing: "]);
    for (field, value, rule) in [
        ("capacity", json!(-1), "expected usize"),
        ("capacity", json!(0), "must be 1 to 16777216 tokens"),
        ("n_layers", json!(0), "must be 1 to 10000"),
        ("n_layers", json!(10_001), "must be 1 to 10000"),
        ("n_layers", json!(1.5), "expected usize"),
        ("name", json!("a b"), "must be 1 to 40 letters, digits"),
        ("name", json!("k4v4"), "is the name of the cache k4v4"),
        ("name", json!("float"), "is the name of the cache float"),
        ("name", json!(""), "must be 1 to 40"),
        ("group_size", json!(32), "unknown field"),
    ] {
        let mut wrong = good.clone();
        wrong[field] = value;
        fails(&wrong, &[&format!("{field} = "), rule]);
    }
    let text = good.to_string();
    for len in 0..text.len() {
        fs::write(&path, &text[..len]).unwrap();
        let error = ModelCacheConfig::read(&path).unwrap_err();
        assert!(matches!(error, Error::Malformed { format: "json", .. }), "{error}");
    }

    let path = folder.path().join("policy.toml");
    for (text, parts) in [
        ("[[rules]]\ncache = \"k4v4\nlayers = 0", "not a readable toml file"),
        ("[[rules]]\ncache = k4v4", "at line 2"),
        ("[[rules]]\nlayers = \"0..0\"\ncache = \"k4v4\"", "rules[0].layers = \"0..0\""),
        ("[rules]\ncache = \"k4v4\"", "rules = {\"cache\":\"k4v4\"}: "),
        ("capacity = 2024-01-01\n[[rules]]\nformat = 4", "capacity = "),
        ("capacity = 0\n[[rules]]\nformat = 4", "capacity = 0: must be 1 to 16777216 tokens"),
    ] {
        fs::write(&path, text).unwrap();
        let message = ModelCacheConfig::read(&path).unwrap_err().to_string();
        assert!(message.contains("policy.toml: ") && !message.contains('\n'), "{message}");
        assert!(message.contains(parts), "{message:?} lacks {parts:?}");
    }
}

#[test]
fn files_of_earlier_versions_are_read_and_never_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.json");
    let cases = [
        (
            json!({
                "key_bits": 2, "value_bits": "int8", "group_size": 32, "residual_length": 128,
                "flush": "before", "sink_tokens": 4, "capacity": 4096, "float": "f16",
                "sliding": true, "rotate_values": true, "window": 256, "float_layers": [1],
            }),
            "k2vint8-s4-gflush-hadv-w256-f16 float layers 1",
        ),
        (
            json!({"rules": [
                {"cache": "k4v4-slide"},
                {"layers": 2, "side": "values", "format": "int8", "rotate": true},
            ]}),
            "k4v4-gflush; layers 2: values as int8 hadamard",
        ),
    ];
    for (old, shown) in cases {
        fs::write(&path, old.to_string()).unwrap();
        let policy = ModelCacheConfig::read(&path).unwrap();
        assert_eq!(policy.to_string(), shown);
        policy.write(&path).unwrap();
        let written = fs::read_to_string(&path).unwrap();
        for name in ["_bits", "sliding\"", "slide", "rotate", "\"window"] {
            assert!(!written.contains(name), "{written} contains {name}");
        }
        assert_eq!(ModelCacheConfig::read(&path).unwrap(), policy);
    }
    // A field under both of its names is ambiguous.
    let twice = json!({"rules": [{"cache": {"key_bits": 2, "key_format": 4}}]});
    fs::write(&path, twice.to_string()).unwrap();
    let error = ModelCacheConfig::read(&path).unwrap_err().to_string();
    assert!(error.contains("key_bits = 2: is also given as key_format"), "{error}");
}

/// Rules by the bias of keys apply to the families that have one, and survive a file.
#[test]
fn rules_by_the_bias_of_keys() {
    let policy = ModelCacheConfig::from_toml(
        r#"
        [[rules]]
        cache = "k2v2"
        [[rules]]
        key_bias = true
        side = "keys"
        format = 4
        [[rules]]
        layers = "0"
        key_bias = false
        cache = "k8v8"
        "#,
    )
    .unwrap();
    assert_eq!(
        policy.to_string(),
        "k2v2; all with a key bias: keys as 4; layers 0 without a key bias: k8v8"
    );
    assert_eq!(ModelCacheConfig::from_toml(&policy.to_toml()).unwrap(), policy);
    let json = serde_json::to_string(&policy).unwrap();
    assert_eq!(serde_json::from_str::<ModelCacheConfig>(&json).unwrap(), policy);
    for (folder, key_bias) in [
        ("qwen2-tiny", true),
        ("gpt2-tiny", true),
        ("llama-tiny", false),
        ("qwen3-tiny", false),
        ("phi3-tiny", false),
        ("gemma3-tiny", false),
        ("gpt-oss-tiny", true),
    ] {
        let model = load(tiny(folder), &device()).unwrap().model;
        let of_layer = |i| policy.layer(model.spec(), i).with_sliding_window(None).to_string();
        let expected = if key_bias { ["k4v2", "k4v2"] } else { ["k8v8", "k2v2"] };
        assert_eq!([of_layer(0), of_layer(1)], expected, "{folder}");
    }
    // A model without kinds of attention never has the caches of both.
    let caches: Vec<String> = policy.candidates().iter().map(|cache| cache.to_string()).collect();
    assert_eq!(caches, ["k2v2", "k8v8", "k4v2"]);
    let error = ModelCacheConfig::from_toml("[[rules]]\ncache = \"k2v2\"\nkey_bias = 1\n");
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rules[0].key_bias = 1: ") && !error.contains('\n'), "{error}");
}
