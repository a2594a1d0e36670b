//! Helpers for the tests.

pub(crate) mod deepseek;
pub(crate) mod deepseek_f64;
mod ggml;
mod gguf;
mod gguf_delta;
mod gguf_experts;
mod gguf_gemma4;
mod gguf_latent;
mod gguf_rope;
pub(crate) mod minifloat;
pub(crate) mod partitions;
pub(crate) mod prefixes;
pub(crate) mod saved;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use std::io::Write as _;
use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{Device, Int, Tensor, TensorData};
use half::{bf16, f16};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use kv_models::kv_cubecl::{On, Target};
use kv_models::{LayerSpec, llama::Config, nn::RopeScaling};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value as Json;

#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use self::{ggml::*, gguf::*};

/// The project's tiny checkpoints.
pub(crate) const TINY: [&str; 17] = [
    "gpt2-tiny",
    "llama-tiny",
    "llama3-rope-tiny",
    "qwen2-tiny",
    "phi3-tiny",
    "qwen3-tiny",
    "phi4-tiny",
    "mistral-swa-tiny",
    "smollm3-tiny",
    "gemma3-tiny",
    "gpt-oss-tiny",
    "qwen3_moe-tiny",
    "qwen3_5-tiny",
    "mixtral-tiny",
    "deepseek_v3-tiny",
    "gemma4-tiny",
    "gemma4-wide-tiny",
];

/// Returns the [`TINY`] checkpoints whose rows are whole blocks of packed weights. Those of Gemma 4
/// have rows of 16 and 48 numbers.
pub(crate) fn blocky() -> impl Iterator<Item = &'static str> {
    TINY.into_iter().filter(|name| !name.starts_with("gemma4"))
}

/// Runs a case on the device of a GPU backend.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn on_gpu<T: Target>(case: fn(&On<T>)) {
    match On::<T>::open() {
        Ok(gpu) => case(&gpu),
        Err(error) if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") => {
            writeln!(std::io::stderr().lock(), "SKIPPED: {error}").unwrap();
        }
        Err(error) => panic!("{error} (KV_ALLOW_NO_DEVICE=1 skips the tests of a missing device)"),
    }
}

