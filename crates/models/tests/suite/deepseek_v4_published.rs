//! DeepSeek-V4 as DeepSeek publishes it: names of tensors, weights in 8 and 4 bits, and what is
//! refused about them. The oracle decodes weights by the definitions of their types.

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::{Tensor, TensorData};
use half::bf16;
use kv_models::{
    LanguageModel, LoadOptions, WeightDtype, kv_cubecl::KvCacheConfig, kv_weights::Activations,
    load, load_with,
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::common::{
    assert_contains, copy,
    deepseek::tiny,
    device, expected, f32s, failure, golden_in, max_difference,
    minifloat::{e2m1, e4m3, nearest},
};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A folder before it is written.
struct Folder {
    config: Json,
    tensors: Tensors,
}

impl Folder {
    fn read(folder: &Path) -> Self {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let owned = |(name, view): (&str, TensorView<'_>)| {
            (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        };
        let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap());
        Self { config: config.unwrap(), tensors: tensors.iter().map(owned).collect() }
    }

    fn write(&self) -> TempDir {
        let folder = copy(&tiny());
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let file = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &file).unwrap();
        folder
    }

    /// Changes the names to DeepSeek's, as its `inference/model.py` has them.
    fn renamed(mut self) -> Self {
        let rename = |(name, tensor): (String, _)| {
            let name = name.strip_prefix("model.").unwrap_or(&name);
            let name = match name {
                "embed_tokens.weight" => "embed.weight".to_string(),
                "hc_head.hc_fn" => "hc_head_fn".to_string(),
                "hc_head.hc_base" => "hc_head_base".to_string(),
                "hc_head.hc_scale" => "hc_head_scale".to_string(),
                name => name.replace(".attn.norm.weight", ".attn.kv_norm.weight"),
            };
            (name, tensor)
        };
        self.tensors = self.tensors.into_iter().map(rename).collect();
        self
    }
}

fn logits(model: &LanguageModel, folder: &Path) -> Tensor<3> {
    let ids = expected(folder, &device()).ids;
    let n = ids.dims()[1].min(96);
    model.forward(ids.narrow(1, 0, n), KvCacheConfig::float()).unwrap()
}

fn data(folder: &Path) -> TensorData {
    logits(&load(folder, &device()).unwrap().model, folder).into_data()
}

#[test]
fn golden_checkpoints_load_under_deepseeks_names() {
    for folder in golden_in("deepseek") {
        let renamed = Folder::read(&folder).renamed();
        let found = |name: &str| renamed.tensors.keys().any(|own| own == name);
        assert!(
            ["embed.weight", "hc_head_fn", "head.weight", "norm.weight"].map(found) == [true; 4]
        );
        assert!(found("layers.0.attn.kv_norm.weight"));
        let written = renamed.write();
        fs::copy(folder.join("expected.safetensors"), written.path().join("expected.safetensors"))
            .unwrap();
        assert_eq!(data(written.path()), data(&folder), "{}", folder.display());
    }
}

#[test]
fn messages_have_the_names_of_the_file() {
    for name in [
        "embed.weight",
        "hc_head_fn",
        "layers.0.attn.kv_norm.weight",
        "layers.1.attn.indexer.wq_b.weight",
        "layers.1.attn.indexer.compressor.ape",
    ] {
        let mut folder = Folder::read(&tiny()).renamed();
        folder.tensors.remove(name).unwrap();
        let message = failure(folder.write().path());
        assert_contains(&message, &[&format!("tensor {name} is missing")]);
    }
    let mut both = Folder::read(&tiny());
    let norm = both.tensors["model.layers.0.attn.norm.weight"].clone();
    both.tensors.insert("model.layers.0.attn.kv_norm.weight".into(), norm);
    let message = failure(both.write().path());
    assert_contains(&message, &["layers.0.attn.norm.weight", "occurs twice", "kv_norm"]);
}

/// The scales of a folder: their name, and whether they are powers of two in a byte.
#[derive(Clone, Copy)]
struct Scales {
    name: &'static str,
    e8m0: bool,
    block: [usize; 2],
}

const PUBLISHED: Scales = Scales { name: "scale", e8m0: true, block: [128, 128] };

