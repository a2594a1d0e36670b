//! Encodes a long text in separate pieces, with the same ids as the whole text.
//!
//! Encoding takes a hundred times the memory of its text, so long texts are cut. A cut is made
//! where the pre-tokenizer splits and neither side depends on the other, preferably before a space
//! that follows a word. When a tokenizer is read, one test finds out whether it splits there for
//! all kinds of words. Each cut is also tested: the text around it must have the same splits and
//! ids in two parts as in one.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use super::{
    Tokenizer,
    cuts::{Cuts, Words, all, continued, splits},
};
use crate::error::{Error, Result};

/// The approximate bytes of a piece. A piece is longer if the text cannot be cut there.
const PIECE: usize = 64 << 10;
/// The most bytes of a piece, so that no endless text fills the memory: encoding them takes about
/// 27 GB.
const LONGEST: usize = 256 << 20;
/// Places that are tested before more of the text is read.
const ATTEMPTS: usize = 64;

/// The kinds of places at which a text may be cut, best first.
#[derive(Clone, Copy)]
enum CutKind {
    /// After a word and the punctuation that follows it, before a space and another word.
    Space,
    /// For texts without spaces: between a letter or digit and other white space, and between a
    /// letter and a digit or punctuation.
    Other,
}

impl CutKind {
    fn is_here(self, before: char, at: char, after: Option<char>) -> bool {
        match self {
            Self::Space => {
                let word = after.is_some_and(|after| !after.is_whitespace());
                !before.is_whitespace() && at == ' ' && word
            }
            Self::Other => {
                let white = at != ' ' && at.is_whitespace();
                // Punctuation of Chinese and Japanese, and full-width forms of ASCII digits and
                // punctuation.
                let wide = matches!(at, '\u{3001}'..='\u{3011}' | '\u{ff01}'..='\u{ff1f}');
                let stop = wide || at.is_numeric() || ".,;:!?(\"{[/=".contains(at);
                before.is_alphanumeric() && white || before.is_alphabetic() && stop
            }
        }
    }
}

impl Tokenizer {
    /// Returns the last place before the end of `text` at which it can be cut. The parts then have
    /// the ids of the whole, whatever text follows.
    fn cut(&self, text: &str) -> Option<usize> {
        let Cuts { words, context, .. } = self.cuts;
        let last = text.len().checked_sub(context)?;
        let places = match words {
            Words::Split => &[CutKind::Space, CutKind::Other][..],
            Words::Vocabulary => &[CutKind::Space],
            Words::Joined => &[],
        };
        places.iter().find_map(|kind| {
            let (mut after, mut at) = (None, (text.len(), None));
            let mut attempts = ATTEMPTS;
            for (i, before) in text.char_indices().rev() {
                let (position, here) = at;
                if let Some(here) = here
                    && position <= last
                    && kind.is_here(before, here, after)
                {
                    if self.parts_at(text, position) {
                        return Some(position);
                    }
                    attempts -= 1;
                    if attempts == 0 {
                        return None;
                    }
                }
                (after, at) = (here, (i, Some(before)));
            }
            None
        })
    }

    /// Returns whether the text around `at` has the same splits and ids in two parts as in one.
    fn parts_at(&self, text: &str, at: usize) -> bool {
        let Cuts { words, prepends, ref spanning, context } = self.cuts;
        let start = text.floor_char_boundary(at.saturating_sub(context));
        let end = text.ceil_char_boundary((at + context).min(text.len()));
        let (around, at) = (&text[start..end], at - start);
        let (before, behind) = around.split_at(at);
        // No cut is allowed inside an added token, even if the tokenizer matches the excerpt
        // otherwise, because text before the excerpt can change the match.
        let spanned = spanning.iter().any(|token| {
            let reaches = |n| before.ends_with(&token[..n]) && behind.starts_with(&token[n..]);
            (1..token.len()).any(|n| token.is_char_boundary(n) && reaches(n))
        });
        if spanned {
            return false;
        }
        let parts = [before, continued(behind, prepends)];
        if words == Words::Split {
            let split = |text| splits(&self.inner, text);
            let Ok([whole, left, right]) = all([around, parts[0], parts[1]].map(split)) else {
                return false;
            };
            if [left, right].concat() != whole {
                return false;
            }
        }
        let encode = |text| self.encode_whole(text);
        let Ok([whole, left, right]) = all([around, parts[0], parts[1]].map(encode)) else {
            return false;
        };
        [left, right].concat() == whole
    }

    /// Returns the ids of a [`Piece`] of a text. Some tokenizers mark the first word of a text; a
    /// piece that `continues` a text has no such mark.
    ///
    /// # Errors
    /// Fails as [`encode`](Self::encode) does.
    pub fn encode_piece(&self, text: &str, continues: bool) -> Result<Vec<u32>> {
        match continues {
            true => self.encode_whole(continued(text, self.cuts.prepends)),
            false => self.encode_whole(text),
        }
    }

