//! Rows under a header, for the terminal and for HTML.

use core::fmt;

use comfy_table::{CellAlignment, presets};

/// A table of text. Rows may be shorter than the header; missing cells are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns.
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row; cells beyond the header are dropped.
    pub fn push<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells = cells.into_iter().map(Into::into).take(self.header.len());
        self.rows.push(cells.collect());
    }

    /// The column names.
    pub fn header(&self) -> &[String] {
        &self.header
    }

    /// The rows, first to last.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Returns the table with its first `n` rows.
    #[must_use]
    pub fn first_rows(&self, n: usize) -> Self {
        Self { header: self.header.clone(), rows: self.rows.iter().take(n).cloned().collect() }
    }

    /// Returns whether every cell of `column` is a number, a percentage or empty.
    pub(crate) fn is_numeric(&self, column: usize) -> bool {
        self.rows.iter().filter_map(|row| row.get(column)).all(|cell| {
            let digits = cell.trim().trim_end_matches('%');
            digits.is_empty() || digits.parse::<f64>().is_ok()
        })
    }
}

impl fmt::Display for Table {
    /// Columns as wide as their widest cell, numbers to the right, one line per row.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).set_header(&self.header).add_rows(&self.rows);
        for (i, column) in table.column_iter_mut().enumerate() {
            column.set_padding((if i == 0 { 0 } else { 2 }, 0));
            if self.is_numeric(i) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.lines().try_for_each(|line| writeln!(f, "{}", line.trim_end()))
    }
}
