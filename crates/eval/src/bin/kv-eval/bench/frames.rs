//! `kv-eval bench frames`.

use anyhow::Result;
use kv_cubecl::{Frames, On, Target};
use kv_eval::bench::{FramesPlan, time_frames};
use kv_report::Table;

use super::output::{Common, Sinks, check_memory, us};
use crate::{
    arguments::{NamedCache, RunningArgs, layer_caches},
    profile::Profile,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench frames
  kv-eval bench frames --cache float --cache kint8vint8 --frames 120 --json out.json")]
pub(crate) struct FramesArgs {
    #[command(flatten)]
    pub(super) common: Common,
    /// Cache format: a short name such as k4v4 or kint8vint8, or a policy file (.json or .toml),
    /// which stands for each cache it gives to a layer; repeatable. The others are compared with
    /// the first.
    #[arg(long = "cache", default_values = [
        "float", "float-f16", "k16vint8", "kint8vint8", "kint8fvint8f", "k4v4",
    ])]
    pub(super) caches: Vec<NamedCache>,
    /// Frames of the ring. The default shape is that of the world model owl-wms.
    #[arg(long, default_value_t = 60)]
    frames: u64,
    #[command(flatten)]
    running: RunningArgs,
    /// Tokens of a frame.
    #[arg(long, default_value_t = 64)]
    tokens_per_frame: usize,
    /// Number of streams.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Heads.
    #[arg(long, default_value_t = 24)]
    heads: usize,
    /// Channels per head.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
}

pub(super) fn frames<T: Target>(args: &FramesArgs, profile: &mut Profile) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let FramesArgs { frames, tokens_per_frame, batch, heads, head_dim, .. } = *args;
    let plan = FramesPlan {
        batch,
        n_heads: heads,
        head_dim,
        tokens_per_frame,
        window: Frames(frames),
        running: args.running.rules(),
        samples: args.common.samples,
    };
    let caches = layer_caches(&args.caches);
    args.running.check(&caches)?;
    check_memory(plan.bytes(&caches)?, &device)?;
    let sinks = Sinks::open(&args.common.json, None)?;
    let what = format!(
        "a frame over a ring of {} of {tokens_per_frame} tokens, one layer on {}: \
             batch {batch}, {heads} heads of \
         {head_dim}",
        plan.window,
        T::NAME
    );
    let copied = sinks.start(&device, &what)?;
    let points = time_frames(&device, &plan, &caches)?;
    let mut table = Table::new([
        "cache",
        "peek us",
        "10%",
        "90%",
        "update us",
        "KB read",
        "KB",
        "bytes",
        "speedup",
    ]);
    for point in &points {
        table.push([
            point.cache.clone(),
            us(point.peek.median),
            us(point.peek.low),
            us(point.peek.high),
            us(point.update.median),
            format!("{:.0}", point.bytes_read as f64 / 1e3),
            format!("{:.0}", point.bytes as f64 / 1e3),
            format!("{:.2}", point.bytes as f64 / points[0].bytes as f64),
            format!("{:.2}", points[0].peek.median / point.peek.median),
        ]);
    }
    sinks.finish(&device, copied, &table, None, &points)
}
