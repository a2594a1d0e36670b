//! The vocabulary in a GGUF file: byte-level BPE, or SentencePiece with scores.
//!
//! The file names its pre-tokenizer. llama.cpp's `src/llama-vocab.cpp` defines the names, which
//! follow the models' own `tokenizer.json`.

use std::{collections::HashMap, path::Path};

use serde_json::{Value as Json, json};
use tokenizers::{
    AddedToken,
    models::bpe::{BPE, Vocab},
};

use super::{
    sentencepiece,
    special::{Settings, begin_with},
};
use crate::{
    error::{Error, Result},
    gguf::{Array, Strings, Value},
};

pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Single digits, contractions in any case, and line breaks with the text before them.
pub(super) const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// [`QWEN2`] with digits in groups of up to three.
pub(super) const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Words by case with contractions, and digits in groups of up to three.
pub(super) const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Digits in groups of up to three, Chinese and Japanese, then words with punctuation before them.
pub(super) const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// Values of `tokenizer.ggml.token_type` for control tokens and for tokens added by a user.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

struct Pre {
    /// Regular expressions that split the text one after another.
    splits: &'static [&'static str],
    /// `true` if a piece that is a token is never divided by merges.
    ignore_merges: bool,
    /// `true` if texts begin with the begin-of-text token unless the file says otherwise.
    adds_bos: bool,
}

fn pre_tokenizer(name: &str) -> Option<Pre> {
    let (splits, llama3): (&[&str], _) = match name {
        "gpt-2" => (&[GPT2], false),
        "default" => (&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], false),
        "smollm" => (&[r"\p{N}", GPT2], false),
        "qwen2" => (&[QWEN2], false),
        "llama-bpe" | "llama3" | "llama-v3" => (&[LLAMA3], true),
        "gpt-4o" => (&[GPT4O], false),
        "deepseek-v3" => (&DEEPSEEK3, false),
        _ => return None,
    };
    Some(Pre { splits, ignore_merges: llama3, adds_bos: llama3 })
}

pub(super) struct Built {
    pub(super) inner: tokenizers::Tokenizer,
    pub(super) n_ids: usize,
    pub(super) eos: Vec<u32>,
    pub(super) settings: Settings,
}

pub(super) fn build(metadata: &HashMap<String, Value>, file: &[u8], path: &Path) -> Result<Built> {
    let vocabulary = Vocabulary { metadata, file, path };
    let tokens = vocabulary.strings("tokenizer.ggml.tokens")?;
    let tokens: Vec<&str> = tokens.iter().collect();
    let types = vocabulary.types(tokens.len())?;
    let mut notes = vec![];
    let (mut inner, begins) = model(&vocabulary, &tokens, &types, &mut notes)?;
    let added: Vec<_> = tokens
        .iter()
        .zip(&types)
        .filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED))
        .map(|(token, kind)| AddedToken::from(*token, *kind == CONTROL).normalized(false))
        .collect();
    inner.add_tokens(added).map_err(Error::tokenizer)?;
    // If two tokens have the same spelling, one has no id. Checking all ids would need a copy of
    // the vocabulary.
    let ids = tokens.iter().enumerate().rev();
    let mut known = ids.filter(|(id, token)| inner.token_to_id(token) == Some(*id as u32));
    let n_ids = known.next().map_or(0, |(id, _)| id + 1);

    let eos = ["eos", "eot", "eom"]
        .iter()
        .filter_map(|name| vocabulary.id(&format!("tokenizer.ggml.{name}_token_id")).transpose())
        .collect::<Result<_>>()?;
    let bos = vocabulary.id("tokenizer.ggml.bos_token_id")?;
    let adds_bos = vocabulary.flag("tokenizer.ggml.add_bos_token")?;
    let adds_bos = adds_bos.unwrap_or(begins && bos.is_some());
    if adds_bos {
        let Some(bos) = bos else {
            return Err(vocabulary
                .wrong("tokenizer.ggml.bos_token_id", "the id of the begin-of-text token"));
        };
        begin_with(&mut inner, bos, path)?;
    }
    let chat_template = match metadata.get("tokenizer.chat_template") {
        None => None,
        Some(_) => Some(vocabulary.string("tokenizer.chat_template")?.to_string()),
    };
    let eos_token = vocabulary.id("tokenizer.ggml.eos_token_id")?;
    let eos_token = eos_token.and_then(|id| inner.id_to_token(id));
    let settings = Settings { bos, chat_template, eos_token, notes, ..Settings::default() };
    Ok(Built { inner, n_ids, eos, settings })
}

/// Builds the tokenizer for the vocabulary's model. The flag is whether texts begin with the
/// begin-of-text token unless the file says otherwise.
fn model(
    vocabulary: &Vocabulary<'_>,
    tokens: &[&str],
    types: &[i64],
    notes: &mut Vec<String>,
) -> Result<(tokenizers::Tokenizer, bool)> {
    let path = vocabulary.path;
    match vocabulary.string("tokenizer.ggml.model")? {
        "gpt2" => {
            if !vocabulary.metadata.contains_key("tokenizer.ggml.pre") {
                notes.push(format!(
                    "{} has no tokenizer.ggml.pre: texts are split as by llama.cpp's default, \
                     which costs quality if the model was trained with another pre-tokenizer; \
                     convert the model again",
                    path.display()
                ));
            }
            byte_level(vocabulary, tokens)
        }
        "llama" => {
            let scores = vocabulary.scores(tokens.len())?;
            let unknown = vocabulary.id("tokenizer.ggml.unknown_token_id")?;
            let prefixed = vocabulary.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            let inner = sentencepiece::build(tokens, &scores, types, unknown, prefixed, path)?;
            Ok((inner, true))
        }
        model => {
            let why = format!(
                "{} has tokenizer.ggml.model {model}; gpt2 (byte-level BPE) and llama \
                 (SentencePiece with scores) are supported",
                path.display()
            );
            Err(Error::unsupported(format!("GGUF tokenizer {model}"), why))
        }
    }
}

