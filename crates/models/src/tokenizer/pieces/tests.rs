#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
//! Compares the ids of pieces with the ids of the whole text, which the tokenizers crate encodes at
//! once.

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus, seq::IndexedRandom};
use serde_json::{Value as Json, json};
use tokenizers::{
    PreTokenizerWrapper,
    models::{
        TrainerWrapper,
        bpe::{BPE, BpeTrainer},
    },
};

use super::*;
use crate::tokenizer::{
    gguf::{DEEPSEEK3, GPT2, GPT4O, LLAMA3, QWEN2},
    special::Settings,
};

const LICENSES: &str = include_str!("../../../tests/fixtures/licenses.txt");
const MIXED: &str = include_str!("../../../tests/fixtures/mixed.txt");

/// Returns a BPE model of 3000 ids, over bytes or over characters with a mark for spaces.
fn model(bytes: bool) -> Json {
    let pre: Json = match bytes {
        true => json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
        }),
        false => json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always" }),
    };
    let pre: PreTokenizerWrapper = serde_json::from_value(pre).unwrap();
    let mut inner = tokenizers::Tokenizer::new(BPE::default());
    inner.with_pre_tokenizer(Some(pre));
    let mut trainer = BpeTrainer::builder().vocab_size(3000).show_progress(false);
    if bytes {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        trainer = trainer.initial_alphabet(alphabet.into_iter().collect());
    }
    let mut trainer = TrainerWrapper::from(trainer.build());
    inner.train(&mut trainer, [LICENSES, MIXED].into_iter()).unwrap();
    let mut model = serde_json::to_value(inner.get_model()).unwrap();
    if !bytes {
        let vocab = model["vocab"].as_object_mut().unwrap();
        for byte in 0..=255 {
            let id = vocab.len();
            vocab.insert(format!("<0x{byte:02X}>"), json!(id));
        }
        model["byte_fallback"] = json!(true);
    }
    model
}

fn added(content: &str, strip: &str) -> Json {
    let is = |what| strip.contains(what);
    json!({
        "id": 0, "content": content, "single_word": is('w'), "lstrip": is('l'), "rstrip": is('r'),
        "normalized": is('n'), "special": !is('n'),
    })
}

fn tokenizer(model: &Json, normalizer: Json, pre: Json, added: &[Json]) -> Tokenizer {
    let n = model["vocab"].as_object().unwrap().len();
    let number = |(i, token): (usize, &Json)| {
        let mut token = token.clone();
        token["id"] = json!(n + i);
        token
    };
    let json = json!({
        "version": "1.0", "model": model, "normalizer": normalizer, "pre_tokenizer": pre,
        "added_tokens": added.iter().enumerate().map(number).collect::<Vec<_>>(),
    });
    let inner = serde_json::from_value(json).unwrap();
    let n_ids = crate::tokenizer::n_ids(&inner);
    let path = Path::new("tokenizer.json");
    Tokenizer::new(inner, n_ids, [], Settings::default(), path).unwrap()
}

fn level(regex: bool, prefix: bool) -> Json {
    json!({
        "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex,
    })
}

/// Returns byte-level pre-tokenization after splits by `regexes`.
fn with(regexes: &[&str]) -> Json {
    let split = |regex: &&str| {
        json!({
            "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false,
        })
    };
    let mut all: Vec<Json> = regexes.iter().map(split).collect();
    all.push(level(false, false));
    json!({"type": "Sequence", "pretokenizers": all})
}