/// Matrices that DeepSeek publishes in 8 bits, and in bf16.
const EIGHT: [&str; 8] = [
    ".wq_a.",
    ".wq_b.",
    "attn.wkv.",
    ".wo_a.",
    ".wo_b.",
    "experts.w1.",
    "experts.w2.",
    "experts.w3.",
];
const SIXTEEN: [&str; 6] = [
    "compressor.wkv.",
    "compressor.wgate.",
    "gate.weight",
    "weights_proj.",
    "norm.",
    "head.weight",
];

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Returns codes and factors of 8-bit floats, and restores `values`.
fn eight_bits(values: &mut [f32], columns: usize, scales: Scales) -> (Vec<u8>, Vec<f32>) {
    let (table, [r, c]) = (e4m3(), scales.block);
    let rows = values.len() / columns;
    let (mut codes, mut factors) = (vec![0; values.len()], vec![]);
    for first_row in (0..rows).step_by(r) {
        for first in (0..columns).step_by(c) {
            let ends = [(first_row + r).min(rows), (first + c).min(columns)];
            let inside = (first_row..ends[0]).flat_map(|i| (first..ends[1]).map(move |j| (i, j)));
            let amax =
                inside.clone().map(|(i, j)| values[i * columns + j].abs()).fold(0.0, f32::max);
            let factor = f64::from(amax) / 448.0;
            let factor = if scales.e8m0 { factor.log2().ceil().exp2() } else { factor } as f32;
            factors.push(factor);
            for (i, j) in inside {
                let at = i * columns + j;
                let (code, number) = nearest(&table, f64::from(values[at]) / f64::from(factor));
                codes[at] = code;
                values[at] = number as f32 * factor;
            }
        }
    }
    (codes, factors)
}

/// Returns codes, two to a byte, and exponents, and restores `values`.
fn four_bits(values: &mut [f32]) -> (Vec<u8>, Vec<u8>) {
    let (table, mut exponents, mut codes) = (e2m1(), vec![], vec![]);
    for block in values.chunks_mut(32) {
        let amax = block.iter().map(|x| x.abs()).fold(0.0, f32::max);
        let exponent = (f64::from(amax) / 6.0).log2().ceil();
        exponents.push((exponent + 127.0) as u8);
        for x in block {
            let (code, number) = nearest(&table, f64::from(*x) / exponent.exp2());
            codes.push(code);
            *x = (number * exponent.exp2()) as f32;
        }
    }
    (codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect(), exponents)
}

fn power_of_two(factor: &f32) -> u8 {
    (factor.log2() + 127.0) as u8
}

/// Returns the folder as published, and one with the restored weights in f32.
fn published(scales: Scales) -> [Folder; 2] {
    let mut restored = Folder::read(&tiny());
    let mut published = Folder::read(&tiny()).renamed();
    let config = json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "scale_fmt": if scales.e8m0 { json!("ue8m0") } else { Json::Null },
        "weight_block_size": scales.block,
    });
    published.config["quantization_config"] = config;
    published.config["expert_dtype"] = json!("fp4");
    published.config["inference_mode"] = json!("transformers");
    let names = Folder::read(&tiny());
    for name in names.tensors.keys() {
        let own = Folder {
            config: Json::Null,
            tensors: [(name.clone(), (Dtype::U8, vec![0], vec![]))].into(),
        };
        let own = own.renamed().tensors.into_keys().next().unwrap();
        let (_, shape, stored) = restored.tensors.get_mut(name).unwrap();
        let module = own.trim_end_matches(".weight");
        let has = |parts: &[&str]| parts.iter().any(|part| own.contains(part));
        let (own_weight, own_scale) = (own.clone(), format!("{module}.{}", scales.name));
        if own.contains("ffn.experts.") {
            let mut values = f32s(stored);
            let (codes, exponents) = four_bits(&mut values);
            *stored = bytes(&values);
            let [rows, columns] = shape[..] else { panic!("a matrix") };
            let all = &mut published.tensors;
            all.insert(own_weight, (Dtype::I8, vec![rows, columns / 2], codes));
            let scale = (Dtype::F8_E8M0, vec![rows, columns / 32], exponents);
            all.insert(own_scale, scale);
        } else if has(&EIGHT) && !own.contains("compressor") {
            let [rows, columns] = shape[..] else { panic!("a matrix") };
            let mut values = f32s(stored);
            let (codes, factors) = eight_bits(&mut values, columns, scales);
            *stored = bytes(&values);
            let blocks = vec![rows.div_ceil(scales.block[0]), columns.div_ceil(scales.block[1])];
            let scale = match scales.e8m0 {
                true => (Dtype::F8_E8M0, blocks, factors.iter().map(power_of_two).collect()),
                false => (Dtype::F32, blocks, bytes(&factors)),
            };
            published.tensors.insert(own_weight, (Dtype::F8_E4M3, vec![rows, columns], codes));
            published.tensors.insert(own_scale, scale);
        } else if has(&SIXTEEN) || own == "embed.weight" {
            let values: Vec<_> = f32s(stored).into_iter().map(bf16::from_f32).collect();
            *stored = bytes(&values.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
            let stored = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            published.tensors.insert(own_weight, (Dtype::BF16, shape.clone(), stored));
        }
    }
    // The layers that predict later tokens are not read.
    let more = (Dtype::F8_E4M3, vec![1, 2], vec![1, 2]);
    published.tensors.insert("mtp.0.attn.wq_a.weight".into(), more);
    let scale = (Dtype::F8_E8M0, vec![1, 1], vec![127]);
    published.tensors.insert(format!("mtp.0.attn.wq_a.{}", scales.name), scale);
    [published, restored]
}

