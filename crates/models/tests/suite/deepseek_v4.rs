//! DeepSeek-V4: logits of tiny checkpoints against the transformers library, refusals, saved
//! folders and residual streams.

use std::{collections::BTreeMap, fs, path::Path};

use burn::{
    module::Param,
    tensor::{Device, Int, Tensor, TensorData},
};
use kv_models::{
    AttentionTrace, LanguageModel, LoadOptions, QuantizeOptions, SaveOptions, WeightDtype,
    deepseek_v4::{Config, DeepseekV4, HyperConnection, sinkhorn},
    kv_cubecl::{
        KvCacheConfig,
        sparse::{Compressed, Entries, SparseOptions, sparse_attention},
    },
    kv_weights::{Activations, GroupSize, WeightFormat},
    load, load_with, outline, save, save_quantized,
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value as Json, json};

use crate::common::{
    assert_contains, copy,
    deepseek::{TOLERANCE, golden, small, tiny, words},
    device, expected, failure, max_difference,
};

mod bad_input;

fn worst(model: &LanguageModel, folder: &Path, device: &Device) -> f32 {
    let expected = expected(folder, device);
    let largest = expected.logits.clone().abs().max().into_scalar::<f32>();
    let logits = model.forward(expected.ids, KvCacheConfig::float()).unwrap();
    max_difference(logits, expected.logits) / largest
}

#[test]
fn golden_logits_of_whole_sequences() {
    let device = device();
    for folder in golden() {
        let loaded = load(&folder, &device).unwrap();
        assert!(loaded.notes.is_empty(), "{:?}", loaded.notes);
        let worst = worst(&loaded.model, &folder, &device);
        assert!(worst <= TOLERANCE, "{}: {worst} > {TOLERANCE}", folder.display());
    }
}

/// A token depends on the tokens before it only, whether or not its window is complete.
#[test]
fn logits_of_a_prefix_do_not_depend_on_later_tokens() {
    let device = device();
    let model = load(tiny(), &device).unwrap().model;
    let ids = expected(&tiny(), &device).ids;
    let whole = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let largest = whole.clone().abs().max().into_scalar::<f32>();
    for n in [1, 3, 4, 5, 8, 15, 17, 31, 32, 33, 65, 131] {
        let prefix = model.forward(ids.clone().narrow(1, 0, n), KvCacheConfig::float()).unwrap();
        let worst = max_difference(prefix, whole.clone().narrow(1, 0, n));
        assert!(worst <= 1e-5 * largest, "{n} tokens: {worst}");
    }
}

#[test]
fn weights_in_16_bits_give_nearly_the_same_logits() {
    let device = device();
    let model = load(tiny(), &device).unwrap().model;
    let ids = expected(&tiny(), &device).ids.narrow(1, 0, 64);
    let exact = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let largest = exact.clone().abs().mean().into_scalar::<f32>();
    let saved = tempfile::tempdir().unwrap();
    let options = SaveOptions { dtype: WeightDtype::Bf16, ..Default::default() };
    save(saved.path(), &model, &words(), options).unwrap();
    for options in [
        LoadOptions::default(),
        LoadOptions::default().with_dtype(WeightDtype::Bf16),
        LoadOptions::default().with_packed(Some(Activations::Exact)),
    ] {
        let model = load_with(saved.path(), &device, options).unwrap().model;
        let logits = model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
        let mean = (logits - exact.clone()).abs().mean().into_scalar::<f32>();
        assert!(mean > 0.0 && mean < 0.05 * largest, "{options:?}: {mean} of {largest}");
    }
}

