//! From texts to batches: a wrong cache file is always noticed, and an order resumes at any
//! position.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::{
    data::dataloader::{DataLoader, split::split_dataloader},
    tensor::{Device, Int, Tensor},
};
use kv_cubecl::{Flex, Target};
use kv_models::Tokenizer;
use kv_train::data::{
    Batch, DataError, Order, Origin, Source, TokenFile, TrainLoader, ValidLoader, Windows,
};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const EOS: u32 = 256;

/// Bytes 0 to 255 as ids, `<|end|>` as 256, then `merges`.
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

    /// The ids that documents must become.
    fn joined(&self, documents: &[&str]) -> Vec<u32> {
        let ids: Vec<_> =
            documents.iter().map(|text| self.tokenizer.encode(text).unwrap()).collect();
        ids.join(&EOS)
    }

    fn n_cached(&self) -> usize {
        fs::read_dir(self.cache()).map_or(0, Iterator::count)
    }

    /// `n` tokens, each telling its position modulo 251.
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

/// The message of an error, which is one line.
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

fn device() -> Device {
    Flex::open().unwrap().clone()
}

// Sources.

#[test]
fn documents_are_files_and_lines_joined_by_eos() {
    let world = World::new();
    let text = "The others\r\nsaw the  theme.\n\n";
    let a = world.write("a.txt", text);
    let lines = [
        r#"{"id": 1, "text": "the first\nline \u00e9"}"#,
        "",
        r#"  {"text": "", "other": [1, {}]}"#,
        "{\"text\": \"second\"}\r",
        r#"{"text": "日本 the last <|end|>"}"#,
    ];
    let b = world.write("b.JSONL", lines.join("\n"));
    let c = world.write("c.md", "\u{feff}marked");
    let source = Source::new([a, b, c]);
    let tokens = world.open(&source).unwrap();
    let documents = [text, "the first\nline é", "second", "日本 the last <|end|>", "marked"];
    assert_eq!(all(&tokens), world.joined(&documents));
    assert_eq!(tokens.n_documents(), documents.len());
    assert_eq!(tokens.origin(), &Origin::Built);
    assert_eq!(tokens.path().parent(), Some(&*world.cache()));
    assert_eq!(source.documents().unwrap(), documents);
    assert_eq!(tokens.ids(3..5).collect::<Vec<_>>(), all(&tokens)[3..5]);
    assert_eq!(tokens.ids(tokens.len() - 1..usize::MAX).count(), 1);
    assert_eq!(tokens.ids(usize::MAX - 1..usize::MAX).count(), 0);
}

#[test]
fn many_lines_keep_their_order() {
    let world = World::new();
    let texts: Vec<String> = (0..4000).map(|i| format!("{i} {}", "the ".repeat(i % 30))).collect();
    let line = |text| json!({ "body": text, "other": "-".repeat(5000) }).to_string();
    let lines: Vec<String> = texts.iter().map(line).collect();
    let source = Source::new([world.write("many.jsonl", lines.join("\n"))]).with_field("body");
    assert!(fs::metadata(&source.paths()[0]).unwrap().len() > 17 << 20, "one batch only");
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert!(all(&world.open(&source).unwrap()) == world.joined(&texts));
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);
}

#[test]
fn without_eos_documents_touch() {
    let world = World::new();
    let tokenizer = Tokenizer::from_file(world.path("tokenizer.json"), &[]).unwrap();
    let source = Source::new([world.write("a.txt", "one"), world.write("b.txt", "two")]);
    // A folder stands for the tokenizer.json in it.
    let tokens = TokenFile::open(&source, &tokenizer, world.folder.path(), &world.cache()).unwrap();
    assert_eq!(tokenizer.decode(&all(&tokens)).unwrap(), "onetwo");
}

