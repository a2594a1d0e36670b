//! Results of a search as text and charts.

use core::fmt;

use kv_cubecl::Side;
use kv_report::{
    Table,
    chart::{Chart, Series, Style},
};

use super::{Alike, Found, Measured};

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Found {
    /// Returns the measurement of the policy.
    pub fn chosen(&self) -> Option<&Measured> {
        self.measured.first()
    }

    /// Returns the cache that diverges least on the unseen text, among those that fit and are
    /// shared by all layers.
    pub fn best_uniform(&self) -> Option<&Measured> {
        let others = self.measured.iter().skip(1);
        others.min_by(|a, b| a.unseen.kl.total_cmp(&b.unseen.kl))
    }

    /// Returns a table of the measurements on the text of the search and on the unseen text.
    fn measured_table(&self) -> Table {
        let mut table = Table::new([
            "cache",
            "cache MiB",
            "of float",
            "kl",
            "perplexity",
            "unseen: kl",
            "perplexity",
            "over float",
        ]);
        let [seen, unseen] = self.float;
        let share =
            |bytes: usize| format!("{:.1}%", 100.0 * bytes as f64 / self.float_bytes as f64);
        table.push([
            "float".into(),
            format!("{:.2}", mib(self.float_bytes)),
            share(self.float_bytes),
            "0.000000".into(),
            format!("{:.4}", seen.perplexity()),
            "0.000000".into(),
            format!("{:.4}", unseen.perplexity()),
            "0.00%".into(),
        ]);
        for row in &self.measured {
            let over = 100.0 * ((row.unseen.nll - unseen.nll).exp() - 1.0);
            table.push([
                row.cache.clone(),
                format!("{:.2}", mib(row.bytes)),
                share(row.bytes),
                format!("{:.6}", row.seen.kl),
                format!("{:.4}", row.seen.perplexity()),
                format!("{:.6}", row.unseen.kl),
                format!("{:.4}", row.unseen.perplexity()),
                format!("{over:+.2}%"),
            ]);
        }
        table
    }

    /// Returns a table of the other caches shared by all layers, on the text of the search.
    fn alike_table(&self) -> Table {
        let mut table = Table::new(["cache", "cache MiB", "kl", "perplexity"]);
        for Alike { cache, bytes, seen } in &self.alike {
            table.push([
                cache.clone(),
                format!("{:.2}", mib(*bytes)),
                format!("{:.6}", seen.kl),
                format!("{:.4}", seen.perplexity()),
            ]);
        }
        table
    }

    /// Returns a table of the divergence that each side of each layer adds, a column per format.
    fn sensitivity_table(&self) -> Table {
        let mut formats = vec![];
        for part in &self.sensitivities {
            if !formats.contains(&part.format) {
                formats.push(part.format);
            }
        }
        let columns = Side::BOTH.map(|side| formats.iter().map(move |&format| (side, format)));
        let columns: Vec<_> = columns.into_iter().flatten().collect();
        let names = columns.iter().map(|(side, format)| format!("{side} as {format}"));
        let mut table = Table::new(["layer".to_string()].into_iter().chain(names));
        let mut layers: Vec<usize> = self.sensitivities.iter().map(|part| part.layer).collect();
        layers.dedup();
        for layer in layers {
            let cell = |&(side, format): &_| {
                let found = self
                    .sensitivities
                    .iter()
                    .find(|part| (part.layer, part.side, part.format) == (layer, side, format));
                found.map_or(String::new(), |part| format!("{:.6}", part.score.kl))
            };
            table.push([layer.to_string()].into_iter().chain(columns.iter().map(cell)));
        }
        table
    }

    /// Draws divergence by bytes: the predicted front, and the measurements on the unseen text.
    pub fn chart(&self) -> Chart {
        let front = self.front.iter().filter(|at| at.kl > 0.0);
        let front = front.map(|at| (mib(at.bytes), at.kl)).collect();
        let mut series = vec![Series::new("front, as predicted", front, Style::Line)];
        let measured = self.measured.iter().filter(|row| row.unseen.kl > 0.0);
        series.extend(measured.map(|row| {
            let point = vec![(mib(row.bytes), row.unseen.kl)];
            Series::new(format!("{}, unseen text", row.cache), point, Style::Points)
        }));
        Chart {
            title: format!("Divergence against the size of a cache of {} tokens", self.context),
            x_label: "cache, MiB".into(),
            y_label: "KL from the float cache, nats".into(),
            log_y: true,
            series,
            vertical_marks: vec![(mib(self.bytes), "bytes allowed".into())],
            ..Chart::default()
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "divergence with one side of one layer quantized, nats:")?;
        write!(f, "{}", self.sensitivity_table())?;
        if !self.alike.is_empty() {
            writeln!(f, "other caches of all layers alike that fit, on the text of the search:")?;
            write!(f, "{}", self.alike_table())?;
        }
        writeln!(f, "caches of {} tokens, {:.2} MiB allowed:", self.context, mib(self.bytes))?;
        write!(f, "{}", self.measured_table())
    }
}
