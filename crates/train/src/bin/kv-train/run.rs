//! From a description of a run to its files.

use std::{
    fs,
    io::{ErrorKind, IsTerminal},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use kv_cli::{MemorySize, OutFile, Screen, dispatch};
use kv_models::{
    LanguageModel, Loaded, SaveOptions, Tokenizer, WeightDtype, check_savable,
    kv_cubecl::{Autodiff, On, Target},
    llama::Llama,
};
use kv_train::{
    Checkpoints, Converted, Error, Resume, Run, Texts, Trained, ValidRecord, checkpointed,
    data::{Source, TokenFile},
    train, write_report,
};
use serde::{Deserialize, Serialize};

use crate::{
    args::{Origin, Spec, Start, load},
    evaluation::{check_eval_tokens, check_evaluation, evaluate_trained},
    inputs::{TOKENIZER, Which, all_inputs, check_inputs, model_inputs},
    memory,
    stop::Stop,
};

/// Lines of training between two that are printed.
const TELL_EVERY: u64 = 10;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// With all it was asked for.
    Finished,
    /// On request, with a checkpoint to go on from.
    Stopped,
}

/// A run to start or to go on with.
struct Job<'a> {
    spec: &'a Spec,
    folder: &'a Path,
    resume: Resume,
    plain: bool,
    memory: Option<MemorySize>,
    stop: &'a Stop,
}

/// Starts a run.
pub(crate) fn start(start: &Start, stop: &Stop) -> Result<Ended> {
    let Start { spec, folder, plain, memory } = start;
    run_on(&Job { spec, folder, resume: Resume::No, plain: *plain, memory: *memory, stop })
}

/// What may be different when a run is resumed, since it does not decide its weights.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Again {
    /// Print a line for every few steps, on a terminal too, instead of the dashboard.
    #[arg(long)]
    plain: bool,
    /// Held-out tokens on which the model is evaluated at the end; 0 for none
    /// [default: those it was started with].
    #[arg(long)]
    pub(crate) eval_tokens: Option<usize>,
    /// The memory that training may take, such as 16G [default: what is free].
    #[arg(long)]
    pub(crate) memory: Option<MemorySize>,
}

/// Continues the run in `folder`.
pub(crate) fn resume(folder: &Path, resume: Resume, again: Again, stop: &Stop) -> Result<Ended> {
    let mut spec = read_spec(folder)?;
    if let Some(result) = read_result(folder)?
        && resume == Resume::Last
    {
        bail!(
            "{}: the run has done its {} steps, the model is in {}",
            folder.display(),
            result.steps,
            model_folder(folder).display()
        );
    }
    if let Some(tokens) = again.eval_tokens {
        check_eval_tokens(tokens)?;
        spec.eval_tokens = tokens;
    }
    let Again { plain, memory, .. } = again;
    run_on(&Job { spec: &spec, folder, resume, plain, memory, stop })
}

fn run_on(job: &Job<'_>) -> Result<Ended> {
    dispatch!(job.spec.backend, Autodiff, run(job))
}

/// Saves the model of a checkpoint.
pub(crate) fn export(
    folder: &Path,
    step: Option<usize>,
    out: Option<PathBuf>,
    stop: &Stop,
) -> Result<()> {
    let spec = read_spec(folder)?;
    dispatch!(spec.backend, Autodiff, export_from(&spec, folder, step, out, stop))
}

