//! The tiny world model equals the authors' code, in parallel and with a ring of frames.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use kv_cubecl::{Frames, KvCacheConfig};
use kv_models::WeightDtype;
use kv_world_model::{CausvidPipeline, Controls, GameRft, Noised, Store};
use safetensors::SafeTensors;
use serde_json::Value;

fn world() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/world/gamerft-tiny")
}

/// Returns the golden models of the project, or of the folder `KV_GOLDEN`.
fn golden() -> Vec<PathBuf> {
    let root = std::env::var_os("KV_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden")),
        PathBuf::from,
    );
    let entries = fs::read_dir(root.join("world")).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<_> =
        entries.filter(|path| path.join("expected.safetensors").is_file()).collect();
    assert!(!folders.is_empty(), "{} holds no world model", root.display());
    folders
}

fn device() -> Device {
    Device::flex()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn max_difference<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a - b).abs().max().into_scalar::<f32>()
}

/// The inputs and outputs of the authors' code.
struct Expected {
    bytes: Vec<u8>,
    device: Device,
}

impl Expected {
    fn of(folder: &Path, device: &Device) -> Self {
        let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
        Self { bytes, device: device.clone() }
    }

    fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        let shape: [usize; D] = tensor.shape().try_into().unwrap();
        Tensor::from_data(TensorData::new(f32s(tensor.data()), shape), &self.device)
    }

    fn input(&self) -> Noised {
        Noised { x: self.tensor("x"), t: self.tensor("t"), controls: self.controls() }
    }

    fn controls(&self) -> Controls {
        Controls { mouse: self.tensor("mouse"), buttons: self.tensor("buttons") }
    }
}

fn ring_frames(folder: &Path) -> Frames {
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    Frames(config["ring_frames"].as_u64().unwrap())
}

fn largest<const D: usize>(x: Tensor<D>) -> f32 {
    x.abs().max().into_scalar::<f32>()
}

/// Streams all frames of the file's noise through a ring.
fn stream(folder: &Path, format: KvCacheConfig, device: &Device) -> (Tensor<5>, CausvidPipeline) {
    let expected = Expected::of(folder, device);
    let (noise, controls) = (expected.tensor::<5>("noise"), expected.controls());
    let [batch, frames, ..] = noise.dims();
    let model = GameRft::load(folder, device).unwrap();
    let cache = model.new_cache(format, ring_frames(folder), batch, device).unwrap();
    let mut pipeline = CausvidPipeline::new(model, cache, 0).unwrap();
    let mut streamed = vec![];
    for i in 0..frames {
        assert_eq!(pipeline.frames(), Frames(i as u64));
        let noise = noise.clone().narrow(1, i, 1).squeeze_dim(1);
        let frame = pipeline.next_frame_from(noise, &controls.frame(i)).unwrap();
        streamed.push(frame.unsqueeze_dim(1));
    }
    (Tensor::cat(streamed, 1), pipeline)
}

fn check_golden(device: &Device) {
    let float = KvCacheConfig::float();
    for folder in golden() {
        let expected = Expected::of(&folder, device);
        let model = GameRft::load(&folder, device).unwrap();
        let parallel = model.forward(expected.input(), float).unwrap();
        let wanted = expected.tensor::<5>("parallel_output");
        let (worst, most) = (max_difference(parallel, wanted.clone()), largest(wanted));
        assert!(worst <= 1e-4 * most, "{} parallel: {worst} of {most}", folder.display());

        for (name, wanted) in [("float", "ring_frames"), ("k16vint8", "ring_frames_v_int8")] {
            let wanted = expected.tensor::<5>(wanted);
            let (frames, _) = stream(&folder, name.parse().unwrap(), device);
            let (worst, most) = (max_difference(frames, wanted.clone()), largest(wanted));
            assert!(worst <= 2e-4 * most, "{} ring of {name}: {worst} of {most}", folder.display());
        }
    }
}

#[test]
fn golden_worlds() {
    check_golden(&device());
}

#[cfg(feature = "wgpu")]
#[test]
fn golden_worlds_on_wgpu() {
    check_golden(&kv_models::kv_cubecl::On::<kv_models::kv_cubecl::Wgpu>::open().unwrap());
}

