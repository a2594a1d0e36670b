use std::{
    borrow::Cow,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use kv_models::{Error, Tokenizer, tokenizer};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::DataError;

/// Texts on disk: plain UTF-8 files, and JSONL files (`.jsonl`) with one JSON object per line.
///
/// A document is a whole text file or the text field of one JSONL line. A byte order mark at the
/// start of a file, blank JSONL lines and empty documents are skipped; all other text is unchanged.
#[derive(Clone, Debug)]
pub struct Source {
    paths: Vec<PathBuf>,
    field: String,
}

/// A document, or a part of one that can be encoded by itself.
pub(super) struct Piece<'a> {
    /// Index of its file.
    pub(super) source: usize,
    pub(super) path: &'a Path,
    /// Line in a JSONL file, counted from 1.
    pub(super) line: Option<u64>,
    content: Content,
}

enum Content {
    /// A line that is not decoded yet, and its offset in the file.
    Line {
        offset: u64,
        bytes: Vec<u8>,
    },
    Text(tokenizer::Piece),
}

impl Piece<'_> {
    /// Returns whether it continues the document of the previous piece.
    pub(super) fn continues(&self) -> bool {
        matches!(&self.content, Content::Text(piece) if piece.continues)
    }
}

impl Source {
    /// Creates a source of these files, in this order. The text of a JSONL line is its field
    /// `text`.
    pub fn new(paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self { paths: paths.into_iter().map(Into::into).collect(), field: "text".into() }
    }

    /// Sets the field that holds the text of a JSONL line.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }

    /// The files.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The field that holds the text of a JSONL line.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Checks that all files exist and can be opened, without reading them.
    ///
    /// # Errors
    /// [`DataError::Read`] for the first file that cannot be opened.
    pub fn check_readable(&self) -> Result<(), DataError> {
        for path in &self.paths {
            let failed = |source| DataError::read(path, source);
            let metadata = fs::metadata(path).map_err(failed)?;
            if metadata.is_dir() {
                return Err(failed(io::ErrorKind::IsADirectory.into()));
            }
            // A pipe can be opened only once, by its reader.
            if metadata.is_file() {
                File::open(path).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Reads all documents into memory, in order, for example to train a tokenizer.
    ///
    /// # Errors
    /// [`DataError::NoSources`], [`DataError::Empty`], or an error of a source that is missing, not
    /// UTF-8 or malformed JSONL.
    pub fn documents(&self) -> Result<Vec<String>, DataError> {
        let Some(first) = self.paths.first() else { return Err(DataError::NoSources) };
        let mut documents: Vec<String> = vec![];
        self.read(None, &mut Digest::new(""), |pieces| {
            for piece in pieces {
                let text = self.text(&piece)?;
                if !text.is_empty() {
                    documents.push(text.into_owned());
                }
            }
            Ok(())
        })?;
        if documents.is_empty() {
            return Err(DataError::Empty { first: first.clone(), n: self.paths.len() });
        }
        Ok(documents)
    }

    /// Adds all bytes to `digest`, and the settings that decide the documents.
    pub(super) fn digest(&self, digest: &mut Digest) -> Result<(), DataError> {
        for path in &self.paths {
            self.digest_kind(path, digest);
            digest_file(path, digest)?;
        }
        Ok(())
    }

    fn digest_kind(&self, path: &Path, digest: &mut Digest) {
        digest.string(if is_jsonl(path) { self.field.as_bytes() } else { b"" });
        digest.update(&[u8::from(is_jsonl(path))]);
    }

    /// Calls `take` with batches of documents, in order, and updates `digest` as
    /// [`digest`](Self::digest) does. `tokenizer` cuts text files into pieces that it encodes to
    /// the same ids as the whole file; without a tokenizer, each text file is one piece.
    pub(super) fn read(
        &self,
        tokenizer: Option<&Tokenizer>,
        digest: &mut Digest,
        mut take: impl FnMut(Vec<Piece<'_>>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut batch = Batch { pieces: vec![], held: 0, take: &mut take };
        for (source, path) in self.paths.iter().enumerate() {
            self.digest_kind(path, digest);
            let failed = |source| DataError::read(path, source);
            let mut file = DigestReader { file: File::open(path).map_err(failed)?, digest, n: 0 };
            match (is_jsonl(path), tokenizer) {
                (true, _) => {
                    let mut file = BufReader::with_capacity(1 << 20, &mut file);
                    let mut offset = 0;
                    for line in 1.. {
                        let mut bytes = vec![];
                        let n = file.read_until(b'\n', &mut bytes).map_err(failed)?;
                        if n == 0 {
                            break;
                        }
                        let content = Content::Line { offset, bytes };
                        batch.push(Piece { source, path, line: Some(line), content }, n)?;
                        offset += n as u64;
                    }
                }
                (false, Some(tokenizer)) => {
                    for piece in tokenizer.pieces(&mut file, path) {
                        let piece = piece.map_err(piece_error)?;
                        let n = piece.text.len();
                        let content = Content::Text(piece);
                        batch.push(Piece { source, path, line: None, content }, n)?;
                    }
                }
                (false, None) => {
                    let mut bytes = vec![];
                    let n = file.read_to_end(&mut bytes).map_err(failed)?;
                    let text = decode(path, 0, &bytes)?.to_string();
                    let content = Content::Text(tokenizer::Piece { text, continues: false });
                    batch.push(Piece { source, path, line: None, content }, n)?;
                }
            }
            let n = file.n;
            digest.number(n);
        }
        batch.finish()
    }

    /// Returns the text of a piece; empty for a blank line.
    pub(super) fn text<'a>(&self, piece: &'a Piece<'_>) -> Result<Cow<'a, str>, DataError> {
        let path = piece.path;
        let (offset, bytes) = match &piece.content {
            Content::Text(piece) => return Ok(Cow::Borrowed(&piece.text)),
            Content::Line { offset, bytes } => (*offset, bytes),
        };
        let text = decode(path, offset, bytes)?;
        let line = piece.line.unwrap_or_default();
        if text.trim().is_empty() {
            return Ok(Cow::Borrowed(""));
        }
        let not_json = |why| DataError::Json { path: path.into(), line, why };
        let mut object = match serde_json::from_str(text.trim_end()) {
            Ok(Value::Object(object)) => object,
            Ok(other) => {
                return Err(not_json(format!("is {}, but must be a JSON object", kind(&other))));
            }
            Err(error) => {
                return Err(not_json(format!("not JSON: {error}").replace("line 1 ", "")));
            }
        };
        let found = match object.remove(&self.field) {
            Some(Value::String(text)) => return Ok(Cow::Owned(text)),
            Some(other) => kind(&other),
            None => "missing",
        };
        Err(DataError::Field { path: path.into(), line, field: self.field.clone(), found })
    }
}

/// Collects pieces and passes them on in batches.
struct Batch<'p, 't> {
    pieces: Vec<Piece<'p>>,
    held: usize,
    take: &'t mut dyn FnMut(Vec<Piece<'p>>) -> Result<(), DataError>,
}

impl<'p> Batch<'p, '_> {
    fn push(&mut self, piece: Piece<'p>, n_bytes: usize) -> Result<(), DataError> {
        /// Bytes of text in a batch, unless one document is larger.
        const BATCH_BYTES: usize = 16 << 20;
        self.pieces.push(piece);
        self.held += n_bytes;
        if self.held < BATCH_BYTES {
            return Ok(());
        }
        self.held = 0;
        (self.take)(std::mem::take(&mut self.pieces))
    }

    fn finish(self) -> Result<(), DataError> {
        if self.pieces.is_empty() { Ok(()) } else { (self.take)(self.pieces) }
    }
}

/// A reader that adds all bytes it reads to a digest.
struct DigestReader<'a> {
    file: File,
    digest: &'a mut Digest,
    n: u64,
}

impl Read for DigestReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        self.digest.update(&buffer[..n]);
        self.n += n as u64;
        Ok(n)
    }
}

