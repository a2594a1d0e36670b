//! Adapters on packed weights: their results, the weights they train, and the weights they keep.

use std::{any::Any, collections::BTreeMap, fs, path::Path};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Device, Distribution, Int, Tensor, TensorData},
};
use kv_models::{
    LanguageModel, LoadOptions, QuantizeOptions, Role, WeightDtype,
    kv_cubecl::{Autodiff, Flex, KvCacheConfig},
    kv_weights::{Activations, GroupSize, WeightFormat},
    llama::Llama,
    load_with,
    nn::init::seeded,
    save_quantized,
};
use kv_train::{Adapter, Resume, Run, Texts, TrainConfig, Trainable, train};

use crate::common::{World, fails, program, quantized, succeeds};

type Cpu = World<Autodiff<Flex>>;

const RANK: usize = 3;
const ALPHA: f64 = 1.5;

/// Saves the world's model with 4-bit weights in the folder `name`.
fn quantize(world: &Cpu, name: &str) -> std::path::PathBuf {
    let folder = world.path(name);
    let options = QuantizeOptions::new([Some(WeightFormat::Int4(GroupSize::G32)); 3]);
    save_quantized(&folder, &world.model.clone().valid(), &world.tokenizer, options).unwrap();
    folder
}

fn read(folder: &Path, device: &Device, packed: bool) -> LanguageModel {
    let packed = packed.then_some(Activations::Exact);
    load_with(folder, device, LoadOptions::default().with_packed(packed)).unwrap().model
}

/// Sets every factor of an adapter to random numbers.
struct Randomize;

impl ModuleMapper for Randomize {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| match D {
            2 => {
                let numbers = tensor.random_like(Distribution::Normal(0.0, 0.2));
                numbers.detach().require_grad()
            }
            _ => tensor,
        })
    }
}

/// Parameters by their paths.
fn params(model: &LanguageModel) -> BTreeMap<String, Tensor<2>> {
    #[derive(Default)]
    struct Found {
        path: Vec<String>,
        all: BTreeMap<String, Tensor<2>>,
    }
    impl ModuleVisitor for Found {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            // Only the leaf itself has a gradient.
            let leaf: Box<dyn Any> = Box::new(param.val());
            if let Ok(matrix) = leaf.downcast::<Tensor<2>>() {
                self.all.insert(self.path.join("."), *matrix);
            }
        }
    }
    let mut found = Found::default();
    model.visit(&mut found);
    found.all
}

fn ids(device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = (0..80).map(|i| i * 37 % crate::common::VOCAB as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, 40]), device)
}

fn close<const D: usize>(name: &str, found: Tensor<D>, expected: Tensor<D>) {
    let scale = expected.clone().abs().max().into_scalar::<f32>();
    let off = (found - expected).abs().max().into_scalar::<f32>();
    assert!(scale > 0.0 && off < 2e-5 * scale, "{name}: {off} of {scale}");
}

