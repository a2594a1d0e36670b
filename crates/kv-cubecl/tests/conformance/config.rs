//! Configurations: names, rules, and a parser that never panics. No device is needed.

use kv_cubecl::{
    CacheFloat, CacheShape, Error, Flush, KvCacheConfig, KvFormat, Sides, layout::CacheLayout,
};
use proptest::prelude::*;

use crate::common::check_properties;

pub(crate) fn bits() -> impl Strategy<Value = KvFormat> {
    prop::sample::select(vec![
        KvFormat::Affine2,
        KvFormat::Affine4,
        KvFormat::Affine8,
        KvFormat::Float,
    ])
}

fn configs() -> impl Strategy<Value = KvCacheConfig> {
    let sizes = (0..200usize, 0..1000usize, 0..50usize);
    let flags = (any::<bool>(), any::<bool>(), any::<(bool, bool)>());
    (bits(), bits(), sizes, flags).prop_map(
        |(
            keys,
            values,
            (group_size, residual_length, sinks),
            (after, half, (by_group, hadamard)),
        )| {
            KvCacheConfig::new(keys, values)
                .with_group_size(group_size)
                .with_residual_length(residual_length)
                .with_sink_tokens(sinks)
                .with_hadamard_values(hadamard)
                .with_flush(Flush::new(after, by_group))
                .with_float(if half { CacheFloat::F16 } else { CacheFloat::F32 })
        },
    )
}

#[test]
fn names_round_trip() {
    check_properties(2000, configs(), |config| {
        let name = config.to_string();
        let parsed: KvCacheConfig = name.parse().unwrap();
        assert_eq!(parsed.to_string(), name);
        // A float cache has no groups and no window, so its name leaves them out.
        match config.is_quantized() {
            true => assert_eq!(parsed, config),
            false => assert_eq!(parsed, KvCacheConfig::float().with_float(config.float)),
        }
    });
}

#[test]
fn names_by_hand() {
    for (name, canonical) in [
        ("float", "float"),
        ("float-f16", "float-f16"),
        ("k16v16", "float"),
        ("k4v4", "k4v4"),
        ("k2v2-g32-r128-s0-before-f32", "k2v2"),
        ("k4v2-g64-r32-s4", "k4v2-g64-r32-s4"),
        ("k2v2-after", "k2v2-after"),
        ("k2v2-f16-after-s1", "k2v2-s1-after-f16"),
        ("k2v2-gflush-s4-after", "k2v2-s4-after-gflush"),
        ("k2v2-hadv-gflush-f16", "k2v2-gflush-hadv-f16"),
        ("k2v2-w1024-s4-f16", "k2v2-s4-w1024-f16"),
        ("k2v2-slide", "k2v2-gflush"),
        ("k2v2-slide-after", "k2v2-after-gflush"),
        ("kint8vint8-hadamard_keys-hadamard_values", "kint8vint8-hadv-hadk"),
        ("float-w9", "float-w9"),
        ("float-w9-s4", "float-s4-w9"),
        ("k16v2-g16", "k16v2-g16"),
        ("kint8vint8", "kint8vint8"),
        ("kint8vint8-r0-g32", "kint8vint8"),
        ("k16vint8-r64-after", "k16vint8-r64-after"),
        ("ke4m3ve4m3-hadk-hadv", "ke4m3ve4m3-hadv-hadk"),
        ("ke5m2v4-r128", "ke5m2v4"),
        ("ke4m3bve2m1b-w100-s4", "ke4m3bve2m1b-s4-w100"),
        ("kmxfp4v16-bf16", "kmxfp4v16-bf16"),
    ] {
        assert_eq!(name.parse::<KvCacheConfig>().unwrap().to_string(), canonical, "{name}");
    }
}