/// Builds a byte-level BPE tokenizer. The flag is whether texts begin with the begin-of-text token
/// unless the file says otherwise.
fn byte_level(
    vocabulary: &Vocabulary<'_>,
    tokens: &[&str],
) -> Result<(tokenizers::Tokenizer, bool)> {
    let &Vocabulary { metadata, path, .. } = vocabulary;
    // Older files do not have this field and use llama.cpp's default.
    let name = match metadata.get("tokenizer.ggml.pre") {
        None => "default",
        Some(_) => vocabulary.string("tokenizer.ggml.pre")?,
    };
    let Some(pre) = pre_tokenizer(name) else {
        let why = format!(
            "{} has tokenizer.ggml.pre {name}; gpt-2, default, smollm, qwen2, llama-bpe, gpt-4o \
             and deepseek-v3 are supported",
            path.display()
        );
        return Err(Error::unsupported(format!("pre-tokenizer {name}"), why));
    };

    let merges = vocabulary.strings("tokenizer.ggml.merges")?;
    let longest = tokens.iter().map(|token| token.len()).max().unwrap_or(0);
    let split = |merge: &str| match merge.split_once(' ') {
        Some((left, right)) if left.len() + right.len() <= longest => {
            Ok((left.to_string(), right.to_string()))
        }
        Some(_) => Err(Error::tokenizer(format!(
            "{}: tokenizer.ggml.merges holds {merge:?}, which do not form a token",
            path.display()
        ))),
        None => Err(Error::tokenizer(format!(
            "{}: tokenizer.ggml.merges holds {merge:?}, not two tokens",
            path.display()
        ))),
    };
    let merges = merges.iter().map(split).collect::<Result<Vec<_>>>()?;
    // If two tokens have the same spelling, the first wins, as in llama.cpp.
    let ids = tokens.iter().enumerate().rev();
    let vocab: Vocab = ids.map(|(id, token)| (token.to_string(), id as u32)).collect();

    let named = |error: String| Error::tokenizer(format!("{}: {error}", path.display()));
    let mut inner: tokenizers::Tokenizer =
        serde_json::from_value(describe(&pre)).map_err(|error| named(error.to_string()))?;
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges);
    inner.with_model(model.build().map_err(|error| named(error.to_string()))?);
    Ok((inner, pre.adds_bos))
}

/// Returns the tokenizer in the form of `tokenizer.json`, without tokens and merges, which would
/// take several times as much memory there.
fn describe(pre: &Pre) -> Json {
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let mut steps: Vec<Json> = pre
        .splits
        .iter()
        .map(|regex| {
            json!({
                "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated",
                "invert": false,
            })
        })
        .collect();
    steps.push(byte_level.clone());
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.ignore_merges, "vocab": {}, "merges": [],
        },
    })
}

struct Vocabulary<'a> {
    metadata: &'a HashMap<String, Value>,
    file: &'a [u8],
    path: &'a Path,
}

impl<'a> Vocabulary<'a> {
    fn wrong(&self, key: &str, what: &str) -> Error {
        let state = if self.metadata.contains_key(key) { "is not" } else { "is missing, expected" };
        Error::tokenizer(format!("{}: {key} {state} {what}", self.path.display()))
    }

    fn string(&self, key: &str) -> Result<&'a str> {
        match self.metadata.get(key) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(self.wrong(key, "a string")),
        }
    }

    fn array(&self, key: &str) -> Option<&'a Array> {
        match self.metadata.get(key) {
            Some(Value::Array(array)) => Some(array),
            _ => None,
        }
    }

    fn strings(&self, key: &str) -> Result<Strings> {
        let strings = self.array(key).and_then(|array| array.strings(self.file));
        strings.ok_or_else(|| self.wrong(key, "an array of strings"))
    }

    /// Returns one type per token; without the key all tokens are normal.
    fn types(&self, n_tokens: usize) -> Result<Vec<i64>> {
        let key = "tokenizer.ggml.token_type";
        if !self.metadata.contains_key(key) {
            return Ok(vec![1; n_tokens]);
        }
        match self.array(key) {
            // An array of the wrong length is not read.
            Some(array) if array.len() != n_tokens => {
                let what = format!("one type for each of {n_tokens} tokens but {}", array.len());
                Err(self.wrong(key, &what))
            }
            array => array
                .and_then(|array| array.integers(self.file))
                .ok_or_else(|| self.wrong(key, "an array of integers")),
        }
    }

    fn scores(&self, n_tokens: usize) -> Result<Vec<f64>> {
        let key = "tokenizer.ggml.scores";
        let what = format!("an array of {n_tokens} finite floats, one per token");
        let scores = self.array(key).filter(|array| array.len() == n_tokens);
        let scores = scores.and_then(|array| array.floats(self.file));
        let scores = scores.filter(|scores| scores.iter().all(|score| score.is_finite()));
        scores.ok_or_else(|| self.wrong(key, &what))
    }

    /// Returns a boolean, if the file has the key.
    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.wrong(key, "a boolean")),
        }
    }

    /// Returns the id of a token, if the file has the key; some files have -1 for no token.
    fn id(&self, key: &str) -> Result<Option<u32>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(id)) => Ok(u32::try_from(*id).ok()),
            Some(Value::Signed(id)) => Ok(u32::try_from(*id).ok()),
            Some(_) => Err(self.wrong(key, "the id of a token")),
        }
    }
}
