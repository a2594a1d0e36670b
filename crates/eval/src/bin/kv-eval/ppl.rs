use std::{fs, path::PathBuf, time::Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::{Mode, Plan, Report, Versions, evaluate};

use crate::{
    backend::{Backend, on_backend},
    source,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A folder with config.json, a .gguf file, or a Hugging Face model id.
    #[arg(long)]
    model: String,
    /// A UTF-8 text file.
    #[arg(long)]
    text: PathBuf,
    /// Where to run.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// streaming: token by token from an empty cache; parallel: the same numbers by the closed
    /// form.
    #[arg(long, default_value = "parallel")]
    mode: Mode,
    /// A cache to compare with float: kKvV with bits 2, 4, 8 or 16, then -gN, -rN, -sN, -after,
    /// -f16; repeatable.
    #[arg(long = "cache")]
    caches: Vec<KvCacheConfig>,
    /// Tokens per window; each window starts from an empty cache. By default 2048, or the model's
    /// limit if that is lower.
    #[arg(long)]
    window: Option<usize>,
    /// Use only the first tokens of the text.
    #[arg(long)]
    tokens: Option<usize>,
    /// Write the report here as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    on_backend!(args.backend, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let text = fs::read_to_string(&args.text)
        .with_context(|| format!("text {}: cannot read", args.text.display()))?;
    let (model, tokenizer, name) = source::load(&args.model, &device)?;
    let ids = tokenizer.encode(&text)?;
    if let Some(tokens) = args.tokens
        && tokens > ids.len()
    {
        eprintln!("note: the text has {} tokens, fewer than --tokens {tokens}", ids.len());
    }
    let window = args.window.unwrap_or_else(|| model.max_positions().min(2048));
    let plan = Plan::new(&model, args.mode, &args.caches, ids, window, args.tokens)?;

    let total = plan.scored_tokens() * plan.caches().len();
    let style = "{bar:40} {pos}/{len} tokens, {elapsed} elapsed, {eta} left";
    let bar = ProgressBar::new(total as u64).with_style(ProgressStyle::with_template(style)?);
    let start = Instant::now();
    let runs = evaluate(&device, &model, &plan, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();

    let report = Report {
        command: std::env::args().collect(),
        versions: Versions::BUILT,
        backend: T::NAME,
        device: device_name::<T>(&device),
        model: name,
        text_tokens: plan.tokens(),
        window: plan.window(),
        runs,
    };
    print!("{report}");
    println!("took {:.1} s", start.elapsed().as_secs_f64());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)?;
        fs::write(path, json + "\n")
            .with_context(|| format!("json {}: cannot write", path.display()))?;
    }
    Ok(())
}

/// What the hardware calls itself, where the backend tells.
pub(crate) fn device_name<T: Target>(device: &On<T>) -> String {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let Some(identity) = device.as_dispatch().identity() {
        return identity.name;
    }
    match T::NAME {
        "flex" => {
            format!("cpu, {} threads", std::thread::available_parallelism().map_or(1, |n| n.get()))
        }
        _ => format!("{:?}", **device),
    }
}
