//! Models whose matrices stay in the blocks of their file compute what restored ones do.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{fs, path::Path};

use burn::{
    module::Module,
    tensor::{Device, Int, Tensor, TensorData},
};
use candle_core::quantized::{GgmlDType, gguf_file};
use common::{TINY, device, expected, fixture, max_difference, tiny, write_gguf};
use kv_models::{
    LanguageModel, LoadOptions, Loaded, SaveOptions, Tokenizer, WeightDtype,
    kv_cubecl::KvCacheConfig, kv_weights::Activations, llama::Llama, load_with, save,
};

fn read(path: &Path, packed: Option<Activations>) -> Loaded {
    load_with(path, &device(), LoadOptions::default().with_packed(packed)).unwrap()
}

/// The file's model with restored weights and with packed ones, and what is said of the latter.
fn both(path: &Path, activations: Activations) -> (LanguageModel, LanguageModel, Vec<String>) {
    let packed = read(path, Some(activations));
    (read(path, None).model, packed.model, packed.notes)
}

fn logits(model: &LanguageModel, folder: &Path, cache: &str) -> Tensor<3> {
    let config: KvCacheConfig = cache.parse().unwrap();
    model.forward(expected(folder, &device()).ids, config).unwrap()
}

/// The largest difference over the largest logit.
fn difference(a: &Tensor<3>, b: &Tensor<3>) -> f32 {
    max_difference(a.clone(), b.clone()) / b.clone().abs().max().into_scalar::<f32>()
}

#[test]
fn packed_families_compute_what_restored_ones_do() {
    let scratch = tempfile::tempdir().unwrap();
    for name in TINY {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlDType::Q4_0, &[]);
        let (restored, packed, notes) = both(&file, Activations::Exact);
        assert!(!notes.iter().any(|note| note.contains("restored to f32")), "{name}: {notes:?}");
        assert_eq!(packed.n_weights(), restored.n_weights(), "{name}");
        // Blocks of 18 bytes for 128; gpt2's positions and vectors are floats.
        let ratio = packed.weight_bytes() as f64 / restored.weight_bytes() as f64;
        assert!(packed.is_packed() && ratio < 0.5, "{name}: {ratio}");
        let close =
            difference(&logits(&packed, &folder, "float"), &logits(&restored, &folder, "float"));
        assert!(close < 1e-4, "{name}: {close}");

        // Bytes are off by half a 127th of the largest of 32. A router may pick another expert for a token.
        let (_, bytes, _) = both(&file, Activations::Int8);
        let (bytes, exact) =
            (logits(&bytes, &folder, "float"), logits(&restored, &folder, "float"));
        let off = (bytes - exact.clone()).abs().mean() / exact.abs().mean();
        let off = off.into_scalar::<f32>();
        assert!((1e-4..0.05).contains(&off), "{name}: {off}");

        // Token by token from a cache, as in parallel.
        let ids = expected(&folder, &device()).ids.narrow(1, 0, 24);
        let config = KvCacheConfig::float().with_capacity(24);
        let parallel = packed.forward(ids.clone(), config).unwrap();
        let mut cache = packed.new_cache(config, ids.dims()[0], &device()).unwrap();
        let step = |t| packed.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap();
        let streamed = Tensor::cat((0..24).map(step).collect(), 1);
        let close = difference(&streamed, &parallel);
        assert!(close < 1e-4, "{name} token by token: {close}");
    }
}

/// Blocks of all types that the gguf package writes: rows of queries and keys in another order, types that differ
/// within a joined matrix, and those that have no packed path.
#[test]
fn every_block_type_is_multiplied_or_said_to_be_restored() {
    let file = fixture("gguf-types").join("types.gguf");
    let (restored, packed, notes) = both(&file, Activations::Exact);
    for kind in ["Q2K", "Q3K"] {
        let said = |note: &&String| note.contains(&format!("1 tensors of {kind} are restored"));
        assert_eq!(notes.iter().filter(said).count(), 1, "{kind}: {notes:?}");
    }
    let matrices = |model: &LanguageModel| -> Vec<Tensor<2>> {
        let llama: &Llama = model.downcast_ref().unwrap();
        let layers = llama.layers.iter().flat_map(|layer| [&layer.qkv, &layer.mlp.gate_up]);
        layers.map(|linear| linear.weight.val()).chain([llama.embedding.weight.val()]).collect()
    };
    for (packed, restored) in matrices(&packed).into_iter().zip(matrices(&restored)) {
        assert_eq!(packed.into_data(), restored.into_data());
    }
}