/// Makes a test for every GPU backend out of each case, a function
/// `fn case<T: Target>(gpu: &On<T>)`.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[allow(unused_macros, reason = "each test binary uses a part")]
macro_rules! stamp_gpus {
    ($($case:ident),+ $(,)?) => {
        #[cfg(feature = "wgpu")]
        mod wgpu {
            $(
                #[test]
                fn $case() {
                    crate::common::on_gpu::<kv_models::kv_cubecl::Wgpu>(super::$case);
                }
            )+
        }
        #[cfg(feature = "cuda")]
        mod cuda {
            $(
                #[test]
                fn $case() {
                    crate::common::on_gpu::<kv_models::kv_cubecl::Cuda>(super::$case);
                }
            )+
        }
    };
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use stamp_gpus;

/// Returns the folder of a tiny checkpoint.
pub(crate) fn tiny(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/models")).join(name)
}

/// Returns all golden checkpoints, from the project or from the folder `KV_GOLDEN` of the same
/// form.
pub(crate) fn golden() -> Vec<PathBuf> {
    golden_in("models")
}

/// Returns the golden checkpoints in a folder of the project or of `KV_GOLDEN`.
pub(crate) fn golden_in(kind: &str) -> Vec<PathBuf> {
    let root = std::env::var_os("KV_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden")),
        PathBuf::from,
    );
    let mut folders: Vec<_> = fs::read_dir(root.join(kind))
        .unwrap_or_else(|error| panic!("{}: {error}", root.join(kind).display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.safetensors").is_file())
        .collect();
    folders.sort();
    assert!(!folders.is_empty(), "{} holds no checkpoint", root.display());
    folders
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

/// Returns the real model. Tests with it run only by `--ignored smollm2`, as in `scripts/check`.
pub(crate) fn smollm2() -> PathBuf {
    let path = std::env::var_os("KV_SMOLLM2").map_or_else(
        || {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    let hint = "run scripts/get-smollm2 or set KV_SMOLLM2";
    assert!(path.is_file(), "{} is missing; {hint}", path.display());
    path
}

/// Returns Gemma 3. Tests with it run only by `--ignored gemma3`.
pub(crate) fn gemma3() -> PathBuf {
    let path = std::env::var_os("KV_GEMMA3").map_or_else(
        || {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../target/models/gemma-3-270m-q4_k_m.gguf")
        },
        PathBuf::from,
    );
    assert!(
        path.is_file(),
        "{} is not there; run scripts/get-gemma3 or set KV_GEMMA3",
        path.display()
    );
    path
}

/// Opens the Flex device of the tests.
pub(crate) fn device() -> Device {
    Device::flex()
}

/// `input_ids` and `logits` of a checkpoint's `expected.safetensors`.
pub(crate) struct Expected {
    pub(crate) ids: Tensor<2, Int>,
    pub(crate) logits: Tensor<3>,
    /// The logits of the last tokens, decoded one by one, if the file has them.
    pub(crate) decoded: Option<Tensor<3>>,
}

pub(crate) fn expected(folder: &Path, device: &Device) -> Expected {
    let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("input_ids").unwrap();
    let shape: [usize; 2] = ids.shape().try_into().unwrap();
    let values: Vec<i32> =
        ids.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    let ids = Tensor::from_data(TensorData::new(values, shape), device);
    let floats = |name: &str| {
        let tensor = tensors.tensor(name).ok()?;
        let shape: [usize; 3] = tensor.shape().try_into().unwrap();
        Some(Tensor::from_data(TensorData::new(f32s(tensor.data()), shape), device))
    };
    Expected { ids, logits: floats("logits").unwrap(), decoded: floats("decode_logits") }
}

pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(crate) fn max_difference<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a - b).abs().max().into_scalar::<f32>()
}

/// Returns a writable copy of a folder.
pub(crate) fn copy(folder: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        fs::write(to.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    to
}

/// Reads `(name, shape, values)` of the tensors in a safetensors file of f32.
pub(crate) fn read_tensors(file: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(n, t)| (n.to_string(), t.shape().to_vec(), f32s(t.data()))).collect()
}

/// Copies a tiny checkpoint and converts the tensors that `which` selects to `dtype`.
pub(crate) fn converted(
    name: &str,
    dtype: Dtype,
    which: impl Fn(&str) -> bool,
) -> tempfile::TempDir {
    let folder = copy(&tiny(name));
    let path = folder.path().join("model.safetensors");
    let data: Vec<_> = read_tensors(&path)
        .into_iter()
        .map(|(name, shape, values)| {
            let dtype = if which(&name) { dtype } else { Dtype::F32 };
            let bytes: Vec<u8> = match dtype {
                Dtype::BF16 => {
                    values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
                }
                Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            (name, dtype, shape, bytes)
        })
        .collect();
    let views = data.iter().map(|(name, dtype, shape, bytes)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    folder
}

/// Returns the message of a failing load, and checks that it is one line that names the file.
pub(crate) fn failure(path: &Path) -> String {
    let message = kv_models::load(path, &device()).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    assert!(message.contains(path.file_name().unwrap().to_str().unwrap()), "{message}");
    message
}

/// Checks that `message` has all of `parts`.
#[track_caller]
pub(crate) fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

/// Copies a golden folder and changes its `config.json`.
pub(crate) fn with_config(name: &str, change: impl FnOnce(&mut Json)) -> tempfile::TempDir {
    let folder = copy(&tiny(name));
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
    folder
}

/// The name, shape and values of a tensor.
pub(crate) type Named = (String, Vec<usize>, Vec<f32>);

/// Copies a golden folder and changes its tensors.
pub(crate) fn with_tensors(name: &str, change: impl FnOnce(&mut Vec<Named>)) -> tempfile::TempDir {
    let folder = copy(&tiny(name));
    let path = folder.path().join("model.safetensors");
    let mut tensors = read_tensors(&path);
    change(&mut tensors);
    write_tensors(&path, tensors);
    folder
}

/// Writes tensors to a safetensors file of f32.
pub(crate) fn write_tensors(path: &Path, tensors: Vec<Named>) {
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(n, shape, values)| (n, shape, values.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views = data.iter().map(|(n, shape, bytes)| {
        (n.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Returns the configuration of a Llama with two layers.
pub(crate) fn small() -> Config {
    Config {
        vocab_size: 256,
        hidden_size: 64,
        intermediate_size: 96,
        n_layers: 2,
        attention: LayerSpec::new(4, 2, 16),
        max_positions: 512,
        norm_epsilon: 1e-5,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        tied_head: true,
        rotary_dim: 16,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        full_layers: Default::default(),
        layers_without_rope: Default::default(),
        qk_norms: false,
    }
}