#[test]
fn bad_names_say_which_part() {
    for (name, part) in [
        ("", "\"\""),
        ("kivi", "\"kivi\""),
        ("k5v2", "5"),
        ("k2v5", "5"),
        ("k2v258", "258"),
        ("k2", "\"k2\""),
        ("k2v", "\"k2v\""),
        ("k-2v2", "\"k\""),
        ("K2V2", "\"K2V2\""),
        ("k2v2-", "\"\""),
        ("k2v2-g", "\"g\""),
        ("k2v2-gx", "\"gx\""),
        ("k2v2-g+32", "\"g+32\""),
        ("k2v2-r99999999999999999999999", "\"r99999999999999999999999\""),
        ("k2v2-s1.5", "\"s1.5\""),
        ("k2v2-q4", "\"q4\""),
        ("k2v2-after-before", "\"before\""),
        ("k2v2-g32-g64", "\"g64\""),
        ("k2v2-f16-f16", "\"f16\""),
        ("k2v2 -g32", "\"k2v2 \""),
        ("k2v2-g３２", "\"g３２\""),
        ("kint7vint8", "\"int7\""),
        ("kint8", "\"kint8\""),
        ("kint8vint8-hadk-hadk", "\"hadk\""),
    ] {
        let error = name.parse::<KvCacheConfig>().expect_err(name);
        let Error::InvalidCacheName { text, why, .. } = &error else { panic!("{name}: {error:?}") };
        assert_eq!(text, name);
        assert!(why.contains(part), "{name:?}: {why}");
        assert!(error.to_string().starts_with(&format!("cache {name:?}: ")), "{error}");
    }
}

#[test]
fn the_parser_survives_mutations() {
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<char>(), 0..6u8), 1..6);
    let alphabet = prop::sample::select("kvgrsfbatleo0123456789-. é".chars().collect::<Vec<_>>());
    let edits = (edits, prop::collection::vec(alphabet, 6));
    check_properties(5000, (configs(), edits), |(config, (edits, letters))| {
        let mut name: Vec<char> = config.to_string().chars().collect();
        for ((place, any, kind), letter) in edits.into_iter().zip(letters) {
            let at = place.index(name.len() + 1);
            match kind {
                0 => name.insert(at, any),
                1 | 2 => name.insert(at, letter),
                3 if at < name.len() => name[at] = letter,
                4 if at < name.len() => drop(name.remove(at)),
                _ => name.truncate(at),
            }
        }
        let name: String = name.into_iter().collect();
        // Either the error quotes the name, or the name means a configuration that has a canonical
        // name.
        match name.parse::<KvCacheConfig>() {
            Ok(parsed) => {
                let canonical = parsed.to_string();
                assert_eq!(canonical.parse::<KvCacheConfig>().unwrap().to_string(), canonical);
                let _ = parsed.validate(64);
            }
            Err(Error::InvalidCacheName { text, .. }) => assert_eq!(text, name),
            Err(error) => panic!("{name:?}: {error:?}"),
        }
    });
}

