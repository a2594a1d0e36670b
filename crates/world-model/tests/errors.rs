//! Configurations, inputs and caches that a world model refuses by name.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{Device, Tensor};
use kv_cubecl::{Frames, KvCacheConfig};
use kv_world_model::{CausvidPipeline, Controls, GameRft, Noised, Store, WorldCache};
use serde_json::{Value, json};

fn world() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/world/gamerft-tiny")
}

fn device() -> Device {
    Device::flex()
}

/// Returns a writable copy of a folder.
fn copy(folder: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        fs::write(to.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    to
}

#[test]
fn errors_name_the_field() {
    let device = device();
    for (field, value, wanted) in [
        ("n_layers", json!(5), "tensor transformer.blocks.4.adaln1.fc.weight is missing"),
        ("n_layers", json!(3), "are not part of the GameRFT model"),
        ("n_layers", json!(0), "n_layers = 0: must be between 1 and"),
        ("d_model", json!(72), "d_model = 72: over n_heads must be a multiple of 8"),
        ("n_buttons", json!(10), "the configuration needs [2048, 10]"),
        ("tokens_per_frame", json!(17), "tokens_per_frame = 17: must be 16"),
        ("causal", json!(false), "causal false"),
        ("causal", Value::Null, "causal = missing"),
        ("backbone", json!("mmdit"), "backbone mmdit"),
        ("rope_impl", json!("motion"), "rope_impl motion"),
        ("local_window", json!(1), "local_window = 1: must be at least 2 frames"),
        ("local_window", Value::Null, "local_window = missing"),
        ("n_frames", json!(1), "n_frames = 1: must be at least 2"),
    ] {
        let folder = copy(&world());
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = value.clone();
        fs::write(path, config.to_string()).unwrap();
        let error = GameRft::load(folder.path(), &device).unwrap_err().to_string();
        assert!(error.contains(wanted) && !error.contains('\n'), "{field} {value}: {error}");
    }
    let folder = copy(&world());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("causal").unwrap();
    fs::write(path, config.to_string()).unwrap();
    let error = GameRft::load(folder.path(), &device).unwrap_err().to_string();
    assert!(error.contains("config.json: causal = missing"), "{error}");

    let folder = copy(&world());
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let error = GameRft::load(folder.path(), &device).unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn wrong_inputs_change_nothing() {
    let device = device();
    let model = GameRft::load(world(), &device).unwrap();
    let mut cache = model.new_cache(KvCacheConfig::float(), Frames(3), 1, &device).unwrap();
    let input = |batch: usize, frames: usize, buttons: usize| Noised {
        x: Tensor::zeros([batch, frames, 8, 4, 4], &device),
        t: Tensor::zeros([batch, frames], &device),
        controls: Controls {
            mouse: Tensor::zeros([batch, frames, 2], &device),
            buttons: Tensor::zeros([batch, frames, buttons], &device),
        },
    };
    for (input, store, wanted) in [
        (input(1, 1, 10), Store::Update, "buttons = [1, 1, 10]: must have shape [1, 1, 11]"),
        (input(1, 2, 11), Store::Update, "frames = 2: must be 1"),
        (input(2, 1, 11), Store::Update, "cache = batch 1, "),
        (input(1, 1, 11), Store::Rewrite, "cache = 0 frames: must hold a frame"),
    ] {
        let error = model.step(input, &mut cache, store).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
        assert_eq!(cache.written(), Frames(0));
    }
    let rejects = |levels: &[f32]| {
        let cache = model.new_cache(KvCacheConfig::float(), Frames(3), 1, &device).unwrap();
        let pipeline = CausvidPipeline::new(model.clone(), cache, 0).unwrap();
        pipeline.with_levels(levels).unwrap_err().to_string()
    };
    for levels in [&[][..], &[0.5], &[1.0, 1.0], &[1.0, -0.1], &[1.0, f32::NAN]] {
        assert!(rejects(levels).contains("must start at 1, decrease"), "{levels:?}");
    }
}

/// A frame of another shape is refused before noise is added.
#[test]
fn a_frame_of_another_shape_is_refused() {
    let device = device();
    let model = GameRft::load(world(), &device).unwrap();
    let cache = model.new_cache(KvCacheConfig::float(), Frames(3), 1, &device).unwrap();
    let mut pipeline = CausvidPipeline::new(model, cache, 1).unwrap();
    let controls = Controls::of(&[([0.0, 0.0], &[false; 11])], &device).unwrap();
    let shapes: [[usize; 4]; 3] = [[2, 8, 4, 4], [1, 7, 4, 4], [1, 8, 4, 5]];
    for shape in shapes {
        let error = pipeline.see(Tensor::zeros(shape, &device), &controls).unwrap_err();
        let wanted = format!("frame = {shape:?}: must have shape [1, 8, 4, 4]");
        assert!(error.to_string().contains(&wanted), "{error}");
        assert_eq!(pipeline.frames(), Frames(0));
    }
}

/// Tensors on another device than the model's are refused by name in every argument.
#[cfg(feature = "wgpu")]
#[test]
fn inputs_of_another_device_are_named() {
    use kv_models::{
        Error,
        kv_cubecl::{On, Wgpu},
    };

    let (device, other) = (device(), (*On::<Wgpu>::open().unwrap()).clone());
    let model = GameRft::load(world(), &device).unwrap();
    let cache = || model.new_cache(KvCacheConfig::float(), Frames(3), 1, &device).unwrap();
    let controls = |device: &Device| Controls::of(&[([0.0, 0.0], &[false; 11])], device).unwrap();
    let input = |x: &Device, t: &Device, mouse: &Device, buttons: &Device| Noised {
        x: Tensor::zeros([1, 1, 8, 4, 4], x),
        t: Tensor::zeros([1, 1], t),
        controls: Controls { mouse: controls(mouse).mouse, buttons: controls(buttons).buttons },
    };
    let named = |error: Error, name: &str| {
        let Error::Argument { field, rule, .. } = &error else { panic!("{error}") };
        assert_eq!(*field, name, "{error}");
        assert!(rule.contains("must be on the model's device"), "{error}");
    };
    for (name, input) in [
        ("x", input(&other, &device, &device, &device)),
        ("t", input(&device, &other, &device, &device)),
        ("mouse", input(&device, &device, &other, &device)),
        ("buttons", input(&device, &device, &device, &other)),
    ] {
        named(model.forward(input.clone(), KvCacheConfig::float()).unwrap_err(), name);
        let mut cache = cache();
        named(model.step(input, &mut cache, Store::Update).unwrap_err(), name);
        assert_eq!(cache.written(), Frames(0));
    }
    let mut pipeline = CausvidPipeline::new(model.clone(), cache(), 1).unwrap();
    let frame = |device: &Device| Tensor::<4>::zeros([1, 8, 4, 4], device);
    named(pipeline.see(frame(&other), &controls(&device)).unwrap_err(), "frame");
    named(pipeline.see(frame(&device), &controls(&other)).unwrap_err(), "mouse");
    named(pipeline.next_frame(&controls(&other)).unwrap_err(), "x");
    assert_eq!(pipeline.frames(), Frames(0));
}

/// The noise level of frames that a pipeline stored is known, and a pipeline with another level
/// refuses them.
#[test]
fn a_pipeline_continues_only_frames_of_its_own_level() {
    let device = device();
    let model = GameRft::load(world(), &device).unwrap();
    let controls = Controls::of(&[([0.0, 0.0], &[false; 11])], &device).unwrap();
    let fresh = || model.new_cache(KvCacheConfig::float(), Frames(3), 1, &device).unwrap();
    let pipeline =
        |cache: &WorldCache| CausvidPipeline::new(model.clone(), cache.clone(), 1).unwrap();
    let refused = |pipeline: &mut CausvidPipeline, rule: &str| {
        let before = pipeline.frames();
        let frame = Tensor::zeros([1, 8, 4, 4], &device);
        for error in [
            pipeline.next_frame(&controls).map(drop).unwrap_err(),
            pipeline.see(frame, &controls).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(error.contains("levels = [1.0, ") && error.contains(rule), "{error}");
        }
        assert_eq!(pipeline.frames(), before);
    };

    let mut first = pipeline(&fresh()).with_levels(&[1.0, 0.5, 0.125]).unwrap();
    assert_eq!(first.cache().level(), None);
    first.next_frame(&controls).unwrap();
    assert_eq!(first.cache().level(), Some(0.125));
    first.see(Tensor::zeros([1, 8, 4, 4], &device), &controls).unwrap();
    let held = first.cache().clone();
    assert_eq!((held.level(), held.written()), (Some(0.125), Frames(2)));

    // The default level is 0.25. Only the last level matters, not the number of steps.
    let rule = "must end with 0.125, the level of the cache's frames";
    refused(&mut pipeline(&held), rule);
    let error = pipeline(&held).with_levels(&[1.0, 0.0]).unwrap_err().to_string();
    assert!(error.contains("levels = [1.0, 0.0]") && error.contains(rule), "{error}");
    let mut again = pipeline(&held).with_levels(&[1.0, 0.125]).unwrap();
    again.next_frame(&controls).unwrap();
    assert_eq!(again.cache().level(), Some(0.125));
    again.reset();
    assert_eq!(again.cache().level(), None);
    again.with_levels(&[1.0, 0.0]).unwrap().next_frame(&controls).unwrap();

    // A step of the model alone: peeking changes nothing, and a stored frame has an unknown level.
    let input = Noised {
        x: Tensor::zeros([1, 1, 8, 4, 4], &device),
        t: Tensor::zeros([1, 1], &device),
        controls: controls.clone(),
    };
    let mut cache = held;
    model.step(input.clone(), &mut cache, Store::Peek).unwrap();
    assert_eq!(cache.level(), Some(0.125));
    let known = cache.clone().with_level(0.125).unwrap_err().to_string();
    assert!(known.contains("level = 0.125: the cache's frames have level 0.125"), "{known}");
    for store in [Store::Update, Store::Rewrite] {
        let mut cache = cache.clone();
        model.step(input.clone(), &mut cache, store).unwrap();
        assert_eq!(cache.level(), None);
        refused(&mut pipeline(&cache), "the cache's frames is unknown");
        for wrong in [-0.1, 1.5, f32::NAN] {
            let error = cache.clone().with_level(wrong).unwrap_err().to_string();
            assert!(error.contains("must be from 0 to 1"), "{error}");
        }
        pipeline(&cache.with_level(0.25).unwrap()).next_frame(&controls).unwrap();
    }
    let error = fresh().with_level(0.25).unwrap_err().to_string();
    assert!(error.contains("level = 0.25: the cache has no frames"), "{error}");
}
