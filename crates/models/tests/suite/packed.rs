//! Models with packed matrices compute the same as restored ones.

use std::{fs, path::Path};

use burn::{
    module::Module,
    tensor::{Device, Int, Tensor},
};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use kv_models::kv_cubecl::{On, Target};
use kv_models::{
    LanguageModel, LoadOptions, Loaded, SaveOptions, Tokenizer, WeightDtype,
    kv_cubecl::KvCacheConfig,
    kv_weights::Activations,
    llama::{Config, Llama},
    load_with,
    nn::init::seeded,
    save,
};
use safetensors::Dtype;

use crate::common::{
    GgmlType, blocky, converted, device, expected, fixture, max_difference, small, tiny, write_gguf,
};

fn read(path: &Path, packed: Option<Activations>) -> Loaded {
    load_with(path, &device(), LoadOptions::default().with_packed(packed)).unwrap()
}

/// Loads the file with restored and with packed weights, and returns the notes of the latter.
fn both(path: &Path, activations: Activations) -> (LanguageModel, LanguageModel, Vec<String>) {
    let packed = read(path, Some(activations));
    (read(path, None).model, packed.model, packed.notes)
}

fn logits(model: &LanguageModel, folder: &Path, cache: &str) -> Tensor<3> {
    let config: KvCacheConfig = cache.parse().unwrap();
    model.forward(expected(folder, &device()).ids, config).unwrap()
}

fn difference(a: &Tensor<3>, b: &Tensor<3>) -> f32 {
    max_difference(a.clone(), b.clone()) / b.clone().abs().max().into_scalar::<f32>()
}

