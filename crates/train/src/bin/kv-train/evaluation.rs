//! The evaluation after training, and the check before training that it will work.

use anyhow::{Result, ensure};
use kv_cli::{Plain, dispatch};
use kv_eval::{Mode, Plan, Report, evaluate, layers::measure_layers};
use kv_models::{
    LanguageModel, ModelCacheConfig, Tokenizer,
    kv_cubecl::{KvCacheConfig, KvFormat, Target},
};
use kv_train::{Converted, Texts};

use crate::spec::{Origin, Spec, load};

/// Refuses an evaluation that would fail after training.
pub(crate) fn check_eval_tokens(tokens: usize) -> Result<()> {
    ensure!(
        tokens != 1,
        "eval-tokens 1: must be at least 2, one token as context and one to score, or 0 for no \
         evaluation"
    );
    Ok(())
}

/// Returns the held-out ids that the model is evaluated on.
fn held_out(spec: &Spec, texts: &Texts) -> Result<Vec<u32>> {
    Ok(match &texts.valid {
        Some(valid) => valid.ids(0..spec.eval_tokens).collect(),
        None => texts.windows(&spec.config)?.1.text(spec.eval_tokens),
    })
}

/// Returns the length of the eval window in tokens.
fn eval_window(model: &LanguageModel, ids: &[u32]) -> usize {
    model.max_positions().min(2048).min(ids.len())
}

/// Returns the KIVI caches that a model from scratch is evaluated with.
fn kivi_caches(model: &LanguageModel) -> Vec<ModelCacheConfig> {
    // The paper's group size is 32. If neither it nor 16 fits the model, there is no KIVI cache.
    let kivi = |group: usize| {
        [KvFormat::Affine4, KvFormat::Affine2].map(|bits| {
            ModelCacheConfig::from(KvCacheConfig::new(bits, bits).with_group_size(group))
        })
    };
    let fits = |caches: &[ModelCacheConfig; 2]| caches.iter().all(|it| it.validate(model).is_ok());
    [32, 16].map(kivi).into_iter().find(fits).into_iter().flatten().collect()
}

/// Checks before training that the evaluation after it will work.
pub(crate) fn check_evaluation(
    spec: &Spec,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    texts: &Texts,
) -> Result<()> {
    let ids = held_out(spec, texts)?;
    let window = eval_window(model, &ids);
    let caches = match (&spec.origin, &spec.config.qat) {
        (Origin::Model(_), Some(qat)) => vec![qat.cache.clone()],
        (Origin::Model(_), None) => vec![],
        (Origin::Random(_) | Origin::Config(_), _) => kivi_caches(model),
    };
    Plan::new(model, Mode::Parallel, caches, ids, window, None)?
        .with_bos(model, tokenizer.leading_bos())?;
    Ok(())
}

/// Evaluates the model before and after training on held-out text, with a float cache and its own.
pub(crate) fn evaluate_trained(
    spec: &Spec,
    trained: &Converted,
    tokenizer: &Tokenizer,
    texts: &Texts,
) -> Result<Report> {
    let ids = held_out(spec, texts)?;
    dispatch!(spec.backend, Plain, evaluate_on(spec, trained, tokenizer, ids))
}

fn evaluate_on<T: Target>(
    spec: &Spec,
    trained: &Converted,
    tokenizer: &Tokenizer,
    ids: Vec<u32>,
) -> Result<Report> {
    let device = spec.open_devices::<T>()?.swap_remove(0);
    let window = eval_window(&trained.model, &ids);
    let text = "held-out text".to_string();
    let bos = tokenizer.leading_bos();
    let mut report = Report::new(&device, kv_cli::command_line(), text, ids.len(), window)
        .with_bos(bos.and_then(|id| tokenizer.id_to_token(id)));
    let mut add = |name: &str, model: &LanguageModel, caches: Vec<ModelCacheConfig>| {
        let plan = Plan::new(model, Mode::Parallel, caches, ids.clone(), window, None)?
            .with_bos(model, bos)?;
        let mut runs = evaluate(&device, model, &plan, |_| ())?;
        measure_layers(&device, model, &plan, &mut runs)?;
        report.add(name, runs);
        anyhow::Ok(())
    };
    match &spec.origin {
        Origin::Model(path) => {
            let cache = spec.config.qat.as_ref().map_or(&trained.cache, |qat| &qat.cache);
            add("before", &load(path, &device, spec.weights)?.model, vec![cache.clone()])?;
            add("after", &trained.model, vec![trained.cache.clone()])?;
        }
        Origin::Random(_) | Origin::Config(_) => {
            add("trained", &trained.model, kivi_caches(&trained.model))?;
        }
    }
    Ok(report)
}