fn metaspace(scheme: &str, split: bool) -> Json {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

/// Returns added tokens that contain spaces or strip the text around them.
fn strange_tokens() -> [Json; 9] {
    [
        ("<s>", ""),
        ("a b", ""),
        ("b a", ""),
        ("of the", "n"),
        ("<l>", "l"),
        ("<r>", "r"),
        ("<w>", "lrw"),
        ("\n\n", ""),
        ("  ", "n"),
    ]
    .map(|(content, strip)| added(content, strip))
}

/// Adds a token that reaches from one word into the next.
fn with_joined_words(mut model: Json) -> Json {
    let id = model["vocab"].as_object().unwrap().len();
    model["vocab"]["e▁"] = json!(id);
    model["merges"].as_array_mut().unwrap().insert(0, json!(["e", "▁"]));
    model
}

/// Returns tokenizers like those of published models, and unusual ones. The flag is whether a
/// tokenizer allows cuts in English text.
fn tokenizers() -> Vec<(&'static str, Tokenizer, bool)> {
    let (bytes, marks) = (model(true), model(false));
    let joined = with_joined_words(marks.clone());
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let sentence_piece = json!({
        "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
    });
    let (plain, strange) = ([added("<s>", ""), added("</s>", "")], strange_tokens());
    let (nothing, nfc) = (Json::Null, json!({"type": "NFC"}));
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let smollm = json!({
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": true}, level(true, false)],
    });
    let make = |model: &Json, normalizer: &Json, pre: &Json, added: &[Json]| {
        tokenizer(model, normalizer.clone(), pre.clone(), added)
    };
    let gguf_default = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];
    vec![
        ("gpt2", make(&bytes, &nothing, &level(true, false), &plain), true),
        ("gpt2 with a space", make(&bytes, &nothing, &level(true, true), &plain), true),
        ("gpt2, strange tokens", make(&bytes, &nothing, &level(true, false), &strange), true),
        ("smollm", make(&bytes, &nothing, &smollm, &plain), true),
        ("llama3", make(&bytes, &nothing, &with(&[LLAMA3]), &plain), true),
        ("llama3, strange tokens", make(&bytes, &nothing, &with(&[LLAMA3]), &strange), true),
        ("qwen2", make(&bytes, &nfc, &with(&[QWEN2]), &plain), true),
        ("o200k", make(&bytes, &nothing, &with(&[GPT4O]), &strange), true),
        ("deepseek3", make(&bytes, &nothing, &with(&DEEPSEEK3), &plain), true),
        ("gguf default", make(&bytes, &nothing, &with(&gguf_default), &plain), true),
        ("one word", make(&bytes, &nothing, &level(false, false), &plain), false),
        ("lines", make(&bytes, &nothing, &with(&[r"\n+"]), &plain), false),
        ("pairs of words", make(&bytes, &nothing, &with(&[r"\S+ \S+"]), &plain), false),
        ("llama2", make(&marks, &sentence_piece, &nothing, &plain), true),
        ("llama2, strange tokens", make(&marks, &sentence_piece, &nothing, &strange), true),
        ("mistral", make(&marks, &nothing, &metaspace("first", false), &strange), true),
        ("metaspace", make(&marks, &nothing, &metaspace("always", true), &strange), true),
        ("no mark", make(&marks, &replace, &nothing, &strange), true),
        ("joined words", make(&joined, &sentence_piece, &nothing, &plain), false),
        ("stripped", make(&marks, &strip, &metaspace("first", false), &plain), false),
    ]
}

/// Words, punctuation and added tokens of texts that are hard to cut.
const PARTS: &str = "\
    word|The|of|the|don't|IT'S|x|é|e\u{301}|ß|naïve|12|3|2024|日本|語|。|，|中文|한국어|עברית|👍|\
    👩‍👩‍👧‍👦|🏳️‍🌈|\u{200d}|\u{fe0f}|-|--|'|\"|)|(|...|$|<s>|</s>|<l>|<r>|<w>|a b|b a|\
    \u{feff}|\u{ad}|\u{301}";
const SPACES: [&str; 10] =
    [" ", " ", " ", "\n", "\t", "\r\n", "\u{a0}", "\u{3000}", "  ", "\u{85}"];

