//! Preparation of a model for its first training step.

use burn::{
    module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup},
    tensor::{Device, Tensor},
};
use kv_models::{LanguageModel, Role, Roles, kv_cubecl::KvCacheConfig, nn::init::seeded};

use crate::{Error, Prepared, QatConfig, Result, TrainConfig, Trainable, prepare, qat::check_f32};

/// Recreates every weight on a device, because a weight that is moved keeps its autodiff settings.
struct Recreate<'a>(&'a Device);

impl ModuleMapper for Recreate<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| Tensor::from_data(tensor.into_data(), self.0))
    }
}

pub(crate) struct Setup {
    pub(crate) prepared: Prepared,
    /// The untrained model, if the objective needs it.
    pub(crate) teacher: Option<LanguageModel>,
    /// The device of the prepared model.
    pub(crate) autodiff: Device,
}

/// Prepares `model` for the cache of `config`, or for a float cache, and freezes all weights that
/// are not trained.
pub(crate) fn set_up(
    device: &Device,
    mut model: LanguageModel,
    config: &TrainConfig,
) -> Result<Setup> {
    check_f32(&model)?;
    check_adapter(&model, config)?;
    let teacher = config.objective.needs_teacher().then(|| model.clone().valid());
    let mut autodiff = device.clone().autodiff();
    if config.gradient_checkpointing {
        autodiff = autodiff.gradient_checkpointing();
    }
    if config.gradient_checkpointing || !model.devices().iter().all(Device::is_autodiff) {
        model = model.map(&mut Recreate(&autodiff));
    }
    let float = || QatConfig::new(KvCacheConfig::float());
    // The weights of new adapters are random.
    let model = seeded(&autodiff, config.seed, || choose(model, config, &autodiff))?;
    let prepared = prepare(model, config.qat.clone().unwrap_or_else(float))?;
    Ok(Setup { prepared, teacher, autodiff })
}

/// Refuses to train all weights of a model that has packed ones.
fn check_adapter(model: &LanguageModel, config: &TrainConfig) -> Result<()> {
    match config.adapter {
        None if model.is_packed() => {
            let rule =
                "are frozen: train adapters on them with --lora N, or use --weights restored";
            Err(Error::setting("weights", "packed", rule))
        }
        _ => Ok(()),
    }
}

/// A float parameter of a module.
pub(crate) struct Weight {
    /// For example `Llama.layers.0.qkv.weight`.
    pub(crate) path: String,
    pub(crate) role: Option<Role>,
    /// Number of dimensions.
    pub(crate) rank: usize,
}

/// Lists every float parameter of a module that holds a model with these roles.
pub(crate) fn weights<M: Module>(module: &M, roles: &Roles) -> Vec<Weight> {
    struct Visitor<'a> {
        path: Vec<String>,
        roles: &'a Roles,
        found: Vec<Weight>,
    }
    impl ModuleVisitor for Visitor<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (path, role) = (self.path.join("."), self.roles.get(param.id));
            self.found.push(Weight { path, role, rank: D });
        }
    }
    let mut visitor = Visitor { path: vec![], roles, found: vec![] };
    module.visit(&mut visitor);
    visitor.found
}

/// The group of those `weights` for which `choice` returns true.
pub(crate) fn group(weights: Vec<Weight>, choice: impl Fn(&Weight) -> bool) -> ParamGroup {
    let chosen = weights.into_iter().filter(choice).map(|weight| weight.path);
    ParamGroup::from_paths(chosen.collect::<Vec<_>>())
}

