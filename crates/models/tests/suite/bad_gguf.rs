//! Invalid GGUF files give one clear line and no panic.

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use kv_models::{LoadOptions, kv_weights::Activations, load, load_with};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use safetensors::Dtype;

use crate::common::{
    GgmlType, Value, assert_contains, converted, copy, device, failure, fixture, tiny, write_gguf,
};

/// Writes a tiny GGUF file with a vocabulary and every kind of metadata value.
fn tiny_gguf(folder: &Path) -> PathBuf {
    let file = folder.join("tiny.gguf");
    let strings = |n: usize| Value::Array((0..n).map(|i| Value::String(format!("t{i}"))).collect());
    let extra = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", strings(256)),
        ("tokenizer.ggml.merges", Value::Array(vec![])),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1); 256])),
        ("general.alignment", Value::U32(32)),
        ("x.f64", Value::F64(0.5)),
        ("x.bool", Value::Bool(true)),
        ("x.nested", Value::Array(vec![Value::Array(vec![Value::U8(1)]); 2])),
    ];
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::Q8_0, &extra);
    file
}

#[test]
fn truncated_gguf_at_any_byte() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(tiny_gguf(folder.path())).unwrap();
    let cut = folder.path().join("cut.gguf");
    let header = (0..400).chain((400..12_000).step_by(61));
    let data = (12_000..bytes.len() - 32).step_by(7919);
    for len in header.chain(data) {
        fs::write(&cut, &bytes[..len]).unwrap();
        assert_contains(&failure(&cut), &["cut.gguf: not a readable GGUF file"]);
    }
}

/// Loads `path` with `n` random patches of the first `header_len` bytes of `file`, one at a time;
/// returns how many loads failed.
fn mutate(path: &Path, file: &Path, header_len: usize, n: usize) -> usize {
    mutate_with(path, file, header_len, n, LoadOptions::default())
}

fn mutate_with(
    path: &Path,
    file: &Path,
    header_len: usize,
    n: usize,
    options: LoadOptions,
) -> usize {
    let bytes = fs::read(file).unwrap();
    let header_len = header_len.min(bytes.len());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut file = fs::OpenOptions::new().write(true).open(file).unwrap();
    let mut n_failed = 0;
    for _ in 0..n {
        let at = rng.random_range(0..header_len - 8);
        let n = rng.random_range(1..=8);
        let mut patch = vec![0; n];
        match rng.random_range(0..3) {
            0 => patch.fill(0xff),
            1 => {}
            _ => rng.fill(&mut patch[..]),
        }
        let mut write = |bytes: &[u8]| {
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.write_all(bytes).unwrap();
        };
        write(&patch);
        match load_with(path, &device(), options) {
            Ok(_) => {}
            Err(error) => {
                n_failed += 1;
                assert!(!error.to_string().contains('\n'), "{error}");
            }
        }
        write(&bytes[at..at + n]);
    }
    load_with(path, &device(), options).unwrap();
    n_failed
}

/// Packed weights in 16 bits, in both kinds of files, whole and truncated.
#[test]
fn mutated_files_of_16_bits_never_panic() {
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let folder = converted("llama-tiny", Dtype::BF16, |_| true);
    let gguf = folder.path().join("model.gguf");
    write_gguf(&tiny("llama-tiny"), &gguf, GgmlType::F16, &[]);
    let safetensors = folder.path().join("model.safetensors");
    for (path, file) in [(&gguf, &gguf), (&folder.path().to_path_buf(), &safetensors)] {
        let n_failed = mutate_with(path, file, 1500, 500, options);
        assert!(n_failed > 50, "mutations must matter, {n_failed} failed");
        let bytes = fs::read(file).unwrap();
        for len in [bytes.len() - 1, bytes.len() - 64, bytes.len() / 2, 700, 7, 0] {
            fs::write(file, &bytes[..len]).unwrap();
            let error = load_with(path, &device(), options).unwrap_err().to_string();
            assert!(!error.contains('\n') && error.contains("model."), "{len}: {error}");
        }
    }
}

