//! Quantized models are written in the layout of other libraries and read back unchanged.

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::Tensor;
use kv_models::{
    LanguageModel, LoadOptions, Loaded, QuantizeOptions, SaveOptions, Tokenizer, WeightDtype,
    kv_cubecl::KvCacheConfig,
    kv_weights::{Activations, GroupSize, Quantize, Range, WeightFormat, quantize, reference},
    load, load_with, save, save_quantized,
};
use serde_json::{Value as Json, json};

use crate::common::{
    GgmlType, TINY, assert_contains, blocky, copy, device, expected, failure, fixture,
    max_difference, read_tensors, tiny, write_gguf,
};

const INT4: WeightFormat = WeightFormat::Int4(GroupSize::G32);
pub(crate) const INT8: WeightFormat = WeightFormat::Int8(GroupSize::G32);
const MXFP4: WeightFormat = WeightFormat::Mxfp4;

/// Returns a tokenizer with two words; the second ends a text.
fn tokenizer() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    });
    fs::write(&path, tokenizer.to_string()).unwrap();
    Tokenizer::from_file(path, &[1]).unwrap()
}

/// Formats of attention, MLPs and embedding.
pub(crate) type Formats = [Option<WeightFormat>; 3];

pub(crate) fn write(model: &LanguageModel, folder: &Path, formats: Formats, how: Quantize) {
    let options = QuantizeOptions::new(formats).with_quantize(how);
    save_quantized(folder, model, &tokenizer(), options).unwrap();
}

pub(crate) fn packed(path: &Path, activations: Activations) -> Loaded {
    load_with(path, &device(), LoadOptions::default().with_packed(Some(activations))).unwrap()
}

fn logits(model: &LanguageModel, folder: &Path) -> Tensor<3> {
    model.forward(expected(folder, &device()).ids, KvCacheConfig::float()).unwrap()
}

/// Returns the tensors of a model in f32.
fn tensors(model: &LanguageModel) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let folder = tempfile::tempdir().unwrap();
    let options = SaveOptions { dtype: WeightDtype::F32, cache: None };
    save(folder.path(), model, &tokenizer(), options).unwrap();
    let tensors = read_tensors(&folder.path().join("model.safetensors"));
    tensors.into_iter().map(|(name, shape, values)| (name, (shape, values))).collect()
}

