//! Starts, resumes and exports runs of language models.

use std::{
    fs,
    io::{ErrorKind, IsTerminal},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use kv_cli::{Backend, DeviceList, MemorySize, Screen, WorkerArgs, dispatch};
use kv_models::{
    LanguageModel, LoadOptions, Loaded, Tokenizer, check_savable,
    kv_cubecl::{Autodiff, On, Target},
    llama::Llama,
    nn::init::seeded,
    outline_config, random,
};
use kv_train::{
    Checkpoints, Error, Resume, Run, Strategy, Texts, checkpointed,
    data::{Source, TokenFile},
    train,
};

use crate::{
    args::Start,
    evaluation::{check_eval_tokens, check_evaluation},
    finish::{finish, model_folder, read_result, result_file, save, save_options},
    memory,
    spec::{Origin, Required, Spec, TOKENIZER, config_json, config_text, load},
    stop::Stop,
};

/// Training steps between two printed lines.
const LOG_EVERY: u64 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All work is done.
    Finished,
    /// It was asked to stop, and can be resumed.
    Stopped,
}

struct Job<'a> {
    spec: &'a Spec,
    folder: &'a Path,
    resume: Resume,
    plain: bool,
    memory: Option<MemorySize>,
    stop: &'a Stop,
}

pub(crate) fn start(start: &Start, stop: &Stop) -> Result<Outcome> {
    let Start { spec, folder, plain, memory } = start;
    run_on(&Job { spec, folder, resume: Resume::No, plain: *plain, memory: *memory, stop })
}

/// Arguments of `kv-train resume` that may differ from the start of the run, because they do not
/// decide its weights.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// Print a line for every few steps instead of showing the dashboard.
    #[arg(long)]
    plain: bool,
    /// Held-out tokens to evaluate the model on at the end; 0 for no evaluation
    /// [default: as when the run was started].
    #[arg(long)]
    pub(crate) eval_tokens: Option<usize>,
    /// Memory limit for training, such as 16G [default: the free memory].
    #[arg(long)]
    pub(crate) memory: Option<MemorySize>,
    /// Devices that share the sequences of each optimizer step, such as flex:2, cuda:0-3 or
    /// remote:HOST:PORT/0 [default: as when the run was started].
    #[arg(long, value_name = "LIST")]
    pub(crate) devices: Option<DeviceList>,
    #[command(flatten)]
    workers: WorkerArgs,
}

pub(crate) fn resume(
    folder: &Path,
    resume: Resume,
    args: ResumeArgs,
    stop: &Stop,
) -> Result<Outcome> {
    let mut spec = read_spec(folder)?;
    if let Some(result) = read_result(folder)?
        && resume == Resume::Last
    {
        bail!(
            "{}: the run is finished after {} steps, and its model is in {}; use --from-step to \
             repeat later steps",
            folder.display(),
            result.steps,
            model_folder(folder).display()
        );
    }
    if let Some(tokens) = args.eval_tokens {
        check_eval_tokens(tokens)?;
        spec.eval_tokens = tokens;
    }
    let ResumeArgs { plain, memory, devices, workers, .. } = args;
    spec.workers = workers;
    if let Some(devices) = devices {
        (spec.backend, spec.devices) = (devices.backend(), Some(devices));
        spec.strategy = Strategy::Auto;
    }
    run_on(&Job { spec: &spec, folder, resume, plain, memory, stop })
}

fn run_on(job: &Job<'_>) -> Result<Outcome> {
    dispatch!(job.spec.backend, Autodiff, run(job))
}

pub(crate) fn export(
    folder: &Path,
    step: Option<usize>,
    out: Option<PathBuf>,
    stop: &Stop,
) -> Result<()> {
    let spec = read_spec(folder)?;
    // A checkpoint is a file of this machine.
    let backend = match spec.backend {
        Backend::Remote => Backend::Flex,
        backend => backend,
    };
    dispatch!(backend, Autodiff, export_from(&spec, folder, step, out, stop))
}

/// Returns the folder for the model of a checkpoint, which must not exist.
pub(crate) fn new_folder(folder: &Path, step: usize, out: Option<PathBuf>) -> Result<PathBuf> {
    let out = out.unwrap_or_else(|| folder.join(format!("model-{step}")));
    ensure!(
        fs::symlink_metadata(&out).is_err(),
        "out {}: already exists; choose another folder, or remove it",
        out.display()
    );
    Ok(out)
}

fn export_from<T: Target>(
    spec: &Spec,
    folder: &Path,
    step: Option<usize>,
    out: Option<PathBuf>,
    stop: &Stop,
) -> Result<()> {
    let device = On::<T>::open()?;
    let checkpoints = Checkpoints::of(folder);
    let Some(step) = checkpoints.resume(step)? else {
        bail!("{}: holds no checkpoint", checkpoints.folder().display());
    };
    let out = new_folder(folder, step, out)?;
    spec.check_inputs(folder, Required::Model)?;
    let Initial { model, tokenizer, .. } = load_initial(spec, folder, &device, false)?;
    let converted = checkpointed(&device, model, folder, step)?.convert();
    stop.begin_folder(&out);
    save(spec, &converted, &tokenizer, &out)?;
    stop.end_folder();
    let (steps, out) = (spec.config.steps, out.display());
    Screen::Out.line(format_args!("the model after step {step} of {steps} is in {out}"))?;
    Ok(())
}

