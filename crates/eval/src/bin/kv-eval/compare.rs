//! `kv-eval` without a command: what a quantized cache costs a model, and how much of that training
//! with the cache recovers.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use kv_cli::{Backend, Plain, dispatch};
use kv_cubecl::{Bits, On, Target};
use kv_eval::{Mode, Plan};
use kv_models::{KV_CACHE_FILE, LoadOptions, ModelCacheConfig};

use crate::{
    arguments::JsonArgs,
    common::{BosArgs, Job, Output, Text, evaluate_and_report, note_short_text, read_ids},
    source::{self, Source},
};

/// Without a command: compare the repository's model, with float, 4-bit and 2-bit caches, to the same
/// model after training with its cache.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of the model as it was trained, without a cache.
    #[arg(long, value_name = "FOLDER", default_value_os_t = repository("austen"))]
    base: PathBuf,
    /// Folder of the model after training with its cache, which its kv_cache.json describes; the base
    /// model is evaluated with caches of the same groups and windows.
    #[arg(long, value_name = "FOLDER", default_value_os_t = repository("austen-k2v2-slide"))]
    tuned: PathBuf,
    /// A UTF-8 text file that neither was trained on.
    #[arg(long, value_name = "FILE", default_value_os_t = repository("austen/heldout.txt"))]
    text: PathBuf,
    /// Use only the first tokens of the text, in windows of the model's limit or 2048.
    #[arg(long, default_value_t = 65536)]
    tokens: usize,
    #[command(flatten)]
    bos: BosArgs,
    /// Where to run.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    #[command(flatten)]
    json: JsonArgs,
    /// Write report.html and its charts into this folder.
    #[arg(long, value_name = "FOLDER", default_value = "kv-eval-report")]
    report: PathBuf,
}

/// A path of the repository this program was built in.
fn repository(path: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    root.unwrap_or(Path::new(".")).join("models").join(path)
}

pub(crate) fn run(args: &Args) -> Result<()> {
    for (name, path) in [("base", &args.base), ("tuned", &args.tuned), ("text", &args.text)] {
        if !path.exists() {
            bail!(
                "{name} {}: not found; name another with --{name}, or give a command, see --help",
                path.display()
            );
        }
    }
    dispatch!(args.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let output = Output::open(&args.json, Some(&args.report))?;
    let mut base = source::read(&args.base, &device, LoadOptions::default())?;
    let mut tuned = source::read(&args.tuned, &device, LoadOptions::default())?;
    // Name the models by their folders, because both files may give the name of the original model.
    (base.name, tuned.name) = names(&args.base, &args.tuned);
    let Some(own) = &tuned.cache else {
        bail!("tuned {}: has no {KV_CACHE_FILE}, which names its cache", args.tuned.display());
    };
    let ids_of = |source: &Source| read_ids(&args.text, &source.tokenizer, Some(args.tokens));
    let bos = args.bos.choose(&base.tokenizer)?;
    let (ids, bytes) = ids_of(&base)?;
    if ids_of(&tuned)?.0 != ids || args.bos.choose(&tuned.tokenizer)? != bos {
        bail!("text {}: the tokenizers of the two models disagree", args.text.display());
    }
    note_short_text(&ids, Some(args.tokens));

    let mut of_base: Vec<ModelCacheConfig> =
        [Bits::Four, Bits::Two].map(|bits| own.with_bits(bits, bits)).to_vec();
    if !of_base.contains(own) {
        of_base.push(own.clone());
    }
    let window = base.model.max_positions().min(tuned.model.max_positions()).min(2048);
    let plan = |source: &Source, caches: Vec<ModelCacheConfig>| {
        let tokens = Some(args.tokens);
        Plan::new(&source.model, Mode::Parallel, caches, ids.clone(), window, tokens)?
            .with_bos(&source.model, bos)
    };
    let jobs = [
        Job { model: &base.model, name: base.name.clone(), plan: plan(&base, of_base)? },
        Job {
            model: &tuned.model,
            name: tuned.name.clone(),
            plan: plan(&tuned, vec![own.clone()])?,
        },
    ];
    let bos = bos.and_then(|bos| base.tokenizer.id_to_token(bos));
    evaluate_and_report(&device, Text { path: &args.text, bytes, bos }, &jobs, output)
}

/// The shortest ends of two paths that tell them apart.
fn names(base: &Path, tuned: &Path) -> (String, String) {
    let end = |path: &Path, n: usize| {
        let parts: Vec<_> = path.iter().collect();
        let end: PathBuf = parts[parts.len().saturating_sub(n)..].iter().collect();
        end.display().to_string()
    };
    let longest = base.iter().count().max(tuned.iter().count());
    let differ = (1..=longest).find(|&n| end(base, n) != end(tuned, n));
    differ.map_or_else(|| ("base".into(), "tuned".into()), |n| (end(base, n), end(tuned, n)))
}