fn transposed(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// Returns a matrix quantized and restored by the reference.
fn rounded(values: &[f32], shape: [usize; 2], format: WeightFormat, how: Quantize) -> Vec<f32> {
    reference::restore(format, &quantize(values, shape, format, how).unwrap())
}

/// Returns the expected values of a quantized tensor.
fn expected_of(
    name: &str,
    shape: &[usize],
    values: &[f32],
    [attention, mlp, embedding]: Formats,
    how: Quantize,
) -> Vec<f32> {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let format = match shape.len() {
        1 => None,
        _ if has(&["wpe", "router", "conv1d"]) || name.ends_with("_bias") => None,
        _ if has(&["embed_tokens", "wte", "lm_head"]) => embedding,
        _ if has(&["attn"]) => attention,
        _ => mlp,
    };
    let Some(format) = format else { return values.to_vec() };
    match *shape {
        // Matrices of gpt2 and of experts are stored transposed.
        [columns, rows] if has(&["c_attn", "c_proj", "c_fc"]) => {
            let rows_first = transposed(values, [columns, rows]);
            transposed(&rounded(&rows_first, [rows, columns], format, how), [rows, columns])
        }
        [rows, columns] => rounded(values, [rows, columns], format, how),
        [_, columns, rows] => values
            .chunks_exact(rows * columns)
            .flat_map(|expert| {
                let rows_first = transposed(expert, [columns, rows]);
                transposed(&rounded(&rows_first, [rows, columns], format, how), [rows, columns])
            })
            .collect(),
        _ => panic!("{name} has shape {shape:?}"),
    }
}

#[test]
fn every_family_matches_the_reference() {
    let scratch = tempfile::tempdir().unwrap();
    let whole = Quantize::default();
    // Compressed queries of 24 channels are not groups of 32.
    for name in blocky().filter(|name| *name != "deepseek_v3-tiny") {
        let original = load(tiny(name), &device()).unwrap().model;
        let experts = name == "gpt-oss-tiny";
        let all: [(&str, Formats, Quantize); 4] = [
            ("int4", [Some(INT4); 3], whole.with_range(Range::LeastError)),
            ("mixed", [Some(INT8), Some(INT4), Some(INT4)], whole.with_symmetric(true)),
            ("mxfp4", [Some(MXFP4); 3], whole),
            ("mlp", [None, Some(MXFP4), None], whole),
        ];
        for (kind, formats, how) in all {
            let formats = match experts {
                true => [formats[0], Some(MXFP4), formats[2]],
                false => formats,
            };
            let folder = scratch.path().join(format!("{name}-{kind}"));
            write(&original, &folder, formats, how);
            let restored = load(&folder, &device()).unwrap().model;
            let before = tensors(&original);
            for (tensor, (shape, values)) in tensors(&restored) {
                let (_, from) = &before[&tensor];
                let expected = expected_of(&tensor, &shape, from, formats, how);
                assert!(values == expected, "{name}, {kind}: {tensor}");
            }
            let Loaded { model, notes, .. } = packed(&folder, Activations::Exact);
            assert!(!notes.iter().any(|note| note.contains("restored")), "{name}: {notes:?}");
            assert!(model.is_packed(), "{name}, {kind}");
            assert_eq!(model.n_weights(), original.n_weights(), "{name}, {kind}");
            assert!(model.weight_bytes() < restored.weight_bytes() * 9 / 10, "{name}, {kind}");
            let (found, expected) = (logits(&model, &tiny(name)), logits(&restored, &tiny(name)));
            let scale = expected.clone().abs().max().into_scalar::<f32>();
            let difference = max_difference(found, expected);
            assert!(difference < 1e-4 * scale, "{name}, {kind}: {difference} of {scale}");
        }
    }
}

/// Weights written by the `compressed-tensors` library, and the values it restores.
#[test]
fn integers_of_compressed_tensors_are_read() {
    let folder = fixture("pack-quantized");
    let model = load(&folder, &device()).unwrap().model;
    let found = tensors(&model);
    let expected = read_tensors(&folder.join("expected.safetensors"));
    assert_eq!(expected.len(), 8);
    for (name, shape, values) in expected {
        let (found_shape, found) = &found[&name];
        assert_eq!(found_shape, &shape, "{name}");
        assert!(found == &values, "{name}");
    }
    assert!(packed(&folder, Activations::Exact).model.is_packed());
}

#[test]
fn blocks_of_a_file_are_quantized_from_restored_numbers() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::Q8_0, &[]);
    let folders = ["restored", "packed"].map(|name| scratch.path().join(name));
    let how = Quantize::default();
    write(&load(&file, &device()).unwrap().model, &folders[0], [Some(INT4); 3], how);
    write(&packed(&file, Activations::Int8).model, &folders[1], [Some(INT4); 3], how);
    let [restored, packed] = folders.map(|f| fs::read(f.join("model.safetensors")).unwrap());
    assert!(restored == packed);
}

#[test]
fn failed_writes_are_one_line_and_leave_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let refused = |name: &str, format: WeightFormat, parts: &[&str]| {
        let model = load(tiny(name), &device()).unwrap().model;
        let options = QuantizeOptions::new([Some(format); 3]);
        let error = save_quantized(&out, &model, &tokenizer(), options).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        assert_contains(&error, parts);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "{error}");
    };
    let wide = WeightFormat::Int4(GroupSize::G128);
    refused("llama-tiny", wide, &["embed_tokens.weight", "columns", "groups of 128"]);
    refused("gpt-oss-tiny", INT4, &["experts", "mxfp4", "int4-g32"]);
    refused("llama-tiny", WeightFormat::Q4_1, &["quantizing to q4_1 is not supported"]);
    fs::create_dir(&out).unwrap();
    let model = load(tiny("llama-tiny"), &device()).unwrap().model;
    let options = QuantizeOptions::new([Some(INT4); 3]);
    let error = save_quantized(&out, &model, &tokenizer(), options).unwrap_err().to_string();
    assert_contains(&error, &["out", "exists already"]);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
}

/// Returns a folder of int4 weights with a changed safetensors header.
fn damaged(change: impl FnOnce(&mut Json, &mut Vec<u8>)) -> tempfile::TempDir {
    let folder = copy(&fixture("pack-quantized"));
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Json = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    change(&mut header, &mut data);
    let header = header.to_string().into_bytes();
    let all = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(path, all).unwrap();
    folder
}

