//! Shows measurements: [`Table`]s for the terminal, [`Chart`](chart::Chart)s as SVG and PNG, both
//! and [`HeatMap`]s on an [`HtmlReport`], a page in one file, and a [`Timeline`] on a page of its
//! own.

pub mod chart;
mod error;
mod files;
pub mod html;
mod table;
pub mod timeline;

pub use error::{Error, Result};
pub use files::create_folder;
pub use html::{HeatMap, HtmlReport};
pub use table::Table;
pub use timeline::Timeline;