#[test]
fn quantized_folders_are_read_restored_and_packed() {
    let device = device();
    let model = load(tiny(), &device).unwrap().model;
    let ids = expected(&tiny(), &device).ids.narrow(1, 0, 64);
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("int8");
    let options = QuantizeOptions::new([Some(WeightFormat::Int8(GroupSize::G32)); 3]);
    save_quantized(&folder, &model, &words(), options).unwrap();
    let logits =
        |model: &LanguageModel| model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let restored = load(&folder, &device).unwrap().model;
    let packed = LoadOptions::default().with_packed(Some(Activations::Exact));
    let packed = load_with(&folder, &device, packed).unwrap().model;
    assert!(packed.weight_bytes() < model.weight_bytes() / 2);
    let (restored, exact) = (logits(&restored), logits(&model));
    let largest = exact.clone().abs().max().into_scalar::<f32>();
    let worst = max_difference(logits(&packed), restored.clone());
    assert!(worst <= 1e-4 * largest, "{worst}");
    assert!(max_difference(restored, exact) > 1e-4 * largest);
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let owned = |(name, view): (&str, TensorView<'_>)| {
        (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    tensors.iter().map(owned).collect()
}

fn with_config(change: impl FnOnce(&mut Json)) -> tempfile::TempDir {
    let folder = copy(&tiny());
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
    folder
}

fn with_config_error(change: impl FnOnce(&mut Json)) -> String {
    failure(with_config(change).path())
}

/// The fields of the first published files: a ratio for each layer, one rope, a number of layers.
#[test]
fn older_fields_describe_the_same_model() {
    let device = device();
    let spec = load(tiny(), &device).unwrap().model.spec().clone();
    let older = with_config(|config| {
        let fields = config.as_object_mut().unwrap();
        for field in ["layer_types", "mlp_layer_types", "partial_rotary_factor"] {
            fields.remove(field).unwrap();
        }
        let mut ropes = fields.remove("rope_parameters").unwrap();
        let mut rope = ropes["compress"].take();
        let entries = rope.as_object_mut().unwrap();
        for field in ["rope_theta", "partial_rotary_factor", "attention_factor"] {
            entries.remove(field).unwrap();
        }
        let kind = entries.remove("rope_type").unwrap();
        entries.insert("type".into(), kind);
        fields.insert("rope_scaling".into(), rope);
        fields.insert("compress_ratios".into(), json!([0, 4, 32, 4, 32, 0]));
        fields.insert("num_hash_layers".into(), json!(2));
    });
    let loaded = load(older.path(), &device).unwrap();
    assert_eq!(*loaded.model.spec(), spec);
    let worst = worst(&loaded.model, &tiny(), &device);
    assert!(worst <= TOLERANCE, "{worst}");
    let message = with_config_error(|config| {
        config.as_object_mut().unwrap().remove("layer_types");
        config["compress_ratios"] = json!([0, 4, 32, 128, 32]);
    });
    assert_contains(&message, &["compress_ratios = 128", "must be 0, 4 or 32"]);
    let message = with_config_error(|config| {
        config.as_object_mut().unwrap().remove("layer_types");
        config["compress_ratios"] = json!([0, 4]);
    });
    assert_contains(&message, &["length of compress_ratios = 2", "num_hidden_layers 5"]);
}

#[test]
fn a_configuration_alone_gives_the_outline() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    fs::copy(tiny().join("config.json"), &config).unwrap();
    let sizes = |path: &Path| {
        let outline = outline(path, &device(), LoadOptions::default()).unwrap();
        (outline.weights.total(), outline.spec)
    };
    let (listed, spec) = sizes(folder.path());
    let (read, whole) = sizes(&tiny());
    assert_eq!((listed, spec), (read, whole));
    assert!(listed > 1_900_000, "{listed}");
}

#[test]
fn saved_models_are_read_back_unchanged() {
    let device = device();
    let saved = tempfile::tempdir().unwrap();
    let model = load(tiny(), &device).unwrap().model;
    save(saved.path(), &model, &words(), SaveOptions::default()).unwrap();
    assert!(tensors(saved.path()) == tensors(&tiny()));
    let again = load(saved.path(), &device).unwrap().model;
    let config = |model: &LanguageModel| model.decoder().config_json(Path::new("a")).unwrap();
    assert_eq!((config(&again), again.spec()), (config(&model), model.spec()));
    let ids = expected(&tiny(), &device).ids;
    let logits = |model: &LanguageModel| {
        model.forward(ids.clone(), KvCacheConfig::float()).unwrap().to_data()
    };
    assert_eq!(logits(&again), logits(&model));
}

fn some_ids(config: &Config, device: &Device) -> Tensor<2, Int> {
    let ids = (0..40).map(|i| (i * 7 + i * i) % config.vocab_size as i32);
    Tensor::from_data(TensorData::new(ids.collect::<Vec<_>>(), [2, 20]), device)
}

#[test]
fn random_models_can_be_saved() {
    let (device, config) = (device(), small());
    let model: LanguageModel = DeepseekV4::random(config.clone(), &device).unwrap().into();
    let ids = some_ids(&config, &device);
    let logits = |model: &LanguageModel| {
        model.forward(ids.clone(), KvCacheConfig::float()).unwrap().to_data()
    };
    let saved = tempfile::tempdir().unwrap();
    save(saved.path(), &model, &words(), SaveOptions::default()).unwrap();
    let again = load(saved.path(), &device).unwrap().model;
    assert_eq!(again.spec(), model.spec());
    assert_eq!(logits(&again), logits(&model));
    assert!(logits(&model).iter::<f32>().all(f32::is_finite));
    // The table of experts is the same in every model, and the experts of an id differ.
    let other = DeepseekV4::random(config.clone(), &device).unwrap();
    let table = other.layers[2].experts.table.clone().unwrap().into_data();
    let bytes = tensors(saved.path())["model.layers.2.ffn.gate.tid2eid"].2.clone();
    let numbers: Vec<i64> = table.iter::<i64>().collect();
    assert_eq!(bytes, numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    assert!(numbers.chunks(2).all(|pair| pair[0] != pair[1]));
    let counts = [0, 1, 2].map(|expert| numbers.iter().filter(|n| **n == expert).count());
    assert!(counts.iter().all(|count| (15..40).contains(count)), "{counts:?}");
    let broken = Config { top_k: 0, ..config };
    let message = DeepseekV4::random(broken, &device).unwrap_err().to_string();
    assert_contains(&message, &["index_topk = 0"]);
}

/// The loss of the text has gradients for all parameters but the indexers', and the indexers' own
/// loss has gradients for these only.
#[test]
fn parameters_have_gradients() {
    let (device, config) = (device().autodiff(), small());
    let model = DeepseekV4::random(config.clone(), &device).unwrap();
    let ids = some_ids(&config, &device);
    let language: LanguageModel = model.clone().into();
    let logits = language.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    let grads = logits.square().sum().backward();
    let mut losses = vec![];
    let mut observe = |trace: AttentionTrace| {
        losses.extend(trace.sparse().unwrap().index_loss().unwrap());
    };
    let float = KvCacheConfig::float().into();
    language.hidden_with(ids, &float, Default::default(), Some(&mut observe)).unwrap();
    assert_eq!(losses.len(), 1);
    let of_indexer = losses.remove(0).backward();
    let found = |vector: &Param<Tensor<1>>| {
        let grad = vector.val().grad(&grads).unwrap();
        assert!(grad.abs().max().into_scalar::<f32>() > 0.0);
    };
    for layer in &model.layers {
        found(&layer.attention.sink_logits);
        found(&layer.attention_streams.base);
        found(&layer.expert_streams.scale);
        found(&layer.attention.row_norm.gamma);
        if let Some(compressor) = &layer.attention.compressor {
            found(&compressor.parts.norm.gamma);
        }
        if let Some(indexer) = &layer.attention.indexer {
            let gamma = indexer.compressor.parts.norm.gamma.val();
            assert!(gamma.grad(&grads).is_none() && gamma.grad(&of_indexer).is_some());
            assert!(indexer.query.weight.val().grad(&of_indexer).is_some());
            assert!(indexer.weights.weight.val().grad(&of_indexer).is_some());
        }
        for own in [&layer.attention.query_norm.gamma, &layer.attention_norm.gamma] {
            assert!(own.val().grad(&of_indexer).is_none());
        }
    }
    found(&model.norm.base);
}

/// Attention to what the observer receives gives the layers' outputs.
#[test]
fn observers_receive_sparse_attention() {
    let device = device();
    let model = load(tiny(), &device).unwrap().model;
    let ids = expected(&tiny(), &device).ids;
    let mut traces: Vec<AttentionTrace> = vec![];
    let mut observe = |trace| traces.push(trace);
    let float = KvCacheConfig::float();
    let hidden = model
        .hidden_with(ids.clone(), &float.into(), Default::default(), Some(&mut observe))
        .unwrap();
    assert_eq!(hidden.to_data(), model.hidden(ids, float).unwrap().to_data());
    assert_eq!(traces.len(), model.n_layers());
    for (i, trace) in traces.iter().enumerate() {
        assert_eq!(trace.layer, i);
        assert!(trace.kv().is_none());
        let sparse = trace.sparse().unwrap();
        let layer = model.spec().layers[i].sparse.unwrap();
        assert_eq!(sparse.index.is_some(), layer.selection.is_some());
        let selection = sparse.index.as_ref().map(|index| &index.selection);
        let entries = sparse.entries.as_ref().and_then(Entries::tensor);
        let compressed = entries.zip(sparse.config.compression);
        let compressed =
            compressed.map(|(entries, compression)| Compressed { entries, compression, selection });
        let options = SparseOptions {
            sliding_window: sparse.config.sliding_window,
            scale: None,
            sink_logits: sparse.sink_logits.clone(),
        };
        let output =
            sparse_attention(sparse.query.clone(), &sparse.rows, compressed, &options).unwrap();
        assert_eq!(output.to_data(), trace.output().to_data());
    }
}

#[test]
fn sinkhorn_ends_with_columns() {
    let device = device();
    let logits = (0..5 * 16).map(|i| ((i * 37 + i * i * 11) % 23) as f32 / 6.0 - 1.8);
    let logits = TensorData::new(logits.collect::<Vec<f32>>(), [1, 5, 4, 4]);
    let matrix = sinkhorn(Tensor::<4>::from_data(logits, &device), 20, 1e-6);
    let off = |axis: usize| (matrix.clone().sum_dim(axis) - 1.0).abs().max().into_scalar::<f32>();
    assert!(off(2) <= 4e-6, "columns: {}", off(2));
    assert!(off(3) <= 1e-3, "rows: {}", off(3));
    let asymmetry = max_difference(matrix.clone(), matrix.swap_dims(2, 3));
    assert!(asymmetry > 0.1, "{asymmetry}");
}

/// Two streams of one channel. The softmax of the rows of `[[ln 3, 0], [0, 0]]` is
/// `[[3/4, 1/4], [1/2, 1/2]]`; divided by the sums of columns it is `[[3/5, 1/3], [2/5, 2/3]]`.
#[test]
fn streams_are_mixed_as_computed_by_hand() {
    let device = device();
    let ln3 = 3f32.ln();
    let vector = |values: &[f32]| Param::from_tensor(Tensor::<1>::from_floats(values, &device));
    let connection = HyperConnection {
        projection: Param::from_tensor(Tensor::<2>::zeros([8, 2], &device)).into(),
        base: vector(&[0.0, ln3, 0.0, ln3, ln3, 0.0, 0.0, 0.0]),
        scale: vector(&[1.0, 1.0, 1.0]),
        streams: 2,
        iterations: 1,
        epsilon: 0.0,
        norm_epsilon: 1e-6,
    };
    let x = Tensor::<3>::from_floats([[[1.0, 10.0]]], &device);
    let weights = connection.weights(&x);
    let close = |found: Vec<f32>, expected: &[f32]| {
        assert_eq!(found.len(), expected.len());
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs();
        assert!(found.iter().zip(expected).all(near), "{found:?} is not {expected:?}");
    };
    let values = |data: TensorData| data.iter::<f32>().collect::<Vec<_>>();
    close(values(weights.pre.to_data()), &[0.5, 0.75]);
    close(values(weights.post.to_data()), &[1.0, 1.5]);
    close(values(weights.matrix.to_data()), &[0.6, 1.0 / 3.0, 0.4, 2.0 / 3.0]);
    close(values(connection.join(&x, &weights).to_data()), &[8.0]);
    // Stream 0: 100 + 3/5 * 1 + 2/5 * 10. Stream 1: 1.5 * 100 + 1/3 * 1 + 2/3 * 10.
    let y = Tensor::<3>::from_floats([[[100.0]]], &device);
    close(values(connection.update(x, y, weights).to_data()), &[104.6, 157.0]);
}
