//! From a description of a run to its files.

use std::{
    fs,
    io::IsTerminal,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use kv_cli::{Plain, dispatch};
use kv_eval::{Mode, Plan, Report, evaluate, layers::measure_layers};
use kv_models::{
    LanguageModel, Loaded, ModelCacheConfig, SaveDtype, SaveOptions, Tokenizer,
    kv_cubecl::{Autodiff, Bits, KvCacheConfig, On, Target},
    llama::Llama,
};
use kv_train::{
    Converted, Resume, Run, Texts, Trained,
    data::{Source, TokenFile},
    train, write_report,
};

use crate::args::{Origin, Spec};

/// Lines of training between two that are printed.
const TELL_EVERY: u64 = 10;

/// Starts a run in `folder`.
pub(crate) fn start(spec: &Spec, folder: &Path) -> Result<()> {
    dispatch!(spec.backend, Autodiff, run(spec, folder, Resume::No))
}

/// Continues the run in `folder`.
pub(crate) fn resume(folder: &Path, resume: Resume) -> Result<()> {
    let path = spec_file(folder);
    let text = fs::read_to_string(&path)
        .with_context(|| format!("{}: cannot read, is this a run's folder?", path.display()))?;
    let spec: Spec = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    dispatch!(spec.backend, Autodiff, run(&spec, folder, resume))
}

fn spec_file(folder: &Path) -> PathBuf {
    folder.join("run.json")
}

fn run<T: Target>(spec: &Spec, folder: &Path, resume: Resume) -> Result<()> {
    let started = Instant::now();
    let device = On::<T>::open()?;
    fs::create_dir_all(folder).with_context(|| format!("{}: cannot create", folder.display()))?;
    let (model, tokenizer, tokenizer_file) = origin(spec, folder, &device, resume)?;
    if resume == Resume::No {
        let path = spec_file(folder);
        fs::write(&path, serde_json::to_string_pretty(spec)? + "\n")
            .with_context(|| format!("{}: cannot write", path.display()))?;
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
    let dashboard = std::io::stdout().is_terminal();
    println!(
        "{} parameters, {} tokens to train on, {} in {} steps",
        parameters(&model),
        texts.train.len(),
        folder.display(),
        spec.config.steps
    );
    let devices = (spec.devices > 1).then(|| devices::<T>(spec.devices)).transpose()?;
    let trained = train(
        &device,
        model,
        &texts,
        &spec.config,
        Run {
            folder: folder.into(),
            resume,
            dashboard,
            tell: (!dashboard).then(|| Box::new(|line: &str| println!("{line}")) as _),
            tell_every: TELL_EVERY,
            devices: devices.as_deref(),
        },
    )?;
    let Trained { model, history, .. } = trained;
    let out = folder.join("model");
    let converted = model.convert();
    match spec.config.qat {
        Some(_) => converted.save(&out, &tokenizer)?,
        None => {
            let options = SaveOptions { dtype: SaveDtype::F16, cache: None };
            kv_models::save(&out, &converted.model, &tokenizer, options)?;
        }
    }
    let evaluation = match spec.eval_tokens {
        0 => None,
        tokens => Some(evaluate_trained(spec, &converted, &texts, tokens)?),
    };
    if let Some(evaluation) = &evaluation {
        print!("{evaluation}");
    }
    let report = write_report(folder, &spec.config, &history, evaluation.as_ref())?;
    println!(
        "trained in {:.0} s; the model is in {}, the report is {}",
        started.elapsed().as_secs_f64(),
        out.display(),
        report.display()
    );
    Ok(())
}

/// The model as it was and as it is, on held-out text, with and without its cache.
fn evaluate_trained(
    spec: &Spec,
    trained: &Converted,
    texts: &Texts,
    tokens: usize,
) -> Result<Report> {
    let ids: Vec<u32> = match &texts.valid {
        Some(valid) => valid.ids(0..tokens).collect(),
        None => {
            let held_out = (texts.train.len() as f64 * spec.config.holdout) as usize;
            // One window at least is.
            let held_out = held_out.max(spec.config.seq_len);
            let start = texts.train.len() - held_out;
            texts.train.ids(start..start + held_out.min(tokens)).collect()
        }
    };
    dispatch!(spec.backend, Plain, evaluate_on(spec, trained, ids))
}

fn evaluate_on<T: Target>(spec: &Spec, trained: &Converted, ids: Vec<u32>) -> Result<Report> {
    let device = On::<T>::open()?;
    let window = trained.model.max_positions().min(2048).min(ids.len());
    let text = "held-out text".to_string();
    let mut report = Report::new(&device, std::env::args().collect(), text, ids.len(), window);
    let mut add = |name: &str, model: &LanguageModel, caches: Vec<ModelCacheConfig>| {
        let plan = Plan::new(model, Mode::Parallel, caches, ids.clone(), window, None)?;
        let mut runs = evaluate(&device, model, &plan, |_| ())?;
        measure_layers(&device, model, &plan, &mut runs)?;
        report.add(name, runs);
        anyhow::Ok(())
    };
    match &spec.origin {
        Origin::Model(path) => {
            add("before", &kv_models::load(path, &device)?.model, vec![trained.cache.clone()])?;
            add("after", &trained.model, vec![trained.cache.clone()])?;
        }
        Origin::Random(_) => {
            // The paper's group of 32, or one that fits the heads; other sizes have no KIVI cache.
            let head_dim = trained.model.head_dim();
            let fits = |group: &usize| head_dim.is_multiple_of(*group);
            let kivi = [32, 16].into_iter().find(fits).map(|group| {
                [Bits::Four, Bits::Two]
                    .map(|bits| KvCacheConfig::kivi(bits, bits).with_group_size(group).into())
            });
            add("trained", &trained.model, kivi.into_iter().flatten().collect())?;
        }
    }
    Ok(report)
}

/// The model, its tokenizer, and the file the tokenizer was read from.
fn origin(
    spec: &Spec,
    folder: &Path,
    device: &Device,
    resume: Resume,
) -> Result<(LanguageModel, Tokenizer, PathBuf)> {
    match &spec.origin {
        Origin::Model(path) => {
            let Loaded { model, tokenizer, notes, .. } = kv_models::load(path, device)?;
            kv_cli::notes(&notes);
            Ok((model, tokenizer?, path.clone()))
        }
        Origin::Random(architecture) => {
            let path = folder.join("tokenizer.json");
            let tokenizer = match resume {
                Resume::No => {
                    let texts = Source::new(&spec.texts).with_field(&spec.field).documents()?;
                    let tokenizer = Tokenizer::train_bpe(texts.iter(), architecture.vocab)?;
                    tokenizer.save(&path)?;
                    tokenizer
                }
                _ => Tokenizer::from_file(&path, &[0])?,
            };
            device.seed(spec.config.seed);
            let config = architecture.config();
            config.validate()?;
            Ok((LanguageModel::Llama(Llama::init(config, device)), tokenizer, path))
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

fn parameters(model: &LanguageModel) -> usize {
    use burn::module::Module;
    model.num_params()
}
