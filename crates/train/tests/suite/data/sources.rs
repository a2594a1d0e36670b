//! Sources: text and JSONL files as documents.

use std::{fs, path::PathBuf};

use kv_models::Tokenizer;
use kv_train::data::{DataError, Origin, Source, TokenFile};
use serde_json::{Map, Value, json};

use super::{EOS, World, all, message};

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
fn without_eos_documents_are_concatenated() {
    let world = World::new();
    let tokenizer = Tokenizer::from_file(world.path("tokenizer.json"), &[]).unwrap();
    let source = Source::new([world.write("a.txt", "one"), world.write("b.txt", "two")]);
    // A folder means the tokenizer.json in it.
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
        assert!(message.contains("id 65536 of token 2 must be below"), "{message}");
    }
    // The tokenizer refuses words without a token.
    let source = Source::new([world.write("b.jsonl", "{\"text\": \"w1\"}\n{\"text\": \"what\"}")]);
    let refused = TokenFile::open(&source, &tokenizer, &path, &world.cache());
    assert!(matches!(&refused, Err(DataError::Tokenizer { line: Some(2), .. })), "{refused:?}");
    message(refused);
    assert_eq!(world.n_cached(), 1);
}

#[test]
fn mistakes_in_sources_are_reported_and_leave_nothing() {
    let world = World::new();
    let check = |name: &str, bytes: &[u8], expected: &str| {
        let message = message(world.open_one(name, bytes));
        assert!(message.contains(name) && message.ends_with(expected), "{message}");
        assert_eq!(world.n_cached(), 0, "{name}");
        let documents = Source::new([world.path(name)]).documents();
        assert_eq!(documents.unwrap_err().to_string(), message);
    };
    check("a.txt", b"good \xff bad", ": byte 5 is not UTF-8; convert the file to UTF-8");
    check(
        "b.txt",
        b"\xef\xbb\xbfgood \xe2\x82",
        ": byte 8 is not UTF-8; convert the file to UTF-8",
    );
    check("c.txt", b"", ": no text in it");
    check("c.jsonl", b"\n  \n{\"text\": \"\"}\n", ": no text in it");
    let good = "{\"text\": \"fine\"}\n";
    let line = |line: &[u8]| [good.as_bytes(), b"\n", line, b"\n", good.as_bytes()].concat();
    check("d.jsonl", &line(b"{}"), ": line 3: field `text` is missing, but must be a string");
    check("e.jsonl", &line(b"{\"text\": 5}"), "field `text` is a number, but must be a string");
    check("f.jsonl", &line(b"{\"text\": null}"), "field `text` is null, but must be a string");
    check("g.jsonl", &line(b"[1]"), ": line 3: is an array, but must be a JSON object");
    check(
        "h.jsonl",
        &line(b"{\"text\": "),
        ": line 3: not JSON: EOF while parsing a value at column 8",
    );
    check(
        "i.jsonl",
        &line(b"{\"text\": \"\xff\"}"),
        ": byte 28 is not UTF-8; convert the file to UTF-8",
    );
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

/// A text file is read in pieces but remains one document.
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
