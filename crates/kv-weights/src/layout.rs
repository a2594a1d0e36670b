//! Where the blocks of a matrix lie.

use crate::{Error, Result, WeightFormat, error::invalid};

/// The format and the shape of a packed matrix.
///
/// Rows follow one another, and in a row its blocks, as in a GGUF file: row `r` begins at byte `r * row_bytes()`.
/// Buffers are of u32 words, little endian, so that up to three zero bytes may follow the last row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    format: WeightFormat,
    rows: usize,
    columns: usize,
}

impl PackedLayout {
    /// The layout of a matrix of `[rows, columns]`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there is nothing in it, or if rows are not whole blocks.
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
            _ => Err(invalid("rows", rows, "must not make more bytes than can be counted")),
        }
    }

    /// The format of the blocks.
    pub const fn format(&self) -> WeightFormat {
        self.format
    }

    /// Rows of the matrix: the numbers of a product.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers of a row.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Rows and columns.
    pub const fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Blocks of a row.
    pub const fn row_blocks(&self) -> usize {
        self.columns / self.format.block_numbers()
    }

    /// Bytes of a row.
    pub const fn row_bytes(&self) -> usize {
        self.row_blocks() * self.format.block_bytes()
    }

    /// Bytes of all rows.
    pub const fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// The layouts of as few matrices of neighboring rows as there can be with buffers of at most `most` bytes each. All
    /// but the last have whole words, and the same number of rows.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if that is not enough for a row, or for as many as fill whole words.
    pub fn split(&self, most: u64) -> Result<Vec<Self>> {
        let word = size_of::<u32>();
        if (word * self.words()) as u64 <= most {
            return Ok(vec![*self]);
        }
        // Every part of so many rows begins at a word.
        let step = (1..=word).find(|rows| (rows * self.row_bytes()).is_multiple_of(word));
        let step = step.unwrap_or(word);
        let step_bytes = step * self.row_bytes();
        let rows = usize::try_from(most).unwrap_or(usize::MAX) / step_bytes * step;
        if rows == 0 {
            let Self { format, rows, columns } = self;
            let some =
                if step == 1 { "a row takes".to_string() } else { format!("{step} rows take") };
            return Err(Error::Unsupported {
                what: format!("a matrix [{rows}, {columns}] of {format}"),
                why: format!(
                    "{some} {step_bytes} bytes, and the device has buffers of at most {most}"
                ),
            });
        }
        let starts = (0..self.rows).step_by(rows);
        Ok(starts.map(|start| Self { rows: rows.min(self.rows - start), ..*self }).collect())
    }

    /// The row and the first column of the first block of `bytes`, those of all rows, whose numbers are not all finite.
    pub fn not_finite(&self, bytes: &[u8]) -> Option<[usize; 2]> {
        let block = self.format.not_finite(bytes)?;
        Some([block / self.row_blocks(), block % self.row_blocks() * self.format.block_numbers()])
    }

    /// Words of the buffer: the bytes of all rows, rounded up.
    pub const fn words(&self) -> usize {
        self.bytes().div_ceil(size_of::<u32>())
    }
}