fn read_spec(folder: &Path) -> Result<Spec> {
    let path = folder.join("run.json");
    let text = fs::read_to_string(&path)
        .with_context(|| format!("{}: cannot read; name the folder of a run", path.display()))?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

fn run<T: Target>(job: &Job<'_>) -> Result<Outcome> {
    let Job { folder, resume, stop, .. } = *job;
    let started = Instant::now();
    let devices = job.spec.open_devices::<T>()?;
    let device = &devices[0];
    let others: Vec<Device> = devices.iter().map(|device| (**device).clone()).collect();
    job.spec.strategy.all_reduces(&others)?;
    if !job.is_new() {
        job.spec.check_inputs(folder, Required::All)?;
    }
    memory::check_run(job.spec, device, job.memory)?;
    let mut initial = load_initial(job.spec, folder, device, job.is_new())?;
    job.check_model(&initial)?;
    let texts = job.texts(&initial)?;
    let spec = &job.spec_to_keep(&initial, &texts)?;
    let dashboard = dashboard(job.plain);
    initial.announce(spec, folder, &texts)?;
    initial.files.push(("run.json", (serde_json::to_string_pretty(spec)? + "\n").into_bytes()));
    // A step without a checkpoint is refused before result.json is removed.
    if let Resume::Step(step) = resume {
        Checkpoints::of(folder).resume(Some(step))?;
    }
    if !job.is_new()
        && let Err(error) = fs::remove_file(result_file(folder))
    {
        // There is no such file if the run had not finished.
        ensure!(error.kind() == ErrorKind::NotFound, "{}: {error}", result_file(folder).display());
    }
    let Initial { model, tokenizer, files, .. } = initial;
    stop.begin(dashboard);
    let run = Run {
        folder: folder.into(),
        resume,
        dashboard,
        // Training continues even if nobody reads the output or its disk is full.
        log: (!dashboard).then(|| Box::new(|line: &str| drop(Screen::Out.line(line))) as _),
        log_every: LOG_EVERY,
        devices: Some(&others),
        strategy: spec.strategy,
        worker_deadline: spec.workers.deadline(),
        stop: Some(stop.asked.clone()),
        files,
    };
    let trained = train(device, model, &texts, &spec.config, run);
    // All that follows is repeated if the run is resumed.
    stop.end(folder);
    let Some(trained) = unless_stopped(trained, folder)? else { return Ok(Outcome::Stopped) };
    finish(spec, folder, trained, &tokenizer, &texts, started)?;
    Ok(Outcome::Finished)
}

impl Job<'_> {
    fn is_new(&self) -> bool {
        self.resume == Resume::No
    }

    /// Checks that the trained model can be saved, because an error is better before hours of
    /// training than after.
    fn check_model(&self, Initial { model, tokenizer, .. }: &Initial) -> Result<()> {
        let Self { spec, folder, .. } = self;
        if self.is_new() {
            // Only for new runs, because an older version may have started such a run.
            spec.config.check_model(model.spec())?;
        }
        check_savable(model, tokenizer, save_options(spec))?;
        if let Some(qat) = &spec.config.qat {
            let (notes, in_full) = (qat.cache.notes(model.spec()), qat.cache.in_full(model.spec()));
            notes.iter().chain(&in_full).for_each(kv_cli::note);
        }
        let out = model_folder(folder);
        if out.exists() && !out.is_dir() {
            bail!("{}: is not a folder, but the model is saved there; move it away", out.display());
        }
        Ok(())
    }

    /// Tokenizes the texts, or reads their ids from an earlier run.
    fn texts(&self, Initial { model, tokenizer, tokenizer_file, .. }: &Initial) -> Result<Texts> {
        let Self { spec, folder, .. } = self;
        let open = |texts: &[PathBuf]| -> Result<Arc<TokenFile>> {
            let source = Source::new(texts).with_field(&spec.field);
            let folder = folder.join("tokens");
            let tokens = TokenFile::open(&source, tokenizer, tokenizer_file, &folder)?;
            tokens.require_vocab(model.vocab_size())?;
            Ok(Arc::new(tokens))
        };
        let valid = match spec.valid_texts.is_empty() {
            true => None,
            false => Some(open(&spec.valid_texts)?),
        };
        Ok(Texts { train: open(&spec.texts)?, valid })
    }

    /// Returns the description to keep in the folder of the run, with the hashes of its inputs.
    fn spec_to_keep(&self, initial: &Initial, texts: &Texts) -> Result<Spec> {
        let mut spec = self.spec.clone();
        if self.is_new() {
            spec.inputs = Some(spec.hash_inputs(&initial.tokenizer_file, Required::All)?);
        }
        if spec.eval_tokens > 0
            && let Err(error) = check_evaluation(&spec, &initial.model, &initial.tokenizer, texts)
        {
            if self.is_new() {
                return Err(error).context("the evaluation after training");
            }
            // A resumed run only loses the evaluation, not its training.
            let why = kv_cli::error_line(&error);
            kv_cli::note(format_args!("the model will not be evaluated after training: {why}"));
            spec.eval_tokens = 0;
        }
        Ok(spec)
    }
}

