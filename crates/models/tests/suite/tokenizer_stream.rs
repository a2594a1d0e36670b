//! Texts that are decoded id by id equal texts that are decoded at once.

use std::collections::{BTreeMap, BTreeSet};

use kv_models::{Tokenizer, tokenizer::TextStream};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use serde_json::{Value, json};

/// The id of byte 0 in both vocabularies.
const BYTES: u32 = 1;

fn tokenizer(tokens: impl IntoIterator<Item = String>, decoder: &Value) -> Tokenizer {
    let vocab: BTreeMap<String, usize> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, id)).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, file.to_string()).unwrap();
    Tokenizer::from_file(&path, &[]).unwrap()
}

/// Words of [`sentencepiece`], after its bytes.
const WORDS: [&str; 8] = ["▁", "▁the", "the", "▁a", "b", "é", ".", "▁▁"];

/// Returns a tokenizer like Llama 2's, which removes the space at the start of a text.
fn sentencepiece() -> Tokenizer {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let words = WORDS.map(String::from);
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    tokenizer(["<unk>".to_string()].into_iter().chain(bytes).chain(words), &decoder)
}

/// Returns the letter of a byte in GPT-2's vocabulary.
fn letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..byte).filter(|byte| !printable(*byte)).count() as u32;
    if printable(byte) { char::from(byte) } else { char::from_u32(256 + others).unwrap() }
}

/// Letters of one to four bytes.
const LETTERS: [char; 6] = ['a', ' ', '\n', 'é', '日', '🦀'];

/// Returns a byte-level tokenizer with tokens that end one letter and begin another, and the ids of
/// all tokens by their bytes.
fn byte_level() -> (Tokenizer, BTreeMap<Vec<u8>, u32>) {
    let mut tokens: BTreeSet<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    for a in LETTERS {
        for b in LETTERS {
            let pair = format!("{a}{b}").into_bytes();
            for (start, n) in (0..pair.len()).flat_map(|start| (2..=4).map(move |n| (start, n))) {
                tokens.extend(pair.get(start..start + n).map(<[u8]>::to_vec));
            }
        }
    }
    // Bytes come first, so that both vocabularies have the same ids for them.
    let (bytes, others): (Vec<_>, Vec<_>) = tokens.into_iter().partition(|token| token.len() == 1);
    let tokens: Vec<Vec<u8>> = bytes.into_iter().chain(others).collect();
    let text = |token: &Vec<u8>| token.iter().map(|byte| letter(*byte)).collect::<String>();
    let unknown = ["<unk>".to_string()].into_iter();
    let decoder = json!({
        "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
    });
    let tokenizer = tokenizer(unknown.chain(tokens.iter().map(text)), &decoder);
    (tokenizer, tokens.into_iter().zip(BYTES..).collect())
}

fn bytes_of(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| BYTES + u32::from(byte)).collect()
}

fn streamed(mut stream: TextStream<'_>, ids: &[u32]) -> String {
    let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    text += &stream.finish().unwrap();
    text
}

/// Checks a text of `ids`, and its continuation after each of the numbers of ids in `ends`.
fn check(tokenizer: &Tokenizer, ids: &[u32], ends: &[usize]) {
    let whole = tokenizer.decode(ids).unwrap();
    assert!(!whole.contains('\u{FFFD}'), "{whole:?}");
    assert_eq!(streamed(tokenizer.stream(), ids), whole, "{ids:?}");
    for &end in ends {
        let (prompt, reply) = ids.split_at(end);
        let continued = streamed(tokenizer.stream_after(prompt), reply);
        let prompt = tokenizer.decode(prompt).unwrap();
        assert_eq!(Some(&*continued), whole.strip_prefix(&prompt), "{ids:?} after {end}");
    }
}

