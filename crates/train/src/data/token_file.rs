use std::{
    fmt,
    fs::{self, File},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use kv_models::{Tokenizer, save::staged::stage};
use memmap2::Mmap;
use rayon::prelude::*;
use tempfile::NamedTempFile;

use super::{
    DataError, Source,
    source::{Digest, Piece, digest_file},
};

/// Token ids of texts, in a file that is mapped into memory.
///
/// The file consists of a header of `HEADER` bytes, one u64 per source with the number of ids up to
/// its end, and the ids. All numbers are little-endian:
///
/// | offset | type | field                                              |
/// |-------:|------|----------------------------------------------------|
/// |      0 | [u8] | `KVTOKENS`                                         |
/// |      8 | u32  | version, 2                                         |
/// |     12 | u32  | bytes per id, 2 or 4                               |
/// |     16 | u64  | number of ids                                      |
/// |     24 | u64  | number of documents                                |
/// |     32 | u64  | fingerprint of the tokenizer and the sources       |
/// |     40 | u64  | number of sources                                  |
/// |     48 | u32  | CRC-32 of what follows the header                  |
/// |     52 | u32  | CRC-32 of the 52 bytes before                      |
///
/// The file is written under a temporary name and renamed when complete. Several processes can
/// therefore share a cache folder, and this crate never changes a mapped file. A process that is
/// killed while it writes leaves a file `*.part`, which is never read.
pub struct TokenFile {
    path: PathBuf,
    map: Mmap,
    width: usize,
    n_documents: usize,
    /// For every source, the number of ids up to its end.
    ends: Vec<usize>,
    origin: Origin,
}

/// The source of the ids of a [`TokenFile`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Read from a cache file of the same texts and tokenizer.
    Reused,
    /// Tokenized now, because there was no cache file.
    Built,
    /// Tokenized now, because the cache file was damaged or belonged to other texts or another
    /// tokenizer; the text is the reason.
    Rebuilt(String),
}

const MAGIC: [u8; 8] = *b"KVTOKENS";
const VERSION: u32 = 2;
const HEADER: usize = 56;

struct Header {
    width: usize,
    n_ids: u64,
    n_documents: u64,
    fingerprint: u64,
    n_sources: u64,
    crc: u32,
}

impl Header {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.width as u32).to_le_bytes());
        for field in [self.n_ids, self.n_documents, self.fingerprint, self.n_sources] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(self.crc.to_le_bytes());
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Parses the header of a file. Returns it with the bytes after it, or the reason why the file
    /// is not usable.
    fn read(bytes: &[u8], fingerprint: u64) -> Result<(Self, &[u8]), String> {
        let Some((header, body)) = bytes.split_at_checked(HEADER) else {
            return Err(format!("it has {} bytes, fewer than a header of {HEADER}", bytes.len()));
        };
        let u32_at = |at: usize| le(&header[at..at + 4]) as u32;
        let u64_at = |at: usize| le(&header[at..at + 8]);
        if header[..8] != MAGIC {
            return Err("it is not a token cache".into());
        }
        if crc32fast::hash(&header[..HEADER - 4]) != u32_at(HEADER - 4) {
            return Err("its header is damaged".into());
        }
        if u32_at(8) != VERSION {
            return Err(format!("its version is {}, not {VERSION}", u32_at(8)));
        }
        let header = Self {
            width: u32_at(12) as usize,
            n_ids: u64_at(16),
            n_documents: u64_at(24),
            fingerprint: u64_at(32),
            n_sources: u64_at(40),
            crc: u32_at(48),
        };
        if header.fingerprint != fingerprint {
            return Err("the sources, the tokenizer or the settings changed".into());
        }
        if !matches!(header.width, 2 | 4) {
            return Err(format!("its ids have {} bytes", header.width));
        }
        let ids = header.n_ids.checked_mul(header.width as u64);
        let table = header.n_sources.checked_mul(8);
        let bytes = ids.zip(table).and_then(|(ids, table)| ids.checked_add(table));
        if bytes != Some(body.len() as u64) {
            let (n, sources) = (header.n_ids, header.n_sources);
            return Err(format!("it holds {} bytes, not {n} ids of {sources} sources", body.len()));
        }
        if crc32fast::hash(body) != header.crc {
            return Err("its ids are damaged".into());
        }
        Ok((header, body))
    }
}

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

