//! Models in f16 and bf16, compared with the transformers library in the same type: all formats of
//! files, decode and parallel passes, saved and loaded.
//!
//! `expected-16-bit.safetensors` of a tiny checkpoint has the logits of the first 64 tokens of its
//! first sequence in each type, computed by `AutoModelForCausalLM.from_pretrained(folder, dtype=..,
//! attn_implementation="eager")`.

use std::{fs, path::Path};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use half::{bf16, f16};
use kv_models::{
    LanguageModel, LoadOptions, SaveOptions, Tokenizer, WeightDtype, kv_cubecl::KvCacheConfig,
    llama::Llama, load, load_with, nn::init::seeded, save,
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::common::{
    GgmlType, assert_contains, converted, device, expected, f32s, fixture, max_difference, small,
    tiny, with_tensors, write_gguf,
};

/// A type and its bits of precision.
const TYPES: [(WeightDtype, DType, u32); 2] =
    [(WeightDtype::Bf16, DType::BF16, 8), (WeightDtype::F16, DType::F16, 11)];

fn options(dtype: WeightDtype) -> LoadOptions {
    LoadOptions::default().with_dtype(dtype)
}

fn load_as(path: &Path, dtype: WeightDtype) -> LanguageModel {
    load_with(path, &device(), options(dtype)).unwrap().model
}

/// The checkpoints that have logits in 16 bits.
const MODELS: [&str; 5] =
    ["gpt2-tiny", "llama-tiny", "llama3-rope-tiny", "qwen2-tiny", "phi3-tiny"];

/// Returns the logits of the transformers library, and the ids.
fn reference(folder: &Path, dtype: WeightDtype, device: &Device) -> (Tensor<2, Int>, Tensor<3>) {
    let bytes = fs::read(folder.join("expected-16-bit.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let logits = file.tensor(dtype.name()).unwrap();
    let shape: [usize; 3] = logits.shape().try_into().unwrap();
    let halves = logits.data().chunks_exact(2).map(|b| b.try_into().unwrap());
    let values: Vec<f32> = match dtype {
        WeightDtype::F16 => halves.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        _ => halves.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
    };
    let ids = expected(folder, device).ids.narrow(0, 0, 1).narrow(1, 0, shape[1]);
    (ids, Tensor::from_data(TensorData::new(values, shape), device))
}

fn rms(tensor: Tensor<3>) -> f32 {
    tensor.square().mean().sqrt().into_scalar::<f32>()
}

/// Returns the type and the bytes of every parameter.
fn parameters(model: &LanguageModel) -> Vec<(DType, Vec<u8>)> {
    struct Collect(Vec<(DType, Vec<u8>)>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let data = param.val().into_data();
            self.0.push((data.dtype(), data.as_bytes().to_vec()));
        }
    }
    let mut all = Collect(vec![]);
    model.visit(&mut all);
    all.0
}

/// Two computations in one type differ wherever another order of sums rounds differently. If their
/// errors have the same size and are independent, the root mean square of the difference (over
/// 16384 logits) is sqrt 2 times the error, which is the limit here. Equally rounded weights make
/// it smaller. A model that computes in f32 would be as close but have no error of its own, so the
/// test requires half of the transformers library's error.
#[test]
fn logits_match_transformers_in_the_same_type() {
    let device = device();
    for name in MODELS {
        let f32 = load(tiny(name), &device).unwrap().model;
        for (dtype, stored, _) in TYPES {
            let model = load_as(&tiny(name), dtype);
            assert_eq!(model.dtype(), stored);
            assert!(parameters(&model).iter().all(|(found, _)| *found == stored), "{name}");
            let (ids, theirs) = reference(&tiny(name), dtype, &device);
            let exact = f32.forward(ids.clone(), KvCacheConfig::float()).unwrap();
            let ours = model.forward(ids, KvCacheConfig::float()).unwrap();
            assert_eq!(ours.dtype(), DType::F32);
            let error = rms(theirs.clone() - exact.clone());
            let (from_theirs, from_exact) = (rms(ours.clone() - theirs), rms(ours - exact));
            let found = format!(
                "{name} {dtype}: {from_theirs} from theirs, {from_exact} from f32, of {error}"
            );
            assert!(from_theirs <= 1.4 * error, "{found}");
            assert!((0.5 * error..=1.2 * error).contains(&from_exact), "{found}");
        }
    }
}

/// Decode and parallel passes round in different places. They differ as two computations do, by a
/// few units in the last place of the largest logit.
#[test]
fn decode_matches_the_parallel_pass() {
    let device = device();
    for name in MODELS {
        for (dtype, _, bits) in TYPES {
            let model = load_as(&tiny(name), dtype);
            let (ids, _) = reference(&tiny(name), dtype, &device);
            let n = ids.dims()[1];
            for cache in ["float", "k4v4-g16-r32"] {
                let config: KvCacheConfig = cache.parse().unwrap();
                let parallel = model.forward(ids.clone(), config).unwrap();
                let mut cache = model.new_cache(config.with_capacity(n), 1, &device).unwrap();
                let first = model.step(ids.clone().narrow(1, 0, 20), &mut cache).unwrap();
                let rest =
                    (20..n).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap());
                let streamed = Tensor::cat([first].into_iter().chain(rest).collect(), 1);
                let largest = parallel.clone().abs().max().into_scalar::<f32>();
                let unit = largest * 0.5f32.powi(bits as i32 - 1);
                let (worst, mean) =
                    (max_difference(streamed.clone(), parallel.clone()), rms(streamed - parallel));
                // Single codes of a quantized cache may flip at the edge of rounding.
                let most = if config.is_quantized() { 16.0 } else { 2.0 };
                let found = format!("{name} {dtype} {config}: {worst}, {mean}, unit {unit}");
                assert!(worst <= most * unit && mean <= unit, "{found}");
            }
        }
    }
}

/// A cache with floats of the model's type stores keys and values exactly.
#[test]
fn a_float_cache_of_the_models_type_is_exact() {
    let device = device();
    for (dtype, cache) in [(WeightDtype::Bf16, "float-bf16"), (WeightDtype::F16, "float-f16")] {
        let model = load_as(&tiny("llama-tiny"), dtype);
        let (ids, _) = reference(&tiny("llama-tiny"), dtype, &device);
        let logits = |cache: &str| {
            let config = cache.parse::<KvCacheConfig>().unwrap().with_capacity(64);
            let mut cache = model.new_cache(config, 1, &device).unwrap();
            let steps =
                (0..64).map(|t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap());
            (Tensor::cat(steps.collect(), 1), cache.memory_bytes().total())
        };
        let ((wide, wide_bytes), (half, half_bytes)) = (logits("float"), logits(cache));
        assert!(half_bytes < wide_bytes, "{half_bytes} of {wide_bytes}");
        assert_eq!(max_difference(wide, half), 0.0, "{dtype}");
    }
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(fixture("bos").join("tokenizer.json"), &[2]).unwrap()
}

/// Returns name, type, shape and bytes of the tensors of a folder.
fn stored(folder: &Path) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> = file
        .iter()
        .map(|(name, t)| (name.to_string(), t.dtype(), t.shape().to_vec(), t.data().to_vec()))
        .collect();
    tensors.sort();
    tensors
}