#[test]
fn large_vocabularies_take_four_bytes() {
    let world = World::new();
    let n = 70_000;
    let vocab: Map<String, Value> = (0..n).map(|i| (format!("w{i}"), json!(i))).collect();
    let path = world.path("large.json");
    let file = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[none]" },
    });
    fs::write(&path, file.to_string()).unwrap();
    let tokenizer = Tokenizer::from_file(&path, &[]).unwrap();
    let source = Source::new([world.write("a.txt", "w5 w65535 w65536 w69999")]);
    for origin in [Origin::Built, Origin::Reused] {
        let tokens = TokenFile::open(&source, &tokenizer, &path, &world.cache()).unwrap();
        assert_eq!(tokens.origin(), &origin);
        assert_eq!(all(&tokens), [5, 65_535, 65_536, 69_999]);
        tokens.require_vocab(70_000).unwrap();
        let message = message(tokens.require_vocab(65_536));
        assert!(message.contains("id 65536 of token 2 is not below"), "{message}");
    }
    // It has no token for other words, and refuses them.
    let source = Source::new([world.write("b.jsonl", "{\"text\": \"w1\"}\n{\"text\": \"what\"}")]);
    let refused = TokenFile::open(&source, &tokenizer, &path, &world.cache());
    assert!(matches!(&refused, Err(DataError::Tokenizer { line: Some(2), .. })), "{refused:?}");
    message(refused);
    assert_eq!(world.n_cached(), 1);
}

#[test]
fn mistakes_in_sources_are_told_and_leave_nothing() {
    let world = World::new();
    let check = |name: &str, bytes: &[u8], expected: &str| {
        let message = message(world.open_one(name, bytes));
        assert!(message.contains(name) && message.ends_with(expected), "{message}");
        assert_eq!(world.n_cached(), 0, "{name}");
        let documents = Source::new([world.path(name)]).documents();
        assert_eq!(documents.unwrap_err().to_string(), message);
    };
    check("a.txt", b"good \xff bad", ": byte 5 is not UTF-8; texts must be");
    check("b.txt", b"\xef\xbb\xbfgood \xe2\x82", ": byte 8 is not UTF-8; texts must be");
    check("c.txt", b"", ": no text in it");
    check("c.jsonl", b"\n  \n{\"text\": \"\"}\n", ": no text in it");
    let good = "{\"text\": \"fine\"}\n";
    let line = |line: &[u8]| [good.as_bytes(), b"\n", line, b"\n", good.as_bytes()].concat();
    check("d.jsonl", &line(b"{}"), ": line 3: field `text` is missing, it must be a string");
    check("e.jsonl", &line(b"{\"text\": 5}"), "field `text` is a number, it must be a string");
    check("f.jsonl", &line(b"{\"text\": null}"), "field `text` is null, it must be a string");
    check("g.jsonl", &line(b"[1]"), ": line 3: is an array, it must be a JSON object");
    check(
        "h.jsonl",
        &line(b"{\"text\": "),
        ": line 3: not JSON: EOF while parsing a value at column 8",
    );
    check("i.jsonl", &line(b"{\"text\": \"\xff\"}"), ": byte 28 is not UTF-8; texts must be");
    check(
        "j.jsonl",
        &line(b"{\"text\": \"\\ud800\"}"),
        ": line 3: not JSON: unexpected end of hex escape at column 17",
    );

    let missing = world.open(&Source::new([world.path("missing.txt")]));
    assert!(matches!(missing, Err(DataError::NotFound { .. })), "{missing:?}");
    assert!(message(missing).ends_with("missing.txt: not found"));
    let folder = world.open(&Source::new([world.folder.path()]));
    assert!(message(folder).contains(": cannot read: "));
    let none = world.open(&Source::new(Vec::<PathBuf>::new()));
    assert!(matches!(none, Err(DataError::NoSources)));
    message(none);
    let empty = Source::new([world.write("k.txt", ""), world.write("l.txt", "")]);
    assert!(message(world.open(&empty)).ends_with("k.txt: no text in any of 2 files"));
    assert_eq!(world.n_cached(), 0);
}

#[test]
fn a_tokenizer_that_truncates_encodes_whole_documents() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the text")]);
    let path = world.path("truncating.json");
    let mut file: Value =
        serde_json::from_slice(&fs::read(world.path("tokenizer.json")).unwrap()).unwrap();
    file["truncation"] = json!({
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    });
    fs::write(&path, file.to_string()).unwrap();
    let tokenizer = Tokenizer::from_file(&path, &[EOS]).unwrap();
    let tokens = TokenFile::open(&source, &tokenizer, &path, &world.cache()).unwrap();
    assert_eq!(all(&tokens), world.joined(&["the text"]));
    assert!(tokens.len() > 2);
}

