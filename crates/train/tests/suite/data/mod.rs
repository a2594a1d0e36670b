//! From texts to batches: a wrong cache file is always detected, and an order resumes at any
//! position.

mod loaders;
mod order;
mod sources;
mod token_file;
mod windows;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use kv_models::Tokenizer;
use kv_train::data::{DataError, Origin, Source, TokenFile};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const EOS: u32 = 256;

/// Writes a tokenizer with bytes as ids 0 to 255, `<|end|>` as 256, then `merges`.
fn write_tokenizer(path: &Path, merges: &[(&str, &str)]) {
    let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let unprintable: Vec<u32> = (0..256).filter(|&b| !printable(b)).collect();
    let token = |b: u32| {
        let rank = unprintable.iter().position(|&other| other == b);
        char::from_u32(rank.map_or(b, |rank| 256 + rank as u32)).unwrap().to_string()
    };
    let mut vocab: Map<String, Value> = (0..256).map(|b| (token(b), json!(b))).collect();
    vocab.insert("<|end|>".into(), json!(EOS));
    for (i, (a, b)) in merges.iter().enumerate() {
        vocab.insert(format!("{a}{b}"), json!(257 + i));
    }
    let merges: Vec<Value> = merges.iter().map(|(a, b)| json!([a, b])).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{
            "id": EOS, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
        },
        "post_processor": null,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": merges,
        },
    });
    fs::write(path, file.to_string()).unwrap();
}

/// A folder with a tokenizer and texts.
struct World {
    folder: TempDir,
    tokenizer: Tokenizer,
}

impl World {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("tokenizer.json");
        write_tokenizer(&path, &[("t", "h"), ("th", "e"), ("Ġ", "the")]);
        let tokenizer = Tokenizer::from_file(path, &[EOS]).unwrap();
        Self { folder, tokenizer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    fn cache(&self) -> PathBuf {
        self.path("cache/ids")
    }

    fn open(&self, source: &Source) -> Result<TokenFile, DataError> {
        TokenFile::open(source, &self.tokenizer, &self.path("tokenizer.json"), &self.cache())
    }

    fn open_one(&self, name: &str, bytes: impl AsRef<[u8]>) -> Result<TokenFile, DataError> {
        self.open(&Source::new([self.write(name, bytes)]))
    }

    /// Returns the expected ids of documents.
    fn joined(&self, documents: &[&str]) -> Vec<u32> {
        let ids: Vec<_> =
            documents.iter().map(|text| self.tokenizer.encode(text).unwrap()).collect();
        ids.join(&EOS)
    }

    fn n_cached(&self) -> usize {
        fs::read_dir(self.cache()).map_or(0, Iterator::count)
    }

    /// Creates `n` tokens that repeat the alphabet.
    fn tokens(&self, n: usize) -> Arc<TokenFile> {
        let text: String = (0..n).map(|i| ALPHABET[i % ALPHABET.len()]).collect();
        let tokens = self.open_one(&format!("{n}.txt"), text).unwrap();
        assert_eq!(tokens.len(), n);
        Arc::new(tokens)
    }
}

/// Characters that no merge joins.
const ALPHABET: &[char] =
    &['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F', 'G'];

fn all(tokens: &TokenFile) -> Vec<u32> {
    tokens.ids(0..tokens.len()).collect()
}

/// Returns the message of an error and checks that it is one line.
fn message<T: std::fmt::Debug>(result: Result<T, DataError>) -> String {
    let message = result.unwrap_err().to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

fn rebuilt(tokens: &TokenFile) -> &str {
    match tokens.origin() {
        Origin::Rebuilt(why) => why,
        other => panic!("{other:?}"),
    }
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}
