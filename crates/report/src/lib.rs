//! Shows measurements: [`Table`]s for the terminal, [`Chart`](chart::Chart)s as SVG and PNG, and
//! both on an [`HtmlReport`], a page in one file.

pub mod chart;
mod error;
pub mod html;
mod table;

pub use error::{Error, Result};
pub use html::HtmlReport;
pub use table::Table;
