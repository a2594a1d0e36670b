//! Rules for cutting a text that a tokenizer encodes in pieces.

use tokenizers::{
    NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, normalizers::NormalizerWrapper,
};

/// The fewest bytes on either side of a cut with which it is tested.
const CONTEXT: usize = 256;
/// The places at which a tokenizer's texts may be cut.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    pub(super) words: Words,
    /// `true` if the normalizer puts the mark for a space before every text. The part after a cut
    /// is then encoded without its leading space, which would be marked twice.
    pub(super) prepends: bool,
    /// Added tokens in which a space follows another character.
    pub(super) spanning: Vec<String>,
    pub(super) context: usize,
}

/// The separation of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Words {
    /// The pre-tokenizer splits between them.
    Split,
    /// The pre-tokenizer does not split, but no token reaches from one word into the next.
    Vocabulary,
    /// Neither holds, so texts are not cut.
    Joined,
}

impl Cuts {
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Self {
        let added = inner.get_added_tokens_decoder();
        let longest = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        let spans = |text: &str| text.trim_start().contains(' ');
        let spanning = added.values().map(|t| &t.content).filter(|t| spans(t)).cloned().collect();
        let prepends = inner.get_normalizer().is_some_and(prepends);
        let whole = match inner.get_pre_tokenizer() {
            None => true,
            Some(PreTokenizerWrapper::Metaspace(metaspace)) => !metaspace.get_split(),
            Some(_) => false,
        };
        let words = match whole {
            false if words_are_split(inner, prepends) => Words::Split,
            true if words_are_apart(inner) => Words::Vocabulary,
            _ => Words::Joined,
        };
        Self { words, prepends, spanning, context: CONTEXT.max(2 * longest) }
    }
}

fn prepends(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Prepend(_) => true,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().any(prepends),
        _ => false,
    }
}

/// Returns whether the pre-tokenizer splits before the space between words of any characters.
fn words_are_split(inner: &tokenizers::Tokenizer, prepends: bool) -> bool {
    // Words of every class of characters that pre-tokenizers distinguish: cases of letters, marks,
    // digits, punctuation, symbols.
    const WORDS: [&str; 16] = [
        "a", "Ab", "AB", "é", "e\u{301}", "日本", "7", "123", "½", ".", "'", "it's", "(", "--",
        "$", "👍",
    ];
    let pairs = WORDS.iter().flat_map(|a| WORDS.iter().map(move |b| (a, format!(" {b}"))));
    pairs.into_iter().all(|(before, behind)| {
        let both = format!("{before}{behind}");
        let parts = [&both, *before, continued(&behind, prepends)];
        all(parts.map(|text| plain_splits(inner, text)))
            .is_ok_and(|[whole, left, right]| whole == [left, right].concat())
    })
}

/// Returns the part of `text` that is encoded after a cut.
pub(super) fn continued(text: &str, prepends: bool) -> &str {
    match prepends {
        true => text.strip_prefix(' ').unwrap_or(text),
        false => text,
    }
}

/// Returns whether no token has the mark for a space after another character.
fn words_are_apart(inner: &tokenizers::Tokenizer) -> bool {
    let Ok(splits) = plain_splits(inner, "a b") else { return false };
    let text: String = splits.into_iter().map(|(text, _)| text).collect();
    let between = text.split_once('a').and_then(|(_, rest)| rest.strip_suffix('b'));
    let Some(mark) = between.and_then(|mark| {
        let mut chars = mark.chars();
        chars.next().filter(|_| chars.next().is_none())
    }) else {
        return false;
    };
    inner.get_vocab(false).keys().all(|token| !token.trim_start_matches(mark).contains(mark))
}

/// The input of the tokenizer's model: normalized pieces, and the ids of added tokens.
pub(super) type Splits = Vec<(String, Option<Vec<u32>>)>;

pub(super) fn splits(inner: &tokenizers::Tokenizer, text: &str) -> tokenizers::Result<Splits> {
    let vocabulary = inner.get_added_vocabulary();
    pre_tokenize(inner, vocabulary.extract_and_normalize(inner.get_normalizer(), text))
}

/// Splits a text without looking for added tokens.
fn plain_splits(inner: &tokenizers::Tokenizer, text: &str) -> tokenizers::Result<Splits> {
    let mut text = NormalizedString::from(text);
    if let Some(normalizer) = inner.get_normalizer() {
        normalizer.normalize(&mut text)?;
    }
    pre_tokenize(inner, text.into())
}

fn pre_tokenize(
    inner: &tokenizers::Tokenizer,
    mut split: PreTokenizedString,
) -> tokenizers::Result<Splits> {
    if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut split)?;
    }
    let splits = split.get_splits(OffsetReferential::Original, OffsetType::None);
    let ids = |tokens: &Option<Vec<tokenizers::Token>>| {
        tokens.as_ref().map(|tokens| tokens.iter().map(|token| token.id).collect())
    };
    Ok(splits.into_iter().map(|(text, _, tokens)| (text.to_string(), ids(tokens))).collect())
}

pub(super) fn all<T, E>(
    [a, b, c]: [std::result::Result<T, E>; 3],
) -> std::result::Result<[T; 3], E> {
    Ok([a?, b?, c?])
}
