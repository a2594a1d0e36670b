//! Converts text to token ids and back.

mod bytes;
mod cuts;
mod gguf;
mod pieces;
mod sentencepiece;
mod special;
mod train;

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    path::Path,
};

pub use self::pieces::{Piece, Pieces};
use self::{cuts::Cuts, special::Settings};
use crate::{
    error::{Error, Result},
    files,
    gguf::{self as gguf_files, Value as GgufValue},
};

/// A tokenizer read from `tokenizer.json` or from the vocabulary of a GGUF file.
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos: BTreeSet<u32>,
    n_ids: usize,
    settings: Settings,
    cuts: Cuts,
}

impl Tokenizer {
    /// Reads `tokenizer.json`; `eos` are the ids that end a text.
    ///
    /// Settings for truncation and padding are ignored, because texts are encoded whole;
    /// [`notes`](Self::notes) then mentions them.
    ///
    /// # Errors
    /// Returns [`Error::NotFound`], [`Error::Tokenizer`] if the file is not a tokenizer, or
    /// [`Error::Unsupported`] if it puts more than one token before a text.
    pub fn from_file(path: impl AsRef<Path>, eos: &[u32]) -> Result<Self> {
        let path = path.as_ref();
        let inner = read(path)?;
        let n_ids = n_ids(&inner);
        Self::new(inner, n_ids, eos.iter().copied(), Settings::default(), path)
    }

    /// Reads `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` if they exist;
    /// `eos` are the ids that end a text.
    ///
    /// # Errors
    /// Fails as [`from_file`](Self::from_file) does. Returns [`Error::Malformed`] if
    /// `tokenizer_config.json` cannot be parsed.
    pub fn from_folder(folder: impl AsRef<Path>, eos: &[u32]) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("tokenizer.json");
        let mut inner = read(&path)?;
        let settings = Settings::read(folder, &mut inner)?;
        let n_ids = n_ids(&inner);
        Self::new(inner, n_ids, eos.iter().copied(), settings, &path)
    }

    /// Reads only the vocabulary of a GGUF file.
    ///
    /// # Errors
    /// Fails if the file is not a GGUF file. Returns [`Error::Unsupported`] with the kind of
    /// vocabulary or its pre-tokenizer.
    pub fn from_gguf(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (map, metadata) = gguf_files::metadata(path)?;
        Self::from_gguf_metadata(metadata, &map, path)
    }

    pub(crate) fn from_gguf_metadata(
        metadata: HashMap<String, GgufValue>,
        file: &[u8],
        path: &Path,
    ) -> Result<Self> {
        let gguf::Built { inner, n_ids, eos, settings } = gguf::build(&metadata, file, path)?;
        // A large vocabulary is freed before the checks, which need memory too.
        drop(metadata);
        Self::new(inner, n_ids, eos, settings, path)
    }

    /// Writes `tokenizer.json`, completely or not at all. It does not contain the ids that end a
    /// text.
    ///
    /// # Errors
    /// Returns [`Error::Write`] if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        files::write(path.as_ref(), self.to_json()?.as_bytes())
    }

    pub(crate) fn to_json(&self) -> Result<String> {
        self.inner.to_string(true).map_err(Error::tokenizer)
    }

    fn new(
        mut inner: tokenizers::Tokenizer,
        n_ids: usize,
        eos: impl IntoIterator<Item = u32>,
        mut settings: Settings,
        path: &Path,
    ) -> Result<Self> {
        let (eos, outside): (BTreeSet<_>, BTreeSet<_>) =
            eos.into_iter().partition(|&id| (id as usize) < n_ids);
        settings.notes.extend(outside.into_iter().map(|id| {
            let path = path.display();
            format!("{path} has {n_ids} tokens and no end token {id}: texts do not end at it")
        }));
        settings.encode_whole(&mut inner, path)?;
        settings.follow_template(&inner, path)?;
        let cuts = Cuts::new(&inner);
        Ok(Self { inner, eos, n_ids, settings, cuts })
    }

    /// Returns the ids of `text`, without a [begin-of-text token](Self::bos) or a template.
    ///
    /// Control tokens spelled out in `text` (`<|im_end|>`) become their ids, as in the transformers
    /// library. A long text is encoded in [pieces](Self::pieces).
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if the vocabulary has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_first(text, usize::MAX)
    }

    /// Returns the ids of `text`, encoded in one piece.
    fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(Error::tokenizer)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text of `ids` with control tokens. Incomplete characters become U+FFFD.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(Error::tokenizer)
    }

    /// Returns a decoder for one id at a time, see [`TextStream`].
    pub fn stream(&self) -> TextStream<'_> {
        self.stream_after(&[])
    }

    /// Returns a decoder as [`stream`](Self::stream) does, for a text that continues `ids`. Their
    /// text is not returned, but the first token keeps a space at its start, which some decoders
    /// remove from the first token of a text.
    pub fn stream_after(&self, ids: &[u32]) -> TextStream<'_> {
        let last = &ids[ids.len().saturating_sub(MOST_CONTEXT)..];
        let start = last.iter().rposition(|&id| self.begins_character(id));
        let ids = last[start.unwrap_or(last.len().saturating_sub(1))..].to_vec();
        // A decoder that fails does so again for the first id that is pushed.
        let mut returned = self.decode(&ids).unwrap_or_default();
        let mut n_context = ids.len();
        if self.ends_inside_character(&ids) {
            // The ids of the incomplete character are kept until it is complete.
            n_context = 0;
            returned.truncate(returned.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        }
        TextStream { tokenizer: self, ids, n_context, returned, holds: false }
    }

    /// Returns the id of the begin-of-text token, if the files name one.
    pub fn bos(&self) -> Option<u32> {
        self.settings.bos
    }

    /// Returns whether the model was trained on texts that begin with [`bos`](Self::bos). This is
    /// `add_bos_token` of `tokenizer_config.json` or of a GGUF file. Without that field, the
    /// post-processor of `tokenizer.json` decides, or llama.cpp's rule for the pre-tokenizer of a
    /// GGUF file. [`encode`](Self::encode) never adds the token; callers put [`bos`](Self::bos)
    /// before the ids.
    pub fn adds_bos(&self) -> bool {
        self.settings.adds_bos
    }

    /// Returns [`bos`](Self::bos) if the model [was trained](Self::adds_bos) on texts that begin
    /// with it.
    pub fn leading_bos(&self) -> Option<u32> {
        self.bos().filter(|_| self.adds_bos())
    }

    /// Returns the Jinja template of conversations, if the files have one; see
    /// [`ChatTemplate`](crate::ChatTemplate).
    pub fn chat_template(&self) -> Option<&str> {
        self.settings.chat_template.as_deref()
    }

    /// Returns the spellings of the tokens that templates call `bos_token` and `eos_token`.
    pub fn template_tokens(&self) -> (Option<String>, Option<String>) {
        let Settings { bos, ref eos_token, .. } = self.settings;
        let first = || self.eos.first().and_then(|&id| self.id_to_token(id));
        (bos.and_then(|id| self.id_to_token(id)), eos_token.clone().or_else(first))
    }

    /// Returns notes for users about ignored settings, one line each.
    pub fn notes(&self) -> &[String] {
        &self.settings.notes
    }

    /// Returns the ids that end a text; may be empty.
    pub fn eos(&self) -> &BTreeSet<u32> {
        &self.eos
    }

    /// Returns the id of the token that the files call `eos_token`; without one, the smallest of
    /// [`eos`](Self::eos).
    pub fn eos_token(&self) -> Option<u32> {
        let named = self.settings.eos_token.as_deref().and_then(|token| self.token_to_id(token));
        named.or_else(|| self.eos.first().copied())
    }

    /// Returns one more than the largest id.
    pub fn n_ids(&self) -> usize {
        self.n_ids
    }

    /// Returns the id of a token by its exact spelling in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the spelling of an id in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}

