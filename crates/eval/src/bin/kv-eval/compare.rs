//! `kv-eval` without a command: the loss of quality by a quantized cache, and how much of it
//! training with the cache recovers.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use burn::tensor::Device;
use kv_cli::{
    Backend, NamedFiles, Plain, check_folder, dispatch, error_line, exit_on_interrupt, note,
    source::{self, Source},
};
use kv_cubecl::{KvFormat, On, Target};
use kv_eval::{Mode, Plan};
use kv_eval_models::{AUSTEN, AUSTEN_K2V2_GFLUSH, BuiltIn, HELDOUT, HELDOUT_NAME};
use kv_models::{KV_CACHE_FILE, LoadOptions, ModelCacheConfig};

use crate::{
    built_in,
    common::{
        BosArgs, Job, Output, Text, evaluate_and_report, ids_of, note_short_text, read_ids,
        text_name,
    },
    json::JsonArgs,
};

/// Compare the built-in model with float, 4-bit and 2-bit caches to the same model after training
/// with its cache.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of the model before training with a cache [default: the built-in model austen].
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// Folder of the model after training with the cache of its kv_cache.json. The base model is
    /// evaluated with caches of the same group size and residual [default: the built-in model
    /// austen-k2v2-gflush].
    #[arg(long, value_name = "FOLDER")]
    tuned: Option<PathBuf>,
    /// UTF-8 text file that neither model was trained on [default: the built-in novel].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Number of first tokens of the text to use, in eval windows of 2048 or the model's limit.
    #[arg(long, default_value_t = 65536)]
    tokens: usize,
    #[command(flatten)]
    bos: BosArgs,
    /// Backend to run on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    #[command(flatten)]
    json: JsonArgs,
    /// Write report.html and its charts into this folder [default: kv-eval-report, if it can be
    /// written].
    #[arg(long, value_name = "FOLDER")]
    report: Option<PathBuf>,
}

pub(crate) const REPORT: &str = "kv-eval-report";

pub(crate) fn run(args: &Args) -> Result<()> {
    let named = [("base", &args.base), ("tuned", &args.tuned), ("text", &args.text)];
    for (name, path) in named {
        let Some(path) = path else { continue };
        match path.try_exists() {
            Ok(true) => {}
            Ok(false) => bail!("{name} {}: not found; name another with --{name}", path.display()),
            Err(error) => bail!("{name} {}: cannot read: {error}", path.display()),
        }
    }
    let mut files = NamedFiles::default()
        .reads_optional("text", args.text.as_ref())
        .writes("json", args.json.path());
    for (name, model) in [("base", &args.base), ("tuned", &args.tuned)] {
        if let Some(model) = model {
            files = files.reads_model(name, model);
        }
    }
    files.check()?;
    exit_on_interrupt()?;
    dispatch!(args.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let (report, without_report) = match &args.report {
        Some(folder) => (Some(&**folder), None),
        // The default folder is optional: without it, the table is printed.
        None => match check_folder("report", Path::new(REPORT)) {
            Ok(()) => (Some(Path::new(REPORT)), None),
            Err(error) => (None, Some(error_line(&error))),
        },
    };
    let output = Output::open(&args.json, report)?;
    let [base, tuned] = args.models(&device)?;
    let Some(own) = &tuned.cache else {
        bail!(
            "tuned {}: has no {KV_CACHE_FILE}, which names its cache",
            args.tuned_path().display()
        );
    };
    let ids_of = |source: &Source| match &args.text {
        Some(text) => read_ids(text, &source.tokenizer, Some(args.tokens)),
        None => {
            let text = Box::new(HELDOUT.as_bytes());
            ids_of(text, Path::new(HELDOUT_NAME), &source.tokenizer, Some(args.tokens))
        }
    };
    let text_name = args.text.as_deref().map_or(HELDOUT_NAME.into(), text_name);
    let bos = args.bos.choose(&base.tokenizer)?;
    let (ids, bytes) = ids_of(&base)?;
    if ids_of(&tuned)?.0 != ids || args.bos.choose(&tuned.tokenizer)? != bos {
        bail!("text {text_name}: the tokenizers of the two models disagree");
    }
    note_short_text(&ids, Some(args.tokens));

    let mut of_base: Vec<ModelCacheConfig> =
        [KvFormat::Affine4, KvFormat::Affine2].map(|bits| own.with_formats(bits, bits)).to_vec();
    if !of_base.contains(own) {
        of_base.push(own.clone());
    }
    let window = base.model.max_positions().min(tuned.model.max_positions()).min(2048);
    let plan = |source: &Source, caches: Vec<ModelCacheConfig>| {
        let tokens = Some(args.tokens);
        Plan::new(&source.model, Mode::Parallel, caches, ids.clone(), window, tokens)?
            .with_bos(&source.model, bos)
    };
    let (of_base, of_tuned) = (plan(&base, of_base)?, plan(&tuned, vec![own.clone()])?);
    let jobs = [
        Job { model: &base.model, name: base.name.clone(), plan: of_base },
        Job { model: &tuned.model, name: tuned.name.clone(), plan: of_tuned },
    ];
    let bos = bos.and_then(|bos| base.tokenizer.id_to_token(bos));
    let notes = [&base.notes[..], &tuned.notes].concat();
    let text = Text { name: text_name, bytes, bos, notes };
    evaluate_and_report(&device, text, &jobs, None, output)?;
    if let Some(why) = without_report {
        note(format_args!("no report was written: {why}; --report names another folder"));
    }
    Ok(())
}

impl Args {
    fn models(&self, device: &Device) -> Result<[Source; 2]> {
        let load = |named: &Option<PathBuf>, model: &BuiltIn| {
            let read = |path: &Path| source::read(path, device, LoadOptions::default());
            built_in::load(named.as_deref(), model, read)
        };
        let mut base = load(&self.base, &AUSTEN)?;
        let mut tuned = load(&self.tuned, &AUSTEN_K2V2_GFLUSH)?;
        // Their folders name them, because both files may give the name of the original model.
        (base.name, tuned.name) = names(self.base_path(), self.tuned_path());
        Ok([base, tuned])
    }

    fn base_path(&self) -> &Path {
        self.base.as_deref().unwrap_or(Path::new(AUSTEN.name))
    }

    fn tuned_path(&self) -> &Path {
        self.tuned.as_deref().unwrap_or(Path::new(AUSTEN_K2V2_GFLUSH.name))
    }
}

/// Returns the shortest ends of two paths that differ.
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
