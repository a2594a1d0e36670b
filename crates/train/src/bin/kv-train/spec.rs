//! The description of a run, which its folder keeps.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use kv_cli::{Backend, DeviceList, WorkerArgs};
use kv_models::{
    ConfigJson, JsonFields, LayerSpec, LoadOptions, Loaded,
    kv_cubecl::{On, Target},
    kv_weights::Activations,
    llama, load_with,
    nn::RopeScaling,
};
use kv_train::{Objective, Strategy, TrainConfig};
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::inputs::{Input, check_same};

/// The description of a run in its folder, with which it is resumed without repeating the
/// arguments.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) backend: Backend,
    /// Devices that share each optimizer step; `None` is the default one of the backend.
    #[serde(default, deserialize_with = "devices")]
    pub(crate) devices: Option<DeviceList>,
    #[serde(default)]
    pub(crate) strategy: Strategy,
    pub(crate) origin: Origin,
    pub(crate) texts: Vec<PathBuf>,
    pub(crate) field: String,
    pub(crate) valid_texts: Vec<PathBuf>,
    pub(crate) config: TrainConfig,
    pub(crate) eval_tokens: usize,
    /// The form in which quantized weights of the model are loaded.
    #[serde(default)]
    pub(crate) weights: Weights,
    /// The files it was started with; `None` for runs of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inputs: Option<Vec<Input>>,
    /// Arguments of workers, which no file keeps.
    #[serde(skip)]
    pub(crate) workers: WorkerArgs,
}

/// Reads a list of devices, or the number of devices in runs of older versions, which was 1.
fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DeviceList>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    match value.as_u64() {
        Some(1) => Ok(None),
        Some(n) => Err(de::Error::custom(format!(
            "devices {n}: runs on several devices of older versions cannot be continued"
        ))),
        None => Option::deserialize(value).map_err(de::Error::custom),
    }
}

/// The file name of the tokenizer in the folder of a run from scratch.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

const TEXT: &str = "text";
const VALID_TEXT: &str = "valid-text";

/// The inputs that an operation needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Required {
    /// All inputs, to continue training.
    All,
    /// The model, to read a checkpoint that may hold only adapters.
    Model,
}

impl Spec {
    /// Opens the devices, at least one. The model is on the first.
    pub(crate) fn open_devices<T: Target>(&self) -> Result<Vec<On<T>>> {
        DeviceList::open_or_default(self.devices.as_ref(), &self.workers)
    }

    /// Hashes the files that the run needs: the ones its model is read from, and the texts.
    /// `tokenizer` is the path of the tokenizer in a run from scratch.
    pub(crate) fn hash_inputs(&self, tokenizer: &Path, required: Required) -> Result<Vec<Input>> {
        let what = match self.config.objective {
            Objective::CrossEntropy => "model",
            Objective::Distillation | Objective::Mixed { .. } => "model and teacher",
        };
        let mut inputs = match &self.origin {
            Origin::Model(path) => Input::of_model(what, path)?,
            Origin::Random(_) | Origin::Config(_) => {
                let input = Input::of("tokenizer", tokenizer)?;
                input.into_iter().map(|input| input.at(TOKENIZER)).collect()
            }
        };
        if required == Required::All {
            inputs.extend(Input::all(TEXT, &self.texts)?);
            inputs.extend(Input::all(VALID_TEXT, &self.valid_texts)?);
        }
        Ok(inputs)
    }

    /// Checks that the files are the ones that the run in `folder` was started with.
    pub(crate) fn check_inputs(&self, folder: &Path, required: Required) -> Result<()> {
        let now = self.hash_inputs(&folder.join(TOKENIZER), required)?;
        let Some(started) = &self.inputs else {
            kv_cli::note(format_args!(
                "{}: has no hashes of the texts and the model, so they are not compared with the \
                 ones that the run was started with",
                folder.join("run.json").display()
            ));
            return Ok(());
        };
        let is_text = |input: &&Input| [TEXT, VALID_TEXT].contains(&&*input.what);
        let needed = started.iter().filter(|input| required == Required::All || !is_text(input));
        check_same(&needed.cloned().collect::<Vec<_>>(), &now)
    }
}

/// The form in which quantized weights of a model's file are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Weights {
    /// Restore them to f32.
    #[default]
    Restored,
    /// Keep them in the file's format, frozen.
    Packed,
}

impl Weights {
    pub(crate) fn options(self) -> LoadOptions {
        let packed = (self == Self::Packed).then_some(Activations::Exact);
        LoadOptions::default().with_packed(packed)
    }
}

pub(crate) fn load(path: &Path, device: &Device, weights: Weights) -> Result<Loaded> {
    let loaded = load_with(path, device, weights.options())?;
    if weights == Weights::Packed && !loaded.model.is_packed() {
        bail!(
            "weights packed: {} has no packed weights; use a GGUF file or one in 16 bits, or run \
             kv-train quantize first",
            path.display()
        );
    }
    Ok(loaded)
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Origin {
    /// The folder or file of a model.
    Model(PathBuf),
    /// Random weights of this architecture.
    Random(Architecture),
    /// Random weights of the model that these fields of a `config.json` describe.
    Config(JsonFields),
}

/// Reads a `config.json`.
pub(crate) fn read_config(path: &Path) -> Result<JsonFields> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("{}: cannot read; name a config.json", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{}: not a JSON object", path.display()))
}

/// Returns the text of a `config.json` with these fields.
pub(crate) fn config_text(fields: &JsonFields) -> String {
    serde_json::Value::Object(fields.clone()).to_string()
}

/// Returns the `config.json` of this text; messages name the file so.
pub(crate) fn config_json(text: &str) -> ConfigJson<'_> {
    ConfigJson { text, path: Path::new("config.json") }
}

/// The sizes of a Llama-style model.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
pub(crate) struct Architecture {
    /// Vocabulary size of the tokenizer, which is trained on the texts.
    #[arg(long, default_value_t = 2048)]
    pub(crate) vocab: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 256)]
    pub(crate) hidden: usize,
    /// Width of the MLP.
    #[arg(long, default_value_t = 704)]
    pub(crate) intermediate: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: usize,
    /// Number of query heads.
    #[arg(long, default_value_t = 4)]
    pub(crate) heads: usize,
    /// Number of key and value heads.
    #[arg(long, default_value_t = 2)]
    pub(crate) kv_heads: usize,
    /// Channels per head.
    #[arg(long, default_value_t = 64)]
    pub(crate) head_dim: usize,
    /// Longest context in tokens.
    #[arg(long, default_value_t = 1024)]
    pub(crate) context: usize,
}

impl Architecture {
    pub(crate) fn config(&self) -> llama::Config {
        llama::Config {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            n_layers: self.layers,
            attention: LayerSpec::new(self.heads, self.kv_heads, self.head_dim),
            max_positions: self.context,
            norm_epsilon: 1e-5,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            tied_head: true,
            rotary_dim: self.head_dim,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            full_layers: Default::default(),
            layers_without_rope: Default::default(),
            qk_norms: false,
        }
    }
}