#[test]
fn every_rule_names_field_value_and_itself() {
    let kivi = KvCacheConfig::new(KvFormat::Affine2, KvFormat::Affine2);
    let k4v16 = KvCacheConfig::new(KvFormat::Affine4, KvFormat::Float);
    let k16v4 = KvCacheConfig::new(KvFormat::Float, KvFormat::Affine4);
    let k3v16 = KvCacheConfig::new(KvFormat::Affine3, KvFormat::Float);
    for (config, head_dim, field, value, rule) in [
        (kivi, 0, "head_dim", "0", "at least 1"),
        (kivi.with_capacity(0), 64, "capacity", "0", "at least 1"),
        (kivi.with_capacity(1 << 25), 64, "capacity", "33554432", "at most 16777216"),
        (KvCacheConfig::float().with_capacity(0), 64, "capacity", "0", "at least 1"),
        (kivi.with_group_size(0), 64, "group_size", "0", "at least 1"),
        (kivi.with_residual_length(0), 64, "residual_length", "0", "at least 1"),
        (kivi.with_group_size(8), 64, "group_size", "8", "16 codes"),
        (kivi.with_group_size(24), 96, "group_size", "24", "16 codes"),
        (k4v16.with_group_size(12), 64, "group_size", "12", "8 codes"),
        (k3v16.with_group_size(16), 64, "group_size", "16", "32 codes"),
        (k3v16.with_group_size(48), 64, "group_size", "48", "32 codes"),
        (k16v4.with_group_size(12), 64, "group_size", "12", "8 codes"),
        (kivi.with_residual_length(48), 64, "residual_length", "48", "32"),
        (k4v16.with_residual_length(20), 64, "residual_length", "20", "32"),
        (kivi.with_group_size(64), 96, "group_size", "64", "head_dim 96"),
        (kivi, 80, "group_size", "32", "head_dim 80"),
        (k16v4, 80, "group_size", "32", "head_dim 80"),
        (kivi.with_residual_length(1 << 21), 64, "residual_length", "2097152", "at most"),
        (kivi.with_sink_tokens(1 << 21), 64, "sink_tokens", "2097152", "at most"),
        (KvCacheConfig::float().with_group_size(0), 64, "group_size", "0", "at least 1"),
        (KvCacheConfig::float().with_residual_length(0), 64, "residual_length", "0", "at least 1"),
        (
            KvCacheConfig::float().with_group_size(1 << 40),
            64,
            "group_size",
            "1099511627776",
            "most",
        ),
        (KvCacheConfig::float().with_sink_tokens(1 << 21), 64, "sink_tokens", "2097152", "at most"),
    ] {
        let error = config.validate(head_dim).expect_err(field);
        let Error::InvalidConfig { field: f, value: v, rule: r } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((*f, v.as_str()), (field, value), "{error}");
        assert!(r.contains(rule), "{error}: expected {rule:?}");
        assert_eq!(error.to_string(), format!("{f} {v}: {r}"));
    }
    for (name, head_dim, expected) in [
        ("k4v4-hadk", 64, "hadamard_keys true: keys as 4 are quantized per channel"),
        ("kint8vint8-hadk", 96, "hadamard_keys true: head_dim 96 of keys is not a power of two"),
        ("kint8vint8-hadk", 512, "hadamard_keys true: head_dim 512 of keys is above 256"),
        ("k16v4-hadv", 512, "hadamard_values true: head_dim 512 of values is above 256"),
        ("kint8vint8-gflush", 64, "flush group: keys as int8 leave the residual one by one"),
        (
            "kint8ve4m3-g64",
            64,
            "group_size 64: must stay 32, as kint8ve4m3 has groups of fixed size",
        ),
        ("kint8v4-r0", 64, "residual_length 0: must be at least 1"),
        (
            "kint8v16",
            66,
            "head_dim 66: must be a multiple of 4: the codes in a word of keys as int8",
        ),
        (
            "k16vmxfp4",
            80,
            "head_dim 80: must be a multiple of 32: the channels of a block of values",
        ),
        ("kint8vint8-r16-w8", 64, "sliding_window 8: must be at least residual_length 16; try -r8"),
    ] {
        let config: KvCacheConfig = name.parse().unwrap();
        let error = config.validate(head_dim).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{name}: {error}");
    }
    let error = kivi.with_hadamard_values(true).validate(96).unwrap_err().to_string();
    assert_eq!(error, "hadamard_values true: head_dim 96 of values is not a power of two");
    let shape = CacheShape::new(1, 1, 64);
    for (shape, field) in [
        (CacheShape::new(0, 1, 64), "batch"),
        (CacheShape::new(1, 0, 64), "n_kv_heads"),
        (CacheShape::new(1, 1, 0), "head_dim"),
        (CacheShape::new(1, 1, Sides { keys: 64, values: 0 }), "head_dim"),
    ] {
        let error = CacheLayout::new(&kivi, shape).expect_err(field);
        assert!(matches!(error, Error::InvalidConfig { field: f, .. } if f == field), "{error}");
    }
    let large = CacheShape::new(1 << 12, 64, 128);
    let error = CacheLayout::new(&KvCacheConfig::float(), large).unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { field: "capacity", .. }), "{error}");
    // However large the numbers are, nothing may overflow before the error is returned. Here batch
    // * n_kv_heads is 2^64.
    let wraps = CacheShape::new(1 << 58, 64, 64);
    assert!(CacheLayout::new(&kivi, wraps).is_err(), "{wraps:?}");
    for huge in [usize::MAX, usize::MAX / 2, 1 << 40] {
        for config in [
            kivi.with_capacity(huge),
            kivi.with_group_size(huge),
            kivi.with_residual_length(huge),
            kivi.with_sink_tokens(huge),
        ] {
            assert!(CacheLayout::new(&config, shape).is_err(), "{config:?}");
        }
        let shape = CacheShape::new(huge, 1, 64);
        assert!(CacheLayout::new(&kivi, shape).is_err(), "batch {huge}");
        let shape = CacheShape::new(1, huge, 64);
        assert!(CacheLayout::new(&kivi, shape).is_err(), "n_kv_heads {huge}");
        let config = KvCacheConfig::float().with_capacity(100);
        for head_dim in [huge.into(), Sides { keys: 64, values: huge }] {
            let shape = CacheShape::new(1, 1, head_dim);
            assert!(CacheLayout::new(&config, shape).is_err(), "{head_dim:?}");
        }
    }
}

