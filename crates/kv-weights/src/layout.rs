//! Addresses of the blocks of a matrix.

use crate::{Error, Result, WeightFormat, error::invalid};

/// Format and shape of a packed matrix.
///
/// Rows are consecutive, and so are the blocks of a row, as in a GGUF file: row `r` begins at byte
/// `r * row_bytes()`. Buffers consist of little-endian u32 words, so up to three zero bytes may
/// follow the last row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    format: WeightFormat,
    rows: usize,
    columns: usize,
}

impl PackedLayout {
    /// Creates the layout of a matrix of `[rows, columns]`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the matrix is empty, if rows are not whole
    /// blocks, or if its bytes cannot be counted.
    pub fn new(format: WeightFormat, [rows, columns]: [usize; 2]) -> Result<Self> {
        let numbers = format.block_numbers();
        if rows == 0 {
            return Err(invalid("rows", rows, "must be at least 1"));
        }
        if columns == 0 || !columns.is_multiple_of(numbers) {
            let rule = format!(
                "must be a positive multiple of {numbers}, the numbers of a {format} block"
            );
            return Err(invalid("columns", columns, rule));
        }
        let layout = Self { format, rows, columns };
        match (columns / numbers)
            .checked_mul(format.block_bytes())
            .and_then(|n| n.checked_mul(rows))
        {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(layout),
            _ => Err(invalid("rows", rows, "must not need more bytes than can be addressed")),
        }
    }

    /// Returns the format of the blocks.
    pub const fn format(&self) -> WeightFormat {
        self.format
    }

    /// Returns the number of rows.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Returns rows and columns.
    pub const fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Returns the number of blocks in a row.
    pub const fn row_blocks(&self) -> usize {
        self.columns / self.format.block_numbers()
    }

    /// Returns the number of bytes in a row.
    pub const fn row_bytes(&self) -> usize {
        self.row_blocks() * self.format.block_bytes()
    }

    /// Returns the number of bytes in all rows.
    pub const fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// Splits the matrix into as few matrices of adjacent rows as fit into buffers of at most
    /// `most` bytes each. All but the last have whole words and equal numbers of rows.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a buffer cannot hold a row, or the number of rows that fill whole
    /// words.
    pub fn split(&self, most: u64) -> Result<Vec<Self>> {
        let word = size_of::<u32>();
        if (word * self.words()) as u64 <= most {
            return Ok(vec![*self]);
        }
        // Parts of multiples of `step` rows begin at a word.
        let step = (1..=word).find(|rows| (rows * self.row_bytes()).is_multiple_of(word));
        let step = step.unwrap_or(word);
        let step_bytes = step * self.row_bytes();
        let rows = usize::try_from(most).unwrap_or(usize::MAX) / step_bytes * step;
        if rows == 0 {
            let Self { format, rows, columns } = self;
            let some =
                if step == 1 { "a row needs".to_string() } else { format!("{step} rows need") };
            return Err(Error::Unsupported {
                what: format!("a matrix [{rows}, {columns}] of {format}"),
                why: format!(
                    "{some} {step_bytes} bytes, but a buffer of the device holds at most {most}"
                ),
            });
        }
        let starts = (0..self.rows).step_by(rows);
        Ok(starts.map(|start| Self { rows: rows.min(self.rows - start), ..*self }).collect())
    }

    /// Returns the row and first column of the first block whose numbers are not all finite.
    /// `bytes` are those of all rows.
    pub fn not_finite(&self, bytes: &[u8]) -> Option<[usize; 2]> {
        let block = self.format.not_finite(bytes)?;
        Some([block / self.row_blocks(), block % self.row_blocks() * self.format.block_numbers()])
    }

    /// Returns the number of words in the buffer: the bytes of all rows, rounded up.
    pub const fn words(&self) -> usize {
        self.bytes().div_ceil(size_of::<u32>())
    }
}