/// Where the model of a checkpoint goes, which must not be there.
pub(crate) fn new_folder(folder: &Path, step: usize, out: Option<PathBuf>) -> Result<PathBuf> {
    let out = out.unwrap_or_else(|| folder.join(format!("model-{step}")));
    ensure!(
        fs::symlink_metadata(&out).is_err(),
        "out {}: is there already; name a folder that is not, or remove it",
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
    check_inputs(spec, folder, &model_inputs(spec, &folder.join(TOKENIZER))?, Which::Model)?;
    let Begun { model, tokenizer, .. } = begin(spec, folder, &device, false)?;
    let converted = checkpointed(&device, model, folder, step)?.convert();
    stop.making(&out);
    save(spec, &converted, &tokenizer, &out)?;
    stop.made();
    let (steps, out) = (spec.config.steps, out.display());
    Screen::Out.line(format_args!("the model after step {step} of {steps} is in {out}"))?;
    Ok(())
}

fn read_spec(folder: &Path) -> Result<Spec> {
    let path = folder.join("run.json");
    let text = fs::read_to_string(&path)
        .with_context(|| format!("{}: cannot read, is this a run's folder?", path.display()))?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// What a finished run leaves, last of all.
#[derive(Debug, Serialize, Deserialize)]
struct RunResult {
    /// Optimizer steps made.
    steps: usize,
    /// The step after which the saved model was.
    step: usize,
    /// The validation before the first step.
    before: Option<ValidRecord>,
    /// That of the saved model.
    saved: Option<ValidRecord>,
    /// The best.
    best: Option<ValidRecord>,
}

fn model_folder(folder: &Path) -> PathBuf {
    folder.join("model")
}

fn result_file(folder: &Path) -> PathBuf {
    folder.join("result.json")
}

fn read_result(folder: &Path) -> Result<Option<RunResult>> {
    let path = result_file(folder);
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => text
            .map_err(anyhow::Error::from)
            .and_then(|text| Ok(Some(serde_json::from_str(&text)?)))
            .with_context(|| path.display().to_string()),
    }
}

fn run<T: Target>(job: &Job<'_>) -> Result<Ended> {
    let Job { spec, folder, resume, plain, memory, stop } = *job;
    let started = Instant::now();
    let device = On::<T>::open()?;
    let new = resume == Resume::No;
    if !new {
        check_inputs(spec, folder, &all_inputs(spec, &folder.join(TOKENIZER))?, Which::All)?;
    }
    memory::check_run(spec, &device, memory)?;
    let Begun { model, tokenizer, tokenizer_file, mut files } = begin(spec, folder, &device, new)?;
    if new {
        // A run that an older version started so is resumed all the same.
        spec.config.check_model(model.spec())?;
    }
    // Before hours of training, not after.
    check_savable(&model, &tokenizer, save_options(spec))?;
    if let Some(qat) = &spec.config.qat {
        let (note, in_full) = (qat.cache.note(model.spec()), qat.cache.in_full(model.spec()));
        note.iter().chain(&in_full).for_each(kv_cli::note);
    }
    let out = model_folder(folder);
    if out.exists() && !out.is_dir() {
        bail!("{}: is not a folder, the model goes there", out.display());
    }
    let open = |texts: &[PathBuf]| -> Result<Arc<TokenFile>> {
        let source = Source::new(texts).with_field(&spec.field);
        let tokens = TokenFile::open(&source, &tokenizer, &tokenizer_file, &folder.join("tokens"))?;
        tokens.require_vocab(model.vocab_size())?;
        Ok(Arc::new(tokens))
    };
    let valid = match spec.valid_texts.is_empty() {
        true => None,
        false => Some(open(&spec.valid_texts)?),
    };
    let texts = Texts { train: open(&spec.texts)?, valid };
    let mut spec = spec.clone();
    if new {
        spec.inputs = Some(all_inputs(&spec, &tokenizer_file)?);
    }
    if spec.eval_tokens > 0
        && let Err(error) = check_evaluation(&spec, &model, &tokenizer, &texts)
    {
        if new {
            return Err(error).context("the evaluation after training");
        }
        // Only the evaluation is lost, and not the training before it.
        let why = kv_cli::error_line(&error);
        kv_cli::note(format_args!("the model will not be evaluated after training: {why}"));
        spec.eval_tokens = 0;
    }
    let spec = &spec;
    let dashboard = dashboard(plain);
    Screen::Out.line(format_args!(
        "{} parameters, {} tokens to train on, {} in {} steps",
        model.n_weights(),
        texts.train.len(),
        folder.display(),
        spec.config.steps
    ))?;
    if let Some(bos) = tokenizer.leading_bos() {
        let bos = tokenizer.id_to_token(bos).unwrap_or_default();
        kv_cli::note(format_args!(
            "windows are cut anywhere in the texts and do not start with {bos}; evaluations do"
        ));
    }
    let devices = (spec.devices > 1).then(|| devices::<T>(spec.devices)).transpose()?;
    files.push(("run.json", (serde_json::to_string_pretty(spec)? + "\n").into_bytes()));
    // A step without a checkpoint is refused before the finished run is none any more.
    if let Resume::Step(step) = resume {
        Checkpoints::of(folder).resume(Some(step))?;
    }
    if !new && let Err(error) = fs::remove_file(result_file(folder)) {
        // None, if the run had not ended.
        ensure!(error.kind() == ErrorKind::NotFound, "{}: {error}", result_file(folder).display());
    }
    stop.begin(dashboard);
    let trained = train(
        &device,
        model,
        &texts,
        &spec.config,
        Run {
            folder: folder.into(),
            resume,
            dashboard,
            // Training goes on where nobody reads, or the terminal's disk is full.
            tell: (!dashboard).then(|| Box::new(|line: &str| drop(Screen::Out.line(line))) as _),
            tell_every: TELL_EVERY,
            devices: devices.as_deref(),
            stop: Some(stop.asked.clone()),
            files,
        },
    );
    // What follows is done again when the run goes on.
    stop.end(folder);
    let Some(trained) = unless_stopped(trained, folder)? else { return Ok(Ended::Stopped) };
    finish(spec, folder, trained, &tokenizer, &texts, started)?;
    Ok(Ended::Finished)
}

/// Returns whether to show the dashboard. Where it cannot be drawn, that is said.
fn dashboard(plain: bool) -> bool {
    let shown = !plain && std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let terminal = std::env::var_os("TERM").unwrap_or_default();
    if shown && cfg!(unix) && (terminal.is_empty() || terminal == "dumb") {
        kv_cli::note(format_args!(
            "TERM {terminal:?}: this terminal cannot draw the dashboard, so lines are printed, as \
             with --plain"
        ));
        return false;
    }
    shown
}

/// What was trained; `None` if the run in `folder` was asked to stop, which is told.
pub(crate) fn unless_stopped<R>(trained: kv_train::Result<R>, folder: &Path) -> Result<Option<R>> {
    let Err(Error::Interrupted { step, steps, .. }) = trained else { return Ok(Some(trained?)) };
    Screen::Out.line(format_args!(
        "stopped after step {step} of {steps}, with a checkpoint in {}; go on with kv-train resume {}",
        Checkpoints::of(folder).folder().display(),
        folder.display()
    ))?;
    Ok(None)
}

/// Saves and evaluates the model, and writes the report.
fn finish(
    spec: &Spec,
    folder: &Path,
    trained: Trained,
    tokenizer: &Tokenizer,
    texts: &Texts,
    started: Instant,
) -> Result<()> {
    let Trained { model, history, steps, step } = trained;
    let out = model_folder(folder);
    let converted = model.convert();
    save(spec, &converted, tokenizer, &out)?;
    let evaluation = match spec.eval_tokens {
        0 => None,
        _ => {
            let evaluated = evaluate_trained(spec, &converted, tokenizer, texts);
            Some(evaluated.with_context(|| {
                format!(
                    "the model is saved in {}, but could not be evaluated; kv-train resume {} \
                     --eval-tokens 0 finishes the run without",
                    out.display(),
                    folder.display()
                )
            })?)
        }
    };
    if let Some(evaluation) = &evaluation {
        Screen::Out.print(evaluation)?;
    }
    let report = write_report(folder, &spec.config, &history, step, evaluation.as_ref())?;
    let objective = spec.config.objective;
    let result = RunResult {
        steps,
        step,
        before: history.validation(0).copied(),
        saved: history.validation(step).copied(),
        best: history.best(objective).copied(),
    };
    if let Some(line) = verdict(spec, folder, &result) {
        Screen::Out.line(line)?;
    }
    let text = serde_json::to_string_pretty(&result)? + "\n";
    OutFile::open("result", &result_file(folder))?.write(text.as_bytes())?;
    Screen::Out.line(format_args!(
        "trained {steps} steps in {:.0} s; the model{} is in {}, the report is {}",
        started.elapsed().as_secs_f64(),
        if step == steps { String::new() } else { format!(" after step {step}, the best,") },
        out.display(),
        report.display()
    ))?;
    Ok(())
}

/// What is not as one would hope of the saved model.
fn verdict(spec: &Spec, folder: &Path, result: &RunResult) -> Option<String> {
    let (before, saved, best) = (result.before?, result.saved?, result.best?);
    let value = |record: ValidRecord| spec.config.objective.value(record.nll, record.kl);
    if best.step == 0 {
        let (before, saved) = (value(before), value(saved));
        return Some(format!(
            "note: no validation was better than {before:.4}, the one before training; the saved \
             model's is {saved:.4}"
        ));
    }
    (best.step != saved.step).then(|| {
        format!(
            "note: the best validation was after step {}, {:.4}, that of the saved model is {:.4}; \
             kv-train export {} --step {} saves the best",
            best.step,
            value(best),
            value(saved),
            folder.display(),
            best.step
        )
    })
}

fn save_options(spec: &Spec) -> SaveOptions<'_> {
    SaveOptions { dtype: WeightDtype::F16, cache: spec.config.qat.as_ref().map(|qat| &qat.cache) }
}