/// A text file is read in pieces, but stays one document.
#[test]
fn a_long_text_is_one_document() {
    let world = World::new();
    let text: String = (0..40_000).map(|i| format!("the {i} others saw. ")).collect();
    assert!(text.len() > 10 << 16, "it is one piece");
    let marked = format!("\u{feff}{text}");
    let source = Source::new([world.write("a.txt", &text), world.write("b.txt", &marked)]);
    let tokens = world.open(&source).unwrap();
    assert!(all(&tokens) == world.joined(&[&text, &text]));
    assert_eq!(tokens.n_documents(), 2);
    assert!(source.documents().unwrap() == [text.clone(), text.clone()]);
    // A bad byte far into a text is reported at its offset.
    let bad = [text.as_bytes(), b"\xff"].concat();
    let message = message(world.open_one("c.txt", &bad));
    assert!(message.contains(&format!("byte {} is not UTF-8", text.len())), "{message}");
}

// The cache file.

#[test]
fn a_cache_follows_its_sources_and_its_tokenizer() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the one"), world.write("b.jsonl", "")]);
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Built);
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);

    // Another text of the same length, even with the same time stamp.
    let old = world.open(&source).unwrap();
    let modified = fs::metadata(&source.paths()[0]).unwrap().modified().unwrap();
    world.write("a.txt", "the two");
    let file = fs::File::options().write(true).open(&source.paths()[0]).unwrap();
    file.set_modified(modified).unwrap();
    let new = world.open(&source).unwrap();
    assert!(rebuilt(&new).contains("changed"));
    assert_eq!(all(&new), world.joined(&["the two"]));
    assert_eq!(all(&old), world.joined(&["the one"]), "a file in use changed");
    assert_eq!(world.n_cached(), 1);

    world.write("b.jsonl", "{\"text\": \"more\", \"body\": \"else\"}");
    assert_eq!(all(&world.open(&source).unwrap()), world.joined(&["the two", "more"]));
    let body = source.clone().with_field("body");
    assert_eq!(all(&world.open(&body).unwrap()), world.joined(&["the two", "else"]));
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);
    assert_eq!(world.n_cached(), 2);

    // A tokenizer with as many tokens but other merges.
    let path = world.path("tokenizer.json");
    write_tokenizer(&path, &[("t", "h"), ("th", "e"), ("t", "w")]);
    let tokenizer = Tokenizer::from_file(&path, &[EOS]).unwrap();
    let open = |tokenizer| TokenFile::open(&source, tokenizer, &path, &world.cache()).unwrap();
    let new = open(&tokenizer);
    rebuilt(&new);
    assert_ne!(tokenizer.encode("the two").unwrap(), world.tokenizer.encode("the two").unwrap());
    let documents = ["the two", "more"].map(|text| tokenizer.encode(text).unwrap());
    assert_eq!(all(&new), documents.join(&EOS));
    // The same file with another end-of-text id.
    rebuilt(&open(&Tokenizer::from_file(&path, &[10]).unwrap()));
}

#[test]
fn bytes_moved_between_sources_are_noticed() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the one"), world.write("b.txt", "and two")]);
    world.open(&source).unwrap();
    world.write("a.txt", "the on");
    world.write("b.txt", "eand two");
    rebuilt(&world.open(&source).unwrap());
}

#[test]
fn a_damaged_cache_is_rebuilt() {
    let world = World::new();
    let text = "all the words of the text ".repeat(40);
    let source = Source::new([world.write("a.txt", &text)]);
    let expected = world.joined(&[&text]);
    let path = world.open(&source).unwrap().path().to_path_buf();
    let good = fs::read(&path).unwrap();
    assert_eq!(good.len(), 56 + 8 + 2 * expected.len());

    let check = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).unwrap();
        let tokens = world.open(&source).unwrap();
        assert!(!rebuilt(&tokens).is_empty(), "{what}");
        assert!(all(&tokens) == expected, "{what}");
        assert!(fs::read(&path).unwrap() == good, "{what}");
        assert_eq!(world.n_cached(), 1, "{what}");
    };
    let mut state = 1;
    for at in 0..56 {
        for mask in [0x80, 1 + random(&mut state) as u8 % 255] {
            let mut bytes = good.clone();
            bytes[at] ^= mask;
            check(&bytes, &format!("byte {at} of the header ^ {mask}"));
        }
    }
    for _ in 0..200 {
        let at = 56 + random(&mut state) as usize % (good.len() - 56);
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (random(&mut state) % 8);
        check(&bytes, &format!("byte {at}"));
    }
    for len in (0..=66).chain([good.len() / 2, good.len() - 2, good.len() - 1]) {
        check(&good[..len], &format!("{len} bytes"));
    }
    check(&[&good[..], &[0, 0]].concat(), "longer");
    check(&vec![0; good.len()], "zeros");
    check(b"something else entirely, which is longer than a header of 56 bytes", "foreign");
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);
}

