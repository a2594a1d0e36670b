//! SentencePiece vocabularies of GGUF files: tokens with scores.
//!
//! llama.cpp's `llm_tokenizer_spm` joins characters in pairs, beginning with the pair whose token
//! has the highest score. A character without a token becomes its bytes. As in the transformers
//! library, this is byte-pair encoding whose merges are ordered by the scores of their results.

use std::{collections::HashMap, path::Path};

use serde_json::json;
use tokenizers::{
    DecoderWrapper, NormalizerWrapper,
    models::bpe::{BPE, Vocab},
};

use crate::error::{Error, Result};

/// The character that SentencePiece writes for a space.
const SPACE: char = '▁';
/// The value of `tokenizer.ggml.token_type` for tokens that merges can produce.
const NORMAL: i64 = 1;

/// Builds the tokenizer of `tokens` with their scores and types. With `prefixed`, it puts a space
/// before a text.
pub(super) fn build(
    tokens: &[&str],
    scores: &[f64],
    types: &[i64],
    unknown: Option<u32>,
    prefixed: bool,
    path: &Path,
) -> Result<tokenizers::Tokenizer> {
    let failed = |error: String| Error::tokenizer(format!("{}: {error}", path.display()));
    // If two tokens have the same spelling, the first wins.
    let mut vocab = HashMap::with_capacity(tokens.len());
    for (id, token) in (0u32..).zip(tokens) {
        vocab.entry((*token).to_string()).or_insert(id);
    }
    let mut model = BPE::builder().byte_fallback(true).fuse_unk(true);
    let merges = merges(tokens, scores, types, &vocab);
    if let Some(unknown) = unknown.and_then(|id| tokens.get(id as usize)) {
        model = model.unk_token((*unknown).to_string());
    }
    let model = model.vocab_and_merges(vocab.into_iter().collect::<Vocab>(), merges);
    let model = model.build().map_err(|error| failed(error.to_string()))?;

    let mut normalizers = vec![];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefixed {
        normalizers.push(json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}));
    let normalizer = json!({"type": "Sequence", "normalizers": normalizers});
    let decoder = json!({"type": "Sequence", "decoders": decoders});
    let normalizer: NormalizerWrapper =
        serde_json::from_value(normalizer).map_err(|error| failed(error.to_string()))?;
    let decoder: DecoderWrapper =
        serde_json::from_value(decoder).map_err(|error| failed(error.to_string()))?;

    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(Some(normalizer)).map_err(|error| failed(error.to_string()))?;
    inner.with_decoder(Some(decoder));
    Ok(inner)
}

/// Returns all pairs of tokens whose joined text is a token, the highest score first.
fn merges(
    tokens: &[&str],
    scores: &[f64],
    types: &[i64],
    vocab: &HashMap<String, u32>,
) -> Vec<(String, String)> {
    let mut joint: Vec<usize> = (0..tokens.len())
        .filter(|&id| types[id] == NORMAL && vocab.get(tokens[id]) == Some(&(id as u32)))
        .collect();
    joint.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let mut merges = vec![];
    for id in joint {
        let token = tokens[id];
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if vocab.contains_key(left) && vocab.contains_key(right) {
                merges.push((left.to_string(), right.to_string()));
            }
        }
    }
    merges
}