/// Compares with a model whose matrices are restored, plus adapters, differentiated by Burn.
#[test]
fn adapters_compute_and_differentiate_as_dense_weights() {
    let world = Cpu::new();
    let folder = quantize(&world, "int4");
    let device: &Device = &world.device;
    let mut packed = read(&folder, device, true);
    let plain = packed.clone().forward(ids(device), KvCacheConfig::float()).unwrap();
    let attention = |role: Role| role.is_attention();
    assert_eq!(seeded(device, 1, || packed.adapt(RANK, ALPHA, device, attention)), 4);
    // New adapters add nothing.
    let adapted = packed.clone().forward(ids(device), KvCacheConfig::float()).unwrap();
    assert_eq!(adapted.into_data(), plain.clone().into_data());

    // With some seeds a code of the cache is at a rounding edge, and the two models store others.
    let packed = seeded(device, 4, || packed.map(&mut Randomize));
    let factors = params(&packed);
    assert_eq!(factors.len(), 8, "{:?}", factors.keys());
    let scale = ALPHA / RANK as f64;
    let delta = |layer: usize, module: &str| {
        let factor = |f: &str| {
            factors[&format!("Llama.layers.{layer}.{module}.weight.adapter.{f}")].clone().detach()
        };
        (factor("a"), factor("b"))
    };
    let mut dense: Llama = read(&folder, device, false).downcast().unwrap();
    for (i, layer) in dense.layers.iter_mut().enumerate() {
        for (module, linear) in [("qkv", &mut layer.qkv), ("output", &mut layer.output)] {
            let (a, b) = delta(i, module);
            let sum =
                |weight: Tensor<2>| (weight.detach() + b.matmul(a) * scale).detach().require_grad();
            linear.weight = linear.weight.clone().map_tensor(sum);
        }
    }
    let dense = LanguageModel::new(dense);
    let cache: KvCacheConfig = crate::common::K2V2.parse().unwrap();
    let random = seeded(device, 3, || plain.random_like(Distribution::Default));
    let (mut found, mut expected) = (None, None);
    for (model, kept) in [(&packed, &mut found), (&dense, &mut expected)] {
        let logits = model.forward(ids(device), cache).unwrap();
        let loss = (logits.clone() * random.clone()).sum();
        *kept = Some((logits.detach(), loss.backward()));
    }
    let ((found, found_grads), (expected, dense_grads)) = (found.unwrap(), expected.unwrap());
    close("logits", found, expected);
    let weights = params(&dense);
    for layer in 0..2 {
        for module in ["qkv", "output"] {
            let path = format!("Llama.layers.{layer}.{module}.weight");
            let g = weights[&path].grad(&dense_grads).unwrap();
            let (a, b) = delta(layer, module);
            let (a, b) = (a.without_autodiff(), b.without_autodiff());
            let grad =
                |f: &str| factors[&format!("{path}.adapter.{f}")].grad(&found_grads).unwrap();
            close(&path, grad("a"), b.transpose().matmul(g.clone()) * scale);
            close(&path, grad("b"), g.matmul(a.transpose()) * scale);
        }
    }

    // After merging, the model is dense and its rows can be transformed. That is impossible for
    // adapters on packed weights.
    let transformed: KvCacheConfig = "k4v4-g16-r16-hadv".parse().unwrap();
    let (kept, still) = packed.clone().fold_hadamard(transformed.into());
    assert!(still.to_string().ends_with("-hadv") && kept.is_packed());
    let merged = packed.valid().materialize();
    assert!(merged.is_packed(), "the MLPs are");
    assert_eq!(merged.n_weights(), dense.n_weights());
    let plain = device.clone().without_autodiff();
    let found = merged.forward(ids(&plain), KvCacheConfig::float()).unwrap();
    let dense = dense.valid();
    close("merged", found, dense.forward(ids(&plain), KvCacheConfig::float()).unwrap());
    let (folded, none) = merged.fold_hadamard(transformed.into());
    assert!(!none.to_string().contains("had"));
    let found = folded.forward(ids(&plain), KvCacheConfig::float()).unwrap();
    close("folded", found, dense.forward(ids(&plain), KvCacheConfig::float()).unwrap());
}

/// [`quantized`], with adapters.
fn adapted() -> TrainConfig {
    let adapter = Some(Adapter { rank: 4, alpha: 8.0 });
    TrainConfig { adapter, trainable: Trainable::Attention, ..quantized() }
}

#[test]
fn packed_weights_stay_as_they_are_and_adapters_learn() {
    let world = Cpu::new();
    let folder = quantize(&world, "int4");
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let run = |name: &str, config: &TrainConfig, resume: Resume| {
        let model = read(&folder, &world.device, true);
        train(&world.device, model, &texts, config, Run { resume, ..Run::new(world.path(name)) })
    };
    let trained = run("run", &adapted(), Resume::No).unwrap();
    let (first, last) = (trained.history.valid[0], trained.history.valid.last().unwrap());
    assert!(last.nll < first.nll - 0.1, "from {} to {}", first.nll, last.nll);
    let checkpoint = world.path("run").join("checkpoints/step-12.model.bpk");
    let bytes = fs::metadata(checkpoint).unwrap().len();
    // Two matrices in each of two layers, and five norms of 64; all weights are 290 kB.
    assert!(bytes < 30_000, "{bytes}");

    // Restored weights give the same losses up to rounding of sums; recomputed activations give the
    // same bits.
    let again = run("again", &adapted(), Resume::No).unwrap();
    let recomputed = TrainConfig { gradient_checkpointing: true, ..adapted() };
    let recomputed = run("recomputed", &recomputed, Resume::No).unwrap();
    for other in [&again, &recomputed] {
        let [a, b] = [&trained, other].map(|run| crate::common::Losses::of(&run.history));
        assert_eq!(a, b);
    }
    let resumed = run("run", &adapted(), Resume::Step(8)).unwrap();
    let [a, b] = [&trained, &resumed].map(|run| crate::common::Losses::of(&run.history));
    assert_eq!(a, b);

    let (before, after) = (read(&folder, &world.device, true), trained.model.model);
    let words = |model: &LanguageModel| -> Vec<TensorData> {
        let llama: &Llama = model.downcast_ref().unwrap();
        let mlps = llama.layers.iter().map(|layer| layer.mlp.gate_up.weight.val());
        mlps.chain([llama.embedding.weight.val()]).map(Tensor::into_data).collect()
    };
    assert_eq!(words(&before), words(&after));
    let plain = read(&folder, &world.device, false);
    let error = train(&world.device, plain, &texts, &adapted(), Run::new(world.path("dense")));
    assert!(error.is_ok(), "restored weights are adapted by the same settings");
}