fn strange_text(rng: &mut Xoshiro256PlusPlus) -> String {
    let parts: Vec<&str> = PARTS.split('|').collect();
    let mut text = String::new();
    let kind = rng.random_range(0..8);
    while text.len() < 6000 {
        match rng.random_range(0..20) {
            0 => text += &SPACES.choose(rng).unwrap().repeat(rng.random_range(1..400)),
            1 => text += &parts.choose(rng).unwrap().repeat(rng.random_range(1..300)),
            2 => text += &"a b ".repeat(rng.random_range(1..200)),
            3 => text += ["<r>", "<l>", "<w>", "of the", "of", "e"].choose(rng).unwrap(),
            _ => text += parts.choose(rng).unwrap(),
        }
        match kind {
            0 => {} // white space only in the runs above
            1 if rng.random_bool(0.5) => text += SPACES.choose(rng).unwrap(),
            1 => {}
            2 => text += SPACES.choose(rng).unwrap(),
            _ => text += " ",
        }
    }
    text
}

/// Returns the ids of `text` in pieces of about `size` bytes, and the number of pieces.
fn in_pieces(tokenizer: &Tokenizer, text: &str, size: usize) -> (Vec<u32>, usize) {
    let pieces = Pieces::new(tokenizer, text.as_bytes(), Path::new(""));
    let pieces: Vec<Piece> = Pieces { size, ..pieces }.map(Result::unwrap).collect();
    let parts: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert!(parts == text, "the pieces are not the text");
    let encode = |piece: &Piece| tokenizer.encode_piece(&piece.text, piece.continues).unwrap();
    (pieces.iter().flat_map(encode).collect(), pieces.len())
}

#[test]
fn pieces_have_the_ids_of_the_whole() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut texts: Vec<String> = (0..60).map(|_| strange_text(&mut rng)).collect();
    texts.extend([LICENSES.into(), MIXED.into()]);
    for (name, tokenizer, cuts) in tokenizers() {
        let mut n_strange = 0;
        for (i, text) in texts.iter().enumerate() {
            let whole = tokenizer.encode_whole(text).unwrap();
            for size in [300, 1000] {
                let (ids, n) = in_pieces(&tokenizer, text, size);
                assert!(ids == whole, "{name}: text {i} in pieces of {size}");
                if i < 60 {
                    n_strange += n;
                } else if i == 60 {
                    assert_eq!(n > LICENSES.len() / (2 * size), cuts, "{name}: {n} of {size}");
                }
            }
        }
        assert_eq!(n_strange > 300, cuts, "{name}: {n_strange} pieces");
    }
}

#[test]
fn a_text_that_cannot_be_cut_is_read_up_to_a_limit() {
    let (_, tokenizer, _) = tokenizers().swap_remove(4);
    for (len, fits) in [(4000, true), (20_000, false)] {
        let pieces = Pieces::new(&tokenizer, std::io::repeat(b'a').take(len), Path::new("a.txt"));
        let pieces: Result<Vec<Piece>> = Pieces { size: 300, longest: 4000, ..pieces }.collect();
        assert_eq!(pieces.is_ok(), fits, "{len} bytes");
        if let Err(error) = pieces {
            let message = error.to_string();
            assert!(message.starts_with("a.txt: not a readable text file: "), "{message}");
            assert!(message.ends_with("at most 4000 are encoded at once"), "{message}");
        }
    }
}

#[test]
fn text_without_spaces_is_cut_where_it_can_be() {
    let (_, tokenizer, _) = tokenizers().swap_remove(4);
    for (text, least) in [
        ("日本語，中文。".repeat(1000), 10),
        ("{\"key\":[1,22,333],\"other\":true},".repeat(500), 10),
        ("word\n\n".repeat(2000), 10),
        ("a".repeat(20_000), 1),
        (" ".repeat(20_000), 1),
        ("\n".repeat(20_000), 1),
        ("👍".repeat(5_000), 1),
    ] {
        let (ids, n) = in_pieces(&tokenizer, &text, 1000);
        assert!(ids == tokenizer.encode_whole(&text).unwrap(), "{}", &text[..20]);
        assert!(n >= least, "{n} pieces of {}", &text[..20]);
    }
}
