//! Prefix caches in folders.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_models::{PrefixCache, SavedAs, SavedCache, load};

use crate::common::{
    assert_contains, device,
    prefixes::Served,
    saved::{config, text},
    tiny,
};

const NAMED: SavedAs<'_> = SavedAs { model: "the-maker", cache: None, talk: &[] };

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    files
}

/// Four prompts of two salts. Three share a beginning.
fn prompts() -> [(&'static str, Vec<u32>); 4] {
    let (ids, other) = (text(100, 1), text(100, 2));
    [
        ("a", ids.clone()),
        ("a", [&ids[..37], &other[..50]].concat()),
        ("a", [&ids[..35], &other[50..90]].concat()),
        ("b", other),
    ]
}

fn filled(served: &Served<'_>) -> PrefixCache {
    let mut store = served.store(usize::MAX);
    for (salt, prompt) in prompts() {
        served.serve(&mut store, salt, &prompt, &[]);
    }
    store
}

#[test]
fn a_loaded_store_equals_the_saved_one() {
    let on = device();
    for (name, cache) in [
        ("llama-tiny", "k4v4-g8-r16"),
        ("llama-tiny", "kint8vint8"),
        ("llama-tiny", "float-f16"),
        ("gemma3-tiny", "k2v2-g16-r16-s2"),
        ("deepseek_v3-tiny", "k4v16-g16-r16"),
        ("qwen3_5-tiny", "k4v4-g8-r16-bf16"),
        ("gemma4-tiny", "float"),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("new").join("folder");
        let model = &load(tiny(name), &on).unwrap().model;
        let served = Served::new(model, cache, 8);
        let mut store = filled(&served);
        store.save(&dir, model, &NAMED).unwrap();
        let mut again = served.store(usize::MAX);
        assert_eq!(again.load(&dir, model, served.own.clone(), &on), [""; 0], "{name} {cache}");
        let [mut before, mut now] = [store.stats(), again.stats()];
        assert_eq!((before.blocks, before.bytes), (now.blocks, now.bytes), "{name} {cache}");
        for (salt, prompt) in prompts() {
            for end in (1..=prompt.len()).step_by(7) {
                let prompt = &prompt[..end];
                assert_eq!(store.marks(salt, prompt), again.marks(salt, prompt));
                let (hit, calls) = served.serve(&mut again.clone(), salt, prompt, &[]);
                assert_eq!(hit, served.hit(&mut store, salt, prompt), "{name} {cache}");
                let fresh = served.fresh(prompt, &[]);
                assert!(calls == fresh[hit / 8..], "{name} {cache}: other logits");
            }
        }
        // Both have the same order of use.
        let mut small = PrefixCache::new(&served.cache(), 8, now.bytes / 2).unwrap();
        assert_eq!(small.load(&dir, model, served.own.clone(), &on), [""; 0]);
        let (salt, newest) = &prompts()[3];
        assert!(served.hit(&mut small, salt, newest) > 0, "the newest prompt is loaded last");
        // Saving again replaces the files.
        let names = files(&dir);
        assert_eq!(names.len(), 4);
        again.save(&dir, model, &NAMED).unwrap();
        assert_eq!(files(&dir), names);
        (before, now) = (again.stats(), store.stats());
        assert_eq!((before.blocks, before.bytes), (now.blocks, now.bytes));
    }
}

#[test]
fn stale_files_are_removed_and_foreign_ones_kept() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let dir = scratch.path();
    let model = &load(tiny("llama-tiny"), &on).unwrap().model;
    let served = Served::new(model, "k4v4-g8-r16", 8);
    // A saved cache that is not of a store, a file of another format, and other names.
    let file = |name: &str| dir.join(name);
    let held = served.model.new_cache(served.own.clone(), 1, &on).unwrap();
    held.save(file("prefix-000001.safetensors"), model, "", &[[0u32; 0]]).unwrap();
    fs::write(file("prefix-000002.safetensors"), "damaged").unwrap();
    fs::write(file("prefix-3.safetensors"), "another name").unwrap();
    fs::write(file("notes.txt"), "notes").unwrap();
    let other = Served::new(model, "kint8vint8", 8);
    filled(&other).save(dir, model, &NAMED).unwrap();
    let foreign: Vec<_> =
        files(dir).into_iter().map(|path| (fs::read(&path).unwrap(), path)).collect();
    assert_eq!(foreign.len(), 8);

    let store = filled(&served);
    store.save(dir, model, &NAMED).unwrap();
    assert_eq!(files(dir).len(), 12);
    let mut few = served.store(usize::MAX);
    served.serve(&mut few, "c", &text(50, 9), &[]);
    few.save(dir, model, &NAMED).unwrap();
    assert_eq!(files(dir).len(), 9);
    let mut again = served.store(usize::MAX);
    let notes = again.load(dir, model, served.own.clone(), &on);
    assert_eq!(notes.len(), 6, "{notes:?}");
    assert_contains(&notes.join("\n"), &["prefix-000001", "prefix-000002", "salt", "int8"]);
    assert!(notes.iter().all(|note| !note.contains('\n')));
    assert_eq!(again.stats().bytes, few.stats().bytes);
    served.store(usize::MAX).save(dir, model, &NAMED).unwrap();
    for (bytes, path) in &foreign {
        assert!(fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
    assert_eq!(files(dir).len(), foreign.len());
}

/// Removes the tokens of a block from the metadata of a file, as earlier versions wrote it.
fn remove_block_tokens(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..end].to_vec()).unwrap();
    let field = r#",\"block_tokens\":8"#;
    assert_contains(&header, &[field]);
    let header = header.replace(field, &" ".repeat(field.len()));
    let fields: serde_json::Value = serde_json::from_str(&header).unwrap();
    // The first checksum belongs to the header.
    let at = end + fields["checksums"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[8..end].copy_from_slice(header.as_bytes());
    bytes[at..at + 4].copy_from_slice(&crc32fast::hash(header.as_bytes()).to_le_bytes());
    fs::write(path, bytes).unwrap();
}

#[test]
fn files_of_earlier_versions_are_skipped_and_replaced() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let dir = scratch.path();
    let model = &load(tiny("llama-tiny"), &on).unwrap().model;
    let served = Served::new(model, "k4v4-g8-r16", 8);
    let whole = filled(&served);
    whole.save(dir, model, &NAMED).unwrap();
    let names = files(dir);
    names.iter().for_each(|path| remove_block_tokens(path));
    // A saved cache resumes from such a file as before.
    assert_eq!(SavedCache::open(&names[0]).unwrap().model(), "the-maker");
    let mut store = served.store(usize::MAX);
    let notes = store.load(dir, model, served.own.clone(), &on);
    assert_eq!((notes.len(), store.stats().blocks), (4, 0), "{notes:?}");
    assert_contains(&notes[3], &["prefix-000003.safetensors", "block_tokens = missing"]);
    whole.save(dir, model, &NAMED).unwrap();
    assert_eq!(files(dir), names);
    assert_eq!(store.load(dir, model, served.own.clone(), &on), [""; 0]);
    assert_eq!(store.stats().bytes, whole.stats().bytes);
}