#[test]
fn packed_weights_themselves_are_not_trained() {
    let world = Cpu::new();
    let folder = quantize(&world, "int4");
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let model = read(&folder, &world.device, true);
    let run = Run::new(world.path("run"));
    let error = train(&world.device, model, &texts, &quantized(), run).unwrap_err().to_string();
    assert!(error.contains("weights packed") && error.contains("--lora"), "{error}");
    assert!(!error.contains('\n'));
    assert!(!world.path("run").exists());
}

#[test]
fn the_program_quantizes_trains_and_resumes() {
    let world = Cpu::new();
    let (model, text, int4) =
        (world.save_model("model"), world.string("text.txt"), world.string("q"));
    let quantize = ["quantize", "--model", &model, "--format", "int4", "--attention", "int8"];
    let said = succeeds(program(&quantize).args(["--range", "least-error", "--out", &int4]));
    assert!(said.contains("weights in") && said.contains(&int4), "{said}");
    fails(program(&quantize).args(["--out", &int4]), &["already exists"]);
    let (wide, none) = (world.string("wide"), world.string("none"));
    let out = ["--group", "128", "--out", &wide];
    fails(program(&quantize).args(out), &["64 columns", "groups of 128", "embed_tokens"]);
    fails(
        program(&quantize).args(["--group", "48", "--out", &wide]),
        &["group 48", "32, 64 or 128"],
    );
    let float = ["quantize", "--model", &model, "--format", "float", "--out", &none];
    fails(&mut program(&float), &["nothing would be quantized"]);
    for (format, option, parts) in [
        ("mxfp4", ["--group", "64"], &["group 64", "mxfp4 has groups of 32"][..]),
        ("mxfp4", ["--for", "transformers"], &["mxfp4", "gpt-oss"]),
        ("int4", ["--for", "transformer"], &["--for", "a similar value exists: 'transformers'"]),
        ("mxfp", ["--group", "32"], &["'mxfp'", "a similar value exists: 'mxfp4'"]),
    ] {
        let args = ["quantize", "--model", &model, "--format", format, "--out", &wide];
        fails(program(&args).args(option), parts);
    }
    let embedding = ["--for", "transformers", "--embedding", "int8", "--out", &wide];
    fails(program(&quantize).args(embedding), &["embedding", "--for transformers"]);
    assert!(!world.path("wide").exists());

    // scripts/check-transformers tests that transformers loads such folders. For others, a note
    // says that it does not.
    let symmetric = world.string("symmetric");
    for (out, more, loads) in [
        (world.string("zeros"), &[][..], false),
        (symmetric.clone(), &["--for", "transformers"], true),
    ] {
        let output = program(&quantize).args(["--out", &out]).args(more).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}");
        assert_eq!(stderr.contains("--for transformers"), !loads, "{stderr}");
        let config = fs::read_to_string(format!("{out}/config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        let config = &config["quantization_config"];
        let groups = config["config_groups"].as_object().unwrap();
        assert_eq!(groups.len(), 2, "{config}");
        assert!(groups.values().all(|group| group["weights"]["symmetric"] == loads), "{config}");
        let floats = config["ignore"].to_string();
        assert_eq!(floats.contains("embed_tokens"), loads, "{config}");
    }

    let run = world.string("run");
    let start = |model: &str, more: &[&str]| {
        let qat = [
            "qat",
            "--model",
            model,
            "--text",
            &text,
            "--out",
            &run,
            "--cache",
            crate::common::K2V2,
        ];
        let sizes =
            ["--steps", "6", "--steps-per-epoch", "3", "--seq-len", "96", "--eval-tokens", "128"];
        let mut command = program(&qat);
        command.args(sizes).args(["--holdout", "0.1", "--plain", "--weights", "packed"]).args(more);
        command
    };
    fails(&mut start(&int4, &[]), &["weights packed", "--lora"]);
    let f32 = world.save_model_in("f32", WeightDtype::F32);
    fails(
        &mut start(&f32, &["--lora", "4"]),
        &["weights packed", "has no packed weights", "quantize"],
    );
    succeeds(&mut start(&int4, &["--lora", "4", "--lr", "1e-3"]));
    let trained = fs::read(world.path("run").join("model/model.safetensors")).unwrap();
    let again = ["resume", &run, "--from-step", "3", "--plain"];
    succeeds(&mut program(&again));
    assert!(trained == fs::read(world.path("run").join("model/model.safetensors")).unwrap());
}