#[test]
fn valid_configurations_are_accepted() {
    for (name, head_dim) in [
        ("k2v2", 64),
        ("k2v2-g16", 80),
        ("k4v4-g8-r8", 72),
        ("k8v8-g4-r4", 4),
        ("k2v16", 80),      // only values need groups of channels
        ("k16v2-r100", 64), // only keys need groups of tokens
        ("float-g5-r7", 33),
        ("kint8vint8", 36),
        ("kint8vint8-r5-s3-w7", 64),
        ("k16vint8", 64),
        ("ke4m3bvmxfp4", 96),
        ("kint8vint8-hadk-hadv", 64),
        ("kint8vint8-hadk-hadv", 256),
        ("k16v4-hadk", 512), // what is in float is not hadamard_values
    ] {
        let config: KvCacheConfig = name.parse().unwrap();
        assert_eq!(config.validate(head_dim), Ok(()), "{name}");
    }
}

/// Other serialization formats read a configuration written by hand.
#[test]
fn other_formats_take_what_they_need() {
    let named = |name: &str| name.parse::<KvCacheConfig>().unwrap();
    for (before, formats, after) in [
        ("kint8vint8-hadk", "k4v4", "k4v4"),
        ("kint8vint8-hadk-hadv", "k4v4", "k4v4-hadv"),
        ("kint8vint8-hadk", "ke4m3v4", "ke4m3v4-hadk"),
        ("kint8vint8-r5", "k4v4", "k4v4"),
        ("kint8vint8-r5", "k16v4", "k16v4-r5"),
        ("kint8vint8-r64", "k2v2", "k2v2-r64"),
        ("kint8vint8-w64", "k4v4", "k4v4-r64-w64"),
        ("kint8vint8-w100", "k4v4", "k4v4-r96-w100"),
        ("kint8vint8-w100", "k16v4", "k16v4-r100-w100"),
        ("float-w64", "k4v4", "k4v4-r64-w64"),
        ("k4v4-gflush", "kint8v4", "kint8v4"),
        ("k4v4-gflush", "k16v4", "k16v4-gflush"),
        ("k4v4-g64-r64-gflush", "kint8vint8", "kint8vint8-r64"),
        ("k8v8-g4-r4", "k2v8", "k2v8"),
        ("k8v8-g4-r4", "k8v16", "k8v16-g4-r4"),
        ("k16v8-g48-r100", "k8v8", "k8v8-g48-r96"),
        ("k16v8-g256", "k8v8", "k8v8-g256-r256"),
        // What was wrong is not put right in silence.
        ("k4v4-hadk", "k4v2", "k4v2-hadk"),
        ("k4v4-g64-r100", "k4v2", "k4v2-g64-r100"),
        ("k4v4-g0", "k2v2", "k2v2-g0"),
    ] {
        let of = named(formats);
        let changed = named(before).with_formats(of.keys, of.values);
        assert_eq!(changed.to_string(), after, "{before} as {formats}");
    }
    let four = named("kint8vint8-r5-hadk").with_formats(KvFormat::Affine4, KvFormat::Affine4);
    assert_eq!((four.to_string().as_str(), four.validate(64)), ("k4v4", Ok(())));
}

/// A configuration that is valid stays so in all other formats.
#[test]
fn other_formats_keep_what_is_valid() {
    let format = || prop::sample::select(KvFormat::ALL.to_vec());
    let sizes = (
        prop::sample::select(vec![4usize, 8, 16, 32, 64]),
        prop::sample::select(vec![0usize, 5, 16, 32, 64, 100, 128]),
        prop::sample::select(vec![None, Some(64usize), Some(100), Some(300)]),
    );
    let formats = (format(), format(), format(), format());
    let cases = (formats, sizes, any::<[bool; 4]>());
    let valid = core::cell::Cell::new(0);
    check_properties(5000, cases, |((k, v, keys, values), (group, residual, window), flags)| {
        let [by_group, stagger, hadamard_keys, hadamard_values] = flags;
        let config = KvCacheConfig::new(k, v)
            .with_group_size(group)
            .with_residual_length(residual)
            .with_sliding_window(window)
            .with_flush(Flush::new(false, by_group))
            .with_stagger(stagger)
            .with_hadamard_keys(hadamard_keys)
            .with_hadamard_values(hadamard_values);
        if config.validate(64).is_ok() {
            valid.set(valid.get() + 1);
            let changed = config.with_formats(keys, values);
            assert_eq!(changed.validate(64), Ok(()), "{config} as k{keys}v{values}: {changed}");
            assert_eq!(config.with_formats(k, v), config, "its own formats change nothing");
        }
    });
    assert!(valid.get() > 100, "{} of the configurations were valid", valid.get());
}

