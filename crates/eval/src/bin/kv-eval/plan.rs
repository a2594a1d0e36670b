//! `kv-eval plan`: what a model takes of memory, before there is any of it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use kv_cli::{Plain, dispatch, memory_limit, name_of};
use kv_cubecl::{On, Target};
use kv_eval::planner::{Preset, Request, Subject, plan};
use kv_models::outline;

use crate::{
    arguments::JsonArgs,
    common::{ModelArgs, Weights, write_json},
};

/// Tokens that are planned for unless the user says, if the model has as many positions.
const CONTEXT: usize = 4096;

/// --model is a folder, a .gguf file, a config.json whose weights need not be there, or a name such as SmolLM2-135M,
/// Llama-3.1-8B or DeepSeek-V4-Pro.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// Tokens of each sequence; by default 4096, or the model's limit if that is lower.
    #[arg(long, conflicts_with = "frames")]
    context: Option<usize>,
    /// Frames of each sequence, of a model of frames.
    #[arg(long)]
    frames: Option<usize>,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// A cache to plan for, or a policy: safe, balanced, small, or a file of .json or .toml; repeatable. By default all formats, and that of the model's kv_cache.json, if it has one.
    #[arg(long = "cache")]
    caches: Vec<String>,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let (screen, json) = args.json.open()?;
    let options = args.on.options(Weights::Packed, &device);
    let model = args.on.source.given();
    if let Some(revision) = args.on.source.revision() {
        bail!("revision {revision}: only models of the hub have one; a plan downloads nothing");
    }
    let path = Path::new(model);
    let subject = if path.exists() {
        Subject::of_files(&name_of(path), outline(path, &device, options)?).on(&device)
    } else if let Some(preset) = Preset::find(model) {
        preset.subject(&device, options)?
    } else {
        let names: Vec<_> = Preset::all().iter().map(|preset| preset.name().to_string()).collect();
        bail!("model {model}: no such file or folder, and not one of {}", names.join(", "));
    };
    let request = Request {
        context: args.context(&subject)?,
        batch: args.batch,
        limit: memory_limit(args.on.memory, &device),
        caches: args.caches.clone(),
    };
    let plan = plan(&subject, &request)?;
    let json = json.map_or(Ok(()), |file| write_json(file, &plan));
    screen.print(&plan)?;
    json
}

impl Args {
    /// Tokens of each sequence.
    fn context(&self, subject: &Subject) -> Result<usize> {
        let most = subject.max_context();
        let Some(frames) = self.frames else {
            let ring = subject.frame.map(|frame| frame.ring * frame.tokens);
            return Ok(self.context.unwrap_or_else(|| ring.unwrap_or(CONTEXT).min(most)));
        };
        let frame = subject.frame;
        let frame = frame.with_context(|| format!("frames {frames}: {} has none", subject.name))?;
        frames.checked_mul(frame.tokens).filter(|tokens| (1..=most).contains(tokens)).with_context(
            || {
                let most = most / frame.tokens;
                format!("frames {frames}: must be 1 to {most}, of {} tokens each", frame.tokens)
            },
        )
    }
}
