//! `kv-eval bench sparse`.

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use kv_cubecl::{On, Target, sparse::Compression};
use kv_eval::bench::{RowCodes, SparseFormats, SparsePlan, time_sparse};
use kv_report::Table;

use super::output::{Common, Sinks, check_memory, us};
use crate::{ALLOCATOR, profile::Profile};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench sparse
  kv-eval bench sparse --entries k4 --keys e2m1b --contexts 131072 --json out.json")]
pub(crate) struct SparseArgs {
    #[command(flatten)]
    pub(super) common: Common,
    /// Context lengths to time at.
    #[arg(long, value_delimiter = ',', default_value = "131072,524288,1048576")]
    contexts: Vec<usize>,
    /// Formats of entries: f32, f16, bf16, or codes such as k4 or e4m3b. Entries with codes keep
    /// the channels with rope in bf16.
    #[arg(long, value_delimiter = ',', default_value = "f32")]
    entries: Vec<RowCodes>,
    /// Formats of the indexer's keys, one for each of --entries or one for all.
    #[arg(long, value_delimiter = ',', default_value = "f32")]
    keys: Vec<RowCodes>,
    /// Query heads. The default shape is that of DeepSeek-V4-Flash.
    #[arg(long, default_value_t = 64)]
    heads: usize,
    /// Channels of a token's row, which serves as key and value of all heads.
    #[arg(long, default_value_t = 512)]
    head_dim: usize,
    /// Channels with rope, the last of a row and of a key.
    #[arg(long, default_value_t = 64)]
    rope_dim: usize,
    /// Recent tokens that a query sees without compression.
    #[arg(long, default_value_t = 128)]
    sliding_window: usize,
    /// Tokens of a compressed entry.
    #[arg(long, default_value_t = 4)]
    ratio: usize,
    /// Compress each window by itself, without the window before it.
    #[arg(long)]
    no_overlap: bool,
    /// Heads of the indexer.
    #[arg(long, default_value_t = 64)]
    index_heads: usize,
    /// Channels of the indexer's keys.
    #[arg(long, default_value_t = 128)]
    index_head_dim: usize,
    /// Entries that a token attends to.
    #[arg(long, default_value_t = 512)]
    top_k: usize,
}

impl SparseArgs {
    fn plan(&self) -> SparsePlan {
        SparsePlan {
            n_heads: self.heads,
            head_dim: self.head_dim,
            rope_dim: self.rope_dim,
            sliding_window: self.sliding_window,
            compression: Compression { ratio: self.ratio, overlap: !self.no_overlap },
            index_heads: self.index_heads,
            index_head_dim: self.index_head_dim,
            top_k: self.top_k,
            samples: self.common.samples,
        }
    }

    fn formats(&self) -> Result<Vec<SparseFormats>> {
        let Self { entries, keys, .. } = self;
        if keys.len() != entries.len() && keys.len() != 1 {
            bail!(
                "keys {}: must be one format, or one for each of the {} --entries",
                keys.iter().map(RowCodes::to_string).collect::<Vec<_>>().join(","),
                entries.len()
            );
        }
        let keys = keys.iter().cycle();
        Ok(entries
            .iter()
            .zip(keys)
            .map(|(&entries, &keys)| SparseFormats { entries, keys })
            .collect())
    }
}

pub(super) fn sparse<T: Target>(args: &SparseArgs, profile: &mut Profile) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let (plan, all) = (args.plan(), args.formats()?);
    for &context in &args.contexts {
        for &formats in &all {
            check_memory(plan.bytes(formats, context)?, &device)?;
        }
    }
    let sinks = Sinks::open(&args.common.json, None)?;
    let what = format!(
        "a step of one layer of sparse attention on {}: {} heads of {}, sliding window {}, \
         ratio {}{}, {} index heads of {}, top-k {}",
        T::NAME,
        args.heads,
        args.head_dim,
        args.sliding_window,
        args.ratio,
        if args.no_overlap { "" } else { " with overlap" },
        args.index_heads,
        args.index_head_dim,
        args.top_k,
    );
    let copied = sinks.start(&device, &what)?;
    let mut table = Table::new([
        "context",
        "entries",
        "keys",
        "step us",
        "completing us",
        "dense us",
        "dense/step",
        "index us",
        "of copy",
        "MB",
        "allocations",
        "peak KB",
    ]);
    let mut points = Vec::new();
    let bar = ProgressBar::new((args.contexts.len() * all.len()) as u64);
    for &context in &args.contexts {
        for &formats in &all {
            let point = time_sparse(&device, &plan, formats, context, &ALLOCATOR)?;
            table.push([
                context.to_string(),
                point.entries.clone(),
                point.keys.clone(),
                us(point.step.median),
                point.step_completing.map_or(String::new(), |t| us(t.median)),
                us(point.dense.median),
                format!("{:.1}", point.dense_over_step),
                us(point.index.median),
                format!("{:.0}%", 100.0 * point.index_over_copy),
                format!("{:.1}", point.bytes as f64 / 1e6),
                point.allocations.to_string(),
                format!("{:.0}", point.peak_bytes as f64 / 1e3),
            ]);
            points.push(point);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    sinks.finish(&device, copied, &table, None, &points)
}