/// With a ring that holds all frames, at the noise levels of the parallel form, both give the same
/// numbers for every format.
#[test]
fn steps_equal_the_parallel_form() {
    let device = device();
    let expected = Expected::of(&world(), &device);
    let model = GameRft::load(world(), &device).unwrap();
    for name in [
        "float",
        "float-f16",
        "k16vint8",
        "kint8vint8",
        "k4v4-g16-r16",
        "k16v8-g16-r32",
        "k8v2-g16-r16-gflush-hadv",
    ] {
        let format: KvCacheConfig = name.parse().unwrap();
        let Noised { x, t, controls } = expected.input();
        let [batch, frames, ..] = x.dims();
        let parallel = model.forward(expected.input(), format).unwrap();
        let mut cache = model.new_cache(format, Frames(frames as u64), batch, &device).unwrap();
        let mut steps = vec![];
        for i in 0..frames {
            let input = Noised {
                x: x.clone().narrow(1, i, 1),
                t: t.clone().narrow(1, i, 1),
                controls: controls.frame(i),
            };
            let noise = Noised {
                x: Tensor::random(input.x.dims(), Distribution::Default, &device),
                ..input.clone()
            };
            // Neither a peeked nor an overwritten frame leaves a trace.
            model.step(noise.clone(), &mut cache, Store::Peek).unwrap();
            model.step(noise, &mut cache, Store::Update).unwrap();
            steps.push(model.step(input, &mut cache, Store::Rewrite).unwrap());
        }
        let most = largest(parallel.clone());
        let worst = max_difference(Tensor::cat(steps, 1), parallel);
        // Another summation order can change a code.
        let tolerance = if format.is_quantized() { 2e-3 } else { 5e-5 };
        assert!(worst <= tolerance * most, "{name}: {worst} of {most}");
    }
}

/// A batch of two streams equals each stream alone, and the noise depends on the seed.
#[test]
fn a_pipeline_is_a_function_of_its_seed() {
    let device = device();
    let play = |seed: u64| {
        let model = GameRft::load(world(), &device).unwrap();
        let cache = model.new_cache(KvCacheConfig::float(), Frames(3), 2, &device).unwrap();
        let mut pipeline = CausvidPipeline::new(model, cache, seed).unwrap();
        let buttons = [[true; 11], [false; 11]];
        let players = [([1.0, -2.0], &buttons[0][..]), ([0.0, 0.0], &buttons[1][..])];
        let controls = Controls::of(&players, &device).unwrap();
        let frames: Vec<_> =
            pipeline.play(vec![controls; 5]).map(|frame| frame.unwrap().into_data()).collect();
        assert_eq!(pipeline.frames(), Frames(5));
        frames
    };
    let (first, again, other) = (play(3), play(3), play(4));
    assert_eq!(first, again);
    assert_ne!(first[0], other[0]);
    assert_ne!(first[0], first[1]);
    assert!(first[4].iter::<f32>().all(f32::is_finite));
}

/// A saved checkpoint gives the same numbers, also with the names of the training loop.
#[test]
fn saved_worlds_load() {
    let device = device();
    let model = GameRft::load(world(), &device).unwrap();
    let folder = tempfile::tempdir().unwrap();
    model.save(folder.path(), WeightDtype::F32).unwrap();
    let names = |folder: &Path| {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<_> = tensors
            .iter()
            .map(|(name, tensor)| {
                (name.to_string(), tensor.shape().to_vec(), tensor.data().to_vec())
            })
            .collect();
        tensors.sort();
        tensors
    };
    assert_eq!(names(folder.path()), names(&world()));
    let again = GameRft::load(folder.path(), &device).unwrap();
    assert_eq!(again.config(), model.config());
}