#[test]
fn experts_stay_in_mxfp4() {
    let folder = fixture("mxfp4");
    for path in [folder.clone(), folder.join("model.gguf")] {
        let (restored, packed, _) = both(&path, Activations::Exact);
        let ratio = packed.weight_bytes() as f64 / restored.weight_bytes() as f64;
        assert!(packed.is_packed() && ratio < 0.6, "{}: {ratio}", path.display());
        assert_eq!(packed.n_weights(), restored.n_weights());
        for cache in ["float", "k4v4-g16-r16"] {
            let close =
                difference(&logits(&packed, &folder, cache), &logits(&restored, &folder, cache));
            assert!(close < 1e-5, "{}: {close}", path.display());
        }
    }
}

#[test]
fn a_packed_model_is_saved_restored() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    write_gguf(&tiny("qwen2-tiny"), &file, GgmlDType::Q8_0, &[]);
    let (restored, packed, _) = both(&file, Activations::Int8);
    let tokenizer = Tokenizer::from_file(fixture("bos").join("tokenizer.json"), &[2]).unwrap();
    let written = |model: &LanguageModel, name: &str| {
        let folder = scratch.path().join(name);
        let options = SaveOptions { dtype: WeightDtype::F32, cache: None };
        save(&folder, model, &tokenizer, options).unwrap();
        fs::read(folder.join("model.safetensors")).unwrap()
    };
    assert!(written(&packed, "packed") == written(&restored, "restored"));
    // Nothing of it is trained.
    assert!(packed.num_params() < restored.num_params() / 10);
}

#[test]
fn scales_that_are_not_finite_are_named() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    write_gguf(&tiny("qwen2-tiny"), &file, GgmlDType::Q8_0, &[]);
    let mut bytes = fs::read(&file).unwrap();
    let content = gguf_file::Content::read(&mut fs::File::open(&file).unwrap()).unwrap();
    let tensor = &content.tensor_infos["token_embd.weight"];
    // Its third block: a scale (f16), then 32 codes.
    let scale = (content.tensor_data_offset + tensor.offset) as usize + 2 * 34;
    bytes[scale..scale + 2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let error = load_with(&file, &device(), options).unwrap_err().to_string();
    let said = "token_embd.weight: holds numbers that are not finite in row 1 from 0 on";
    assert!(error.contains(said), "{error}");
    assert!(!error.contains('\n'));
}

/// Every family, every type of block and experts, in parallel and token by token.
#[cfg(feature = "wgpu")]
#[test]
fn packed_on_wgpu_as_restored_on_the_cpu() {
    use kv_models::kv_cubecl::{On, Wgpu};
    let wgpu = On::<Wgpu>::open().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let written = TINY.iter().map(|name| {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlDType::Q4_0, &[]);
        file
    });
    let files = written.chain([fixture("mxfp4"), fixture("gguf-types").join("types.gguf")]);
    for file in files {
        let name = file.display();
        let options = LoadOptions::default().with_packed(Some(Activations::Exact));
        let (restored, packed) = (read(&file, None).model, load_with(&file, &wgpu, options));
        let packed = packed.unwrap().model;
        assert!(packed.is_packed(), "{name}");
        let ids = |device: &Device| {
            let ids: Vec<i64> = (0..24).map(|i| i * 37 % restored.vocab_size() as i64).collect();
            Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 24]), device)
        };
        let config = KvCacheConfig::float().with_capacity(24);
        let expected = restored.forward(ids(&device()), config).unwrap();
        let parallel = packed.forward(ids(&wgpu), config).unwrap().to_device(&device());
        let close = difference(&parallel, &expected);
        assert!(close < 1e-3, "{name}: {close}");
        let mut cache = packed.new_cache(config, 1, &wgpu).unwrap();
        let step = |t| packed.step(ids(&wgpu).narrow(1, t, 1), &mut cache).unwrap();
        let streamed = Tensor::cat((0..4).map(step).collect(), 1).to_device(&device());
        let close = difference(&streamed, &expected.narrow(1, 0, 4));
        assert!(close < 1e-3, "{name} token by token: {close}");
    }
}
