//! Shared by all tests: a small text, its tokenizer, a model that trains in a second, and the
//! program.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Command, Output},
    sync::Arc,
};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Device, Tensor},
};
use kv_models::{
    LanguageModel, LayerSpec, LoadOptions, QuantizeOptions, SaveOptions, Tokenizer, WeightDtype,
    kv_cubecl::{Flex, KvCacheConfig, On, Target},
    kv_weights::{Activations, GroupSize, WeightFormat},
    llama::{Config, Llama},
    load_with,
    nn::{RopeScaling, init::seeded},
    save, save_quantized,
};
use kv_train::{
    Adapter, History, QatConfig, Result, Resume, Run, Schedule, Texts, TrainConfig, Trainable,
    Trained,
    data::{Source, TokenFile},
    train,
};
use tempfile::TempDir;

pub(crate) const VOCAB: usize = 288;
/// With sequences of 96 tokens and a residual of 32, most tokens that a query sees are quantized.
pub(crate) const K2V2: &str = "k2v2-g16-r32";

/// Returns `n` sentences of one pattern.
pub(crate) fn sentences(n: usize) -> String {
    let pick = |words: &[&'static str], i: usize| words[i * i / 3 % words.len()];
    (0..n)
        .map(|i| {
            let who = pick(&["the cat", "a dog", "my aunt", "the miller"], i);
            let does = pick(&["saw", "fed", "painted"], i + 1);
            let what = pick(&["the moon", "a small boat", "an old red door"], i + 2);
            format!("{who} {does} {what}. ")
        })
        .collect()
}

/// Two layers of two query heads and one key and value head of 32 channels.
pub(crate) fn architecture() -> Config {
    Config {
        vocab_size: VOCAB,
        hidden_size: 64,
        intermediate_size: 128,
        n_layers: 2,
        attention: LayerSpec::new(2, 1, 32),
        max_positions: 128,
        norm_epsilon: 1e-5,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        tied_head: true,
        rotary_dim: 32,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        full_layers: Default::default(),
        layers_without_rope: Default::default(),
        qk_norms: false,
    }
}

/// Creates a model with random weights, the same on every backend. The weights of keys and values
/// are enlarged, so that quantization matters.
pub(crate) fn tiny(config: Config, device: &Device) -> LanguageModel {
    struct Copy<'a>(&'a Device);
    impl ModuleMapper for Copy<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| Tensor::from_data(tensor.into_data(), self.0))
        }
    }
    let flex = On::<Flex>::open().unwrap();
    let mut llama = seeded(&flex, 7, || Llama::init(config, &flex));
    for layer in &mut llama.layers {
        for (weight, times) in [(&mut layer.qkv.weight, 1.6), (&mut layer.output.weight, 1.6)] {
            *weight = weight.clone().map_tensor(|tensor| tensor.mul_scalar(times));
        }
    }
    LanguageModel::new(llama.map(&mut Copy(device)))
}

/// A run of twelve steps of two sequences in three epochs.
pub(crate) fn config() -> TrainConfig {
    TrainConfig {
        seq_len: 96,
        batch: 2,
        steps: 12,
        steps_per_epoch: 4,
        schedule: Schedule { lr: 3e-3, min_lr: 0.0, warmup: 2 },
        valid_windows: 3,
        holdout: 0.1,
        seed: 5,
        ..TrainConfig::default()
    }
}

pub(crate) fn qat(cache: &str) -> QatConfig {
    QatConfig::new(cache.parse::<KvCacheConfig>().unwrap())
}

/// [`config`] for a quantized cache.
pub(crate) fn quantized() -> TrainConfig {
    TrainConfig { qat: Some(qat(K2V2)), ..config() }
}

/// A folder with a text and its tokenizer, and a model.
pub(crate) struct World<T: Target> {
    pub(crate) folder: TempDir,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) device: On<T>,
    pub(crate) model: LanguageModel,
}