#[test]
fn a_cache_that_cannot_be_written_is_an_error() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the text")]);
    let file = world.write("file", "in the way");
    for cache in [file.clone(), file.join("below")] {
        let failed =
            TokenFile::open(&source, &world.tokenizer, &world.path("tokenizer.json"), &cache);
        let message = message(failed);
        assert!(message.contains("cannot write the token cache"), "{message}");
        assert!(message.ends_with("free space or name another cache folder"), "{message}");
    }
    assert_eq!(fs::read(file).unwrap(), b"in the way");

    // A folder in place of the file.
    let path = world.open(&source).unwrap().path().to_path_buf();
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(world.open(&source), Err(DataError::Cache { .. })));
    assert_eq!(world.n_cached(), 1);
}

/// Writes fail when the file reaches the limit of the process, as they do on a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing() {
    const FOLDER: &str = "KV_TRAIN_TEST_FULL_DISK";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let folder = PathBuf::from(folder);
        let path = folder.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path, &[EOS]).unwrap();
        let source = Source::new([folder.join("a.txt")]);
        let failed = TokenFile::open(&source, &tokenizer, &path, &folder.join("cache/ids"));
        assert!(matches!(failed, Err(DataError::Cache { .. })), "{failed:?}");
        return;
    }
    let world = World::new();
    let source = Source::new([world.write("a.txt", "0123456789\n".repeat(300_000))]);
    let status = std::process::Command::new("sh")
        .arg("-c")
        // Blocks of 512 or 1024 bytes; the signal would end the process before the error.
        .arg("trap '' XFSZ; ulimit -f 2000; exec \"$0\" --exact a_full_disk_leaves_nothing")
        .arg(std::env::current_exe().unwrap())
        .env(FOLDER, world.folder.path())
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    assert!(world.cache().is_dir(), "the child did not run");
    assert_eq!(world.n_cached(), 0);
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Built);
}

#[test]
fn processes_may_share_a_cache() {
    let world = World::new();
    let text = "some of the text ".repeat(20_000);
    let source = Source::new([world.write("a.txt", &text)]);
    let expected = world.joined(&[&text]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(all(&world.open(&source).unwrap()) == expected));
        }
    });
    assert_eq!(world.n_cached(), 1);
}

// Windows.

#[test]
fn every_token_is_predicted_once() {
    let world = World::new();
    for (n, seq_len) in [(17, 4), (16, 4), (20, 4), (2, 1), (100, 99), (100, 7), (65, 64)] {
        let tokens = world.tokens(n);
        let ids = all(&tokens);
        let windows = Windows::new(tokens, seq_len).unwrap();
        assert_eq!(windows.len(), (n - 1) / seq_len);
        let mut predicted = vec![];
        for i in 0..windows.len() {
            let window: Vec<u32> = windows.get(i).unwrap().collect();
            assert_eq!(window, ids[i * seq_len..=(i + 1) * seq_len]);
            predicted.extend_from_slice(&window[1..]);
        }
        assert_eq!(predicted, ids[1..=windows.len() * seq_len]);
        assert!(n - 1 - predicted.len() < seq_len);
        assert!(windows.get(windows.len()).is_none() && windows.get(usize::MAX).is_none());
    }
}

#[test]
fn short_texts_and_odd_splits_are_errors() {
    let world = World::new();
    let tokens = world.tokens(17);
    let short = Windows::new(tokens.clone(), 17);
    assert_eq!(message(short), "tokens = 17: 1 window(s) with seq_len = 17 need at least 18");
    message(Windows::new(tokens.clone(), usize::MAX));
    assert!(message(Windows::new(tokens.clone(), 0)).starts_with("seq_len = 0: "));
    let windows = Windows::new(tokens.clone(), 4).unwrap();
    for fraction in [0.0, 1.0, -0.5, 2.0, f64::NAN, f64::INFINITY, 0.9] {
        assert!(message(windows.hold_out(fraction)).starts_with("holdout = "), "{fraction}");
    }
    let one = Windows::new(tokens, 16).unwrap();
    assert!(matches!(one.hold_out(0.5), Err(DataError::TooShort { needed: 33, .. })));
}