#[test]
fn a_16_bit_folder_takes_half_the_bytes_and_is_read_back_bit_for_bit() {
    let device = device();
    for name in MODELS {
        for (file, dtype, text) in [
            (Dtype::BF16, DType::BF16, "\"torch_dtype\": \"bfloat16\""),
            (Dtype::F16, DType::F16, "\"torch_dtype\": \"float16\""),
        ] {
            let folder = converted(name, file, |_| true);
            let loaded = load_with(folder.path(), &device, options(WeightDtype::Auto)).unwrap();
            assert!(loaded.notes.is_empty(), "{:?}", loaded.notes);
            let wide = load(folder.path(), &device).unwrap().model;
            assert_eq!((loaded.model.dtype(), wide.dtype()), (dtype, DType::F32));
            assert_eq!(2 * loaded.model.weight_bytes(), wide.weight_bytes(), "{name}");
            // Both models have the same values.
            let values = |model: &LanguageModel| -> Vec<Vec<f32>> {
                struct Values(Vec<Vec<f32>>);
                impl ModuleVisitor for Values {
                    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                        self.0.push(param.val().cast(DType::F32).into_data().try_to_vec().unwrap());
                    }
                }
                let mut all = Values(vec![]);
                model.visit(&mut all);
                all.0
            };
            assert_eq!(values(&loaded.model), values(&wide), "{name}");

            let saved = tempfile::tempdir().unwrap();
            save(saved.path(), &loaded.model, &tokenizer(), SaveOptions::default()).unwrap();
            assert_eq!(stored(saved.path()), stored(folder.path()), "{name}");
            let config = fs::read_to_string(saved.path().join("config.json")).unwrap();
            assert_contains(&config, &[text]);
            let again = load_as(saved.path(), WeightDtype::Auto);
            assert_eq!(parameters(&again), parameters(&loaded.model), "{name}");
        }
    }
}