fn save(spec: &Spec, converted: &Converted, tokenizer: &Tokenizer, out: &Path) -> Result<()> {
    // The cache of the weights that are saved, which may have taken up a rotation of its values.
    let cache = spec.config.qat.as_ref().map(|_| &converted.cache);
    let options = SaveOptions { cache, ..save_options(spec) };
    Ok(kv_models::save(out, &converted.model, tokenizer, options)?)
}

/// What a run begins with.
struct Begun {
    model: LanguageModel,
    tokenizer: Tokenizer,
    /// The file the tokenizer was read from.
    tokenizer_file: PathBuf,
    /// What of it the run's folder is to keep.
    files: Vec<(&'static str, Vec<u8>)>,
}

/// The model before training; that of a `new` run from scratch with a tokenizer of its own.
fn begin(spec: &Spec, folder: &Path, device: &Device, new: bool) -> Result<Begun> {
    match &spec.origin {
        Origin::Model(path) => {
            let Loaded { model, tokenizer, notes, .. } = load(path, device, spec.weights)?;
            kv_cli::notes(&notes);
            let (tokenizer, tokenizer_file) = (tokenizer?, path.clone());
            Ok(Begun { model, tokenizer, tokenizer_file, files: Vec::new() })
        }
        Origin::Random(architecture) => {
            let config = architecture.config();
            config.validate()?;
            let kept = folder.join(TOKENIZER);
            if new && kept.exists() {
                bail!("{}: is there already; choose another folder", kept.display());
            }
            let tokenizer = match new {
                true => {
                    let texts = Source::new(&spec.texts).with_field(&spec.field).documents()?;
                    Tokenizer::train_bpe(texts.iter(), architecture.vocab)?
                }
                false => Tokenizer::from_file(&kept, &[0])?,
            };
            // Beside the ids made with it, so that no other tokenizer.json is in danger.
            let tokens = folder.join("tokens");
            fs::create_dir_all(&tokens)
                .with_context(|| format!("{}: cannot create", tokens.display()))?;
            let tokenizer_file = tokens.join(TOKENIZER);
            tokenizer.save(&tokenizer_file)?;
            let files = match new {
                true => vec![(TOKENIZER, fs::read(&tokenizer_file)?)],
                false => Vec::new(),
            };
            device.seed(spec.config.seed);
            let model = LanguageModel::new(Llama::init(config, device));
            Ok(Begun { model, tokenizer, tokenizer_file, files })
        }
    }
}

/// The first `n` devices of the target.
fn devices<T: Target>(n: usize) -> Result<Vec<Device>> {
    #[allow(unused_mut, reason = "on the CPU there is one device")]
    let mut found: Vec<Device> = Vec::new();
    #[cfg(feature = "cuda")]
    found.extend(Device::enumerate(burn::tensor::DeviceType::Cuda));
    #[cfg(feature = "wgpu")]
    found.extend(Device::enumerate(burn::tensor::DeviceType::Wgpu));
    let devices: Vec<Device> =
        found.into_iter().map(Device::autodiff).filter(T::hosts).take(n).collect();
    if devices.len() < n {
        bail!("devices {n}: {} has {} here", T::NAME, devices.len().max(1));
    }
    Ok(devices)
}
