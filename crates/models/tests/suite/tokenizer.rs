//! Tokenizers against an independent byte-pair encoder, and pre-tokenizers by their rules.

use std::{
    fs,
    io::{self, Read},
    path::Path,
};

use kv_models::{Error, Loaded, Tokenizer, load};
use serde_json::{Value as Json, json};

use crate::common::{
    GgmlType, Value, bos_vocabulary, copy, device, fixture, smollm2, tiny, with_config, write_gguf,
    write_vocabulary,
};

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_ids_match_an_independent_encoder() {
    let tokenizer = load(smollm2(), &device()).unwrap().tokenizer.unwrap();
    for name in ["licenses", "mixed"] {
        let text = fs::read_to_string(fixture(name).with_extension("txt")).unwrap();
        let bytes = fs::read(fixture(name).with_extension("smollm.u16")).unwrap();
        let expected: Vec<u32> =
            bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect();
        let ids = tokenizer.encode(&text).unwrap();
        let first = ids.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(first, None, "{name} differs");
        assert_eq!(ids.len(), expected.len(), "{name}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{name} does not round-trip");

        let mut stream = tokenizer.stream();
        let mut streamed: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        streamed += &stream.finish().unwrap();
        assert!(streamed == text, "{name} streams another text");
    }
    let title = " \n = Robert Boulter = \n";
    assert_eq!(tokenizer.encode(title).unwrap()[..7], [3717, 446, 6356, 389, 9226, 352, 446]);
    assert_eq!(tokenizer.eos().iter().copied().collect::<Vec<_>>(), [2]);
    assert_eq!(tokenizer.encode("<|im_end|>").unwrap(), [2]);
    assert_eq!(tokenizer.n_ids(), 49152);
}

/// llama.cpp's server has the same ids for this file (`/tokenize`, of xllamacpp 2026).
#[test]
#[ignore = "needs Gemma 3: scripts/get-gemma3 or KV_GEMMA3"]
fn gemma3_ids_match_llama_cpp() {
    let tokenizer = load(crate::common::gemma3(), &device()).unwrap().tokenizer.unwrap();
    for name in ["licenses", "mixed"] {
        let text = fs::read_to_string(fixture(name).with_extension("txt")).unwrap();
        let bytes = fs::read(fixture(name).with_extension("gemma3.u32")).unwrap();
        let expected: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        let ids = tokenizer.encode(&text).unwrap();
        let first = ids.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(first, None, "{name} differs");
        assert_eq!(ids.len(), expected.len(), "{name}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{name} does not round-trip");
    }
    assert_eq!(tokenizer.leading_bos(), Some(2));
}

/// Encodes as llama.cpp's `llm_tokenizer_spm` does. It joins the neighbors whose joint token has
/// the highest score, the first of equals, until no two neighbors form a token. The rest is written
/// as bytes.
fn joined_by_score(text: &str, scores: &[(&str, f32)]) -> Vec<String> {
    let score = |token: &str| scores.iter().find(|(other, _)| *other == token).map(|(_, s)| *s);
    let mut parts: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for i in 0..parts.len().saturating_sub(1) {
            if let Some(score) = score(&format!("{}{}", parts[i], parts[i + 1]))
                && best.is_none_or(|(highest, _)| score > highest)
            {
                best = Some((score, i));
            }
        }
        let Some((_, i)) = best else { break };
        let right = parts.remove(i + 1);
        parts[i] += &right;
    }
    let bytes = |part: &String| match score(part) {
        Some(_) => vec![part.clone()],
        None => part.bytes().map(|byte| format!("<0x{byte:02X}>")).collect(),
    };
    parts.iter().flat_map(bytes).collect()
}