#[test]
fn mutated_gguf_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny_gguf(folder.path());
    let n_failed = mutate(&path, &path, 14_000, 1500);
    assert!(n_failed > 100, "mutations must matter, {n_failed} failed");

    // The headers of parts of a split file are short, and most of their bytes matter.
    let (_folder, [first, second, third]) = split_gguf();
    for (named, file, header_len) in [
        (&first, &first, 1200),
        (&second, &first, 1200),
        (&first, &second, 700),
        (&third, &third, 500),
    ] {
        let n_failed = mutate(named, file, header_len, 700);
        assert!(n_failed > 200, "mutations must matter, {n_failed} failed");
    }
}

/// Copies the split GGUF file of the fixtures to a folder.
fn split_gguf() -> (tempfile::TempDir, [PathBuf; 3]) {
    let folder = copy(&fixture("gguf-types"));
    let files = [1, 2, 3].map(|i| folder.path().join(format!("split-0000{i}-of-00003.gguf")));
    (folder, files)
}

#[test]
fn incomplete_split_gguf_is_named() {
    let (_folder, [first, second, third]) = split_gguf();
    let bytes = fs::read(&second).unwrap();
    fs::remove_file(&second).unwrap();
    for named in [&first, &third] {
        let message = load(named, &device()).unwrap_err().to_string();
        assert_contains(&message, &["split-00002-of-00003.gguf: not found", "part 2 of 3"]);
    }
    // The third part under the name of the second.
    fs::copy(&third, &second).unwrap();
    let message = load(&first, &device()).unwrap_err().to_string();
    assert_contains(&message, &["split-00002-of-00003.gguf: split.no = 2", "must be 1"]);
    fs::write(&second, &bytes[..bytes.len() / 2]).unwrap();
    let message = load(&first, &device()).unwrap_err().to_string();
    assert_contains(&message, &["split-00002-of-00003.gguf: not a readable GGUF file"]);
    fs::write(&second, &bytes).unwrap();
    load(&first, &device()).unwrap();

    // Without the number of the part in its name, the others cannot be found.
    let renamed = first.with_file_name("model.gguf");
    fs::copy(&first, &renamed).unwrap();
    assert_contains(&failure(&renamed), &["split.count = 3", "-00001-of-00003.gguf"]);
    // A part that counts more tensors than all parts have.
    let key = b"split.tensors.count";
    let mut fewer = fs::read(&third).unwrap();
    let at = fewer.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
    fewer[at] += 1;
    fs::write(&third, fewer).unwrap();
    let message = load(&first, &device()).unwrap_err().to_string();
    assert_contains(&message, &["split-00003-of-00003.gguf: split.tensors.count = 22", "21"]);
}

#[test]
fn wrong_gguf_content_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.gguf");
    let cases: [(&str, Value, &[&str]); 5] = [
        (
            "general.architecture",
            Value::String("mamba".into()),
            &["unsupported GGUF architecture mamba"],
        ),
        ("llama.attention.head_count", Value::U32(12), &["blk.0.attn_q.weight", "[192, 96]"]),
        ("llama.attention.head_count", Value::String("6".into()), &["head_count", "integer"]),
        ("general.alignment", Value::U32(0), &["general.alignment", "multiple of 8"]),
        (
            "llama.rope.scaling.type",
            Value::String("dynamic".into()),
            &["unsupported rope type dynamic"],
        ),
    ];
    for (key, value, parts) in cases {
        // A later key replaces an earlier one.
        write_gguf(&tiny("llama-tiny"), &file, GgmlType::F32, &[(key, value)]);
        assert_contains(&failure(&file), parts);
    }
    fs::write(&file, b"not a model at all").unwrap();
    assert_contains(&failure(&file), &["magic GGUF"]);
}

