//! Results as tables and as a page with heat maps.

use core::fmt;
use std::path::{Path, PathBuf};

use kv_report::{HeatMap, HtmlReport, Table};

use super::{Retrieval, RetrievalRow, RetrievalTask};
use crate::{Result, Versions, files::write_together};

/// The number of values that were found with a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Found {
    found: usize,
    /// All values.
    of: usize,
    /// Values found with the first cache.
    by_first: usize,
    /// Values found with the first cache and not with this one.
    lost: usize,
    /// Values found with this cache and not with the first one.
    gained: usize,
}

impl Found {
    /// Returns whether the first cache finds a value. Otherwise the others show nothing.
    const fn counts(&self, is_first: bool) -> bool {
        is_first || self.by_first > 0
    }

    fn cell(&self, is_first: bool) -> String {
        match self.counts(is_first) {
            true => format!("{}/{}", self.found, self.of),
            false => "-".to_string(),
        }
    }
}

impl Retrieval {
    /// Returns the names of all caches.
    fn caches(&self) -> impl Iterator<Item = &str> {
        self.rows.iter().take(self.caches).map(|row| row.cache.as_str())
    }

    /// Counts the values found with the `nth` cache in the chosen answers.
    fn found(&self, nth: usize, chosen: impl Fn(&RetrievalRow) -> bool) -> Found {
        let mut count = Found::default();
        for answers in self.rows.chunks(self.caches) {
            let (Some(first), Some(row)) = (answers.first(), answers.get(nth)) else { continue };
            if !chosen(row) {
                continue;
            }
            for (&found, &by_first) in row.found.iter().zip(&first.found) {
                count.of += 1;
                count.found += usize::from(found);
                count.by_first += usize::from(by_first);
                count.lost += usize::from(by_first && !found);
                count.gained += usize::from(found && !by_first);
            }
        }
        count
    }

    /// Lists the values found by task, context, cache and depth, and those that a cache lost and
    /// gained compared to the first one. A dash stands where the first cache found none.
    pub fn table(&self) -> Table {
        let depths = self.plan.depths.iter().map(|depth| format!("{depth}%"));
        let start = ["task", "context", "cache"].map(String::from);
        let end = ["all", "lost", "gained"].map(String::from);
        let mut table = Table::new(start.into_iter().chain(depths).chain(end));
        for &task in &self.plan.tasks {
            for &context in &self.plan.contexts {
                for (nth, cache) in self.caches().enumerate() {
                    let here = |row: &RetrievalRow| row.task == task && row.context == context;
                    let cell = |depth: usize| {
                        let found = self.found(nth, |row| here(row) && row.depth == Some(depth));
                        // Tasks that ask for all needles have no depths.
                        if found.of == 0 { String::new() } else { found.cell(nth == 0) }
                    };
                    let all = self.found(nth, here);
                    let mut row = vec![task.to_string(), context.to_string(), cache.to_string()];
                    row.extend(self.plan.depths.iter().map(|&depth| cell(depth)));
                    row.push(all.cell(nth == 0));
                    row.extend([all.lost, all.gained].map(|n| n.to_string()));
                    table.push(row);
                }
            }
        }
        table
    }

    /// Draws the share of the values found by context and depth, with one column for a task without
    /// depths.
    fn heat_map(&self, task: RetrievalTask, nth: usize, cache: &str) -> HeatMap {
        let depths = self.plan.depths_of(task);
        let cell = |context: usize, depth: Option<usize>| {
            let here =
                |row: &RetrievalRow| (row.task, row.context, row.depth) == (task, context, depth);
            let found = self.found(nth, here);
            let share = found.found as f64 / found.of as f64;
            found.counts(nth == 0).then(|| (share, found.cell(nth == 0)))
        };
        let name = |depth: &Option<usize>| match depth {
            Some(depth) => format!("{depth}%"),
            None => "all".to_string(),
        };
        let contexts = &self.plan.contexts;
        HeatMap {
            title: format!("{task}, {cache}"),
            corner: "tokens, depth".to_string(),
            columns: depths.iter().map(name).collect(),
            rows: contexts.iter().map(usize::to_string).collect(),
            cells: contexts
                .iter()
                .map(|&context| depths.iter().map(|&depth| cell(context, depth)).collect())
                .collect(),
        }
    }

    /// Writes `report.html` with a heat map for each task and cache into `folder`, which is created
    /// if missing. Returns its path.
    ///
    /// # Errors
    /// A folder or file that cannot be written.
    pub fn write_folder(&self, folder: impl AsRef<Path>, command: &[String]) -> Result<PathBuf> {
        let folder = folder.as_ref();
        let page = folder.join("report.html");
        let mut html = HtmlReport::new("Retrieval from long prompts").paragraph(
            "The values that answers contain, of all values, by the length of the prompt and the \
             place of the needle. A dash stands where the first cache finds none, so that the \
             others show nothing.",
        );
        for &task in &self.plan.tasks {
            html = html.heading(&task.to_string());
            for (nth, cache) in self.caches().enumerate() {
                html = html.heat_map(&self.heat_map(task, nth, cache));
            }
        }
        let html = html.heading("All counts").table(&self.table()).heading("Settings");
        let html = html.pre(&format!("{}\n\n{}", command.join(" "), Versions::BUILT));
        write_together(folder, vec![(page.clone(), html.html().into_bytes())])?;
        Ok(page)
    }
}

impl fmt::Display for Retrieval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.table())?;
        if self.caches > 1 {
            writeln!(
                f,
                "values found, of all; lost and gained compared to {}",
                self.rows[0].cache
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::{Haystack, NeedleType, RetrievalPlan};

    fn row(cache: &str, depth: usize, found: &[bool]) -> RetrievalRow {
        RetrievalRow {
            task: RetrievalTask::MultiKey,
            cache: cache.to_string(),
            context: 1024,
            depth: Some(depth),
            sample: 0,
            tokens: 1000,
            expected: vec![String::new(); found.len()],
            found: found.to_vec(),
            answer: String::new(),
        }
    }

    /// A value that float does not find says nothing about another cache.
    #[test]
    fn caches_are_compared_where_float_finds() {
        let plan = RetrievalPlan {
            tasks: vec![RetrievalTask::MultiKey],
            keys: NeedleType::Word,
            values: NeedleType::Number,
            haystack: Haystack::Words,
            contexts: vec![1024],
            depths: vec![0, 50],
            count: 3,
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
        let found = Retrieval { plan, rows, caches: 2 };
        let table = found.table();
        let header = ["task", "context", "cache", "0%", "50%", "all", "lost", "gained"];
        assert_eq!(table.header(), header);
        let rows = table.rows();
        assert_eq!(rows[0], ["multi-key", "1024", "float", "2/3", "0/3", "2/6", "0", "0"]);
        assert_eq!(rows[1], ["multi-key", "1024", "k2v2", "2/3", "-", "3/6", "1", "2"]);
        let map = found.heat_map(RetrievalTask::MultiKey, 1, "k2v2");
        assert_eq!(map.cells, [[Some((2.0 / 3.0, "2/3".to_string())), None]]);
    }
}