#[test]
fn streams_of_byte_tokens_equal_whole_texts() {
    let tokenizer = sentencepiece();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    for _ in 0..2000 {
        let (mut ids, mut ends) = (vec![], vec![0]);
        for _ in 0..rng.random_range(1..12) {
            match rng.random_range(0..2) {
                0 => ids.push(BYTES + 256 + rng.random_range(0..WORDS.len() as u32)),
                _ => {
                    let letter = LETTERS[rng.random_range(0..LETTERS.len())];
                    ids.extend(bytes_of(&letter.to_string()));
                }
            }
            ends.push(ids.len());
        }
        check(&tokenizer, &ids, &ends);
    }
}

#[test]
fn streams_of_parts_of_letters_equal_whole_texts() {
    let (tokenizer, tokens) = byte_level();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(6);
    let mut longest = 0;
    for _ in 0..2000 {
        let n = rng.random_range(1..20);
        let text: String = (0..n).map(|_| LETTERS[rng.random_range(0..LETTERS.len())]).collect();
        let (mut ids, mut ends) = (vec![], vec![0]);
        let (mut at, mut inside) = (0, 0);
        while at < text.len() {
            let end = text.len().min(at + rng.random_range(1..=4));
            let Some(id) = tokens.get(&text.as_bytes()[at..end]) else { continue };
            ids.push(*id);
            at = end;
            match text.is_char_boundary(at) {
                true => {
                    ends.push(ids.len());
                    inside = 0;
                }
                false => inside += 1,
            }
            longest = longest.max(inside);
        }
        check(&tokenizer, &ids, &ends);
    }
    assert!(longest > 5, "at most {longest} neighboring tokens end inside a letter");
}

#[test]
fn letters_of_byte_tokens_arrive_when_they_are_complete() {
    for tokenizer in [sentencepiece(), byte_level().0] {
        let mut stream = tokenizer.stream();
        let mut pieces = vec![];
        for id in bytes_of("🦀\n🦀é") {
            pieces.push(stream.push(id).unwrap());
        }
        assert_eq!(pieces, ["", "", "", "🦀", "\n", "", "", "", "🦀", "", "é"]);
        // A prompt that ends inside a letter.
        let ids = bytes_of("a🦀é");
        for end in 1..=5 {
            let expected = if end < 5 { "🦀é" } else { "é" };
            let stream = tokenizer.stream_after(&ids[..end]);
            assert_eq!(streamed(stream, &ids[end..]), expected, "after {end}");
            assert_eq!(tokenizer.stream_after(&ids[..end]).finish().unwrap(), "");
        }
        // Ids outside the vocabulary have no text.
        let ids = [&bytes_of("é🦀")[..4], &[9999; 9], &bytes_of("é🦀")[4..]].concat();
        assert_eq!(streamed(tokenizer.stream(), &ids), "é🦀");
    }
}

/// Invalid bytes are neither held back without limit, nor do they damage the next letter.
#[test]
fn invalid_bytes_are_returned() {
    for tokenizer in [sentencepiece(), byte_level().0] {
        for byte in [0x80, 0xF0, 0xFF] {
            let mut stream = tokenizer.stream();
            let mut text = String::new();
            for n in 1..=300 {
                text += &stream.push(BYTES + byte).unwrap();
                assert!(text.chars().count() + 4 >= n, "{byte:x}: {n} ids, {text}");
            }
            text += &stream.finish().unwrap();
            assert_eq!(text, "\u{FFFD}".repeat(300), "{byte:x}");
        }
        let ids = [bytes_of("é"), vec![BYTES + 0x80], bytes_of("🦀b")].concat();
        assert_eq!(streamed(tokenizer.stream(), &ids), "é\u{FFFD}🦀b");
        let ids = [bytes_of("é"), bytes_of("🦀")[..3].to_vec()].concat();
        let text = streamed(tokenizer.stream(), &ids);
        assert_eq!(text.trim_end_matches('\u{FFFD}'), "é");
        assert!(text.len() > "é".len());
    }
}
