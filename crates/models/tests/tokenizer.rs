//! Tokenizers against an independent byte-pair encoder, and pre-tokenizers by their rules.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;

use common::{device, fixture, smollm2, write_vocabulary};
use kv_models::{Error, Tokenizer, load};

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

/// The pieces that a pre-tokenizer leaves to merges that would join everything they can.
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
    assert_eq!(pieces("qwen2", &merges, "(a"), ["(a"]);
    assert_eq!(pieces("gpt-2", &merges, "(a"), ["(", "a"]);
    assert_eq!(pieces("gpt-2", &merges, "   a"), ["  ", " ", "a"]);
}

#[test]
fn llama_bpe_keeps_whole_tokens_that_no_merge_reaches() {
    // "ab" is a token only through b+c first; ignoring merges finds it whole.
    let merges = ["b c", "a b", "ab c"];
    assert_eq!(pieces("gpt-2", &merges, "abc"), ["a", "bc"]);
    assert_eq!(pieces("llama-bpe", &merges, "abc"), ["abc"]);
}

#[test]
fn unknown_vocabularies_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vocabulary.gguf");
    for (model, pre, what) in
        [("gpt2", "tekken", "pre-tokenizer tekken"), ("llama", "default", "GGUF tokenizer llama")]
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
    assert!(error.contains("has 257 ids, the model knows 256"), "{error}");
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
