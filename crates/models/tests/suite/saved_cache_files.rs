//! Damaged and contradictory files are refused, and no partial file is left.

use std::{collections::BTreeMap, fs, path::Path};

use kv_models::{SavedCache, load};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use serde_json::{Value, json};

use crate::common::{
    assert_contains, device,
    saved::{Saved, config, pass},
    tiny,
};

/// Every changed byte and every truncation is detected.
#[test]
fn damaged_files_are_refused() {
    let saved = Saved::new("llama-tiny");
    let whole = fs::read(saved.path()).unwrap();
    let damaged = saved.scratch.path().join("damaged.safetensors");
    let refused = |bytes: &[u8], what: &str| {
        fs::write(&damaged, bytes).unwrap();
        let error = SavedCache::open(&damaged).map(|_| ()).expect_err(what).to_string();
        assert!(error.contains("damaged.safetensors") && !error.contains('\n'), "{what}: {error}");
    };
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let data = (0..600).map(|_| rng.random_range(header..whole.len())).collect::<Vec<_>>();
    let last = whole.len() - 64..whole.len();
    for at in (0..header).step_by(3).chain(data).chain(last) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << rng.random_range(0..8);
        refused(&bytes, &format!("byte {at} changed"));
    }
    let ends = (0..header + 64).step_by(7).chain((header..whole.len()).step_by(997));
    for end in ends.chain([whole.len() - 1]) {
        refused(&whole[..end], &format!("cut off at {end}"));
    }
    refused(&[&whole[..], &[0]].concat(), "a byte more");
    // Other files.
    let weights = tiny("llama-tiny").join("model.safetensors");
    let error = SavedCache::open(&weights).unwrap_err().to_string();
    assert_contains(&error, &["saved cache", "kv_cache"]);
    assert!(SavedCache::open(saved.scratch.path()).is_err());
    let error = SavedCache::open(saved.scratch.path().join("none")).unwrap_err().to_string();
    assert_contains(&error, &["none: not found"]);
}

/// Writes a safetensors file with valid checksums, to reach the checks after them.
fn forge(path: &Path, change: impl FnOnce(&mut Value, &mut Vec<Named>)) {
    let bytes = fs::read(path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let metadata = header["__metadata__"]["kv_cache"].as_str().unwrap();
    let mut said: Value = serde_json::from_str(metadata).unwrap();
    let fields = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let mut tensors: Vec<Named> = fields
        .map(|(name, info)| {
            let [start, end] = [0, 1].map(|i| info["data_offsets"][i].as_u64().unwrap() as usize);
            let data = bytes[8 + n + start..8 + n + end].to_vec();
            (name.clone(), info["dtype"].clone(), info["shape"].clone(), data)
        })
        .collect();
    tensors.retain(|(name, ..)| name != "checksums");
    change(&mut said, &mut tensors);
    header["__metadata__"]["kv_cache"] = said.to_string().into();
    let kept = header["__metadata__"].clone();
    let words = 4 * (tensors.len() + 1);
    tensors.push(("checksums".into(), json!("U32"), json!([words / 4]), vec![0; words]));
    let (mut at, mut header, mut data) = (0, BTreeMap::new(), vec![]);
    for (name, dtype, shape, bytes) in &tensors {
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes.len()]});
        header.insert(name.clone(), info);
        at += bytes.len();
        data.extend_from_slice(bytes);
    }
    header.insert("__metadata__".into(), kept);
    let header = serde_json::to_vec(&header).unwrap();
    let sums: BTreeMap<_, _> = tensors
        .iter()
        .filter(|(name, ..)| name != "checksums")
        .map(|(name, .., bytes)| (name, crc32fast::hash(bytes)))
        .collect();
    let sums = [crc32fast::hash(&header)].into_iter().chain(sums.into_values());
    let end = data.len();
    let sums: Vec<u8> = sums.flat_map(u32::to_le_bytes).collect();
    data.splice(end - words.., sums);
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(path, file).unwrap();
}

/// The name, type, shape and bytes of a tensor.
type Named = (String, Value, Value, Vec<u8>);

