//! The end of a run: saves and evaluates the model, and writes the report and `result.json`.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result};
use kv_cli::{OutFile, Screen};
use kv_models::{SaveOptions, Tokenizer, WeightDtype};
use kv_train::{Converted, Texts, Trained, ValidRecord, write_report};
use serde::{Deserialize, Serialize};

use crate::{evaluation::evaluate_trained, spec::Spec};

/// The summary that a finished run writes last.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RunResult {
    /// Optimizer steps made.
    pub(crate) steps: usize,
    /// Optimizer step after which the saved model was taken.
    step: usize,
    /// The validation before the first step.
    before: Option<ValidRecord>,
    /// The validation of the saved model.
    saved: Option<ValidRecord>,
    /// The best validation.
    best: Option<ValidRecord>,
}

pub(crate) fn model_folder(folder: &Path) -> PathBuf {
    folder.join("model")
}

pub(crate) fn result_file(folder: &Path) -> PathBuf {
    folder.join("result.json")
}

pub(crate) fn read_result(folder: &Path) -> Result<Option<RunResult>> {
    let path = result_file(folder);
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => text
            .map_err(anyhow::Error::from)
            .and_then(|text| Ok(Some(serde_json::from_str(&text)?)))
            .with_context(|| path.display().to_string()),
    }
}

/// Saves and evaluates the model, and writes the report.
pub(crate) fn finish(
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
                    "the model is saved in {}, but its evaluation failed; kv-train resume {} \
                     --eval-tokens 0 finishes the run without it",
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
    if let Some(line) = result_note(spec, folder, &result) {
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

/// Returns a note if the saved model is not the best one or not better than before training.
fn result_note(spec: &Spec, folder: &Path, result: &RunResult) -> Option<String> {
    let (before, saved, best) = (result.before?, result.saved?, result.best?);
    let value = |record: ValidRecord| spec.config.objective.value(record.nll, record.kl);
    if best.step == 0 {
        let (before, saved) = (value(before), value(saved));
        return Some(format!(
            "note: no validation was better than the one before training, {before:.4}; the saved \
             model has {saved:.4}"
        ));
    }
    (best.step != saved.step).then(|| {
        format!(
            "note: the best validation was {:.4} after step {}, but the saved model has {:.4}; \
             kv-train export {} --step {} saves the best model",
            value(best),
            best.step,
            value(saved),
            folder.display(),
            best.step
        )
    })
}

pub(crate) fn save_options(spec: &Spec) -> SaveOptions<'_> {
    SaveOptions { dtype: WeightDtype::F16, cache: spec.config.qat.as_ref().map(|qat| &qat.cache) }
}

pub(crate) fn save(
    spec: &Spec,
    converted: &Converted,
    tokenizer: &Tokenizer,
    out: &Path,
) -> Result<()> {
    // The cache of the saved weights: a Hadamard transform of values may be folded into them.
    let cache = spec.config.qat.as_ref().map(|_| &converted.cache);
    let options = SaveOptions { cache, ..save_options(spec) };
    Ok(kv_models::save(out, &converted.model, tokenizer, options)?)
}