/// Freezes the weights that are not trained, or attaches adapters to the ones that are.
fn choose(model: LanguageModel, config: &TrainConfig, device: &Device) -> Result<LanguageModel> {
    let weights = weights(&model, &model.roles());
    let Some(adapter) = config.adapter else {
        let trained = group(weights, |weight| config.trainable.includes(weight.role));
        let model = model.freeze().unfreeze_group(trained);
        if !trains(&model) {
            let rule = "selects no weights of this model; try --trainable all";
            return Err(Error::setting("trainable", config.trainable, rule));
        }
        return Ok(model);
    };
    // Embeddings have no adapters: each lookup would compute the whole adapted matrix.
    let included =
        |role: Option<Role>| config.trainable.includes(role) && Trainable::Layers.includes(role);
    let adapted = group(weights, |weight| included(weight.role));
    let mut model =
        model.apply_lora(Lora::new(adapter.rank, adapter.alpha).set_param_group(adapted));
    model.adapt(adapter.rank, adapter.alpha, device, |role| included(Some(role)));
    if model.is_packed() && !trains(&model) {
        let rule = "selects no packed projection of this model; try --trainable all";
        return Err(Error::setting("trainable", config.trainable, rule));
    }
    Ok(model)
}

fn trains(model: &LanguageModel) -> bool {
    struct Any(bool);
    impl ModuleVisitor for Any {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= param.is_require_grad();
        }
    }
    let mut any = Any(false);
    model.visit(&mut any);
    any.0
}

/// Returns the bytes of a checkpoint's files in f32: all weights, and two moments of each trained
/// weight.
pub(crate) fn checkpoint_bytes(prepared: &Prepared) -> [u64; 2] {
    struct Count([u64; 2]);
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let n = param.shape().num_elements() as u64;
            self.0[0] += 4 * n;
            if param.is_require_grad() {
                self.0[1] += 8 * n;
            }
        }
    }
    let mut count = Count([0, 0]);
    prepared.visit(&mut count);
    count.0
}

/// Checks that every weight of `module` is finite, so that every checkpoint is usable.
///
/// # Errors
/// The first weight that is not finite.
pub(crate) fn check_finite<M: Module>(module: &M, step: usize) -> core::result::Result<(), String> {
    struct Finite {
        path: Vec<String>,
        wrong: Option<String>,
    }
    impl ModuleVisitor for Finite {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let finite = || param.val().is_finite().all().into_scalar::<bool>();
            if self.wrong.is_none() && !finite() {
                self.wrong = Some(self.path.join("."));
            }
        }
    }
    let mut finite = Finite { path: vec![], wrong: None };
    module.visit(&mut finite);
    match finite.wrong {
        None => Ok(()),
        Some(name) => Err(format!(
            "weight {name} is not finite after step {step}, so it is not saved; try a lower \
             learning rate or weight decay"
        )),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use kv_models::{
        kv_cubecl::{Flex, On},
        load,
    };

    use super::*;

    /// Selects weights by names in their paths, as was done before models gave them roles.
    fn by_name(trainable: Trainable, path: &str) -> bool {
        let any = |names: &[&str]| path.split('.').any(|part| names.contains(&part));
        match trainable {
            Trainable::All => true,
            Trainable::Layers => any(&["layers"]),
            Trainable::Attention => any(&["layers"]) && any(&["attention_norm", "qkv", "output"]),
            Trainable::Qkv => any(&["layers"]) && any(&["qkv"]),
            Trainable::Indexer => any(&["indexer"]),
        }
    }

    #[test]
    fn roles_choose_what_names_chose() {
        let device = On::<Flex>::open().unwrap();
        for name in ["gpt2-tiny", "llama-tiny", "qwen2-tiny", "phi3-tiny"] {
            let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models");
            let plain = load(format!("{golden}/{name}"), &device).unwrap().model;
            let adapted = plain.clone().apply_lora(Lora::new(2, 4.0));
            let (n_plain, n_adapted) = (plain.num_params(), adapted.num_params());
            assert!(n_adapted > n_plain);
            for model in [plain, adapted] {
                let weights = weights(&model, &model.roles());
                assert!(weights.len() > 10, "{name}");
                for Weight { path, role, .. } in weights {
                    assert!(role.is_some(), "{name}: {path}");
                    for trainable in Trainable::ALL {
                        let (got, expected) = (trainable.includes(role), by_name(trainable, &path));
                        assert_eq!(got, expected, "{name}: {path}, {trainable}");
                    }
                    let is_lookup = path.split('.').any(|p| p == "embedding" || p == "positions");
                    assert_eq!(role == Some(Role::Embedding), is_lookup, "{name}: {path}");
                }
            }
        }
    }
}