#[test]
fn gguf_files_keep_16_bits_and_restore_blocks_to_them() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("tiny.gguf");
    for name in MODELS {
        for (blocks, dtype, stored) in [
            (GgmlType::BF16, WeightDtype::Bf16, DType::BF16),
            (GgmlType::F16, WeightDtype::F16, DType::F16),
        ] {
            write_gguf(&tiny(name), &gguf, blocks, &[]);
            let loaded = load_with(&gguf, &device, options(WeightDtype::Auto)).unwrap();
            // The file's norms and biases are f32.
            let folder = load_as(&tiny(name), dtype);
            assert_eq!(loaded.model.dtype(), stored);
            assert_eq!(parameters(&loaded.model), parameters(&folder), "{name} {dtype}");
        }
        write_gguf(&tiny(name), &gguf, GgmlType::Q8_0, &[]);
        assert_eq!(load_as(&gguf, WeightDtype::Auto).dtype(), DType::F32);
        let (wide, narrow) = (load_as(&gguf, WeightDtype::F32), load_as(&gguf, WeightDtype::Bf16));
        let rounded: Vec<_> = parameters(&wide)
            .into_iter()
            .map(|(_, bytes)| {
                let values = f32s(&bytes).into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes());
                (DType::BF16, values.collect::<Vec<u8>>())
            })
            .collect();
        assert_eq!(parameters(&narrow), rounded, "{name}");
    }
}

#[test]
fn auto_selects_the_most_common_type_and_notes_rounding() {
    let device = device();
    let auto = |folder: &tempfile::TempDir| {
        load_with(folder.path(), &device, options(WeightDtype::Auto)).unwrap()
    };
    let mostly = converted("llama-tiny", Dtype::BF16, |name| name.contains("layers"));
    let loaded = auto(&mostly);
    assert_eq!(loaded.model.dtype(), DType::BF16);
    assert_eq!(loaded.notes.len(), 1);
    assert_contains(&loaded.notes[0], &["model.safetensors", "bf16", "rounded"]);
    let hardly = converted("llama-tiny", Dtype::BF16, |name| name.contains("q_proj"));
    assert_eq!(auto(&hardly).model.dtype(), DType::F32);
    // Vectors do not count for the type.
    let norms = converted("llama-tiny", Dtype::BF16, |name| !name.contains("norm"));
    let loaded = auto(&norms);
    assert_eq!((loaded.model.dtype(), loaded.notes.len()), (DType::BF16, 0));
}

#[test]
fn errors_are_one_line() {
    let message = |path: &Path, dtype| {
        let message = load_with(path, &device(), options(dtype)).unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    };
    for text in ["bf17", "", "BF16", "q8"] {
        let error = text.parse::<WeightDtype>().unwrap_err().to_string();
        assert_eq!(error, format!("dtype = {text:?}: must be f32, f16, bf16 or auto"));
    }
    let large = with_tensors("llama-tiny", |tensors| tensors[3].2[5] = 7e4);
    let found = message(large.path(), WeightDtype::F16);
    assert_contains(&found, &["model.safetensors", "holds 70000 at element 5", "at most 65504"]);
    load_as(large.path(), WeightDtype::Bf16);
    for (value, text) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let broken = with_tensors("llama-tiny", |tensors| tensors[3].2[7] = value);
        for dtype in [WeightDtype::F16, WeightDtype::Bf16] {
            let found = message(broken.path(), dtype);
            assert_contains(&found, &["model.safetensors", text, "element 7", "must be finite"]);
        }
        // The file has 16 bits already.
        let folder = converted("llama-tiny", Dtype::F32, |_| false);
        let path = folder.path().join("model.safetensors");
        let bits = bf16::from_f32(value).to_le_bytes();
        let bytes: Vec<u8> = [bf16::ONE.to_le_bytes(), bits].concat();
        let view = TensorView::new(Dtype::BF16, vec![1, 2], &bytes).unwrap();
        safetensors::serialize_to_file([("model.embed_tokens.weight", view)], None, &path).unwrap();
        let config = folder.path().join("config.json");
        let mut json: serde_json::Value =
            serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
        (json["vocab_size"], json["hidden_size"]) = (1.into(), 2.into());
        json["num_attention_heads"] = 1.into();
        json["num_key_value_heads"] = 1.into();
        json["head_dim"] = 2.into();
        fs::write(&config, json.to_string()).unwrap();
        let found = message(folder.path(), WeightDtype::Auto);
        assert_contains(&found, &["embed_tokens", text, "element 1", "must be finite"]);
    }
    // A value beyond the type is not saved.
    let mut llama = seeded(&device(), 9, || Llama::init(small(), &device()));
    llama.embedding.weight = llama.embedding.weight.map_tensor(|tensor| tensor.add_scalar(1e5));
    let to = tempfile::tempdir().unwrap();
    let narrow = SaveOptions { dtype: WeightDtype::F16, cache: None };
    let error = save(to.path(), &llama.into(), &tokenizer(), narrow).unwrap_err().to_string();
    assert_contains(&error, &["model.safetensors", "embed_tokens", "at most 65504"]);
}
