//! Plans as text.

use core::fmt;

use kv_models::decimal_size;
use kv_report::Table;

use super::{MemoryPlan, Row};

impl MemoryPlan {
    /// Returns the types of the weights, such as `BF16, f32`.
    pub fn weight_types(&self) -> String {
        let types = self.weights.iter().flat_map(|types| types.keys());
        types.map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// Returns a table of the caches, in megabytes (10^6 bytes).
    fn table(&self) -> Table {
        // The parts that any cache has.
        let all = self.caches.iter().filter_map(|row| row.needs.as_ref());
        let mut parts: Vec<&str> = vec![];
        for (name, bytes) in all.flat_map(|needs| &needs.parts) {
            if *bytes > 0 && !parts.contains(&&**name) {
                parts.push(name);
            }
        }
        let mut header = vec!["cache"];
        header.extend(&parts);
        let last = ["cache MB", "B/token", "activations", "total MB", "fits"];
        header.extend(last.into_iter().chain(["longest context", "largest batch"]));
        let mut table = Table::new(header);
        for row in &self.caches {
            table.push(cells(row, &parts));
        }
        table
    }
}

fn cells(row: &Row, parts: &[&str]) -> Vec<String> {
    let mb = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
    let number = |n: Option<usize>| n.map_or("none".into(), |n| n.to_string());
    let mut cells = vec![row.cache.clone()];
    match &row.needs {
        Some(needs) => {
            cells.extend(parts.iter().map(|part| {
                let found = needs.parts.iter().find(|(name, _)| name == part);
                mb(found.map_or(0, |(_, bytes)| *bytes))
            }));
            cells.push(mb(needs.cache));
            cells.push(format!("{:.1}", needs.cache_per_token));
            cells.push(needs.activations.map_or(String::new(), mb));
            cells.push(mb(needs.total));
        }
        None => cells.extend(vec![String::new(); parts.len() + 4]),
    }
    cells.push(if row.fits { "yes" } else { "no" }.into());
    cells.extend([number(row.longest_context), number(row.largest_batch)]);
    cells
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.model)?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        let memory = &self.memory;
        writeln!(
            f,
            ": {} tokens of {} at most, batch {}; {} of memory ({})",
            self.context,
            self.max_context,
            self.batch,
            decimal_size(memory.usable),
            memory.source,
        )?;
        if let Some(weights) = &self.weights {
            let size = |bytes: usize| decimal_size(bytes as u64);
            let types = weights.iter().map(|(name, bytes)| format!("{name} {}", size(*bytes)));
            let types: Vec<_> = types.collect();
            writeln!(f, "weights {}: {}", size(weights.values().sum()), types.join(", "))?;
        }
        write!(f, "{}", self.table())?;
        for row in &self.caches {
            if let Some(why) = &row.why {
                writeln!(f, "{}: {why}", row.cache)?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}