#[test]
fn damaged_weights_are_named() {
    const MATRIX: &str = "model.layers.0.mlp.up_proj.weight";
    let key = |suffix: &str| format!("{MATRIX}{suffix}");
    let start = |header: &Json, suffix: &str| {
        header[key(suffix)]["data_offsets"][0].as_u64().unwrap() as usize
    };
    type Change<'a> = Box<dyn Fn(&mut Json, &mut Vec<u8>) + 'a>;
    let rename = |from: &'static str, to: &'static str| -> Change<'_> {
        Box::new(move |header, _| {
            let tensor = header.as_object_mut().unwrap().remove(&key(from)).unwrap();
            header[key(to)] = tensor;
        })
    };
    let cases: Vec<(Change<'_>, Vec<&str>)> = vec![
        (rename("_scale", "_scales"), vec!["up_proj.weight_scale is missing"]),
        (rename("_packed", "_codes"), vec!["up_proj.weight"]),
        (
            rename("_zero_point", "_g_idx"),
            vec!["up_proj.weight_g_idx", "not part of the Llama model"],
        ),
        (
            Box::new(|header, _| {
                let shape = header[key("_packed")]["shape"].clone();
                let [rows, words] = [0, 1].map(|i| shape[i].as_u64().unwrap());
                header[key("_packed")]["shape"] = json!([rows / 2, words * 2]);
            }),
            vec!["up_proj.weight_shape", "not a shape of"],
        ),
        (
            Box::new(|header, data| {
                let at = start(header, "_shape") + 8;
                data[at..at + 8].copy_from_slice(&96u64.to_le_bytes());
            }),
            vec!["up_proj.weight_packed", "96 codes of 4 or of 8 bits"],
        ),
        (
            Box::new(|header, data| {
                let at = start(header, "_scale");
                data[at..at + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
            }),
            vec!["up_proj.weight_scale", "NaN"],
        ),
        (
            Box::new(|header, data| {
                let at = start(header, "_scale");
                data[at..at + 2].copy_from_slice(&half::f16::NEG_ONE.to_le_bytes());
            }),
            vec!["up_proj.weight_scale", "not negative"],
        ),
        (
            Box::new(|_, data| data.truncate(data.len() / 2)),
            vec!["model.safetensors", "not a readable safetensors file"],
        ),
    ];
    for (change, parts) in cases {
        let folder = damaged(&*change);
        let file = folder.path().join("model.safetensors");
        assert_contains(&failure(&file), &parts);
        let options = LoadOptions::default().with_packed(Some(Activations::Exact));
        let error = load_with(&file, &device(), options).unwrap_err().to_string();
        assert_contains(&error, &parts);
    }
    let other = crate::common::with_config("llama-tiny", |config| {
        config["quantization_config"] =
            json!({"quant_method": "compressed-tensors", "format": "float-quantized"});
    });
    let error = load(other.path(), &device()).unwrap_err().to_string();
    assert_contains(&error, &["compressed-tensors", "float-quantized"]);
}

/// A head that is quantized as it is loaded has the numbers of the reference, and all other tensors
/// are unchanged.
#[test]
fn a_head_is_quantized_as_it_is_loaded() {
    let how = Quantize::default().with_range(Range::LeastError);
    let scratch = tempfile::tempdir().unwrap();
    for name in TINY {
        let plain = load(tiny(name), &device()).unwrap().model;
        let before = tensors(&plain);
        let is_tied = !before.keys().any(|name| name.contains("lm_head"));
        for format in [INT4, INT8, MXFP4] {
            let options = LoadOptions::default().with_head(Some(format));
            let model = load_with(tiny(name), &device(), options).unwrap().model;
            assert!(model.is_packed(), "{name} {format}");
            let head = if is_tied { ["embed_tokens.weight", "wte"] } else { ["lm_head"; 2] };
            let after = tensors(&model);
            assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
            for (tensor, (shape, values)) in &before {
                let expected = match head.iter().any(|part| tensor.contains(part)) {
                    true => rounded(values, [shape[0], shape[1]], format, how),
                    false => values.clone(),
                };
                assert!(after[tensor].1 == expected, "{name} {format}: {tensor}");
            }
        }
        // A head in blocks is refused: quantizing it again would add a second error.
        let file = scratch.path().join(name).with_extension("gguf");
        write_gguf(&tiny(name), &file, GgmlType::Q4_0, &[]);
        let options = LoadOptions::default().with_head(Some(INT4));
        let error = load_with(&file, &device(), options).unwrap_err().to_string();
        assert_contains(&error, &["is stored as", "already, so the head cannot become int4"]);
        assert!(!error.contains('\n'), "{error}");
    }
    for (options, wanted) in [
        (
            LoadOptions::default().with_head(Some(INT4)).with_dtype(WeightDtype::Bf16),
            "needs dtype f32",
        ),
        (LoadOptions::default().with_head(Some(WeightFormat::Q4_0)), "only int4, int8 and mxfp4"),
        (
            LoadOptions::default().with_head(Some(WeightFormat::Int4(GroupSize::G128))),
            "columns, which groups of 128 do not divide",
        ),
    ] {
        let error = load_with(tiny("qwen2-tiny"), &device(), options).unwrap_err().to_string();
        assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
    }
}