/// Files of earlier versions are read, and written with today's names.
#[test]
fn old_field_names_are_read_and_never_written() {
    let old = r#"{"key_bits":4,"value_bits":"int8","group_size":32,"residual_length":128,
        "flush":"after","sink_tokens":4,"capacity":9,"float":"f16","sliding":true,
        "rotate_values":true,"rotate_keys":true,"window":200}"#;
    let config: KvCacheConfig = serde_json::from_str(old).unwrap();
    let expected = KvCacheConfig::new(KvFormat::Affine4, KvFormat::Int8)
        .with_sink_tokens(4)
        .with_capacity(9)
        .with_float(CacheFloat::F16)
        .with_flush(Flush::GroupAfterAttention)
        .with_hadamard_values(true)
        .with_hadamard_keys(true)
        .with_sliding_window(Some(200));
    assert_eq!(config, expected);
    let new = concat!(
        r#"{"key_format":4,"value_format":"int8","group_size":32,"residual_length":128,"#,
        r#""flush":"group-after","sink_tokens":4,"capacity":9,"float":"f16","#,
        r#""hadamard_values":true,"hadamard_keys":true,"sliding_window":200}"#
    );
    assert_eq!(serde_json::to_string(&config).unwrap(), new);
    assert_eq!(serde_json::from_str::<KvCacheConfig>(new).unwrap(), config);
    for flush in ["before", "group"] {
        let text = old.replace("after", flush).replace("\"rotate_keys\":true,", "");
        let config: KvCacheConfig = serde_json::from_str(&text).unwrap();
        assert_eq!(config.flush, Flush::GroupBeforeAttention, "{flush}");
    }
    let twice = old.replace("\"window\"", "\"key_format\":4,\"window\"");
    let error = serde_json::from_str::<KvCacheConfig>(&twice).unwrap_err().to_string();
    assert!(error.contains("duplicate field"), "{error}");
}

#[test]
fn sliding_windows_that_are_too_short_are_refused() {
    for (name, expected) in [
        ("k2v2-w127", "sliding_window 127: must be at least residual_length 128; try -r96"),
        ("k4v4-w24", "sliding_window 24: must be at least residual_length 128; try -g16-r16"),
        ("k3v3-w24", "sliding_window 24: must be at least residual_length 128; try kint8vint8"),
        ("kint8v4-w24", "sliding_window 24: must be at least residual_length 128; try -r24"),
        ("float-w0", "sliding_window 0: must be 1 to 16777216 tokens"),
        ("float-s5-w4", "sink_tokens 5: must be at most sliding_window 4"),
    ] {
        let config: KvCacheConfig = name.parse().unwrap();
        let error = config.validate(64).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Formats of a number of bits are numbers in files, as ever, and others names.
#[test]
fn formats_in_files() {
    let json = |name: &str| serde_json::to_string(&name.parse::<KvCacheConfig>().unwrap()).unwrap();
    let old = concat!(
        r#"{"key_format":4,"value_format":16,"group_size":32,"residual_length":128,"#,
        r#""flush":"before","sink_tokens":0,"capacity":4096,"float":"f32"}"#
    );
    assert_eq!(json("k4v16"), old);
    let new = json("kint8vmxfp4-hadk");
    assert!(new.starts_with(r#"{"key_format":"int8","value_format":"mxfp4","#), "{new}");
    let read = |text: &str| serde_json::from_str::<KvCacheConfig>(text);
    for (name, text) in [("k4v16", old), ("kint8vmxfp4-hadk", &new)] {
        assert_eq!(read(text).unwrap(), name.parse().unwrap());
    }
    for wrong in ["5", "\"4\"", "\"int7\"", "null"] {
        let error = read(&old.replace(":4,\"v", &format!(":{wrong},\"v"))).unwrap_err().to_string();
        assert!(
            error.contains("expected 2, 3, 4, 8, or 16 for float, or one of \"vn2\""),
            "{error}"
        );
    }
}

/// A configuration without a sliding window is written without the field, as in earlier versions.
#[test]
fn sliding_windows_are_optional_in_files() {
    let config: KvCacheConfig = "k2v2-s4".parse().unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert!(!text.contains("window"), "{text}");
    let with_sliding_window = config.with_sliding_window(Some(512));
    let text = serde_json::to_string(&with_sliding_window).unwrap();
    assert_eq!(serde_json::from_str::<KvCacheConfig>(&text).unwrap(), with_sliding_window);
}