#[test]
fn files_that_contradict_themselves_are_refused() {
    let on = device();
    let forged = |change: &dyn Fn(&mut Value, &mut Vec<Named>)| {
        let saved = Saved::new("llama-tiny");
        forge(&saved.path(), |said, tensors| change(said, tensors));
        let opened = SavedCache::open(saved.path())?;
        opened.restore(&saved.model, saved.config, &on)
    };
    assert!(forged(&|_, _| ()).is_ok(), "an unchanged forgery is accepted");
    let first_version = forged(&|said, _| {
        said["version"] = json!(1);
        for field in ["kept", "config"] {
            drop(said["model"].as_object_mut().unwrap().remove(field).unwrap());
        }
    });
    assert!(first_version.is_ok(), "{first_version:?}");
    fn of<'a>(name: &str, tensors: &'a mut [Named]) -> &'a mut Named {
        tensors.iter_mut().find(|it| it.0 == name).unwrap()
    }
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Value, &mut Vec<Named>));
    let changes: &[Change<'_>] = &[
        ("version", &|said, _| said["version"] = json!(5)),
        ("checkpoints at [31]", &|said, _| said["checkpoints"] = json!([31])),
        ("checkpoints at [9, 9]", &|said, _| said["checkpoints"] = json!([9, 9])),
        ("do not match", &|said, _| said["checkpoints"] = json!([9])),
        ("unknown field", &|said, _| said["more"] = json!(1)),
        ("missing field", &|said, _| drop(said.as_object_mut().unwrap().remove("ropes"))),
        ("sequences of", &|said, _| said["lens"] = json!([29])),
        ("sequences of", &|said, _| said["lens"] = json!([])),
        ("sequences of", &|said, _| said["lens"] = json!([u64::MAX, 31])),
        ("layer 0", &|said, _| {
            said["lens"] = json!([15, 15]);
            let layers = said["layers"].as_array_mut().unwrap();
            layers.iter_mut().for_each(|layer| layer["cache"]["capacity"] = json!(15));
        }),
        ("capacity 31 for 30 saved tokens", &|said, _| {
            said["layers"][0]["cache"]["capacity"] = json!(31)
        }),
        ("do not match", &|said, _| {
            let layer = said["layers"][0].clone();
            said["layers"].as_array_mut().unwrap().push(layer);
        }),
        ("number of layers", &|said, tensors| {
            let layers = said["layers"].as_array_mut().unwrap();
            layers.pop();
            let n = layers.len();
            tensors.retain(|it| !it.0.starts_with(&format!("layers.{n}.")));
        }),
        ("do not match", &|_, tensors| tensors.retain(|it| it.0 != "layers.0.keys")),
        ("not a list of U32", &|_, tensors| {
            of("layers.0.keys", tensors).1 = json!("F32");
        }),
        ("not a list of U32", &|_, tensors| {
            of("tokens", tensors).2 = json!([30, 1]);
        }),
        ("layer 0", &|_, tensors| {
            let (.., shape, bytes) = of("layers.0.values", tensors);
            bytes.truncate(bytes.len() - 4);
            *shape = json!([bytes.len() / 4]);
        }),
        ("layer 0", &|_, tensors| {
            let (_, dtype, shape, _) = of("layers.0.floats", tensors);
            *dtype = json!("F16");
            shape[3] = json!(2 * shape[3].as_u64().unwrap());
        }),
        ("shape", &|_, tensors| {
            let (.., shape, bytes) = of("layers.0.floats", tensors);
            *shape = json!([bytes.len() / 4]);
        }),
        ("token 4000000000", &|_, tensors| {
            of("tokens", tensors).3[8..12].copy_from_slice(&4_000_000_000u32.to_le_bytes());
        }),
    ];
    for (why, change) in changes {
        let error = forged(*change).expect_err(why).to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{why}: {error}");
        assert!(error.contains("prefix.safetensors"), "{why}: {error}");
    }
}

/// A recurrent state, latent rows and a shared cache cannot be left out.
#[test]
fn missing_parts_of_a_layer_are_refused() {
    for model in ["qwen3_5-tiny", "deepseek_v3-tiny", "gemma4-tiny"] {
        let saved = Saved::new(model);
        let (on, whole) = (device(), fs::read(saved.path()).unwrap());
        let mut names = vec![];
        forge(&saved.path(), |_, tensors| names.extend(tensors.iter().map(|it| it.0.clone())));
        names.retain(|name| name.starts_with("layers.0."));
        assert!(!names.is_empty(), "{model} has no tensors of layer 0");
        for name in names {
            fs::write(saved.path(), &whole).unwrap();
            forge(&saved.path(), |_, tensors| tensors.retain(|it| it.0 != name));
            let opened = SavedCache::open(saved.path());
            let restored = opened.and_then(|it| it.restore(&saved.model, saved.config, &on));
            let error = restored.expect_err(&name).to_string();
            assert!(error.contains("do not match") && !error.contains('\n'), "{name}: {error}");
        }
    }
}

/// Random changes of the metadata, with valid checksums, never panic, and every accepted cache can
/// be continued.
#[test]
fn forged_files_never_panic() {
    never_panic("llama-tiny");
}

#[test]
fn forged_files_of_recurrent_states_never_panic() {
    never_panic("qwen3_5-tiny");
}

#[test]
fn forged_files_of_sparse_attention_never_panic() {
    never_panic("../deepseek/deepseek-v4-tiny");
}

