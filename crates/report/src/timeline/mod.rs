//! A timeline in one HTML file, to be zoomed and searched in a browser, with tables below it.
//!
//! The page refers to nothing outside itself; its script draws lanes of bars on a canvas and needs
//! no library. Without a script, its tables are there all the same.

use serde::Serialize;

use crate::{HtmlReport, Table};

/// Kind of a bar, which decides its color.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Kind {
    /// A part of the run, which the page's list of phases leads to.
    Phase,
    /// Something that others are part of.
    Group,
    /// Something that was computed. Bars of one [`Label::group`] have one colour.
    Operation,
    /// Nothing was computed.
    Idle,
}

/// Names of bars.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Label {
    /// The name.
    pub name: String,
    /// Group the bar belongs to.
    pub group: String,
    /// Kind of the bar.
    pub kind: Kind,
}

/// Something that took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Its name: an index of [`Timeline::labels`].
    pub label: u32,
    /// More about it: an index of [`Timeline::details`].
    pub detail: Option<u32>,
    /// The line of the lane that it is drawn on, from 0. Bars of one line do not overlap.
    pub row: u16,
    /// Nanoseconds from the start of the timeline.
    pub start: u64,
    /// Nanoseconds from the start of the timeline, at least `start`.
    pub end: u64,
}

/// Bars of one thread, or of one queue of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Whose they are.
    pub name: String,
    /// The bars, in any order.
    pub bars: Vec<Bar>,
}

/// A timeline and its description.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// The page's title.
    pub title: String,
    /// Facts about the run, as names and values.
    pub facts: Vec<(String, String)>,
    /// Notes for the reader, one paragraph each.
    pub notes: Vec<String>,
    /// Names of bars.
    pub labels: Vec<Label>,
    /// Further details of bars.
    pub details: Vec<String>,
    /// The lanes, top to bottom.
    pub lanes: Vec<Lane>,
    /// Tables, each with its heading.
    pub tables: Vec<(String, Table)>,
}

/// The bars of a line, as the script reads them.
#[derive(Serialize)]
struct Row {
    labels: Vec<u32>,
    /// 0 for none, else the index and 1.
    details: Vec<u32>,
    /// Each less the one before it.
    starts: Vec<u64>,
    lengths: Vec<u64>,
}

#[derive(Serialize)]
struct Rows<'a> {
    name: &'a str,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Data<'a> {
    labels: &'a [Label],
    details: &'a [String],
    lanes: Vec<Rows<'a>>,
}

impl Timeline {
    /// The page.
    pub fn html(&self) -> String {
        let mut page = HtmlReport::new(&self.title).style(include_str!("page.css"));
        let mut facts = Table::new(["", ""]);
        self.facts.iter().for_each(|(name, value)| facts.push([name, value]));
        page = page.table(&facts).markup(include_str!("page.html"));
        for note in &self.notes {
            page = page.paragraph(note);
        }
        for (heading, table) in &self.tables {
            page = page.heading(heading).table(table);
        }
        // What ends a script in HTML does not occur in JSON that is written so.
        let data = self.json().replace('<', "\\u003c");
        page.markup(&format!("<script type=\"application/json\" id=\"timeline\">{data}</script>\n"))
            .markup(&format!("<script>\n{}</script>\n", include_str!("page.js")))
            .html()
    }

    fn json(&self) -> String {
        let lanes = self.lanes.iter().map(|lane| Rows { name: &lane.name, rows: rows(&lane.bars) });
        let data = Data { labels: &self.labels, details: &self.details, lanes: lanes.collect() };
        serde_json::to_string(&data).expect("numbers and texts can be written as JSON")
    }
}

fn rows(bars: &[Bar]) -> Vec<Row> {
    let n = bars.iter().map(|bar| usize::from(bar.row) + 1).max().unwrap_or(0);
    let mut rows: Vec<Vec<&Bar>> = vec![vec![]; n];
    bars.iter().for_each(|bar| rows[usize::from(bar.row)].push(bar));
    rows.into_iter()
        .map(|mut bars| {
            bars.sort_by_key(|bar| (bar.start, bar.end));
            let before = std::iter::once(0).chain(bars.iter().map(|bar| bar.start));
            Row {
                labels: bars.iter().map(|bar| bar.label).collect(),
                details: bars.iter().map(|bar| bar.detail.map_or(0, |detail| detail + 1)).collect(),
                starts: bars.iter().zip(before).map(|(bar, before)| bar.start - before).collect(),
                lengths: bars.iter().map(|bar| bar.end.saturating_sub(bar.start)).collect(),
            }
        })
        .collect()
}
