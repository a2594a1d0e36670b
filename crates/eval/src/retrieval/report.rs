//! Results as tables and as a page with heat maps.

use core::fmt;
use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_report::{HeatMap, HtmlReport, Table};

use super::{Retrieval, RetrievalRow, RetrievalTask};
use crate::Result;

/// How many values were found, of how many.
#[derive(Clone, Copy, Default)]
struct Found {
    found: usize,
    of: usize,
}

impl Found {
    fn share(self) -> Option<f64> {
        (self.of > 0).then(|| self.found as f64 / self.of as f64)
    }
}

impl fmt::Display for Found {
    /// Writes a dash if there was nothing to find.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.of {
            0 => f.write_str("-"),
            of => write!(f, "{}/{of}", self.found),
        }
    }
}

impl Retrieval {
    /// Returns the names of all caches, the first one first.
    fn caches(&self) -> Vec<&str> {
        let mut all: Vec<&str> = vec![];
        for row in &self.rows {
            if !all.contains(&row.cache.as_str()) {
                all.push(&row.cache);
            }
        }
        all
    }

    /// Counts the values found with one cache, of those that the first cache finds; of all values
    /// for the first cache.
    fn found(&self, cache: &str, chosen: impl Fn(&RetrievalRow) -> bool) -> Found {
        let first = self.rows.first().map_or("", |row| &row.cache);
        let mut count = Found::default();
        for row in self.rows.iter().filter(|row| row.cache == cache && chosen(row)) {
            let same = |other: &&RetrievalRow| other.cache == first && other.is_beside(row);
            let Some(float) = self.rows.iter().find(same) else { continue };
            for (&found, &by_float) in row.found.iter().zip(&float.found) {
                if cache == first || by_float {
                    count.of += 1;
                    count.found += usize::from(found);
                }
            }
        }
        count
    }

    /// Lists the values found by task, cache, context and depth. For the first cache they are of
    /// all values, for others of those that the first one found; a dash stands for none.
    pub fn table(&self) -> Table {
        let depths = self.plan.depths.iter().map(|depth| format!("{depth}%"));
        let start = ["task", "cache", "context"].map(String::from);
        let header = start.into_iter().chain(depths).chain(["all".to_string()]);
        let mut table = Table::new(header);
        for &task in &self.plan.tasks {
            for &context in &self.plan.contexts {
                for cache in self.caches() {
                    let here = |row: &RetrievalRow| row.task == task && row.context == context;
                    let depths = self.plan.depths.iter();
                    let cells = depths
                        .map(|&depth| self.found(cache, |row| here(row) && row.depth == depth));
                    let start = [task.to_string(), cache.to_string(), context.to_string()];
                    let cells = cells.chain([self.found(cache, here)]);
                    table.push(start.into_iter().chain(cells.map(|cell| cell.to_string())));
                }
            }
        }
        table
    }

    /// Draws the share of the values found by context and depth, counted as in
    /// [`table`](Self::table).
    fn heat_map(&self, task: RetrievalTask, cache: &str) -> HeatMap {
        let row = |&context: &usize| {
            let at = |&depth: &usize| {
                let here = |row: &RetrievalRow| {
                    (row.task, row.context, row.depth) == (task, context, depth)
                };
                self.found(cache, here).share()
            };
            self.plan.depths.iter().map(at).collect()
        };
        HeatMap {
            title: format!("{task}, {cache}"),
            corner: "tokens, depth".to_string(),
            columns: self.plan.depths.iter().map(|depth| format!("{depth}%")).collect(),
            rows: self.plan.contexts.iter().map(usize::to_string).collect(),
            shares: self.plan.contexts.iter().map(row).collect(),
        }
    }

    /// Writes `report.html` with a heat map for each task and cache into `folder`, which is created
    /// if missing. Returns its path.
    ///
    /// # Errors
    /// A folder or file that cannot be written.
    pub fn write_folder(&self, folder: impl AsRef<Path>, command: &[String]) -> Result<PathBuf> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder)
            .map_err(|source| kv_report::Error::Write { path: folder.into(), source })?;
        let page = folder.join("report.html");
        let mut html = HtmlReport::new("Retrieval from long prompts").paragraph(
            "The share of the values that answers contain, by the length of the prompt and the \
             place of the first needle. For the first cache it is of all values, for the others of \
             those that the first cache finds; a dash stands for none.",
        );
        for &task in &self.plan.tasks {
            html = html.heading(&task.to_string());
            for cache in self.caches() {
                html = html.heat_map(&self.heat_map(task, cache));
            }
        }
        html.heading("All counts").table(&self.table()).pre(&command.join(" ")).write(&page)?;
        Ok(page)
    }
}

impl RetrievalRow {
    /// Returns whether both are answers to the same prompt.
    fn is_beside(&self, other: &Self) -> bool {
        let prompt = |row: &Self| (row.task, row.context, row.depth, row.sample);
        prompt(self) == prompt(other)
    }
}

impl fmt::Display for Retrieval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.table())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::{Haystack, RetrievalPlan, Spelling};

    fn row(cache: &str, depth: usize, found: &[bool]) -> RetrievalRow {
        RetrievalRow {
            task: RetrievalTask::MultiValue,
            cache: cache.to_string(),
            context: 1024,
            depth,
            sample: 0,
            tokens: 1000,
            found: found.to_vec(),
            answer: String::new(),
        }
    }

    /// What float does not find says nothing of another cache.
    #[test]
    fn caches_are_compared_where_float_finds() {
        let plan = RetrievalPlan {
            tasks: vec![RetrievalTask::MultiValue],
            keys: Spelling::Word,
            values: Spelling::Number,
            haystack: Haystack::Noise,
            contexts: vec![1024],
            depths: vec![0, 50],
            needles: 3,
            samples: 1,
            seed: 0,
            bos: None,
        };
        let rows = vec![
            row("float", 0, &[true, false, true]),
            row("k2v2", 0, &[false, true, true]),
            row("float", 50, &[false, false, false]),
            row("k2v2", 50, &[true, false, false]),
        ];
        let found = Retrieval { plan, rows };
        let table = found.table();
        assert_eq!(table.header(), ["task", "cache", "context", "0%", "50%", "all"]);
        assert_eq!(table.rows()[0], ["multi-value", "float", "1024", "2/3", "0/3", "2/6"]);
        assert_eq!(table.rows()[1], ["multi-value", "k2v2", "1024", "1/2", "-", "1/2"]);
        let map = found.heat_map(RetrievalTask::MultiValue, "k2v2");
        assert_eq!(map.shares, [[Some(0.5), None]]);
    }
}