#[test]
fn held_out_tokens_are_the_end_of_the_text() {
    let world = World::new();
    let tokens = world.tokens(1003);
    let windows = Windows::new(tokens.clone(), 10).unwrap();
    for (fraction, expected) in [(0.05, 5), (0.001, 1), (0.5, 50), (0.994, 99), (0.126, 13)] {
        let (train, valid) = windows.hold_out(fraction).unwrap();
        assert_eq!((train.len(), valid.len()), (100 - expected, expected));
        for i in 0..100_usize {
            let part = match i.checked_sub(train.len()) {
                None => train.get(i).unwrap().collect::<Vec<_>>(),
                Some(i) => valid.get(i).unwrap().collect(),
            };
            assert!(part.into_iter().eq(windows.get(i).unwrap()));
        }
        assert!(train.get(train.len()).is_none() && valid.get(valid.len()).is_none());
    }
    // Held out a second time: the end of what is left.
    let (train, _) = windows.hold_out(0.1).unwrap();
    let (train, valid) = train.hold_out(0.5).unwrap();
    assert_eq!((train.len(), valid.len()), (45, 45));
    assert!(valid.get(44).unwrap().eq(windows.get(89).unwrap()));
}

#[test]
fn every_text_holds_out_its_own_tail() {
    let world = World::new();
    // Ids are bytes: each text has letters of its own.
    let lengths = [500, 301, 3, 812];
    let texts = ["a", "b", "c", "d"].map(|letter| (letter, letter.as_bytes()[0]));
    let paths: Vec<PathBuf> = texts
        .iter()
        .zip(lengths)
        .map(|((letter, _), n)| world.write(&format!("{letter}.txt"), letter.repeat(n)))
        .collect();
    let tokens = Arc::new(world.open(&Source::new(paths)).unwrap());
    let ends: Vec<usize> = tokens.sources().map(|source| source.end).collect();
    // A separator goes before each text but the first.
    assert_eq!(ends, [500, 802, 806, 1619]);
    let count = |ids: &[u32], letter: u8| ids.iter().filter(|&&id| id == u32::from(letter)).count();

    let windows = Windows::new(tokens.clone(), 10).unwrap();
    for fraction in [0.001, 0.1, 0.5] {
        let (train, valid) = windows.hold_out(fraction).unwrap();
        let part = |part: &Windows| -> Vec<Vec<u32>> {
            (0..part.len()).map(|i| part.get(i).unwrap().collect()).collect()
        };
        let (trained, held_out) = (part(&train), part(&valid));
        // 49, 30 and 80 windows lie within one text; that of three tokens has none.
        for (&(letter, byte), whole) in texts.iter().zip([49.0f64, 30.0, 0.0, 80.0]) {
            let expected =
                if whole == 0.0 { 0 } else { ((whole * fraction).round() as usize).max(1) };
            let own = held_out.iter().filter(|ids| count(ids, byte) == ids.len()).count();
            assert_eq!(own, expected, "{letter} at {fraction}");
        }
        // The first held-out window of every text comes first.
        let first: Vec<u32> = held_out.iter().take(3).map(|ids| ids[5]).collect();
        assert_eq!(first, [97, 98, 100]);
        // The window in which one text ends and the next begins is in neither part.
        assert!(trained.len() + held_out.len() >= windows.len() - 3);
        let text = valid.text(usize::MAX);
        assert!(text.len() > 10 * held_out.len());
        assert_eq!(valid.text(30).len(), 30);
        for (_, byte) in [texts[0], texts[1], texts[3]] {
            assert_eq!(count(&valid.text(30), byte), 10);
        }
    }

    // No id that is scored is trained on. In these texts no character occurs twice, so ids show
    // their position.
    let distinct: Vec<PathBuf> = (0..3)
        .map(|text| {
            let chars = (0..400u32).map(|i| char::from_u32(0x4e00 + 400 * text + i).unwrap());
            world.write(&format!("distinct {text}.txt"), chars.collect::<String>())
        })
        .collect();
    let tokens = Arc::new(world.open(&Source::new(distinct)).unwrap());
    let windows = Windows::new(tokens.clone(), 7).unwrap();
    let (train, valid) = windows.hold_out(0.2).unwrap();
    let at = |windows: &Windows, i: usize| windows.get(i).unwrap().collect::<Vec<u32>>();
    let position = |ids: &[u32]| {
        // Three bytes are a character, and no two characters are equal.
        (0..=tokens.len() - ids.len())
            .find(|&p| tokens.ids(p..p + ids.len()).eq(ids.iter().copied()))
            .unwrap()
    };
    let positions = |windows: &Windows| -> Vec<usize> {
        (0..windows.len()).map(|i| position(&at(windows, i))).collect()
    };
    let trained: BTreeSet<usize> =
        positions(&train).into_iter().flat_map(|start| start..start + 8).collect();
    for start in positions(&valid) {
        for target in start + 1..start + 8 {
            assert!(!trained.contains(&target), "{target}");
        }
    }

    // A hundred small texts: not every one of them holds out a window, which would be a third of
    // it.
    let small: Vec<PathBuf> =
        (0..100).map(|i| world.write(&format!("small {i}.txt"), "x".repeat(35))).collect();
    let tokens = Arc::new(world.open(&Source::new(small)).unwrap());
    let windows = Windows::new(tokens, 10).unwrap();
    let (train, valid) = windows.hold_out(0.02).unwrap();
    assert!((5..=9).contains(&valid.len()), "{}", valid.len());
    assert!(train.len() + 2 * valid.len() >= windows.len());
}