#[test]
fn unknown_ggml_types_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("iq.gguf");
    write_gguf(&tiny("qwen2-tiny"), &file, GgmlType::F32, &[]);
    let mut bytes = fs::read(&file).unwrap();
    // name, u32 n_dims, two u64 dims, u32 type
    let name = b"token_embd.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 16;
    bytes[at..at + 4].copy_from_slice(&20u32.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    assert_contains(
        &failure(&file),
        &["unsupported GGML type 20 (IQ4_NL)", "token_embd.weight", "iq.gguf"],
    );
}

/// Returns the position of the offset of a tensor with two dimensions: after name, u32 n_dims, two
/// u64 dims and u32 type.
fn offset_of(bytes: &[u8], tensor: &str) -> usize {
    let name = [&(tensor.len() as u64).to_le_bytes()[..], tensor.as_bytes()].concat();
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    at + name.len() + 4 + 16 + 4
}

#[test]
fn overlapping_tensors_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("overlap.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::F32, &[]);
    let bytes = fs::read(&file).unwrap();
    // The order of tensors in the file differs from run to run. The smaller one moves into the
    // larger one, so that neither ends past the file.
    let (first, second) = ("blk.1.ffn_down.weight", "blk.0.attn_q.weight");
    let [to, from] = [second, first].map(|tensor| offset_of(&bytes, tensor));
    let offset = u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap());
    // The same bytes, and some of them.
    for shift in [0, 32] {
        let mut changed = bytes.clone();
        changed[to..to + 8].copy_from_slice(&(offset + shift).to_le_bytes());
        fs::write(&file, &changed).unwrap();
        assert_contains(&failure(&file), &[first, second, "overlap"]);
    }
    fs::write(&file, &bytes).unwrap();
    load(&file, &device()).unwrap();
}

/// A key that is there with another type is not absent, and sizes agree.
#[test]
fn keys_of_another_type_and_contradictions_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.gguf");
    let (llama, gemma) = ("llama-tiny", "gemma4-tiny");
    let cases: [(&str, &str, Value, &[&str]); 8] = [
        (
            llama,
            "general.name",
            Value::Bool(true),
            &["general.name = true", "a string, not a bool"],
        ),
        (
            llama,
            "general.architecture",
            Value::U32(4),
            &["general.architecture = 4", "must be a string, not an unsigned integer"],
        ),
        (
            llama,
            "llama.rope.scaling.type",
            Value::U32(3),
            &["llama.rope.scaling.type = 3", "must be a string, not an unsigned integer"],
        ),
        (
            llama,
            "llama.rope.scaling.type",
            Value::String("yarn".into()),
            &["llama.rope.scaling.factor = missing"],
        ),
        (
            llama,
            "llama.attention.head_count",
            Value::F32(6.0),
            &["head_count = 6", "must be an unsigned integer, not a float"],
        ),
        (
            gemma,
            "gemma4.rope.dimension_count",
            Value::U32(32),
            &["gemma4.rope.dimension_count = 32", "must be 64, the attention.key_length"],
        ),
        (
            gemma,
            "gemma4.rope.dimension_count_swa",
            Value::U32(64),
            &["gemma4.rope.dimension_count_swa = 64", "must be 32"],
        ),
        (gemma, "gemma4.attention.value_length", Value::U32(32), &["value_length = 32", "64"]),
    ];
    for (name, key, value, parts) in cases {
        write_gguf(&tiny(name), &file, GgmlType::F32, &[(key, value)]);
        assert_contains(&failure(&file), parts);
    }
}

#[test]
fn values_of_wrong_types_are_quoted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.gguf");
    let cases = [
        (Value::String("6".into()), "head_count = \"6\":"),
        (Value::F32(1.5), "head_count = 1.5:"),
        (Value::I32(-3), "head_count = -3:"),
        (Value::Bool(true), "head_count = true:"),
        (Value::Array(vec![Value::U8(1); 3]), "head_count = an array of 3 values:"),
    ];
    for (value, expected) in cases {
        let extra = [("llama.attention.head_count", value)];
        write_gguf(&tiny("llama-tiny"), &file, GgmlType::F32, &extra);
        assert_contains(&failure(&file), &[expected]);
    }
}