/// Returns one more than the largest id.
fn n_ids(inner: &tokenizers::Tokenizer) -> usize {
    inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
}

fn read(path: &Path) -> Result<tokenizers::Tokenizer> {
    if !path.is_file() {
        return Err(Error::NotFound { path: path.into(), hint: String::new() });
    }
    tokenizers::Tokenizer::from_file(path)
        .map_err(|error| Error::tokenizer(format!("{}: {error}", path.display())))
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_ids, eos, settings: Settings { bos, adds_bos, .. }, .. } = self;
        f.debug_struct("Tokenizer")
            .field("n_ids", n_ids)
            .field("eos", eos)
            .field("bos", bos)
            .field("adds_bos", adds_bos)
            .finish_non_exhaustive()
    }
}

/// The most ids at the end of a text that one character spans, which has at most four bytes.
const MOST_HELD: usize = 4;

/// The most ids before a text among which its context is searched.
const MOST_CONTEXT: usize = 8;

/// Decodes ids as they arrive. A character that spans several ids is held back until it is
/// complete.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The context, whose text was returned, and then the ids that are held back. Decoders need a
    /// context, because some treat the first token of a text differently. It begins with a whole
    /// character, because neighboring byte tokens are valid only together.
    ids: Vec<u32>,
    n_context: usize,
    /// The start of the text of `ids` that was returned.
    returned: String,
    /// Set if ids are held back.
    holds: bool,
}

impl TextStream<'_> {
    /// Returns the text that `id` completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// Fails as [`Tokenizer::decode`] does.
    pub fn push(&mut self, id: u32) -> Result<String> {
        // Decoders skip such an id, so it must not count as part of a character.
        if self.tokenizer.id_to_token(id).is_none() {
            return Ok(String::new());
        }
        self.ids.push(id);
        let mut new = self.new_text()?;
        let has_replacement = new.contains(char::REPLACEMENT_CHARACTER);
        self.holds = new.ends_with(char::REPLACEMENT_CHARACTER)
            && self.tokenizer.ends_inside_character(&self.ids);
        if self.holds {
            if self.ids.len() - self.n_context <= MOST_HELD {
                return Ok(String::new());
            }
            // Only the last ids can belong to the last character, so the text before it is
            // returned. Otherwise ids that each begin a character would pile up.
            new.pop();
            self.ids.drain(..self.ids.len() - MOST_HELD);
            self.n_context = 0;
            self.returned = self.tokenizer.decode(&self.ids)?;
            self.returned.pop();
            return Ok(new);
        }
        let held = self.ids.split_off(self.n_context);
        // Beside an invalid byte token, the next ones would be invalid too.
        if self.ids.is_empty() || !has_replacement {
            self.ids = held;
        }
        self.n_context = self.ids.len();
        self.returned = self.tokenizer.decode(&self.ids)?;
        Ok(new)
    }

    /// Returns the text that is still held back, if the ids end inside a character.
    ///
    /// # Errors
    /// Fails as [`Tokenizer::decode`] does.
    pub fn finish(self) -> Result<String> {
        if self.holds { self.new_text() } else { Ok(String::new()) }
    }

    /// Returns the text of the ids that was not returned yet.
    fn new_text(&self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids)?;
        match text.strip_prefix(self.returned.as_str()) {
            Some(new) => Ok(new.into()),
            // An incomplete character also makes the byte tokens before it invalid.
            None => self.tokenizer.decode(&self.ids[self.n_context..]),
        }
    }
}
