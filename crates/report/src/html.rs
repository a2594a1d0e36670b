//! A report in one HTML file: tables, charts as inline SVG, notes. It refers to nothing outside
//! itself and runs no script, unless it shows a [`Timeline`](crate::Timeline).

use std::path::Path;

use crate::{Result, Table, chart::Chart, files::write};

const STYLE: &str = "\
body{font:16px/1.5 sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}\
table{border-collapse:collapse;font-size:.9rem;margin:1rem 0}caption{text-align:left}\
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:left}\
th{border-bottom:2px solid #888}.number{text-align:right;font-variant-numeric:tabular-nums}\
figure{margin:1.5rem 0}svg{max-width:100%;height:auto}\
pre{background:#f5f5f5;padding:.8rem;white-space:pre-wrap;font-size:.85rem}";

/// A grid of cells, each in a color between that of 0 and that of 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// Above the grid.
    pub title: String,
    /// In the cell above the names of rows.
    pub corner: String,
    /// The names of columns.
    pub columns: Vec<String>,
    /// The names of rows.
    pub rows: Vec<String>,
    /// The cells of each row: a number from 0 to 1 and a text, or nothing.
    pub cells: Vec<Vec<Option<(f64, String)>>>,
}

/// The colors of 0, 0.5 and 1, which color-blind readers can distinguish.
const HEAT: [[f64; 3]; 3] = [[244.0, 165.0, 130.0], [247.0; 3], [146.0, 197.0, 222.0]];

/// Returns the style of a cell.
fn heat(number: f64) -> String {
    let at = number.clamp(0.0, 1.0) * 2.0;
    let (from, part) = if at < 1.0 { (0, at) } else { (1, at - 1.0) };
    let [red, green, blue] = core::array::from_fn(|i| {
        (HEAT[from][i] + part * (HEAT[from + 1][i] - HEAT[from][i])).round() as u8
    });
    format!("background:rgb({red},{green},{blue})")
}

/// Builds a page from top to bottom; every text is escaped.
#[derive(Clone, Debug)]
pub struct HtmlReport {
    title: String,
    /// Added to the style of all pages.
    style: &'static str,
    body: String,
}

impl HtmlReport {
    /// An empty page.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), style: "", body: String::new() }
    }

    /// Adds the heading of a section.
    #[must_use]
    pub fn heading(self, text: &str) -> Self {
        self.element("h2", text)
    }

    /// Adds a paragraph.
    #[must_use]
    pub fn paragraph(self, text: &str) -> Self {
        self.element("p", text)
    }

    /// Adds text whose spaces and line breaks are kept.
    #[must_use]
    pub fn pre(self, text: &str) -> Self {
        self.element("pre", text)
    }

    /// Adds a table; columns of numbers are aligned to the right.
    #[must_use]
    pub fn table(mut self, table: &Table) -> Self {
        let row = |name: &str, cells: &[String]| {
            let cells = (0..table.header().len()).map(|i| {
                let class = if table.is_numeric(i) { " class=\"number\"" } else { "" };
                let text = escape(cells.get(i).map_or("", String::as_str));
                format!("<{name}{class}>{text}</{name}>")
            });
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        self.body += "<table>\n";
        self.body += &row("th", table.header());
        self.body.extend(table.rows().iter().map(|cells| row("td", cells)));
        self.body += "</table>\n";
        self
    }

    /// Adds a grid of colored cells; a dash marks a cell without a number.
    #[must_use]
    pub fn heat_map(mut self, map: &HeatMap) -> Self {
        let named = |name: &String| format!("<th>{}</th>", escape(name));
        let cell = |cell: &Option<(f64, String)>| match cell {
            Some((number, text)) => {
                let (style, text) = (heat(*number), escape(text));
                format!("<td class=\"number\" style=\"{style}\">{text}</td>")
            }
            None => "<td class=\"number\">-</td>".to_string(),
        };
        self.body += &format!("<table>\n<caption>{}</caption>\n", escape(&map.title));
        let columns: String = map.columns.iter().map(named).collect();
        self.body += &format!("<tr>{}{columns}</tr>\n", named(&map.corner));
        for (name, cells) in map.rows.iter().zip(&map.cells) {
            let cells: String = cells.iter().map(cell).collect();
            self.body += &format!("<tr>{}{cells}</tr>\n", named(name));
        }
        self.body += "</table>\n";
        self
    }

    /// Adds a chart as inline SVG.
    ///
    /// # Errors
    /// Fails as [`Chart::svg`] does.
    pub fn chart(mut self, chart: &Chart) -> Result<Self> {
        self.body += &format!("<figure>\n{}</figure>\n", chart.svg()?);
        Ok(self)
    }

    /// Adds rules to the page's style.
    pub(crate) fn style(self, style: &'static str) -> Self {
        Self { style, ..self }
    }

    pub(crate) fn markup(mut self, html: &str) -> Self {
        self.body += html;
        self
    }

    /// The page.
    pub fn html(&self) -> String {
        let (title, style) = (escape(&self.title), self.style);
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
             <style>{STYLE}{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n\
             {}</body>\n</html>\n",
            self.body
        )
    }

    /// Writes the page.
    ///
    /// # Errors
    /// [`Error::Write`](crate::Error::Write) naming the path.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), self.html().as_bytes())
    }

    fn element(mut self, name: &str, text: &str) -> Self {
        self.body += &format!("<{name}>{}</{name}>\n", escape(text));
        self
    }
}

/// Escapes `text` for HTML elements and quoted attributes. Control characters, except line feeds
/// and tabs, become U+FFFD.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