    /// Returns the text of a UTF-8 file in pieces, which are read on demand. A byte order mark at
    /// the start of the file is skipped. `path` is for messages.
    pub fn pieces<R: Read>(&self, reader: R, path: impl AsRef<Path>) -> Pieces<'_, R> {
        let skip_mark = true;
        Pieces { skip_mark, ..Pieces::new(self, reader, path.as_ref()) }
    }

    /// Returns the ids of a UTF-8 file, at most `limit`. The file is read in pieces, and only as
    /// far as necessary. A byte order mark at its start is skipped. `path` is for messages.
    ///
    /// # Errors
    /// Fails as [`encode`](Self::encode) does. Returns [`Error::Io`] or [`Error::NotUtf8`] with the
    /// byte, for the part of the file that is read.
    pub fn encode_reader(
        &self,
        reader: impl Read,
        path: impl AsRef<Path>,
        limit: Option<usize>,
    ) -> Result<Vec<u32>> {
        self.collect(self.pieces(reader, path), limit.unwrap_or(usize::MAX))
    }

    /// Returns the first ids of `text`, at most `limit`, without encoding all of it.
    ///
    /// # Errors
    /// Fails as [`encode`](Self::encode) does.
    pub fn encode_first(&self, text: &str, limit: usize) -> Result<Vec<u32>> {
        self.collect(Pieces::new(self, text.as_bytes(), Path::new("the text")), limit)
    }

    fn collect<R: Read>(&self, pieces: Pieces<'_, R>, limit: usize) -> Result<Vec<u32>> {
        let mut ids = vec![];
        if limit == 0 {
            return Ok(ids);
        }
        for piece in pieces {
            let Piece { text, continues } = piece?;
            ids.extend(self.encode_piece(&text, continues)?);
            if ids.len() >= limit {
                break;
            }
        }
        ids.truncate(limit);
        Ok(ids)
    }
}

/// A part of a text, see [`Tokenizer::pieces`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text of the part.
    pub text: String,
    /// `true` if other text precedes it.
    pub continues: bool,
}

/// The parts of a text, in order. Joined, they are the text.
#[derive(Debug)]
pub struct Pieces<'a, R> {
    tokenizer: &'a Tokenizer,
    reader: R,
    path: PathBuf,
    /// The approximate bytes of a piece.
    size: usize,
    /// The most bytes of a piece.
    longest: usize,
    /// `true` to skip a byte order mark at the start.
    skip_mark: bool,
    /// Text that was read and not yet returned.
    text: String,
    /// The first bytes of a character whose other bytes were not read yet.
    partial: Vec<u8>,
    /// Bytes of the file that were read.
    n_read: u64,
    at_end: bool,
    continues: bool,
}

impl<'a, R: Read> Pieces<'a, R> {
    fn new(tokenizer: &'a Tokenizer, reader: R, path: &Path) -> Self {
        Self {
            tokenizer,
            reader,
            path: path.into(),
            size: PIECE,
            longest: LONGEST,
            skip_mark: false,
            text: String::new(),
            partial: vec![],
            n_read: 0,
            at_end: false,
            continues: false,
        }
    }

    /// Reads until `text` has `len` bytes or the file ends.
    fn fill(&mut self, len: usize) -> Result<()> {
        while !self.at_end && self.text.len() < len {
            let mut bytes = std::mem::take(&mut self.partial);
            let held = bytes.len();
            let mut rest = self.reader.by_ref().take(self.size as u64);
            let n = rest
                .read_to_end(&mut bytes)
                .map_err(|source| Error::Io { path: self.path.clone(), source })?;
            self.at_end = n == 0;
            let start = self.n_read - held as u64;
            self.n_read += n as u64;
            let valid = match str::from_utf8(&bytes) {
                Ok(text) => text,
                Err(error) => {
                    let valid = error.valid_up_to();
                    if error.error_len().is_some() || self.at_end {
                        let offset = start + valid as u64;
                        return Err(Error::NotUtf8 { path: self.path.clone(), offset });
                    }
                    self.partial = bytes[valid..].to_vec();
                    str::from_utf8(&bytes[..valid]).unwrap_or_default()
                }
            };
            self.text.push_str(match start {
                0 if self.skip_mark => valid.strip_prefix('\u{feff}').unwrap_or(valid),
                _ => valid,
            });
        }
        Ok(())
    }

    fn piece(&mut self) -> Result<Option<Piece>> {
        let mut len = self.size;
        loop {
            self.fill(len)?;
            let whole = self.at_end && self.text.len() <= len;
            let at = match whole {
                true => self.text.len(),
                false => match self.tokenizer.cut(&self.text) {
                    Some(at) => at,
                    None if self.text.len() > self.longest => {
                        return Err(Error::Malformed {
                            path: self.path.clone(),
                            format: "text",
                            why: format!(
                                "{} bytes have no place where they can be encoded in parts; at \
                                 most {} are encoded at once",
                                self.text.len(),
                                self.longest
                            ),
                        });
                    }
                    None if self.at_end => self.text.len(),
                    None => {
                        len = 2 * self.text.len();
                        continue;
                    }
                },
            };
            if at == 0 {
                return Ok(None);
            }
            let rest = self.text.split_off(at);
            let text = std::mem::replace(&mut self.text, rest);
            let continues = std::mem::replace(&mut self.continues, true);
            return Ok(Some(Piece { text, continues }));
        }
    }
}

impl<R: Read> Iterator for Pieces<'_, R> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        let piece = self.piece();
        if piece.is_err() {
            // Nothing follows an error.
            (self.at_end, self.text) = (true, String::new());
            self.partial.clear();
        }
        piece.transpose()
    }
}

#[cfg(test)]
mod tests;
