//! Models in several files and with every GGUF block type.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{Int, Tensor};
use kv_models::{
    LanguageModel, LayerSpec, SaveOptions, Tokenizer,
    kv_cubecl::KvCacheConfig,
    llama::{Config, Llama},
    load,
    nn::init::seeded,
    save,
};
use safetensors::{Dtype, tensor::TensorView};

use crate::common::{
    GgmlType, Value, byte_vocabulary, copy, device, expected, fixture, gguf_parts, max_difference,
    read_tensors, small, tiny, write_gguf, write_gguf_file,
};

fn llama(path: &Path) -> Llama {
    load(path, &device()).unwrap().model.downcast().unwrap()
}

/// Returns the weights that `types.gguf` stores as blocks, under their GGUF names.
fn restored(model: &Llama) -> BTreeMap<String, Vec<f32>> {
    let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
    let mut all = BTreeMap::from([
        ("token_embd.weight".to_string(), values(model.embedding.weight.val())),
        ("output.weight".to_string(), values(model.head.as_ref().unwrap().weight.val())),
    ]);
    for (i, layer) in model.layers.iter().enumerate() {
        let (qkv, gate_up) = (layer.qkv.weight.val(), layer.mlp.gate_up.weight.val());
        for (name, matrix, start, rows) in [
            ("attn_q", &qkv, 0, 4),
            ("attn_k", &qkv, 4, 4),
            ("attn_v", &qkv, 8, 4),
            ("ffn_gate", &gate_up, 0, 2),
            ("ffn_up", &gate_up, 2, 2),
        ] {
            let rows = values(matrix.clone().narrow(0, start, rows));
            all.insert(format!("blk.{i}.{name}.weight"), rows);
        }
    }
    all
}

fn gguf_types(file: &str) -> PathBuf {
    fixture("gguf-types").join(file)
}

#[test]
fn every_block_type_is_restored_as_the_gguf_package_restores_it() {
    let restored = restored(&llama(&gguf_types("types.gguf")));
    let expected = read_tensors(&gguf_types("expected.safetensors"));
    assert_eq!(expected.len(), restored.len());
    for (name, _, values) in expected {
        assert_eq!(restored[&name], values, "{name}");
    }
}

/// Version 3 only added big-endian files.
#[test]
fn version_2_of_gguf_is_read_as_version_3() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("types.gguf");
    let mut bytes = fs::read(gguf_types("types.gguf")).unwrap();
    assert_eq!(bytes[4..8], 3u32.to_le_bytes());
    bytes[4] = 2;
    fs::write(&file, bytes).unwrap();
    assert_eq!(restored(&llama(&file)), restored(&llama(&gguf_types("types.gguf"))));
}

#[test]
fn a_split_gguf_loads_by_any_of_its_files() {
    let whole = restored(&llama(&gguf_types("types.gguf")));
    for i in 1..=3 {
        let file = gguf_types(&format!("split-0000{i}-of-00003.gguf"));
        assert_eq!(restored(&llama(&file)), whole, "{}", file.display());
        assert_eq!(load(&file, &device()).unwrap().name, "types");
    }
}

#[test]
fn a_split_gguf_has_its_vocabulary_in_the_first_file() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.gguf");
    let (metadata, tensors) =
        gguf_parts(&tiny("gpt2-tiny"), GgmlType::F32, &byte_vocabulary("gpt2", "gpt-2", &[]));
    write_gguf_file(&whole, &metadata, &tensors);
    let [first, second] =
        [1, 2].map(|i| folder.path().join(format!("parts-0000{i}-of-00002.gguf")));
    // All tensors in the second file, as with llama.cpp's `--no-tensor-first-split`.
    let part = |no: u16| {
        vec![("split.no".to_string(), Value::U16(no)), ("split.count".to_string(), Value::U16(2))]
    };
    let metadata: Vec<_> = metadata.into_iter().chain(part(0)).collect();
    write_gguf_file(&first, &metadata, &[]);
    write_gguf_file(&second, &part(1), &tensors);

    let ids = |tokenizer: Tokenizer| tokenizer.encode("hi hi").unwrap();
    let expected = ids(Tokenizer::from_gguf(&whole).unwrap());
    for file in [&first, &second] {
        assert_eq!(ids(Tokenizer::from_gguf(file).unwrap()), expected);
        let loaded = load(file, &device()).unwrap();
        assert_eq!(ids(loaded.tokenizer.unwrap()), expected);
        assert_eq!(loaded.name, "parts");
    }
}

/// Compares the logits of a model with those of the transformers library.
fn check(path: &Path, folder: &Path, tolerance: f32) {
    let device = device();
    let expected = expected(folder, &device);
    let model = load(path, &device).unwrap().model;
    let logits = model.forward(expected.ids, KvCacheConfig::float()).unwrap();
    let worst = max_difference(logits, expected.logits);
    assert!(worst <= tolerance, "{}: {worst} > {tolerance}", path.display());
}