#[test]
fn sentencepiece_vocabularies_join_by_score() {
    let mut scores = vec![("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)];
    let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    scores.extend(bytes.iter().map(|byte| (byte.as_str(), 0.0)));
    scores.extend("▁ a b c d é ab bc cd abc ▁a ▁ab bcd ▁▁ aa aaa".split(' ').zip(1u8..).map(
        |(token, i)| {
            // Scores follow neither ids nor lengths.
            (token, -f32::from(i * 7 % 16))
        },
    ));
    let kinds = |id: usize| {
        if id < 3 {
            3
        } else if id < 259 {
            6
        } else {
            1
        }
    };
    let strings = scores.iter().map(|(token, _)| Value::String((*token).into())).collect();
    let metadata = |prefixed: bool| {
        [
            ("tokenizer.ggml.model", Value::String("llama".into())),
            ("tokenizer.ggml.tokens", Value::Array(Clone::clone(&strings))),
            ("tokenizer.ggml.scores", {
                Value::Array(scores.iter().map(|(_, score)| Value::F32(*score)).collect())
            }),
            ("tokenizer.ggml.token_type", {
                Value::Array((0..scores.len()).map(|id| Value::I32(kinds(id))).collect())
            }),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(2)),
            ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
            ("tokenizer.ggml.add_space_prefix", Value::Bool(prefixed)),
        ]
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scores.gguf");
    for prefixed in [false, true] {
        write_gguf(&tiny("gpt2-tiny"), &file, GgmlType::F32, &metadata(prefixed));
        let tokenizer = Tokenizer::from_gguf(&file).unwrap();
        assert_eq!(tokenizer.leading_bos(), Some(1));
        for text in [
            "abcd",
            "bcd abc",
            "a  ab",
            "aaaa",
            "aaaaa",
            "dé abé",
            "zab",
            "日",
            "abcabcdbc a b",
            "b",
        ] {
            let ids = tokenizer.encode(text).unwrap();
            let tokens: Vec<_> = ids.iter().map(|&id| tokenizer.id_to_token(id).unwrap()).collect();
            let whole = if prefixed { format!(" {text}") } else { text.into() };
            assert_eq!(tokens, joined_by_score(&whole, &scores[3..]), "{text}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }
    // A score is missing.
    let mut short = metadata(false);
    short[2].1 = Value::Array(vec![Value::F32(0.0)]);
    write_gguf(&tiny("gpt2-tiny"), &file, GgmlType::F32, &short);
    let message = Tokenizer::from_gguf(&file).unwrap_err().to_string();
    assert!(message.contains("tokenizer.ggml.scores") && message.contains("275"), "{message}");
}

/// Returns the tokens of `text`. `merges` would join all of it, so the tokens show where the
/// pre-tokenizer splits.
fn pieces(pre: &str, merges: &[&str], text: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vocabulary.gguf");
    write_vocabulary(&file, "gpt2", pre, merges);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let ids = tokenizer.encode(text).unwrap();
    ids.iter().map(|&id| tokenizer.decode(&[id]).unwrap()).collect()
}

#[test]
fn pre_tokenizers_split_digits_as_their_models_do() {
    let merges = ["1 2", "12 3", "123 4", "Ġ 1"];
    assert_eq!(pieces("gpt-2", &merges, "a1234"), ["a", "1234"]);
    assert_eq!(pieces("smollm", &merges, "a1234"), ["a", "1", "2", "3", "4"]);
    assert_eq!(pieces("qwen2", &merges, "a1234"), ["a", "1", "2", "3", "4"]);
    assert_eq!(pieces("llama-bpe", &merges, "a1234"), ["a", "123", "4"]);
    assert_eq!(pieces("default", &merges, "a1234"), ["a", "123", "4"]);
    assert_eq!(pieces("deepseek-v3", &merges, "a1234"), ["a", "123", "4"]);
    assert_eq!(pieces("deepseek-v3", &merges, "a 1"), ["a", " ", "1"]);
    assert_eq!(pieces("gpt-2", &merges, "a 1"), ["a", " 1"]);
    assert_eq!(pieces("smollm", &merges, "a 1"), ["a", " ", "1"]);
}

#[test]
fn pre_tokenizers_split_contractions_and_lines_as_their_models_do() {
    let merges = ["' S", "' s", "I T", ". Ċ", "Ċ Ċ", "Ġ Ġ", "( a"];
    assert_eq!(pieces("gpt-2", &merges, "IT'S"), ["IT", "'", "S"]);
    assert_eq!(pieces("gpt-2", &merges, "IT's"), ["IT", "'s"]);
    assert_eq!(pieces("qwen2", &merges, "IT'S"), ["IT", "'S"]);
    assert_eq!(pieces("llama-bpe", &merges, ".\n\n"), [".\n", "\n"]);
    assert_eq!(pieces("smollm", &merges, ".\n\n"), [".", "\n\n"]);
    assert_eq!(pieces("deepseek-v3", &merges, "IT'S"), ["IT", "'S"]);
    assert_eq!(pieces("deepseek-v3", &merges, ".\n\n"), [".\n", "\n"]);
    assert_eq!(pieces("qwen2", &merges, "(a"), ["(a"]);
    assert_eq!(pieces("gpt-2", &merges, "(a"), ["(", "a"]);
    assert_eq!(pieces("gpt-2", &merges, "   a"), ["  ", " ", "a"]);
}

#[test]
fn llama_bpe_keeps_whole_tokens_that_no_merge_reaches() {
    // The merge of b and c comes first and prevents "abc"; a tokenizer that ignores merges finds
    // "abc" in the vocabulary.
    let merges = ["b c", "a b", "ab c"];
    assert_eq!(pieces("gpt-2", &merges, "abc"), ["a", "bc"]);
    assert_eq!(pieces("llama-bpe", &merges, "abc"), ["abc"]);
}

#[test]
fn unknown_vocabularies_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vocabulary.gguf");
    for (model, pre, what) in
        [("gpt2", "tekken", "pre-tokenizer tekken"), ("t5", "default", "GGUF tokenizer t5")]
    {
        write_vocabulary(&file, model, pre, &["a b"]);
        let loaded = load(&file, &device()).unwrap();
        match loaded.tokenizer {
            Err(Error::Unsupported { what: found, .. }) => assert_eq!(found, what),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_vocabulary_beyond_the_model_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vocabulary.gguf");
    write_vocabulary(&file, "gpt2", "gpt-2", &["a b"]);
    let error = load(&file, &device()).unwrap().tokenizer.unwrap_err().to_string();
    assert!(error.contains("has 257 ids, but the model has 256"), "{error}");
}

#[test]
fn broken_tokenizer_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    assert!(matches!(Tokenizer::from_file(&file, &[]), Err(Error::NotFound { .. })));
    fs::write(&file, "{\"version\": \"1.0\"").unwrap();
    let error = Tokenizer::from_file(&file, &[]).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && !error.contains('\n'), "{error}");
}

#[test]
fn truncation_and_padding_are_ignored_and_noted() {
    let folder = copy(&tiny("llama-tiny"));
    let path = folder.path().join("tokenizer.json");
    let mut file: Json =
        serde_json::from_slice(&fs::read(fixture("bos/tokenizer.json")).unwrap()).unwrap();
    file["truncation"] = json!({
        "direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0,
    });
    file["padding"] = json!({
        "strategy": {"Fixed": 4000}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<unk>",
    });
    fs::write(&path, file.to_string()).unwrap();
    let text = fs::read_to_string(fixture("licenses.txt")).unwrap();
    let plain = Tokenizer::from_file(fixture("bos/tokenizer.json"), &[]).unwrap();
    assert!(plain.notes().is_empty());
    let loaded = load(folder.path(), &device()).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    assert_eq!(loaded.notes, tokenizer.notes());
    assert_eq!(tokenizer.encode(&text).unwrap(), plain.encode(&text).unwrap());
    assert_eq!(tokenizer.encode("a").unwrap().len(), 1);
    let [note] = tokenizer.notes() else { panic!("{:?}", tokenizer.notes()) };
    assert!(note.ends_with(
        "ignores truncation to 512 tokens and padding, because texts are encoded whole"
    ));
    assert!(note.contains("tokenizer.json"), "{note}");
}

/// An endless text that counts the bytes read.
struct Endless {
    line: &'static [u8],
    n_read: usize,
}

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        for byte in buffer.iter_mut() {
            *byte = self.line[self.n_read % self.line.len()];
            self.n_read += 1;
        }
        Ok(buffer.len())
    }
}

#[test]
fn a_text_is_read_only_as_far_as_needed() {
    let tokenizer = Tokenizer::from_file(fixture("bos/tokenizer.json"), &[]).unwrap();
    let line = "The licenses for most software are designed to take away your freedom.\n";
    let mut text = Endless { line: line.as_bytes(), n_read: 0 };
    let ids = tokenizer.encode_reader(&mut text, "endless.txt", Some(1000)).unwrap();
    assert!(text.n_read < 200_000, "{} bytes for 1000 ids", text.n_read);
    assert_eq!(ids, tokenizer.encode(&line.repeat(100)).unwrap()[..1000]);
    assert_eq!(tokenizer.encode_first(&line.repeat(100), 1000).unwrap(), ids);
    assert!(tokenizer.encode_first(line, 0).unwrap().is_empty());
    let short = tokenizer.encode_reader(line.as_bytes(), "short.txt", Some(1000)).unwrap();
    assert_eq!(short, tokenizer.encode(line).unwrap());
}

#[test]
fn a_byte_order_mark_is_skipped_and_bad_bytes_are_named() {
    let tokenizer = Tokenizer::train_bpe(["some text"].into_iter(), 260).unwrap();
    let read = |bytes: &[u8]| tokenizer.encode_reader(bytes, Path::new("a.txt"), None);
    assert_eq!(read("\u{feff}é text".as_bytes()).unwrap(), tokenizer.encode("é text").unwrap());
    let twice = "\u{feff}\u{feff}a";
    assert_eq!(read(twice.as_bytes()).unwrap(), tokenizer.encode(&twice[3..]).unwrap());
    // In a string, the marks are kept.
    assert_eq!(tokenizer.decode(&tokenizer.encode(twice).unwrap()).unwrap(), twice);
    let long = [&b"good ".repeat(50_000)[..], b"\xff bad"].concat();
    for (bytes, at) in
        [(&b"good \xff bad"[..], 5), (b"\xef\xbb\xbfgood \xe2\x82", 8), (&long, 250_000)]
    {
        match read(bytes) {
            Err(Error::NotUtf8 { offset, .. }) => assert_eq!(offset, at),
            other => panic!("{other:?}"),
        }
    }
}

/// Loads a GGUF file with a vocabulary of 256 tokens and these values.
fn gguf_of(file: &Path, pre: Option<&str>, more: &[(&str, Value)]) -> Loaded {
    let mut metadata = bos_vocabulary(more);
    metadata.retain(|(key, _)| key != "tokenizer.ggml.pre");
    metadata.extend(pre.map(|pre| ("tokenizer.ggml.pre".into(), Value::String(pre.into()))));
    let metadata: Vec<_> =
        metadata.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    write_gguf(&tiny("llama-tiny"), file, GgmlType::F32, &metadata);
    load(file, &device()).unwrap()
}

/// transformers never ends a text at such an id, and llama.cpp warns and ignores it.
#[test]
fn end_tokens_outside_the_vocabulary_are_noted() {
    let folder = with_config("llama-tiny", |c| c["eos_token_id"] = json!([2, 256, 70_000]));
    fs::copy(fixture("bos/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let loaded = load(folder.path(), &device()).unwrap();
    assert_eq!(loaded.tokenizer.unwrap().eos(), &[2].into());
    let [first, second] = &loaded.notes[..] else { panic!("{:?}", loaded.notes) };
    for (note, id) in [(first, 256), (second, 70_000)] {
        let expected =
            format!("tokenizer.json has 256 tokens and no end token {id}: texts do not end at it");
        assert!(note.ends_with(&expected), "{note}");
    }

    let file = folder.path().join("end.gguf");
    let with = |end| gguf_of(&file, Some("gpt-2"), &[("tokenizer.ggml.eos_token_id", end)]);
    let with_end = |id: u32| with(Value::U32(id));
    let error = with(Value::String("2".into())).tokenizer.err().unwrap().to_string();
    assert!(error.contains("eos_token_id is not the id of a token"), "{error}");
    let inside = with_end(255);
    assert_eq!(inside.tokenizer.unwrap().eos(), &[255].into());
    assert!(inside.notes.is_empty(), "{:?}", inside.notes);
    let outside = with_end(256);
    assert!(outside.tokenizer.unwrap().eos().is_empty());
    let [note] = &outside.notes[..] else { panic!("{:?}", outside.notes) };
    assert!(note.contains("end.gguf has 256 tokens and no end token 256"), "{note}");
}

/// llama.cpp then uses its default and warns about the quality.
#[test]
fn a_missing_pre_tokenizer_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = gguf_of(&folder.path().join("plain.gguf"), None, &[]);
    let [note] = &loaded.notes[..] else { panic!("{:?}", loaded.notes) };
    assert!(note.contains("plain.gguf has no tokenizer.ggml.pre"), "{note}");
    let named = gguf_of(&folder.path().join("default.gguf"), Some("default"), &[]);
    assert!(named.notes.is_empty(), "{:?}", named.notes);
    let text = "It's 1234 words, and 5 more.";
    let ids = |loaded: Loaded| loaded.tokenizer.unwrap().encode(text).unwrap();
    assert_eq!(ids(loaded), ids(named));
}
