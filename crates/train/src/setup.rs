//! A model ready for its first step.

use burn::{
    module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup},
    tensor::{Device, Tensor},
};
use kv_models::{LanguageModel, kv_cubecl::KvCacheConfig};

use crate::{Prepared, QatConfig, Result, TrainConfig, Trainable, prepare};

/// Creates every weight anew on a device. A weight that is moved there would keep its own autodiff
/// settings.
struct Recreate<'a>(&'a Device);

impl ModuleMapper for Recreate<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| Tensor::from_data(tensor.into_data(), self.0))
    }
}

/// A model ready for its first step.
pub(crate) struct Setup {
    pub(crate) prepared: Prepared,
    /// The model as it was, where the objective needs it.
    pub(crate) teacher: Option<LanguageModel>,
    /// The device of the prepared model.
    pub(crate) autodiff: Device,
}

/// Prepares `model` for the cache of `config`, or for a float cache, and marks the weights that are
/// trained.
pub(crate) fn set_up(
    device: &Device,
    mut model: LanguageModel,
    config: &TrainConfig,
) -> Result<Setup> {
    // The weights of new adapters are random.
    device.seed(config.seed);
    let teacher = config.objective.needs_teacher().then(|| model.clone().valid());
    let mut autodiff = device.clone().autodiff();
    if config.gradient_checkpointing {
        autodiff = autodiff.gradient_checkpointing();
    }
    if config.gradient_checkpointing || !model.devices().iter().all(Device::is_autodiff) {
        model = model.map(&mut Recreate(&autodiff));
    }
    let float = || QatConfig::new(KvCacheConfig::float());
    let prepared = prepare(choose(model, config)?, config.qat.clone().unwrap_or_else(float))?;
    Ok(Setup { prepared, teacher, autodiff })
}

/// The path of every float parameter, such as `Llama.layers.0.qkv.weight`, and its number of dimensions.
pub(crate) fn float_parameters<M: Module>(module: &M) -> Vec<(String, usize)> {
    #[derive(Default)]
    struct Paths {
        path: Vec<String>,
        found: Vec<(String, usize)>,
    }
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            self.found.push((self.path.join("."), D));
        }
    }
    let mut paths = Paths::default();
    module.visit(&mut paths);
    paths.found
}

/// Freezes what is not trained, or attaches adapters to what is.
fn choose(model: LanguageModel, config: &TrainConfig) -> Result<LanguageModel> {
    let chosen = float_parameters(&model).into_iter().map(|(path, _)| path);
    let chosen = chosen.filter(|path| config.trainable.includes(path));
    if let Some(adapter) = config.adapter {
        // Adapters are for the matrices of the layers: an adapted embedding would be computed as a
        // whole for every lookup.
        let matrices: Vec<String> =
            chosen.filter(|path| Trainable::Layers.includes(path)).collect();
        let group = ParamGroup::from_paths(matrices);
        return Ok(model.apply_lora(Lora::new(adapter.rank, adapter.alpha).set_param_group(group)));
    }
    let group = ParamGroup::from_paths(chosen.collect::<Vec<_>>());
    Ok(model.freeze().unfreeze_group(group))
}

/// Bytes of the files of a checkpoint of `prepared`, as f32: weights, and two moments of those that are
/// trained.
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