/// Restored weights are exact, so logits are, too.
#[test]
fn weights_in_8_and_4_bits_are_restored() {
    // Blocks that are not square and do not divide the matrices tell rows from columns.
    let ragged = Scales { block: [24, 20], ..PUBLISHED };
    let v3 = Scales { name: "weight_scale_inv", e8m0: false, block: [24, 20] };
    for scales in [PUBLISHED, ragged, v3] {
        let [published, restored] = published(scales);
        let kinds = |kind| published.tensors.values().filter(|tensor| tensor.0 == kind).count();
        // Five layers with five projections of attention, two with an indexer, and experts.
        assert_eq!(kinds(Dtype::F8_E4M3), 5 * 5 + 2 + 5 * 3 + 1);
        assert_eq!(kinds(Dtype::I8), 5 * 4 * 3);
        let [published, restored] = [published, restored].map(|folder| folder.write());
        let exact = data(restored.path());
        assert_eq!(data(published.path()), exact, "{} {:?}", scales.name, scales.block);
        assert!(data(&tiny()) != exact);
    }
}

#[test]
fn published_weights_have_the_type_that_is_asked_for() {
    let folder = published(PUBLISHED)[0].write();
    let options = LoadOptions::default();
    let model = |options| load_with(folder.path(), &device(), options).unwrap().model;
    let exact = model(options);
    let auto = model(options.with_dtype(WeightDtype::Auto));
    let bf16 = model(options.with_dtype(WeightDtype::Bf16));
    assert_eq!(auto.weight_bytes(), bf16.weight_bytes());
    assert!(auto.weight_bytes() * 100 < exact.weight_bytes() * 51);
    // Experts stay packed as MXFP4, and matrices in bf16 as they are.
    let packed = model(options.with_packed(Some(Activations::Exact)));
    assert!(packed.is_packed() && packed.weight_bytes() < exact.weight_bytes());
    let exact = logits(&exact, folder.path());
    let largest = exact.clone().abs().max().into_scalar::<f32>();
    // The order of sums differs.
    let worst = max_difference(logits(&packed, folder.path()), exact);
    assert!(worst <= 1e-4 * largest, "{worst} of {largest}");
}

/// Returns the message of a load of the published folder after `change`.
fn refused(change: impl FnOnce(&mut Folder)) -> String {
    let [mut folder, _] = published(PUBLISHED);
    change(&mut folder);
    failure(folder.write().path())
}