fn never_panic(model: &str) {
    let saved = Saved::new(model);
    let (on, whole) = (device(), fs::read(saved.path()).unwrap());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
    let numbers = [0u64, 1, 2, 3, 7, 16, 31, 1 << 24, 1 << 32, 1 << 60, u64::MAX];
    let mut accepted = 0;
    for _ in 0..400 {
        fs::write(saved.path(), &whole).unwrap();
        forge(&saved.path(), |said, tensors| {
            let mut places = vec![];
            numbers_in(said, String::new(), &mut places);
            let place = &places[rng.random_range(0..places.len())];
            *said.pointer_mut(place).unwrap() = json!(numbers[rng.random_range(0..numbers.len())]);
            if rng.random_range(0..4) == 0 {
                let i = rng.random_range(0..tensors.len());
                let keep = rng.random_range(0..=tensors[i].3.len() / 4);
                tensors[i].3.truncate(4 * keep);
                tensors[i].2 = json!([keep]);
            }
        });
        let opened = SavedCache::open(saved.path());
        let restored = opened.and_then(|it| it.restore(&saved.model, saved.config, &on));
        if let Ok(mut cache) = restored {
            accepted += 1;
            pass(&saved.model, &mut cache, &[1], &on);
        }
    }
    // Some changes are accepted because they do not change the number of tokens.
    assert!(accepted < 80, "{accepted} of 400 forged files are accepted");
}

/// Lists the paths of numbers.
fn numbers_in(value: &Value, at: String, places: &mut Vec<String>) {
    match value {
        Value::Number(_) => places.push(at),
        Value::Array(values) => {
            let values = values.iter().enumerate();
            values.for_each(|(i, value)| numbers_in(value, format!("{at}/{i}"), places));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| numbers_in(value, format!("{at}/{key}"), places));
        }
        _ => {}
    }
}

/// The old file stays, and nothing is left beside it.
#[test]
fn a_failed_write_keeps_the_old_file() {
    let saved = Saved::new("llama-tiny");
    let on = device();
    let mut cache =
        SavedCache::open(saved.path()).unwrap().restore(&saved.model, saved.config, &on).unwrap();
    pass(&saved.model, &mut cache, &[5], &on);
    let tokens = [&saved.text[..], &[5]].concat();
    // The path is a folder.
    let taken = saved.scratch.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let error = cache.save(&taken, &saved.model, "it", &[&tokens]).unwrap_err().to_string();
    assert_contains(&error, &["taken", "cannot write"]);
    let error = cache
        .save(saved.scratch.path().join("no/folder"), &saved.model, "it", &[&tokens])
        .unwrap_err();
    assert_contains(&error.to_string(), &["no/folder", "cannot write"]);
    #[cfg(unix)]
    {
        // The path is not a regular file.
        let socket = saved.scratch.path().join("socket");
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = cache.save(&socket, &saved.model, "it", &[&tokens]).unwrap_err().to_string();
        assert_contains(&error, &["socket", "is not a regular file"]);
        fs::remove_file(socket).unwrap();
    }
    let names = || {
        let files = fs::read_dir(saved.scratch.path()).unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["prefix.safetensors", "taken"]);
    // The path is a link to another file.
    #[cfg(unix)]
    {
        let link = saved.scratch.path().join("link");
        std::os::unix::fs::symlink(saved.path(), &link).unwrap();
        cache.save(&link, &saved.model, "it", &[&tokens]).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(SavedCache::open(saved.path()).unwrap().tokens(), std::slice::from_ref(&tokens));
        fs::remove_file(link).unwrap();
    }
    // The path is the file that the cache was restored from.
    cache.save(saved.path(), &saved.model, "it", &[&tokens]).unwrap();
    assert_eq!(SavedCache::open(saved.path()).unwrap().tokens(), [tokens]);
    assert_eq!(names(), ["prefix.safetensors", "taken"]);
}

/// Writes fail at the process's limit of file size, as on a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_no_partial_file() {
    const FOLDER: &str = "KV_MODELS_TEST_FULL_DISK";
    let prefix = |folder: &Path| folder.join("prefix.safetensors");
    if let Some(folder) = std::env::var_os(FOLDER) {
        let (on, path) = (device(), prefix(folder.as_ref()));
        let model = load(tiny("llama-tiny"), &on).unwrap().model;
        let saved = SavedCache::open(&path).unwrap();
        let cache = saved.restore(&model, config("k4v2-g16-r16-s3", 48), &on).unwrap();
        let error = cache.save(&path, &model, "it", saved.tokens()).unwrap_err().to_string();
        assert_contains(&error, &["prefix.safetensors", "cannot write", "too large"]);
        fs::write(Path::new(&folder).join("ran"), "").unwrap();
        return;
    }
    let saved = Saved::new("llama-tiny");
    let before = fs::read(saved.path()).unwrap();
    assert!(before.len() > 8192);
    let output = std::process::Command::new("sh")
        .arg("-c")
        // The limit is in blocks of 512 or 1024 bytes. Without the trap, the signal ends the
        // process before the error.
        .arg("trap '' XFSZ; ulimit -f 4; exec \"$0\" --exact \"$1\"")
        .arg(std::env::current_exe().unwrap())
        .arg("saved_cache_files::a_full_disk_leaves_no_partial_file")
        .env(FOLDER, saved.scratch.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(fs::read(saved.path()).unwrap(), before);
    let names = fs::read_dir(saved.scratch.path()).unwrap().map(|file| file.unwrap().file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, ["prefix.safetensors", "ran"], "the child ran and left nothing");
}