impl<T: Target> World<T> {
    pub(crate) fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let text = sentences(400);
        let tokenizer = Tokenizer::train_bpe([&text].into_iter(), VOCAB).unwrap();
        tokenizer.save(folder.path().join("tokenizer.json")).unwrap();
        let device = On::open().unwrap();
        let model = tiny(architecture(), &device);
        let world = Self { folder, tokenizer, device, model };
        world.write("text.txt", &text);
        world
    }

    /// Returns the same text and model on another device.
    #[cfg(feature = "remote")]
    pub(crate) fn on<U: Target>(&self, device: On<U>) -> World<U> {
        let (folder, tokenizer) = (TempDir::new().unwrap(), self.tokenizer.clone());
        for file in ["text.txt", "tokenizer.json"] {
            fs::copy(self.path(file), folder.path().join(file)).unwrap();
        }
        let model = self.model.clone().fork(&device);
        World { folder, tokenizer, device, model }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn string(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().into()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Tokenizes a text in the folder.
    pub(crate) fn tokens(&self, name: &str) -> Arc<TokenFile> {
        let source = Source::new([self.path(name)]);
        let file = self.path("tokenizer.json");
        Arc::new(TokenFile::open(&source, &self.tokenizer, &file, &self.path("tokens")).unwrap())
    }

    /// Trains the model into the folder `name`.
    pub(crate) fn train(&self, name: &str, config: &TrainConfig) -> Result<Trained> {
        self.resume(name, config, Resume::No)
    }

    pub(crate) fn resume(
        &self,
        name: &str,
        config: &TrainConfig,
        resume: Resume,
    ) -> Result<Trained> {
        let texts = Texts { train: self.tokens("text.txt"), valid: None };
        self.train_on(self.model.clone(), &texts, name, config, resume)
    }

    pub(crate) fn train_on(
        &self,
        model: LanguageModel,
        texts: &Texts,
        name: &str,
        config: &TrainConfig,
        resume: Resume,
    ) -> Result<Trained> {
        let run = Run { resume, ..Run::new(self.path(name)) };
        train(&self.device, model, texts, config, run)
    }

    /// Trains adapters of attention on `model` in packed int8, in folders that start with `name`.
    /// The loss must fall.
    #[track_caller]
    pub(crate) fn adapters_learn(&self, name: &str, model: LanguageModel, config: TrainConfig) {
        let folder = self.path(&format!("{name}-int8"));
        let options = QuantizeOptions::new([Some(WeightFormat::Int8(GroupSize::G32)); 3]);
        save_quantized(&folder, &model.valid(), &self.tokenizer, options).unwrap();
        let options = LoadOptions::default().with_packed(Some(Activations::Exact));
        let read = load_with(&folder, &self.device, options).unwrap().model;
        let adapter = Some(Adapter { rank: 4, alpha: 8.0 });
        let config = TrainConfig { adapter, trainable: Trainable::Attention, ..config };
        let texts = Texts { train: self.tokens("text.txt"), valid: None };
        let trained = self.train_on(read, &texts, name, &config, Resume::No).unwrap();
        let (first, last) = (trained.history.valid[0], trained.history.valid.last().unwrap());
        assert!(last.nll < first.nll - 0.05, "{name}: from {} to {}", first.nll, last.nll);
    }

    /// Returns the losses of a run that must succeed.
    #[track_caller]
    pub(crate) fn losses(&self, name: &str, config: &TrainConfig) -> Losses {
        Losses::of(&self.train(name, config).unwrap().history)
    }

    /// Saves a model of one narrow layer as a Hugging Face folder.
    pub(crate) fn save_small_model(&self, name: &str) -> String {
        let attention = LayerSpec::new(1, 1, 16);
        let config = Config {
            attention,
            hidden_size: 16,
            intermediate_size: 16,
            n_layers: 1,
            rotary_dim: 16,
            ..architecture()
        };
        let model = tiny(config, &self.device).valid();
        let options = SaveOptions { dtype: WeightDtype::F16, cache: None };
        save(self.path(name), &model, &self.tokenizer, options).unwrap();
        self.string(name)
    }

    /// Saves the model as a Hugging Face folder.
    pub(crate) fn save_model(&self, name: &str) -> String {
        self.save_model_in(name, WeightDtype::F16)
    }

    pub(crate) fn save_model_in(&self, name: &str, dtype: WeightDtype) -> String {
        let options = SaveOptions { dtype, cache: None };
        save(self.path(name), &self.model.clone().valid(), &self.tokenizer, options).unwrap();
        self.string(name)
    }
}

/// The numbers that two equal runs must share bit for bit: all except times.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Losses {
    /// Position, step, and the bits of objective, likelihood and divergence.
    pub(crate) train: Vec<(u64, u64, [u64; 3])>,
    pub(crate) valid: Vec<(u64, [u64; 4])>,
}