#[test]
fn scales_that_are_missing_or_do_not_fit_are_refused() {
    let (eight, four) = ("layers.0.attn.wq_b", "layers.0.ffn.experts.1.w2");
    for (module, kind) in [(eight, "F8_E4M3"), (four, "I8")] {
        let [weight, scale, inverse] =
            ["weight", "scale", "weight_scale_inv"].map(|part| format!("{module}.{part}"));
        let missing = refused(|folder| drop(folder.tensors.remove(&scale).unwrap()));
        let why = format!("has type {kind}, but its scales {scale} or {inverse} are missing");
        assert_contains(&missing, &[&weight, &why, "download the folder again"]);
        let twice = refused(|folder| {
            let tensor = folder.tensors[&scale].clone();
            folder.tensors.insert(inverse.clone(), tensor);
        });
        assert_contains(&twice, &["1 tensor is not part of the DeepSeek-V4 model", &inverse]);
        let without = refused(|folder| drop(folder.tensors.remove(&weight).unwrap()));
        assert_contains(&without, &[&format!("{weight} is missing")]);
        let transposed = refused(|folder| folder.tensors.get_mut(&scale).unwrap().1.reverse());
        assert_contains(&transposed, &[&scale, "has shape [1, "]);
    }
    let shape = refused(|folder| {
        let tensor = (Dtype::F8_E8M0, vec![2, 2], vec![127; 4]);
        folder.tensors.insert(format!("{eight}.scale"), tensor);
    });
    assert_contains(&shape, &["[2, 2]", "256 x 32 numbers in blocks of 128 x 128", "[2, 1]"]);
    let shape = refused(|folder| {
        let tensor = (Dtype::F8_E8M0, vec![64, 2], vec![127; 128]);
        folder.tensors.insert(format!("{four}.scale"), tensor);
    });
    assert_contains(&shape, &[four, "[64, 2]", "64 x 16 bytes", "[64, 1]"]);
    let kind = refused(|folder| {
        let tensor = (Dtype::F32, vec![64, 1], bytes(&[1.0; 64]));
        folder.tensors.insert(format!("{four}.scale"), tensor);
    });
    assert_contains(&kind, &[four, "type F32", "must be F8_E8M0"]);
    for (value, text) in [(f32::NAN, "NaN"), (-1.0, "-1"), (f32::INFINITY, "inf")] {
        let message = refused(|folder| {
            let tensor = (Dtype::F32, vec![2, 1], bytes(&[1.0, value]));
            folder.tensors.insert(format!("{eight}.scale"), tensor);
        });
        assert_contains(&message, &[eight, text, "element 1", "finite"]);
    }
    let message =
        refused(|folder| folder.tensors.get_mut(&format!("{eight}.scale")).unwrap().2[1] = 255);
    assert_contains(&message, &[eight, "NaN", "element 1", "finite"]);
    let message =
        refused(|folder| folder.tensors.get_mut(&format!("{four}.scale")).unwrap().2[1] = 255);
    assert_contains(&message, &[four, "finite"]);
    let message =
        refused(|folder| folder.tensors.get_mut(&format!("{eight}.weight")).unwrap().2[33] = 127);
    assert_contains(&message, &[eight, "NaN", "element 33"]);
}

#[test]
fn weights_of_other_types_and_shapes_are_refused() {
    let name = "layers.1.attn.indexer.wq_b.weight";
    let message = refused(|folder| {
        let (_, shape, bytes) = folder.tensors.get_mut(name).unwrap();
        shape[0] /= 2;
        bytes.truncate(shape.iter().product());
        let scale = folder.tensors.get_mut("layers.1.attn.indexer.wq_b.scale").unwrap();
        scale.1[0] /= 2;
        scale.2.truncate(4);
    });
    assert_contains(&message, &[name, "[512, 32]", "[1024, 32]"]);
    let message = refused(|folder| folder.tensors.get_mut(name).unwrap().0 = Dtype::F8_E5M2);
    assert_contains(&message, &[name, "F8_E5M2", "cannot be read"]);
    let message = refused(|folder| {
        folder.config.as_object_mut().unwrap().remove("quantization_config");
    });
    assert_contains(&message, &["F8_E4M3", "quantization_config", "quant_method fp8"]);
    let four = "layers.0.ffn.experts.1.w1.weight";
    let message = refused(|folder| {
        let (_, shape, bytes) = folder.tensors.get_mut(four).unwrap();
        *shape = vec![32, 24];
        bytes.truncate(32 * 24);
    });
    assert_contains(&message, &[four, "48"]);
    let missing = refused(|folder| {
        folder.tensors.remove(name).unwrap();
        folder.tensors.remove("layers.1.attn.indexer.wq_b.scale").unwrap();
    });
    assert_contains(&missing, &[&format!("tensor {name} is missing")]);
}

#[test]
fn quantizations_that_are_not_published_are_refused() {
    let field = |field: &str, value: Json| {
        refused(|folder| folder.config["quantization_config"][field] = value)
    };
    assert_contains(&field("quant_method", json!("awq")), &["quant_method awq", "fp8"]);
    assert_contains(&field("fmt", json!("e5m2")), &["config.fmt = \"e5m2\"", "must be e4m3"]);
    assert_contains(&field("scale_fmt", json!("f8")), &["config.scale_fmt", "must be ue8m0"]);
    let message = field("activation_scheme", json!("static"));
    assert_contains(&message, &["config.activation_scheme = \"static\"", "must be dynamic"]);
    for value in [Json::Null, json!([128]), json!([0, 128]), json!("128")] {
        let shown = if value.is_null() { "missing".into() } else { value.to_string() };
        let message = field("weight_block_size", value);
        assert_contains(&message, &["config.weight_block_size", &shown, "such as [128, 128]"]);
    }
    let other = crate::common::with_config("llama-tiny", |config| {
        config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [1, 1]});
    });
    let message = failure(other.path());
    assert_contains(&message, &["quant_method fp8", "for DeepSeek"]);
}