/// Decodes the bytes at `offset` of a file, without a byte order mark at its start.
fn decode<'a>(path: &Path, offset: u64, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    let text = std::str::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
        path: path.into(),
        offset: offset + error.valid_up_to() as u64,
    })?;
    Ok(if offset == 0 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text })
}

/// Converts an error from cutting a text into pieces.
fn piece_error(error: Error) -> DataError {
    match error {
        Error::NotUtf8 { path, offset } => DataError::NotUtf8 { path, offset },
        Error::Io { path, source } => DataError::read(&path, source),
        other => DataError::argument("text", other, "must be readable"),
    }
}

fn is_jsonl(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Adds a file's bytes and their number to a digest.
pub(super) fn digest_file(path: &Path, digest: &mut Digest) -> Result<(), DataError> {
    let failed = |source| DataError::read(path, source);
    let mut file = File::open(path).map_err(failed)?;
    let mut buffer = vec![0; 1 << 20];
    let mut len = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                digest.update(&buffer[..n]);
                len += n as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    digest.number(len);
    Ok(())
}

/// A streaming 64-bit hash (XXH3). It does not protect against deliberate collisions.
#[derive(Clone)]
pub(super) struct Digest(Xxh3);

impl Digest {
    pub(super) fn new(domain: &str) -> Self {
        let mut digest = Self(Xxh3::new());
        digest.string(domain.as_bytes());
        digest
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn number(&mut self, number: u64) {
        self.update(&number.to_le_bytes());
    }

    /// Adds the number of bytes, then the bytes.
    pub(super) fn string(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.update(bytes);
    }

    pub(super) fn finish(self) -> u64 {
        self.0.digest()
    }
}