// Order.

#[test]
fn each_pass_is_a_permutation_of_its_own() {
    for n in [1, 2, 3, 7, 64, 1000, 4099] {
        let order = Order::new(7, n).unwrap();
        let mut passes = BTreeSet::new();
        for pass in 0..20_u64 {
            let of = |i| order.window_at(pass * n as u64 + i);
            let windows: Vec<usize> = (0..n as u64).map(of).collect();
            let mut sorted = windows.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..n), "pass {pass} of {n}");
            passes.insert(windows);
        }
        assert!(n < 64 || passes.len() == 20, "{n}: passes repeat");
    }
}

#[test]
fn an_order_depends_on_the_seed_and_the_position_only() {
    let n = 100;
    let whole: Vec<usize> =
        (0..1000).map(|position| Order::new(3, n).unwrap().window_at(position)).collect();
    let order = Order::new(3, n).unwrap();
    assert!(whole.iter().copied().eq((0..1000).map(|position| order.window_at(position))));
    let mut state = 5;
    for _ in 0..2000 {
        let position = random(&mut state) % 1000;
        assert_eq!(order.clone().window_at(position), whole[position as usize]);
    }
    let of = |seed| {
        let order = Order::new(seed, n).unwrap();
        (0..n as u64).map(|i| order.window_at(i)).collect::<Vec<_>>()
    };
    let orders: BTreeSet<Vec<usize>> = (0..200).map(of).collect();
    assert_eq!(orders.len(), 200);
    // A neighboring seed does not give the same passes at another time.
    assert!(!orders.contains(&whole[100..200]));
    order.window_at(u64::MAX);
    message(Order::new(1, 0));
    message(Order::new(1, (1 << 32) + 1));
    // A run that resumes from a checkpoint relies on this order, so it must never change.
    assert_eq!(whole[..8], PINNED);
}

const PINNED: [usize; 8] = [83, 88, 11, 30, 97, 35, 50, 28];

#[test]
fn an_order_is_uniform() {
    // Each of the 24 orders of 4 windows comes up about as often as the others.
    let order = Order::new(11, 4).unwrap();
    let mut counts = std::collections::BTreeMap::<Vec<usize>, f64>::new();
    for pass in 0..24_000 {
        *counts.entry((0..4).map(|i| order.window_at(pass * 4 + i)).collect()).or_default() += 1.0;
    }
    let chi2: f64 = counts.values().map(|n| (n - 1000.0).powi(2) / 1000.0).sum();
    assert!(counts.len() == 24 && chi2 < 60.0, "chi2 of 23 degrees of freedom: {chi2}");
}

