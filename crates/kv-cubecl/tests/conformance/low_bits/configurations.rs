//! Names, files and rules of ranges and tiles.

use kv_cubecl::KvCacheConfig;

fn named(name: &str) -> KvCacheConfig {
    name.parse().unwrap()
}

#[test]
fn names_and_files() {
    for (name, canonical) in [
        ("kvn2vvn2-s4", "kvn2vvn2-s4"),
        ("kvn2vvn2-c195-t128-i16", "kvn2vvn2"),
        ("kvn2vvn2-t64-r64-i8-c0", "kvn2vvn2-r64-t64-i8-c0"),
        ("kvn3v2-g64-kc270-hadv", "kvn3v2-g64-hadv-kc270"),
        ("k2vvn2-kclip", "k2vvn2-kclip"),
        ("k2v2-clip", "k2v2-clip"),
        ("k2v2-kc195-vclip", "k2v2-kc195-vclip"),
        ("kvn2vvn2-s4-stagger", "kvn2vvn2-s4-gflush-stagger"),
    ] {
        let config = named(name);
        assert_eq!(config.to_string(), canonical, "{name}");
        let file = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<KvCacheConfig>(&file).unwrap(), config, "{file}");
    }
    let file = serde_json::to_string(&named("kvn2v3-r64-t64-i8-kc180-vclip")).unwrap();
    let fields = r#""tile":{"tokens":64,"iterations":8},"key_range":"c180","value_range":"clip""#;
    assert!(file.contains(fields), "{file}");
    let wrong = file.replace("c180", "180");
    let error = serde_json::from_str::<KvCacheConfig>(&wrong).unwrap_err().to_string();
    assert!(error.contains("range \"180\" is unknown: must be c0, clip, or c"), "{error}");
}

#[test]
fn bad_names_say_which_part() {
    for (name, part) in [
        ("kvn5vvn2", "\"\""),
        ("kvn2vvn5", "\"\""),
        ("kvn2v5", "\"\""),
        ("k2v2-c", "\"c\""),
        ("k2v2-c1.95", "\"c1.95\""),
        ("k2v2-c99999", "\"c99999\""),
        ("kvn2vvn2-tx", "\"tx\""),
    ] {
        let error = name.parse::<KvCacheConfig>().expect_err(name).to_string();
        assert!(error.contains(part), "{name:?}: {error}");
    }
}

#[test]
fn tiles_and_ranges_that_do_not_fit() {
    for (name, head_dim, expected) in [
        ("kvn2vvn2-t32", 64, "tile.tokens 32: must be 64 or 128"),
        ("kvn2vvn2-i99", 64, "tile.iterations 99: must be at most 32"),
        (
            "kvn2vvn2-r64",
            64,
            "residual_length 64: tile.tokens 128 does not divide it; try -gflush or -r128",
        ),
        ("kvn2vvn2", 96, "head_dim 96: is not a power of two, which values as vn2 need"),
        ("k16vvn4", 512, "head_dim 512: is above 256, which values as vn4 need"),
        ("kvn3vvn3", 16, "head_dim 16: must be a multiple of 32: the codes in a word of keys"),
        ("kvn2vvn2-r127-gflush", 64, "residual_length 127: must be at least tile.tokens 128"),
        ("k2v2-stagger", 64, "stagger true: needs keys or values in tiles"),
        ("k4vvn2-g48-r384", 64, "group_size 48: must divide the tiles of values, 128 tokens"),
    ] {
        let error = named(name).validate(head_dim).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{name}: {error}");
    }
    for (name, head_dim) in [
        ("kvn2vvn2", 64),
        ("kvn2vvn2-r150-stagger", 64),
        ("kvn4v16-t64-r192-gflush", 256),
        ("k2vvn3-g16-t64-r64-clip", 32),
    ] {
        assert_eq!(named(name).validate(head_dim), Ok(()), "{name}");
    }
}

#[test]
fn layers_are_staggered_within_a_tile() {
    let config = named("kvn2vvn2-s4-stagger");
    let residuals = (0..4).map(|layer| config.in_layer(layer, 4).residual_length);
    assert_eq!(residuals.collect::<Vec<_>>(), [128, 160, 192, 224]);
    assert_eq!(config.in_layer(1, 4).to_string(), "kvn2vvn2-r160-s4-gflush");
    // No layer keeps more than its window.
    let windowed = config.with_sliding_window(Some(200));
    assert_eq!(windowed.in_layer(3, 4).residual_length, 200);
    assert_eq!(named("kvn2vvn2-gflush").in_layer(3, 4), named("kvn2vvn2-gflush"));
    let huge = named("kvn2vvn2-stagger-t18446744073709551615-r18446744073709551615");
    assert_eq!(huge.in_layer(3, 4).residual_length, usize::MAX);
}
