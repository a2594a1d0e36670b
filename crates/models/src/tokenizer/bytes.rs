//! The bytes that single tokens stand for.

use std::{collections::HashMap, sync::OnceLock};

use super::Tokenizer;

impl Tokenizer {
    /// Returns the bytes that token `id` adds to a text, which may be a part of a character; `None`
    /// for an id that the vocabulary does not have. Control tokens return their spelling.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.id_to_token(id)?;
        if self.inner.get_added_tokens_decoder().contains_key(&id) {
            return Some(token.into_bytes());
        }
        if self.is_byte_level() {
            let bytes: Option<Vec<u8>> =
                token.chars().map(|letter| byte_letters().get(&letter).copied()).collect();
            return Some(bytes.unwrap_or_else(|| token.into_bytes()));
        }
        let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => Some(vec![byte]),
            // SentencePiece writes a space as a lower one eighth block.
            None => Some(token.replace('\u{2581}', " ").into_bytes()),
        }
    }

    /// Returns whether the bytes of `id` begin with the first byte of a character.
    pub(super) fn begins_character(&self, id: u32) -> bool {
        let first = self.token_bytes(id).and_then(|bytes| bytes.first().copied());
        first.is_some_and(|byte| byte & 0xC0 != 0x80)
    }

    /// Returns whether more bytes can complete a character at the end of `ids`.
    pub(super) fn ends_inside_character(&self, ids: &[u32]) -> bool {
        /// The most bytes of an incomplete character.
        const MOST: usize = 3;
        let mut end = vec![];
        for &id in ids.iter().rev() {
            end = [self.token_bytes(id).unwrap_or_default(), end].concat();
            if end.len() >= MOST {
                break;
            }
        }
        let is_incomplete = |n: usize| {
            let read = std::str::from_utf8(&end[end.len() - n..]);
            read.is_err_and(|error| error.error_len().is_none())
        };
        (1..=end.len().min(MOST)).any(is_incomplete)
    }

    /// Returns whether `id` is a control token, such as an end-of-text token.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    /// Returns whether the letters of tokens stand for bytes, as in GPT-2.
    fn is_byte_level(&self) -> bool {
        fn names_it(value: &serde_json::Value) -> bool {
            match value {
                serde_json::Value::Object(fields) => {
                    fields.get("type").is_some_and(|it| it == "ByteLevel")
                        || fields.values().any(names_it)
                }
                serde_json::Value::Array(items) => items.iter().any(names_it),
                _ => false,
            }
        }
        let decoder = self.inner.get_decoder().map(serde_json::to_value);
        decoder.and_then(Result::ok).is_some_and(|decoder| names_it(&decoder))
    }
}

/// Returns the byte of each letter of GPT-2's alphabet: printable characters of Latin-1 stand for
/// themselves, and the other bytes have the letters from 256 on, in order.
fn byte_letters() -> &'static HashMap<char, u8> {
    static LETTERS: OnceLock<HashMap<char, u8>> = OnceLock::new();
    LETTERS.get_or_init(|| {
        let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let mut others = (256..).filter_map(char::from_u32);
        let letter = |byte: u8| match printable(byte) {
            true => Some(char::from(byte)),
            false => others.next(),
        };
        let bytes = 0..=u8::MAX;
        bytes
            .clone()
            .map(letter)
            .zip(bytes)
            .filter_map(|(letter, byte)| Some((letter?, byte)))
            .collect()
    })
}