// Loaders.

/// Position and number of an epoch's first batch.
fn place(loader: &dyn DataLoader<Batch>) -> (u64, u64) {
    let batch = loader.iter().next().unwrap().unwrap();
    (batch.position, batch.number)
}

fn rows(tensor: Tensor<2, Int>) -> Vec<Vec<i64>> {
    let [_, seq] = tensor.dims();
    let ids: Vec<i64> = tensor.into_data().convert::<i64>().try_into_vec().unwrap();
    ids.chunks(seq).map(<[i64]>::to_vec).collect()
}

/// The windows of an epoch, checked to be inputs and targets one apart, and the batches' sizes.
fn epoch(loader: &dyn DataLoader<Batch>) -> (Vec<Vec<i64>>, Vec<usize>) {
    let mut iterator = loader.iter();
    let (mut windows, mut sizes, mut places) = (vec![], vec![], vec![]);
    assert_eq!(iterator.progress().items_total, loader.num_items());
    assert_eq!(iterator.progress().items_processed, 0);
    while let Some(batch) = iterator.next() {
        let batch = batch.unwrap();
        assert_eq!(batch.inputs.dims(), batch.targets.dims());
        places.push((batch.position, batch.number));
        sizes.push(batch.inputs.dims()[0]);
        for (mut input, target) in rows(batch.inputs).into_iter().zip(rows(batch.targets)) {
            assert_eq!(input[1..], target[..target.len() - 1]);
            input.push(target[target.len() - 1]);
            windows.push(input);
        }
        assert_eq!(iterator.progress().items_processed, windows.len());
    }
    for (i, pair) in places.windows(2).enumerate() {
        let expected = (pair[0].0 + sizes[i] as u64, pair[0].1 + 1);
        assert_eq!(pair[1], expected, "position and number");
    }
    assert!(iterator.progress().is_completed());
    assert!(iterator.next().is_none());
    (windows, sizes)
}

/// 23 windows of 7 ids, all different.
fn windows(world: &World) -> Arc<Windows> {
    Arc::new(Windows::new(world.tokens(23 * 6 + 1), 6).unwrap())
}

fn expected(windows: &Windows, order: &Order, positions: std::ops::Range<u64>) -> Vec<Vec<i64>> {
    let window = |position| {
        let window = windows.get(order.window_at(position)).unwrap();
        window.map(i64::from).collect()
    };
    positions.map(window).collect()
}

#[test]
fn epochs_follow_the_order_and_resume_anywhere() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    let new =
        |first| TrainLoader::new(windows.clone(), order.clone(), 4, 3, first, device()).unwrap();
    let loader = new(0);
    assert_eq!(loader.num_items(), 12);
    let epochs: Vec<_> = (0..8).map(|_| epoch(&loader)).collect();
    for (e, (windows_of, sizes)) in epochs.iter().enumerate() {
        let e = e as u64;
        assert_eq!(windows_of, &expected(&windows, &order, e * 12..(e + 1) * 12));
        assert_eq!(sizes, &[4; 3]);
    }
    for first in 0..8 {
        let resumed = new(first);
        for e in &epochs[first..] {
            assert_eq!(&epoch(&resumed), e);
        }
    }
    // A loader that is moved continues with its next epoch, and so does the one it was moved from.
    let loader = new(2);
    epoch(&loader);
    let moved = loader.to_device(&device());
    for e in &epochs[3..5] {
        assert_eq!(&epoch(&*moved), e);
    }
    assert_eq!(epoch(&loader), epochs[3]);
}