impl TokenFile {
    /// Returns the ids of `source` encoded by `tokenizer`. They are read from a file in the folder
    /// `cache` if it holds an intact one of the same bytes. Otherwise the texts are tokenized into
    /// a new file; the folder is created if it is missing.
    ///
    /// `tokenizer_file` is the file that `tokenizer` was read from: a `tokenizer.json`, a GGUF file
    /// or a folder with a `tokenizer.json`. Its bytes are part of the fingerprint. Each document is
    /// encoded as a whole. Documents are joined by the smallest of the tokenizer's end-of-text ids,
    /// if it has any.
    ///
    /// Every source is read once to compute the fingerprint, and a second time if it is tokenized.
    /// A few pieces of text, or the longest JSONL line, are in memory at a time.
    /// [`origin`](Self::origin) says which case it was.
    ///
    /// # Errors
    /// Sources that are missing, not UTF-8 or malformed JSONL; texts without a token; a text that
    /// the tokenizer refuses; a cache folder that cannot be written, in which nothing is left
    /// behind.
    pub fn open(
        source: &Source,
        tokenizer: &Tokenizer,
        tokenizer_file: &Path,
        cache: &Path,
    ) -> Result<Self, DataError> {
        let Some(first) = source.paths().first() else { return Err(DataError::NoSources) };
        let tokenizer_file = if tokenizer_file.is_dir() {
            tokenizer_file.join("tokenizer.json")
        } else {
            tokenizer_file.to_path_buf()
        };
        let mut settings = Digest::new("kv-train tokens");
        digest_file(&tokenizer_file, &mut settings)?;
        settings.number(tokenizer.n_ids() as u64);
        settings.number(tokenizer.eos().len() as u64);
        tokenizer.eos().iter().for_each(|&id| settings.number(id.into()));
        let mut all = settings.clone();
        source.digest(&mut all)?;
        let fingerprint = all.finish();

        let path = cache.join(file_name(source, first, &tokenizer_file)?);
        let origin = match File::open(&path) {
            Ok(file) => match Self::map(&file, &path, fingerprint, Origin::Reused) {
                Ok(tokens) => return Ok(tokens),
                Err(why) => Origin::Rebuilt(why),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Origin::Built,
            Err(error) => Origin::Rebuilt(error.to_string()),
        };
        let failed = |source| DataError::Cache { path: cache.into(), source };
        fs::create_dir_all(cache).map_err(failed)?;
        let file = build(source, tokenizer, &path, settings, fingerprint)?;
        Self::map(&file, &path, fingerprint, origin)
            .map_err(|why| DataError::ReadBack { path, why })
    }

    fn map(file: &File, path: &Path, fingerprint: u64, origin: Origin) -> Result<Self, String> {
        // SAFETY: the map is read-only, and any bytes are valid as `u8`. This crate replaces a
        // cache file only by renaming another over it. No memory map can be protected from another
        // process that changes the file in place.
        let map =
            unsafe { Mmap::map(file) }.map_err(|error| format!("it cannot be mapped: {error}"))?;
        let (header, body) = Header::read(&map, fingerprint)?;
        let (width, n_documents) = (header.width, header.n_documents as usize);
        let table = &body[..8 * header.n_sources as usize];
        let ends = table.chunks_exact(8).map(|end| le(end) as usize).collect();
        Ok(Self { path: path.into(), map, width, n_documents, ends, origin })
    }

    /// Returns the number of ids, at least 1.
    pub fn len(&self) -> usize {
        self.body().len() / self.width
    }

    /// Always returns false, because texts without a token are an error.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the range of ids of each source, in order.
    pub fn sources(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }

    /// Returns the number of documents with at least one id.
    pub fn n_documents(&self) -> usize {
        self.n_documents
    }

    /// The cache file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the ids were read from the cache file or tokenized now.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the ids in `range`, clamped to the file.
    pub fn ids(&self, range: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        let end = range.end.min(self.len());
        let range = range.start.min(end) * self.width..end * self.width;
        self.body()[range].chunks_exact(self.width).map(|id| le(id) as u32)
    }

    /// Checks every id against a model's vocabulary.
    ///
    /// # Errors
    /// [`DataError::Vocab`] naming the first id that is not below `vocab_size`.
    pub fn require_vocab(&self, vocab_size: usize) -> Result<(), DataError> {
        let beyond = self.ids(0..self.len()).enumerate().find(|&(_, id)| id as usize >= vocab_size);
        beyond.map_or(Ok(()), |(index, id)| {
            Err(DataError::Vocab { path: self.path.clone(), index, id, vocab_size })
        })
    }

    fn body(&self) -> &[u8] {
        &self.map[HEADER + 8 * self.ends.len()..]
    }
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, n_documents, origin, .. } = self;
        f.debug_struct("TokenFile")
            .field("path", path)
            .field("len", &self.len())
            .field("n_documents", n_documents)
            .field("origin", origin)
            .finish_non_exhaustive()
    }
}

/// Returns a file name that does not depend on the contents of the files.
fn file_name(source: &Source, first: &Path, tokenizer_file: &Path) -> Result<String, DataError> {
    let mut key = Digest::new("kv-train token file");
    for path in source.paths().iter().map(PathBuf::as_path).chain([tokenizer_file]) {
        let path = path.canonicalize().map_err(|error| DataError::read(path, error))?;
        key.string(path.as_os_str().as_encoded_bytes());
    }
    key.string(source.field().as_bytes());
    let stem = first.file_stem().unwrap_or_default().to_string_lossy();
    let plain = |c: char| if c.is_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' };
    let stem: String = stem.chars().take(40).map(plain).collect();
    Ok(format!("{stem}-{:016x}.tokens", key.finish()))
}