#[test]
fn packed_models_match_restored_ones() {
    let scratch = tempfile::tempdir().unwrap();
    for name in blocky() {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlType::Q4_0, &[]);
        let (restored, packed, notes) = both(&file, Activations::Exact);
        assert!(!notes.iter().any(|note| note.contains("restored to f32")), "{name}: {notes:?}");
        assert_eq!(packed.n_weights(), restored.n_weights(), "{name}");
        // Blocks have 18 bytes for 128 of f32; gpt2's positions and vectors stay floats.
        let ratio = packed.weight_bytes() as f64 / restored.weight_bytes() as f64;
        assert!(packed.is_packed() && ratio < 0.5, "{name}: {ratio}");
        let close =
            difference(&logits(&packed, &folder, "float"), &logits(&restored, &folder, "float"));
        assert!(close < 1e-4, "{name}: {close}");

        // Rounding to bytes is off by up to half a 127th of the largest of 32 numbers, so a router
        // may pick another expert.
        let (_, bytes, _) = both(&file, Activations::Int8);
        let (bytes, exact) =
            (logits(&bytes, &folder, "float"), logits(&restored, &folder, "float"));
        let off = (bytes - exact.clone()).abs().mean() / exact.abs().mean();
        let off = off.into_scalar::<f32>();
        assert!((1e-4..0.05).contains(&off), "{name}: {off}");

        // Decode from a cache, compared with the parallel pass.
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

/// All block types that the gguf package writes: query and key rows in another order, different
/// types in a joined matrix, and types without a kernel.
#[test]
fn every_block_type_is_packed_or_noted_as_restored() {
    let file = fixture("gguf-types").join("types.gguf");
    let (restored, packed, notes) = both(&file, Activations::Exact);
    for kind in ["q2_k", "q3_k"] {
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

/// Matrices of 16 bits stay packed in all formats of files and compute the same as in f32.
#[test]
fn matrices_of_16_bits_stay_packed() {
    let scratch = tempfile::tempdir().unwrap();
    for name in blocky() {
        for (dtype, ggml) in [(Dtype::BF16, GgmlType::BF16), (Dtype::F16, GgmlType::F16)] {
            let (folder, file) =
                (converted(name, dtype, |_| true), scratch.path().join("model.gguf"));
            write_gguf(&tiny(name), &file, ggml, &[]);
            for path in [folder.path(), &file] {
                let at = format!("{name} {dtype:?} {}", path.display());
                let (restored, packed, notes) = both(path, Activations::Int8);
                let said = notes.iter().any(|note| note.contains("restored to f32"));
                // Experts of Hugging Face checkpoints are stored transposed.
                let experts = name.starts_with("gpt-oss") && path != file;
                // Compressed queries have 24 channels, and in folders the rows of keys and values
                // of all heads are floats.
                let latent = name == "deepseek_v3-tiny";
                assert_eq!(said, experts || latent, "{at}: {notes:?}");
                assert!(packed.is_packed(), "{at}");
                assert_eq!(packed.n_weights(), restored.n_weights(), "{at}");
                let ratio = packed.weight_bytes() as f64 / restored.weight_bytes() as f64;
                let most = if latent { 0.62 } else { 0.52 };
                assert!(experts || ratio < most, "{at}: {ratio}");
                for cache in ["float", "k4v4-g16-r16"] {
                    let [packed, restored] =
                        [&packed, &restored].map(|model| logits(model, &tiny(name), cache));
                    let close = difference(&packed, &restored);
                    // Sums have another order, and a code of a cache may flip at the edge of
                    // rounding.
                    assert!(close < if cache == "float" { 1e-5 } else { 0.02 }, "{at}: {close}");
                }
                // Activations are not rounded, because float weights are multiplied with exact
                // activations.
                let ids = expected(&tiny(name), &device()).ids.narrow(0, 0, 1).narrow(1, 0, 1);
                let config = KvCacheConfig::float().with_capacity(8);
                let step = |model: &LanguageModel| {
                    let mut cache = model.new_cache(config, 1, &device()).unwrap();
                    model.step(ids.clone(), &mut cache).unwrap()
                };
                let close = difference(&step(&packed), &step(&restored));
                assert!(close < 1e-5, "{at}: {close} for a token");
            }
        }
    }
}

/// Rows that are not whole blocks of 32 numbers are restored, and a note mentions them.
#[test]
fn incomplete_blocks_of_16_bits_are_restored_with_a_note() {
    let config = Config { intermediate_size: 80, ..small() };
    let tokenizer = Tokenizer::from_file(fixture("bos").join("tokenizer.json"), &[2]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let options = SaveOptions { dtype: WeightDtype::Bf16, cache: None };
    let model = seeded(&device(), 9, || Llama::init(config, &device()));
    save(folder.path(), &model.into(), &tokenizer, options).unwrap();
    let (restored, packed, notes) = both(folder.path(), Activations::Exact);
    // The matrices are the down projections of two layers, [64, 80].
    let said = "2 tensors of BF16 are restored to f32: 0.0 MB, 0.0 MB in the file";
    assert!(notes.iter().any(|note| note == said), "{notes:?}");
    let saved = restored.weight_bytes() - packed.weight_bytes();
    assert!(saved > restored.weight_bytes() / 3, "{saved}");
    let ids = Tensor::<2, Int>::from_data([[3, 1, 4, 1, 5, 9, 2, 6]], &device());
    let logits =
        |model: &LanguageModel| model.forward(ids.clone(), KvCacheConfig::float()).unwrap();
    assert!(difference(&logits(&packed), &logits(&restored)) < 1e-5);
}

/// Compares a model whose matrices take several buffers each, including the vocabulary and a gate,
/// with one whose matrices take one.
fn several_buffers_match_one(device: &Device, most: f32) {
    let scratch = tempfile::tempdir().unwrap();
    for name in
        ["llama-tiny", "gpt2-tiny", "gemma3-tiny", "gpt-oss-tiny", "qwen3_moe-tiny", "mixtral-tiny"]
    {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlType::Q4_0, &[]);
        // A row of 64 numbers takes 36 bytes, and the embedding has 256 rows.
        let options = LoadOptions::default().with_packed(Some(Activations::Exact));
        let load = |options| load_with(&file, device, options).unwrap().model;
        let (one, several) = (load(options), load(options.with_largest_buffer(Some(1500))));
        assert_eq!(one.weight_bytes(), several.weight_bytes(), "{name}");
        let ids = expected(&folder, device).ids.narrow(1, 0, 40);
        let config = KvCacheConfig::float().with_capacity(40);
        let all = |model: &LanguageModel| {
            let parallel = model.forward(ids.clone(), config).unwrap();
            let mut cache = model.new_cache(config, ids.dims()[0], device).unwrap();
            let step = |t| model.step(ids.clone().narrow(1, t, 1), &mut cache).unwrap();
            Tensor::cat((0..3).map(step).chain([parallel]).collect(), 1)
        };
        let close = difference(&all(&several), &all(&one));
        assert!(close < most, "{name}: {close}");

        // Two rows of 18 bytes for each 32 numbers fill whole words.
        let error = load_with(&file, device, options.with_largest_buffer(Some(40))).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("a matrix [") && error.contains("at most 40"), "{name}: {error}");
    }
}

#[test]
fn a_large_matrix_is_divided() {
    several_buffers_match_one(&device(), 1e-6);
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
crate::common::stamp_gpus!(
    a_large_matrix_is_divided_too,
    packed_models_match_the_cpu,
    experts_are_picked_on_a_gpu,
);

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn a_large_matrix_is_divided_too<T: Target>(gpu: &On<T>) {
    several_buffers_match_one(gpu, 1e-5);
}

#[test]
fn a_packed_model_is_saved_restored() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    write_gguf(&tiny("qwen2-tiny"), &file, GgmlType::Q8_0, &[]);
    let (restored, packed, _) = both(&file, Activations::Int8);
    let tokenizer = Tokenizer::from_file(fixture("bos").join("tokenizer.json"), &[2]).unwrap();
    let written = |model: &LanguageModel, name: &str| {
        let folder = scratch.path().join(name);
        let options = SaveOptions { dtype: WeightDtype::F32, cache: None };
        save(&folder, model, &tokenizer, options).unwrap();
        fs::read(folder.join("model.safetensors")).unwrap()
    };
    assert!(written(&packed, "packed") == written(&restored, "restored"));
    // Packed weights are not trained.
    assert!(packed.num_params() < restored.num_params() / 10);
}

#[test]
fn scales_that_are_not_finite_are_named() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    let starts = write_gguf(&tiny("qwen2-tiny"), &file, GgmlType::Q8_0, &[]);
    let mut bytes = fs::read(&file).unwrap();
    // Its third block: a scale (f16), then 32 codes.
    let scale = starts["token_embd.weight"] + 2 * 34;
    bytes[scale..scale + 2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let error = load_with(&file, &device(), options).unwrap_err().to_string();
    let said = "token_embd.weight: holds numbers that are not finite in row 1 from 0 on";
    assert!(error.contains(said), "{error}");
    assert!(!error.contains('\n'));
}

/// Every family, every block type and experts, in parallel and in decode.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn packed_models_match_the_cpu<T: Target>(gpu: &On<T>) {
    let scratch = tempfile::tempdir().unwrap();
    let written = blocky().map(|name| {
        let (folder, file) = (tiny(name), scratch.path().join(name).with_extension("gguf"));
        write_gguf(&folder, &file, GgmlType::Q4_0, &[]);
        file
    });
    let halves = [("llama-tiny", Dtype::F16), ("gpt2-tiny", Dtype::BF16)];
    let halves = halves.map(|(name, dtype)| converted(name, dtype, |_| true));
    let files = written.chain([fixture("mxfp4"), fixture("gguf-types").join("types.gguf")]);
    let files = files.chain(halves.each_ref().map(|folder| folder.path().to_path_buf()));
    for file in files {
        let name = file.display();
        let options = LoadOptions::default().with_packed(Some(Activations::Exact));
        let (restored, packed) = (read(&file, None).model, load_with(&file, gpu, options));
        let packed = packed.unwrap().model;
        assert!(packed.is_packed(), "{name}");
        let ids = |device: &Device| {
            let ids: Vec<i64> = (0..24).map(|i| i * 37 % restored.vocab_size() as i64).collect();
            Tensor::<2, Int>::from_data(burn::tensor::TensorData::new(ids, [1, 24]), device)
        };
        let config = KvCacheConfig::float().with_capacity(24);
        let expected = restored.forward(ids(&device()), config).unwrap();
        let parallel = packed.forward(ids(gpu), config).unwrap().to_device(&device());
        let close = difference(&parallel, &expected);
        assert!(close < 1e-3, "{name}: {close}");
        let mut cache = packed.new_cache(config, 1, gpu).unwrap();
        let step = |t| packed.step(ids(gpu).narrow(1, t, 1), &mut cache).unwrap();
        let streamed = Tensor::cat((0..4).map(step).collect(), 1).to_device(&device());
        let close = difference(&streamed, &expected.narrow(1, 0, 4));
        assert!(close < 1e-3, "{name} token by token: {close}");
    }
}

/// A GPU multiplies with the experts that it selected itself, in a launched step and in a graph
/// replay, and computes the same as the CPU.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn experts_are_picked_on_a_gpu<T: Target>(gpu: &On<T>) {
    use kv_models::{DecodeGraph, kv_sampling::Draw};
    let folder = fixture("mxfp4");
    let options = LoadOptions::default().with_packed(Some(Activations::Exact));
    let scratch = tempfile::tempdir().unwrap();
    let without_biases = ["qwen3_moe-tiny", "mixtral-tiny", "deepseek_v3-tiny"].map(|name| {
        let file = scratch.path().join(name).with_extension("gguf");
        write_gguf(&tiny(name), &file, GgmlType::Q4_0, &[]);
        file
    });
    for path in [folder.clone(), folder.join("model.gguf")].into_iter().chain(without_biases) {
        let [on_cpu, on_gpu] =
            [&device(), &**gpu].map(|device| load_with(&path, device, options).unwrap().model);
        // The rows of latent attention's heads are packed on the CPU alone.
        let is_latent = on_cpu.spec().layers.iter().any(|layer| layer.latent.is_some());
        assert_eq!(on_gpu.weight_bytes() == on_cpu.weight_bytes(), !is_latent);
        assert_eq!(on_gpu.n_weights(), on_cpu.n_weights());
        // The CPU has experts in one range of a GGUF file.
        assert!(on_gpu.decoder().captures());
        assert_eq!(on_cpu.decoder().captures(), path.is_file(), "{path:?}");
        let config = KvCacheConfig::float().with_capacity(20);
        let [mut expected, mut launched, mut replayed] =
            [(&on_cpu, &device()), (&on_gpu, &**gpu), (&on_gpu, &**gpu)]
                .map(|(model, device)| model.new_cache(config, 1, device).unwrap());
        let none = Default::default();
        let mut graph = DecodeGraph::new(&on_gpu, &mut replayed, &none, Draw::GREEDY, gpu).unwrap();
        assert!(graph.is_captured());
        for id in [3u32, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] {
            let step = |model: &LanguageModel, cache: &mut _, device: &Device| {
                let ids = Tensor::<2, Int>::from_data([[id as i32]], device);
                model.step(ids, cache).unwrap().squeeze_dim::<2>(1)
            };
            let want: Tensor<2> = step(&on_cpu, &mut expected, &device());
            let host = |logits: Tensor<2>| {
                let shape = logits.dims();
                let data = logits.into_data().try_into_vec::<f32>().unwrap();
                Tensor::<2>::from_data(burn::tensor::TensorData::new(data, shape), &device())
                    .unsqueeze::<3>()
            };
            let launched = host(step(&on_gpu, &mut launched, gpu));
            let replayed = host(graph.step(&[id]).unwrap().clone());
            for (got, how) in [(launched, "launched"), (replayed, "replayed")] {
                let close = difference(&got, &want.clone().unsqueeze());
                assert!(close < 1e-4, "{} {how}: {close}", path.display());
            }
        }
    }
}