/// Inputs of 16 bits give the results of the same numbers in f32.
#[test]
fn inputs_of_sixteen_bits_are_computed_in_f32() {
    fn controls(Controls { mouse, buttons }: Controls, dtype: DType) -> Controls {
        Controls { mouse: mouse.cast(dtype), buttons: buttons.cast(dtype) }
    }
    let device = device();
    let expected = Expected::of(&world(), &device);
    let model = GameRft::load(world(), &device).unwrap();
    let float = KvCacheConfig::float();
    let cast = |input: Noised, dtype: DType| Noised {
        x: input.x.cast(dtype),
        t: input.t.cast(dtype),
        controls: controls(input.controls, dtype),
    };
    for dtype in [DType::F16, DType::BF16] {
        let narrow = cast(expected.input(), dtype);
        let wide = cast(narrow.clone(), DType::F32);
        let [a, b] = [&narrow, &wide].map(|input| model.forward(input.clone(), float).unwrap());
        assert_eq!((a.dtype(), a.to_data()), (DType::F32, b.to_data()));

        let played = [&narrow, &wide].map(|input| {
            let first = |x: &Tensor<5>| x.clone().narrow(1, 0, 1);
            let step = Noised {
                x: first(&input.x),
                t: input.t.clone().narrow(1, 0, 1),
                controls: input.controls.frame(0),
            };
            let batch = step.x.dims()[0];
            let mut cache = model.new_cache(float, Frames(3), batch, &device).unwrap();
            let stepped = model.step(step.clone(), &mut cache, Store::Update).unwrap();
            let cache = model.new_cache(float, Frames(3), batch, &device).unwrap();
            let mut pipeline = CausvidPipeline::new(model.clone(), cache, 5).unwrap();
            let frame = step.x.squeeze_dim::<4>(1);
            pipeline.see(frame.clone(), &step.controls).unwrap();
            let next = pipeline.next_frame(&step.controls).unwrap();
            let from = pipeline.next_frame_from(frame, &step.controls).unwrap();
            assert_eq!([next.dtype(), from.dtype()], [DType::F32; 2]);
            (stepped.to_data(), next.to_data(), from.to_data())
        });
        assert_eq!(played[0], played[1], "{dtype:?}");
    }
}

/// Every parameter has a gradient that predicts the change of the loss along it.
#[cfg(feature = "autodiff")]
#[test]
fn gradients_reach_every_parameter() {
    use burn::{
        module::{Module, ModuleMapper, ModuleVisitor, Param},
        tensor::Gradients,
    };
    use kv_models::kv_cubecl::{Autodiff, Flex, On};

    struct Seen<'a> {
        gradients: &'a Gradients,
        squares: f64,
        without: usize,
    }
    impl ModuleVisitor for Seen<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match param.val().grad(self.gradients) {
                Some(gradient) => {
                    let squares = gradient.square().sum().into_scalar::<f32>();
                    self.squares += f64::from(squares);
                    self.without += usize::from(squares == 0.0);
                }
                None => self.without += 1,
            }
        }
    }
    /// Moves parameters along the gradient.
    struct Moved<'a> {
        gradients: &'a Gradients,
        by: f64,
    }
    impl ModuleMapper for Moved<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|values| {
                let gradient = values.grad(self.gradients).unwrap();
                let moved = values.clone().detach().without_autodiff() + gradient * self.by;
                Tensor::from_data(moved.into_data(), &values.device())
            })
        }
    }

    let device = On::<Autodiff<Flex>>::open().unwrap();
    let expected = Expected::of(&world(), &device);
    let model = GameRft::load(world(), &device).unwrap();
    for name in ["float", "k8v8-g16-r16"] {
        let format: KvCacheConfig = name.parse().unwrap();
        let loss = |model: &GameRft| {
            let wanted = expected.tensor::<5>("noise");
            (model.forward(expected.input(), format).unwrap() - wanted).square().mean()
        };
        let gradients = loss(&model).backward();
        let mut seen = Seen { gradients: &gradients, squares: 0.0, without: 0 };
        model.visit(&mut seen);
        assert_eq!(seen.without, 0, "{name}: parameters without a gradient");
        if format.is_quantized() {
            // The true loss is piecewise constant there.
            continue;
        }
        let at = |by: f64| {
            let moved = model.clone().map(&mut Moved { gradients: &gradients, by });
            f64::from(loss(&moved).into_scalar::<f32>())
        };
        let step = 1e-2 / seen.squares.sqrt();
        let slope = (at(step) - at(-step)) / (2.0 * step);
        let error = (slope / seen.squares - 1.0).abs();
        assert!(error < 1e-2, "{name}: slope {slope}, squares {}", seen.squares);
    }
}