/// Rewrites the weights as two shards of another float type and returns their names.
fn shard(folder: &Path, dtype: Dtype) -> [String; 2] {
    let tensors = read_tensors(&folder.join("model.safetensors"));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let files = [1, 2].map(|i| format!("model-0000{i}-of-00002.safetensors"));
    let mut map = BTreeMap::new();
    let half = tensors.len() / 2;
    for (file, part) in files.iter().zip([&tensors[..half], &tensors[half..]]) {
        let data: Vec<(String, Vec<usize>, Vec<u8>)> = part
            .iter()
            .map(|(name, shape, values)| {
                map.insert(name.clone(), file.clone());
                let bytes = values.iter().flat_map(|&x| match dtype {
                    Dtype::F16 => half::f16::from_f32(x).to_le_bytes(),
                    _ => half::bf16::from_f32(x).to_le_bytes(),
                });
                (name.clone(), shape.clone(), bytes.collect())
            })
            .collect();
        let views = data.iter().map(|(name, shape, bytes)| {
            (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &folder.join(file)).unwrap();
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    files
}

#[test]
fn shards_load_by_the_folder_or_any_of_them() {
    for (dtype, tolerance) in [(Dtype::F16, 5e-3), (Dtype::BF16, 5e-2)] {
        let folder = copy(&tiny("llama3-rope-tiny"));
        let files = shard(folder.path(), dtype).map(|file| folder.path().join(file));
        for with_index in [true, false] {
            if !with_index {
                fs::remove_file(folder.path().join("model.safetensors.index.json")).unwrap();
            }
            for path in [folder.path(), &files[0], &files[1]] {
                check(path, &tiny("llama3-rope-tiny"), tolerance);
            }
        }
        // The model's name is the common prefix of its shards.
        assert_eq!(load(&files[1], &device()).unwrap().name, "model");
    }
    let folder = fixture("pytorch-shards");
    for path in [folder.clone(), folder.join("pytorch_model-00002-of-00002.bin")] {
        check(&path, &fixture("pytorch-tiny"), 2e-4);
    }
}

fn rms(a: &Tensor<3>, b: &Tensor<3>) -> f32 {
    (a.clone() - b.clone()).powi_scalar(2).mean().into_scalar::<f32>().sqrt()
}

/// Writes the Llama in `folder` with each of `types` and compares its logits with `logits`. The
/// difference must be a small share of the least difference caused by a missing layer. `types`
/// gives that share, 1.5x the measured one.
fn compare_with_a_missing_layer(
    folder: &Path,
    ids: &Tensor<2, Int>,
    logits: &Tensor<3>,
    types: &[(GgmlType, f32)],
) {
    let changed = |model: Llama| {
        let model = LanguageModel::new(model);
        rms(&model.forward(ids.clone(), KvCacheConfig::float()).unwrap(), logits)
    };
    let float = llama(folder);
    let without = |i| {
        let mut model = float.clone();
        model.layers.remove(i);
        changed(model)
    };
    let layer = (0..float.layers.len()).map(without).fold(f32::INFINITY, f32::min);
    let mut wrong = vec![];
    let scratch = tempfile::tempdir().unwrap();
    for &(dtype, share) in types {
        let file = scratch.path().join(format!("{dtype:?}.gguf"));
        write_gguf(folder, &file, dtype, &[]);
        let of_layer = changed(llama(&file)) / layer;
        // A much smaller difference would mean that another type was written.
        if !(share / 3.0..=share).contains(&of_layer) {
            wrong.push((dtype, of_layer, share));
        }
    }
    assert!(wrong.is_empty(), "type, part of a layer, allowed: {wrong:?}");
}

#[test]
fn blocks_of_32_change_the_logits_far_less_than_a_missing_layer() {
    let folder = tiny("qwen2-tiny");
    let expected = expected(&folder, &device());
    let types = [
        (GgmlType::F16, 0.001),
        (GgmlType::BF16, 0.0075),
        (GgmlType::Q8_0, 0.027),
        (GgmlType::Q5_1, 0.17),
        (GgmlType::Q5_0, 0.22),
        (GgmlType::Q4_1, 0.38),
        (GgmlType::Q4_0, 0.36),
    ];
    compare_with_a_missing_layer(&folder, &expected.ids, &expected.logits, &types);
}

#[test]
fn blocks_of_256_change_the_logits_less_than_a_missing_layer() {
    let device = device();
    let config = Config {
        vocab_size: 257,
        hidden_size: 256,
        intermediate_size: 512,
        n_layers: 1,
        attention: LayerSpec::new(4, 2, 64),
        rotary_dim: 64,
        ..small()
    };
    let model = LanguageModel::new(seeded(&device, 5, || Llama::init(config, &device)));
    let ids = expected(&tiny("llama-tiny"), &device).ids;
    let logits = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::train_bpe(["a text"].iter(), 257).unwrap();
    save(folder.path(), &model, &tokenizer, SaveOptions::default()).unwrap();
    let types = [
        (GgmlType::Q8_0, 0.019),
        (GgmlType::Q6K, 0.066),
        (GgmlType::Q5K, 0.13),
        (GgmlType::Q4K, 0.27),
        (GgmlType::Q3K, 0.52),
        (GgmlType::Q2K, 0.85),
    ];
    compare_with_a_missing_layer(folder.path(), &ids, &logits, &types);
}