/// Tokenizes `source` into a new file at `path`.
fn build(
    source: &Source,
    tokenizer: &Tokenizer,
    path: &Path,
    mut digest: Digest,
    fingerprint: u64,
) -> Result<File, DataError> {
    let failed = |source| DataError::Cache { path: path.into(), source };
    let paths = source.paths();
    let file = Builder::create(path, tokenizer, paths.len(), fingerprint);
    let mut file = file.map_err(failed)?;
    source.read(Some(tokenizer), &mut digest, |pieces| {
        let encode = |piece| {
            let text = source.text(piece)?;
            let ids = match piece.line {
                // A JSONL line is always a whole document, even a long one.
                Some(_) => tokenizer.encode(&text),
                None => tokenizer.encode_piece(&text, piece.continues()),
            };
            ids.map_err(|error| DataError::Tokenizer {
                path: piece.path.into(),
                line: piece.line,
                why: error.to_string(),
            })
        };
        // The results are kept in order, so the first error is always the same one.
        let documents: Vec<Result<Vec<u32>, DataError>> = pieces.par_iter().map(encode).collect();
        documents.into_iter().zip(&pieces).try_for_each(|(ids, piece)| file.push(piece, ids?))
    })?;
    if digest.finish() != fingerprint {
        return Err(DataError::Changed { path: paths[0].clone() });
    }
    if file.header.n_ids == 0 {
        return Err(DataError::Empty { first: paths[0].clone(), n: paths.len() });
    }
    let file = file.finish().map_err(failed)?;
    // Makes the new name durable if folders can be synced. If it is lost, texts are tokenized
    // again.
    if let Some(Ok(folder)) = path.parent().map(File::open) {
        let _ = folder.sync_all();
    }
    Ok(file)
}

/// A token file that is being written, under a temporary name.
struct Builder<'a> {
    path: &'a Path,
    out: BufWriter<NamedTempFile>,
    /// The numbers so far, without the CRC.
    header: Header,
    /// CRC of the ids.
    crc: crc32fast::Hasher,
    /// The id between two documents, if there is one.
    separator: Option<u32>,
    /// True once the current document has ids.
    begun: bool,
    /// For every source, the number of ids up to its end; 0 for a source without a token.
    ends: Vec<u64>,
}

impl<'a> Builder<'a> {
    fn create(
        path: &'a Path,
        tokenizer: &Tokenizer,
        n_sources: usize,
        fingerprint: u64,
    ) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(1 << 20, stage(path)?);
        out.write_all(&vec![0; HEADER + 8 * n_sources])?;
        let width = if tokenizer.n_ids() <= 1 << 16 { 2 } else { 4 };
        let (n_ids, n_documents, n_sources) = (0, 0, n_sources as u64);
        let header = Header { width, n_ids, n_documents, fingerprint, n_sources, crc: 0 };
        let (separator, ends) = (tokenizer.eos().first().copied(), vec![0; n_sources as usize]);
        Ok(Self { path, out, header, crc: Default::default(), separator, begun: false, ends })
    }

    fn push(&mut self, piece: &Piece<'_>, ids: Vec<u32>) -> Result<(), DataError> {
        self.begun &= piece.continues();
        if ids.is_empty() {
            return Ok(());
        }
        let Header { width, n_ids, n_documents, .. } = &mut self.header;
        let joint = self.separator.filter(|_| *n_documents > 0 && !self.begun);
        let mut bytes = Vec::with_capacity((ids.len() + 1) * *width);
        for id in joint.into_iter().chain(ids) {
            // Tensors of ids are i32.
            let limit = if *width == 2 { 1 << 16 } else { 1 << 31 };
            if id >= limit {
                let (path, vocab_size) = (self.path.into(), limit as usize);
                let index = *n_ids as usize + bytes.len() / *width;
                return Err(DataError::Vocab { path, index, id, vocab_size });
            }
            bytes.extend_from_slice(&id.to_le_bytes()[..*width]);
        }
        self.crc.update(&bytes);
        let failed = |source| DataError::Cache { path: self.path.into(), source };
        self.out.write_all(&bytes).map_err(failed)?;
        *n_ids += (bytes.len() / *width) as u64;
        *n_documents += u64::from(!self.begun);
        self.begun = true;
        self.ends[piece.source] = *n_ids;
        Ok(())
    }

    /// Writes the header and renames the file.
    fn finish(mut self) -> io::Result<File> {
        // A source without a token ends where the previous one ends.
        let ends = self.ends.iter().scan(0, |last, &end| {
            *last = end.max(*last);
            Some(last.to_le_bytes())
        });
        let table: Vec<u8> = ends.flatten().collect();
        let mut crc = crc32fast::Hasher::new();
        crc.update(&table);
        crc.combine(&self.crc);
        self.header.crc = crc.finalize();
        let mut file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&self.header.to_bytes())?;
        file.write_all(&table)?;
        file.as_file().sync_all()?;
        Ok(file.persist(self.path)?)
    }
}