#[test]
fn workers_share_each_epoch() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    for (batch, batches, n_workers) in [(4, 3, 2), (4, 3, 3), (4, 3, 5), (2, 1, 3), (5, 2, 1)] {
        let items = (batch * batches) as u64;
        let new = |first| -> Arc<dyn DataLoader<Batch>> {
            let (windows, order) = (windows.clone(), order.clone());
            Arc::new(TrainLoader::new(windows, order, batch, batches, first, device()).unwrap())
        };
        let devices = vec![device(); n_workers];
        let workers = split_dataloader(new(0), &devices);
        let mut epochs = vec![];
        for e in 0..6_u64 {
            let shares: Vec<_> = workers.iter().map(|worker| epoch(&**worker)).collect();
            for (worker, (share, sizes)) in workers.iter().zip(&shares) {
                assert_eq!(share.len(), worker.num_items());
                assert!(sizes.iter().rev().skip(1).all(|&size| size == batch), "{sizes:?}");
            }
            let together: Vec<_> = shares.iter().flat_map(|(share, _)| share.clone()).collect();
            assert_eq!(together, expected(&windows, &order, e * items..(e + 1) * items));
            epochs.push(shares);
        }
        for first in 0..6 {
            let resumed = split_dataloader(new(first), &devices);
            for shares in &epochs[first..] {
                let again: Vec<_> = resumed.iter().map(|worker| epoch(&**worker)).collect();
                assert_eq!(&again, shares);
            }
        }
    }
    // Slices of slices, and beyond the end.
    let loader = TrainLoader::new(windows.clone(), order.clone(), 4, 3, 1, device()).unwrap();
    let slice = loader.slice(3, 11).slice(2, 5);
    assert_eq!(epoch(&*slice).0, expected(&windows, &order, 12 + 5..12 + 8));
    assert_eq!(loader.slice(10, 99).num_items(), 2);
    assert_eq!(loader.slice(99, 3).num_items(), 0);
    assert!(epoch(&*loader.slice(99, 3)).0.is_empty());
}

#[test]
fn batches_know_their_place() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    let loader = TrainLoader::new(windows.clone(), order, 4, 6, 2, device()).unwrap();
    // 24 items: 8 for each of three workers, in 2 batches.
    let workers = split_dataloader(loader.slice(0, 24), &[device(), device(), device()]);
    for epoch in 2..5 {
        assert_eq!(place(&loader), (24 * epoch, 6 * epoch));
        for (i, worker) in workers.iter().enumerate() {
            assert_eq!(place(&**worker), (24 * epoch + 8 * i as u64, 2 * epoch));
        }
    }
    let valid = ValidLoader::new(windows, 4, 10, device()).unwrap();
    assert_eq!(place(&valid), (0, 0));
    assert_eq!(place(&valid), (0, 0));
    assert_eq!(place(&*valid.slice(3, 9)), (3, 0));
}

#[test]
fn validation_is_the_same_every_time() {
    let world = World::new();
    let windows = windows(&world);
    let loader = ValidLoader::new(windows.clone(), 4, 10, device()).unwrap();
    let first: Vec<Vec<i64>> =
        (0..10).map(|i| windows.get(i).unwrap().map(i64::from).collect()).collect();
    for _ in 0..2 {
        assert_eq!(epoch(&loader), (first.clone(), vec![4, 4, 2]));
    }
    assert_eq!(epoch(&*loader.to_device(&device())).0, first);
    assert_eq!(epoch(&*loader.slice(2, 9)).0, first[2..9]);
    let all = ValidLoader::new(windows.clone(), 64, usize::MAX, device()).unwrap();
    assert_eq!((all.num_items(), epoch(&all).1), (23, vec![23]));
}

#[test]
fn loaders_refuse_what_makes_no_batch() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    let train = |order: &Order, batch, batches| {
        message(TrainLoader::new(windows.clone(), order.clone(), batch, batches, 0, device()))
    };
    assert_eq!(train(&order, 0, 1), "batch = 0: must be at least 1");
    assert_eq!(train(&order, 1, 0), "batches_per_epoch = 0: must be at least 1");
    assert!(train(&order, 1 << 40, 1 << 40).starts_with("batches_per_epoch = "));
    let other = Order::new(5, 22).unwrap();
    assert_eq!(
        train(&other, 1, 1),
        "n_windows = 22: the order must be of the 23 windows there are"
    );
    assert!(message(ValidLoader::new(windows.clone(), 0, 1, device())).starts_with("batch = 0"));
    assert!(message(ValidLoader::new(windows.clone(), 1, 0, device())).starts_with("max_windows"));
    // Positions beyond 64 bits: an error in place of a batch, then the end.
    let last = TrainLoader::new(windows, order, 4, 3, usize::MAX, device()).unwrap();
    let mut iterator = last.iter();
    let error = iterator.next().unwrap().unwrap_err();
    assert!(error.to_string().contains("below 2^64"), "{error}");
    assert!(iterator.next().is_none());
}