#[test]
fn files_that_do_not_fit_are_skipped() {
    let (on, scratch) = (device(), tempfile::tempdir().unwrap());
    let dir = scratch.path();
    let models = ["llama-tiny", "qwen3-tiny"].map(|name| load(tiny(name), &on).unwrap().model);
    let served = Served::new(&models[0], "k4v4-g8-r16", 8);
    let whole = filled(&served);
    whole.save(dir, &models[0], &NAMED).unwrap();
    let load = |dir: &Path, block: usize| {
        let mut store =
            Served { block, ..Served::new(&models[0], "k4v4-g8-r16", 8) }.store(usize::MAX);
        let notes = store.load(dir, &models[0], served.own.clone(), &on);
        (store, notes)
    };
    assert_eq!(load(&dir.join("none"), 8).1, [""; 0]);
    // A store of another model, of other formats, and of other blocks.
    let other = Served::new(&models[1], "k4v4-g8-r16", 8);
    let notes = other.store(usize::MAX).load(dir, &models[1], other.own.clone(), &on);
    assert_eq!(notes.len(), 4, "{notes:?}");
    let float = Served::new(&models[0], "float", 8);
    let mut store = float.store(usize::MAX);
    let notes = store.load(dir, &models[0], float.own.clone(), &on);
    assert_eq!(notes.len(), 4, "{notes:?}");
    assert_contains(&notes[0], &["prefix-000000.safetensors", "cache"]);
    let notes = store.load(dir, &models[0], served.own.clone(), &on);
    assert_eq!((notes.len(), store.stats().blocks), (4, 0), "{notes:?}");
    // Blocks of 4 tokens divide all of the prompts, and blocks of 32 some of them.
    for block in [4, 16, 32] {
        let (store, notes) = load(dir, block);
        assert_eq!((notes.len(), store.stats().blocks), (4, 0), "{notes:?}");
        let asked = format!("{block} is requested");
        let parts = ["prefix-000000.safetensors", "block_tokens = 8", &asked, "--prefill-chunk"];
        assert_contains(&notes[0], &parts);
    }
    // A damaged byte or end of a file loses its prompt only.
    for path in files(dir) {
        let bytes = fs::read(&path).unwrap();
        let mut damaged = vec![bytes[..bytes.len() - 1].to_vec(), bytes[..40].to_vec(), vec![]];
        for at in (0..bytes.len()).step_by(bytes.len() / 20) {
            damaged.push(bytes.clone());
            damaged.last_mut().unwrap()[at] ^= 4;
        }
        for damaged in damaged {
            fs::write(&path, damaged).unwrap();
            let (mut store, notes) = load(dir, 8);
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert_contains(&notes[0], &[path.file_name().unwrap().to_str().unwrap()]);
            for (salt, prompt) in prompts() {
                let (hit, calls) = served.serve(&mut store, salt, &prompt, &[]);
                let fresh = served.fresh(&prompt, &[]);
                assert!(calls == fresh[hit / 8..]);
            }
        }
        fs::write(&path, bytes).unwrap();
    }
    assert_eq!(load(dir, 8).0.stats().bytes, whole.stats().bytes);
    // A file of a store is a saved cache.
    let path = &files(dir)[0];
    let file = SavedCache::open(path).unwrap();
    assert_eq!((file.model(), file.tokens().len()), ("the-maker", 1));
    let restored = file.restore(&models[0], config("k4v4-g8-r16", 160), &on).unwrap();
    assert_eq!(restored.len(), file.tokens()[0].len());
    // A folder that cannot be created.
    let blocked = dir.join("file");
    fs::write(&blocked, "").unwrap();
    let error = whole.save(&blocked, &models[0], &NAMED).unwrap_err().to_string();
    assert_contains(&error, &["file"]);
    let error = whole.save(dir.join("x"), &models[1], &NAMED).unwrap_err().to_string();
    assert_contains(&error, &["layers differ"]);
    assert!(!dir.join("x").exists());
}