impl Losses {
    pub(crate) fn of(history: &History) -> Self {
        let train = history.train.iter().map(|record| {
            let kl = record.kl.unwrap_or(-1.0);
            (record.position, record.step, [record.loss, record.nll, kl].map(f64::to_bits))
        });
        let valid = history.valid.iter().map(|record| {
            let losses = [record.nll, record.nll_float, record.kl, record.kl_float];
            (record.step, losses.map(f64::to_bits))
        });
        Self { train: train.collect(), valid: valid.collect() }
    }

    /// Returns the objectives, in order.
    pub(crate) fn objectives(&self) -> Vec<f64> {
        self.train.iter().map(|&(_, _, [loss, ..])| f64::from_bits(loss)).collect()
    }
}

/// Returns every weight by its path.
pub(crate) fn weights(model: &LanguageModel) -> BTreeMap<String, Vec<f32>> {
    #[derive(Default)]
    struct Weights {
        path: Vec<String>,
        all: BTreeMap<String, Vec<f32>>,
    }
    impl ModuleVisitor for Weights {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let data = param.val().into_data().try_to_vec::<f32>().unwrap();
            assert!(self.all.insert(self.path.join("."), data).is_none());
        }
    }
    let mut weights = Weights::default();
    model.visit(&mut weights);
    weights.all
}

/// Creates a command that runs `kv-train` with `args`.
pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-train"));
    command.args(args);
    command
}

/// Runs a command that must fail with one line that contains `parts`.
#[track_caller]
pub(crate) fn fails(command: &mut Command, parts: &[&str]) -> String {
    let Output { status, stderr, stdout } = command.output().unwrap();
    let (stderr, stdout) = (String::from_utf8(stderr).unwrap(), String::from_utf8_lossy(&stdout));
    assert!(!status.success(), "it succeeded: {stdout}");
    assert!(status.code().is_some_and(|code| code != 101), "{status}: {stderr}");
    let lines: Vec<&str> = stderr.lines().collect();
    assert_eq!(lines.len(), 1, "not one line: {stderr:?}");
    assert!(lines[0].starts_with("error: "), "{}", lines[0]);
    assert!(!stderr.contains("panicked"), "{stderr}");
    for part in parts {
        assert!(lines[0].contains(part), "{part:?} is not in {:?}", lines[0]);
    }
    lines[0].to_string()
}

/// Runs a command that must succeed, and returns its output.
#[track_caller]
pub(crate) fn succeeds(command: &mut Command) -> String {
    let Output { status, stderr, stdout } = command.output().unwrap();
    assert!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// Reads the bytes of the weights that a run saved.
pub(crate) fn saved(folder: &str) -> Vec<u8> {
    fs::read(format!("{folder}/model/model.safetensors")).unwrap()
}

/// Reads the losses in the history of a run's folder.
pub(crate) fn losses(folder: &str) -> Losses {
    Losses::of(&History::read(folder.as_ref()).unwrap())
}

/// Returns the arguments of a run of `steps` steps with a validation after every fourth one.
pub(crate) fn qat_args<'a>(
    model: &'a str,
    text: &'a str,
    out: &'a str,
    steps: &'a str,
) -> Vec<&'a str> {
    let mut args = vec!["qat", "--model", model, "--text", text, "--out", out];
    args.extend(["--cache", K2V2, "--seq-len", "48", "--holdout", "0.1"]);
    args.extend(["--valid-windows", "3", "--lr", "1e-3", "--warmup", "2", "--eval-tokens", "0"]);
    args.extend(["--batch", "1", "--accumulation", "2", "--steps-per-epoch", "4"]);
    args.extend(["--steps", steps]);
    args
}
