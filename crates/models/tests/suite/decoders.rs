//! A decoder and a family outside this crate, as models of other crates define them.

use std::path::Path;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup, list_param_ids},
    nn::EmbeddingConfig,
    tensor::{Device, Int, Tensor},
};
use kv_models::{
    ConfigJson, Decoder, Family, LanguageModel, LayerSpec, ModelSpec, Pass, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    gguf::GgufNames,
    kv_cubecl::{AttentionOptions, KvCacheConfig},
    llama::Llama,
    load,
    nn::{Embedding, Linear, Matrix, init::seeded},
    register,
};
use serde_json::{Map, Value};

use crate::common::{device, tiny};

/// A model of embeddings, attention in two layers of different heads, and the embeddings again.
#[derive(Module, Debug)]
struct Toy {
    embedding: Embedding,
    qkv: Vec<Linear>,
    #[module(skip)]
    spec: ModelSpec,
}

impl Toy {
    fn new(device: &Device) -> Self {
        let scaled = AttentionOptions::default().with_scale(0.5);
        let layers = [LayerSpec::new(2, 1, 32), LayerSpec::new(4, 4, 16).with_options(scaled)];
        let mut spec = ModelSpec::uniform(40, 64, 96, 0, layers[0]);
        spec.layers = layers.to_vec();
        let random = |rows| {
            Param::from_tensor(Tensor::random(
                [rows, 64],
                burn::tensor::Distribution::Normal(0.0, 0.2),
                device,
            ))
        };
        let linear =
            |layer: &LayerSpec| Linear { weight: random(layer.qkv_rows()).into(), bias: None };
        seeded(device, 3, || {
            let embedding = EmbeddingConfig::new(40, 64).init(device);
            // Burn draws the numbers on first use.
            embedding.weight.val();
            let qkv = layers.iter().map(linear).collect();
            Self { embedding: embedding.into(), qkv, spec }
        })
    }
}

impl Decoder for Toy {
    fn name(&self) -> &'static str {
        "Toy"
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let mut x = self.embedding.forward(ids);
        for (i, (qkv, layer)) in self.qkv.iter().zip(&self.spec.layers).enumerate() {
            x = x.clone() + layer.attend(qkv.forward(x), None, pass.layer(i))?;
        }
        Ok(x)
    }

    fn head_weight(&self) -> &Matrix {
        &self.embedding.weight
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::Embedding, &self.embedding);
        roles.add(Role::Qkv, &self.qkv);
    }

    fn config_json(&self, _: &Path) -> Result<Map<String, Value>> {
        Ok(Map::new())
    }

    fn export(&self) -> Exports {
        Exports::new(&NAMES)
    }
}

const NAMES: Names = Names {
    family: "Toy",
    prefix: "",
    layers: "layers.",
    embedding: "embedding.weight",
    head: "head.weight",
    ..Names::NONE
};

/// Two layers with different heads, one with its own scale, give the same logits in parallel and
/// token by token. Each cache has its layer's shape.
#[test]
fn layers_may_differ() {
    let device = device();
    let model = LanguageModel::from(Toy::new(&device));
    let config: KvCacheConfig = "k2v2-g16-r16".parse().unwrap();
    let mut cache = model.new_cache(config.with_capacity(96), 1, &device).unwrap();
    let ids = Tensor::<1, Int>::arange(0..80, &device).remainder_scalar(40).unsqueeze::<2>();
    let parallel = model.forward(ids.clone(), config).unwrap();
    let first = model.step(ids.clone().narrow(1, 0, 50), &mut cache).unwrap();
    let rest: Vec<_> =
        (50..80).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap()).collect();
    let streamed = Tensor::cat([vec![first], rest].concat(), 1);
    let worst = (streamed - parallel.clone()).abs().max().into_scalar::<f32>();
    let largest = parallel.clone().abs().max().into_scalar::<f32>();
    assert!(worst < 1e-4 * largest, "{worst} of {largest}");
    for (cache, layer) in cache.layers().iter().zip(&model.spec().layers) {
        assert_eq!(cache.kv().unwrap().layout().shape(), layer.cache_shape(1));
    }

    // The scale is not 1 / sqrt(16), so it changes the result.
    let mut plain = Toy::new(&device);
    let toy = model.downcast::<Toy>().unwrap();
    (plain.embedding, plain.qkv) = (toy.embedding, toy.qkv);
    plain.spec.layers[1] = LayerSpec::new(4, 4, 16);
    let unscaled = LanguageModel::new(plain).forward(ids, config).unwrap();
    assert!((unscaled - parallel).abs().max().into_scalar::<f32>() > 1e-3);

    // Groups of 32 channels do not fit the second layer's heads.
    let model = LanguageModel::new(Toy::new(&device));
    let error = model.new_cache("k2v2".parse::<KvCacheConfig>().unwrap(), 1, &device);
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "group_size 32: does not divide head_dim 16");
}

