//! Unused arrays of a GGUF file take no memory, whatever their size.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "suite/common/mod.rs"]
#[allow(dead_code, reason = "this program uses a part")]
mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs::{self, File},
    io::Write,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use common::{GgmlType, Value, assert_contains, device, tiny, write_gguf};
use kv_models::load;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Returns the peak of bytes allocated by `work`.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.load(Relaxed);
    MOST.store(before, Relaxed);
    let result = work();
    (result, MOST.load(Relaxed) - before)
}

const LARGE: usize = 96 << 20;

/// Writes `gguf` with one more value, an array of type `kind` that fills 96 MiB with copies of
/// `item`. Its length is a multiple of the alignment, so that offsets of tensors stay valid.
fn with_array(gguf: &[u8], to: &Path, name: &str, kind: u32, item: &[u8]) {
    let n = LARGE / item.len();
    let fixed = 8 + 4 + 4 + 8 + n * item.len();
    let key_len = name.len() + (fixed + name.len()).next_multiple_of(32) - (fixed + name.len());
    // The name is padded with underscores.
    let key = format!("{name:_<key_len$}");
    let count = u64::from_le_bytes(gguf[16..24].try_into().unwrap());
    let mut file = File::create(to).unwrap();
    file.write_all(&gguf[..16]).unwrap();
    file.write_all(&(count + 1).to_le_bytes()).unwrap();
    file.write_all(&(key.len() as u64).to_le_bytes()).unwrap();
    file.write_all(key.as_bytes()).unwrap();
    file.write_all(&9u32.to_le_bytes()).unwrap();
    file.write_all(&kind.to_le_bytes()).unwrap();
    file.write_all(&(n as u64).to_le_bytes()).unwrap();
    let chunk = item.repeat((1 << 20) / item.len());
    for _ in 0..n * item.len() / chunk.len() {
        file.write_all(&chunk).unwrap();
    }
    file.write_all(&item.repeat(n - n * item.len() / chunk.len() * (chunk.len() / item.len())))
        .unwrap();
    file.write_all(&gguf[24..]).unwrap();
}

#[test]
fn unused_arrays_take_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small.gguf");
    let tokens = (0..256).map(|i| Value::String(format!("t{i}"))).collect();
    let extra = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.merges", Value::Array(vec![])),
    ];
    write_gguf(&tiny("llama-tiny"), &small, GgmlType::Q8_0, &extra);
    let gguf = fs::read(&small).unwrap();
    let large = folder.path().join("large.gguf");
    // The first load creates threads and other things that are not counted.
    load(&small, &device()).unwrap();
    let (_, usual) = peak(|| load(&small, &device()).unwrap());
    assert!(usual > 1 << 16, "the counter counts: {usual}");

    let word = [&3u64.to_le_bytes()[..], b"abc"].concat();
    let empty_array = [&0u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    let cases: [(&str, u32, &[u8]); 7] = [
        ("u8", 0, &[7]),
        ("bool", 7, &[1]),
        ("i32", 5, &[1, 0, 0, 0]),
        ("f64", 12, &[0; 8]),
        ("empty strings", 8, &[0; 8]),
        ("strings", 8, &word),
        ("empty arrays", 9, &empty_array),
    ];
    for (name, kind, item) in cases {
        // A key of the architecture, a key of the vocabulary, and an unknown key.
        for key in ["x.of_nothing", "llama.of_nothing", "tokenizer.ggml.of_nothing"] {
            with_array(&gguf, &large, key, kind, item);
            let (loaded, most) = peak(|| load(&large, &device()));
            loaded.unwrap();
            // The order of operations in several threads may differ.
            assert!(most < usual + (1 << 20), "{name}, {key}: {most} bytes, not {usual}");
        }
    }

    // An array instead of a single value, and an array of the wrong length: the error does not
    // repeat it.
    for (key, parts) in [
        ("general.alignment", ["general.alignment = an array of", "multiple of 8"]),
        ("general.architecture", ["general.architecture = an array of", "must be a string"]),
        ("llama.block_count", ["llama.block_count = an array of", "unsigned integer"]),
    ] {
        // A later value replaces an earlier one, and the name is not padded, so the small file's
        // key is renamed.
        let renamed = renamed(&gguf, key);
        exact_key(&renamed, &large, key);
        let (error, most) = peak(|| load(&large, &device()).unwrap_err().to_string());
        assert_contains(&error, &parts);
        assert!(error.len() < 400, "{error}");
        assert!(most < usual + (1 << 20), "{key}: {most} bytes, not {usual}");
    }
}

/// Returns `gguf` with one letter of a key changed, so that no key has that name.
fn renamed(gguf: &[u8], key: &str) -> Vec<u8> {
    let mut bytes = gguf.to_vec();
    if let Some(at) = bytes.windows(key.len()).position(|window| window == key.as_bytes()) {
        bytes[at + key.len() - 1] = b'_';
    }
    bytes
}

/// Writes an array of bytes as [`with_array`] does, but with an exact name; tensors may move.
fn exact_key(gguf: &[u8], to: &Path, key: &str) {
    let count = u64::from_le_bytes(gguf[16..24].try_into().unwrap());
    let mut file = File::create(to).unwrap();
    let of_key = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
    let of_array = [&9u32.to_le_bytes()[..], &0u32.to_le_bytes(), &(LARGE as u64).to_le_bytes()];
    file.write_all(&gguf[..16]).unwrap();
    file.write_all(&(count + 1).to_le_bytes()).unwrap();
    file.write_all(&[of_key, of_array.concat()].concat()).unwrap();
    let chunk = vec![7; 1 << 20];
    for _ in 0..LARGE / chunk.len() {
        file.write_all(&chunk).unwrap();
    }
    file.write_all(&gguf[24..]).unwrap();
}