/// Returns whether to show the dashboard. Prints a note if the terminal cannot draw it.
fn dashboard(plain: bool) -> bool {
    let shown = !plain && std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let terminal = std::env::var_os("TERM").unwrap_or_default();
    if shown && cfg!(unix) && (terminal.is_empty() || terminal == "dumb") {
        kv_cli::note(format_args!(
            "TERM {terminal:?}: this terminal cannot draw the dashboard, so progress is printed in \
             lines, as with --plain"
        ));
        return false;
    }
    shown
}

/// Returns the result of training; `None`, with a message, if the run in `folder` was stopped.
pub(crate) fn unless_stopped<R>(trained: kv_train::Result<R>, folder: &Path) -> Result<Option<R>> {
    let Err(Error::Interrupted { step, steps, .. }) = trained else { return Ok(Some(trained?)) };
    Screen::Out.line(format_args!(
        "stopped after step {step} of {steps}, with a checkpoint in {}; continue with kv-train \
         resume {}",
        Checkpoints::of(folder).folder().display(),
        folder.display()
    ))?;
    Ok(None)
}

/// The inputs of a run before its first step.
struct Initial {
    model: LanguageModel,
    tokenizer: Tokenizer,
    /// The file the tokenizer was read from.
    tokenizer_file: PathBuf,
    /// Names and contents of files for the run's folder.
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Initial {
    fn announce(&self, spec: &Spec, folder: &Path, texts: &Texts) -> Result<()> {
        Screen::Out.line(format_args!(
            "{} parameters, {} tokens to train on, {} in {} steps",
            self.model.n_weights(),
            texts.train.len(),
            folder.display(),
            spec.config.steps
        ))?;
        if let Some(bos) = self.tokenizer.leading_bos() {
            let bos = self.tokenizer.id_to_token(bos).unwrap_or_default();
            kv_cli::note(format_args!(
                "training windows are cut anywhere in the texts and do not start with {bos}; eval \
                 windows do"
            ));
        }
        Ok(())
    }
}

/// Loads the model before training, or creates it with its own tokenizer for a `new` run from
/// scratch.
fn load_initial(spec: &Spec, folder: &Path, device: &Device, new: bool) -> Result<Initial> {
    match &spec.origin {
        Origin::Model(path) => {
            let Loaded { model, tokenizer, notes, .. } = load(path, device, spec.weights)?;
            kv_cli::notes(&notes);
            let (tokenizer, tokenizer_file) = (tokenizer?, path.clone());
            Ok(Initial { model, tokenizer, tokenizer_file, files: Vec::new() })
        }
        Origin::Random(architecture) => {
            let config = architecture.config();
            config.validate()?;
            let model = || Ok(LanguageModel::new(Llama::init(config, device)));
            from_scratch(spec, folder, (architecture.vocab, new), device, model)
        }
        Origin::Config(fields) => {
            let text = config_text(fields);
            let config = config_json(&text);
            let outline = outline_config(&config, None, device, LoadOptions::default())?;
            let model = || Ok(random(&config, device)?);
            from_scratch(spec, folder, (outline.spec.vocab_size, new), device, model)
        }
    }
}

/// Creates a model with random weights, and trains its tokenizer of `vocab` tokens on the texts if
/// the run is `new`.
fn from_scratch(
    spec: &Spec,
    folder: &Path,
    (vocab, new): (usize, bool),
    device: &Device,
    model: impl FnOnce() -> Result<LanguageModel>,
) -> Result<Initial> {
    let kept = folder.join(TOKENIZER);
    if new && kept.exists() {
        bail!("{}: already exists; choose another folder", kept.display());
    }
    let tokenizer = match new {
        true => {
            let texts = Source::new(&spec.texts).with_field(&spec.field).documents()?;
            Tokenizer::train_bpe(texts.iter(), vocab)?
        }
        false => Tokenizer::from_file(&kept, &[0])?,
    };
    // It is saved beside its ids, where it cannot overwrite another tokenizer.json.
    let tokens = folder.join("tokens");
    fs::create_dir_all(&tokens).with_context(|| format!("{}: cannot create", tokens.display()))?;
    let tokenizer_file = tokens.join(TOKENIZER);
    tokenizer.save(&tokenizer_file)?;
    let files = match new {
        true => vec![(TOKENIZER, fs::read(&tokenizer_file)?)],
        false => Vec::new(),
    };
    let model = seeded(device, spec.config.seed, model)?;
    Ok(Initial { model, tokenizer, tokenizer_file, files })
}