/// A boxed module is visited and mapped like itself, under the name of its decoder.
#[test]
fn a_boxed_decoder_behaves_like_its_module() {
    struct Negate(Vec<String>);
    impl ModuleMapper for Negate {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| -tensor)
        }
    }
    let device = device();
    let toy = Toy::new(&device);
    let model = LanguageModel::new(toy.clone());
    assert_eq!(list_param_ids(&model), list_param_ids(&toy));
    assert_eq!(model.num_params(), toy.num_params());
    assert_eq!(model.to_string(), toy.to_string());

    let mut negate = Negate(vec![]);
    let negated = model.clone().map(&mut negate);
    let linear = ["weight", "bias"];
    let entered =
        [&["Toy", "embedding", "weight", "qkv", "0"][..], &linear, &["1"], &linear].concat();
    assert_eq!(negate.0, entered);
    assert_eq!(list_param_ids(&negated), list_param_ids(&toy));
    let weight = |model: &LanguageModel| model.decoder().head_weight().val().to_data();
    assert_eq!(weight(&negated), (-toy.embedding.weight.val()).to_data());
    // The original is unchanged.
    assert_eq!(weight(&model), toy.embedding.weight.val().to_data());

    // Freezing by path, moves and captured calls keep the parameters.
    let frozen = model.clone().freeze_group(ParamGroup::from_path("Toy.embedding.weight"));
    let frozen = frozen.fork(&device).to_device(&device).valid().train();
    assert!(!frozen.decoder().head_weight().val().is_require_grad());
    let again = negated.load_record(model.clone().into_record());
    assert_eq!(weight(&again), weight(&model));

    // A downcast to another type returns the model.
    assert!(model.downcast_ref::<Llama>().is_none());
    let model = model.downcast::<Llama>().unwrap_err();
    assert!(model.downcast::<Toy>().is_ok());
}

struct Files {
    model_types: &'static [&'static str],
    gguf: &'static [(&'static str, GgufNames)],
}

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        self.model_types
    }

    fn import(&self, _: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        Ok(Toy::new(weights.device()).into())
    }

    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        self.gguf
    }
}

#[test]
fn a_name_belongs_to_one_family() {
    const NO_NAMES: GgufNames = GgufNames { layer: ("", ""), outer: &[], inner: &[], base: None };
    static TOY: Files = Files { model_types: &["toy"], gguf: &[] };
    static LLAMA: Files = Files { model_types: &["toy-2", "mistral"], gguf: &[] };
    static GGUF: Files = Files { model_types: &["toy-3"], gguf: &[("gpt2", NO_NAMES)] };
    static ITSELF: Files = Files { model_types: &["toy-4", "toy-4"], gguf: &[] };
    register(&TOY).unwrap();
    for (family, start) in [
        (&TOY, "model_type = toy: is already registered"),
        (&LLAMA, "model_type = mistral: is already registered"),
        (&GGUF, "general.architecture = gpt2: is already registered"),
        (&ITSELF, "model_type = toy-4: is already registered"),
    ] {
        let error = register(family).unwrap_err().to_string();
        assert!(error.starts_with(start) && !error.contains('\n'), "{error}");
    }
    // Nothing of a refused family is registered, and the error lists the known names.
    let folder = crate::common::copy(&tiny("llama-tiny"));
    let config = |model_type: &str| {
        let text = format!(r#"{{"model_type": "{model_type}"}}"#);
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        load(folder.path(), &device()).map(|loaded| loaded.model)
    };
    let error = config("toy-2").unwrap_err().to_string();
    assert!(
        error.contains(
            "smollm3, gemma3_text, gpt_oss, deepseek_v3, deepseek_v2, kimi_k2, deepseek_v4, \
             qwen3_moe, mixtral, qwen3_5, qwen3_5_text, gemma4, gemma4_text and toy are supported"
        ),
        "{error}"
    );
    assert!(config("toy").unwrap().downcast_ref::<Toy>().is_some());
}

/// Checkpoints of training runs name parameters by their paths.
#[test]
fn parameters_keep_their_paths() {
    #[derive(Default)]
    struct Paths(Vec<String>, Vec<String>);
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            self.1.push(self.0.join("."));
        }
    }
    for (name, path) in [
        ("gpt2-tiny", "Gpt2.positions.weight"),
        ("gpt2-tiny", "Gpt2.layers.0.up.bias"),
        ("llama-tiny", "Llama.norm.gamma"),
        ("llama-tiny", "Llama.layers.1.mlp.gate_up.weight"),
    ] {
        let mut paths = Paths::default();
        load(tiny(name), &device()).unwrap().model.visit(&mut paths);
        assert!(paths.1.iter().any(|found| found == path), "{path} of {:?}", paths.1);
    }
}
