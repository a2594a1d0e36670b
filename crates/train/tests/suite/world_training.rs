//! Training of world models: it lowers the loss, resumes bit for bit, and refuses invalid settings.
use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use kv_models::{
    WeightDtype,
    kv_cubecl::{Autodiff, Flex, Frames, On},
};
use kv_train::{
    Checkpoints, Error, Resume, Schedule, WorldConfig, WorldHistory, WorldRun, checkpointed_world,
    train_world,
};

/// A model that lowers its loss within seconds.
fn small(steps: usize) -> WorldConfig {
    WorldConfig {
        patch: 12,
        channels: 8,
        d_model: 32,
        layers: 2,
        heads: 2,
        local_window: Frames(2),
        frames: 4,
        batch: 2,
        segments: 4,
        steps,
        two_step: 0,
        steps_per_epoch: steps,
        schedule: Schedule { lr: 4e-3, min_lr: 4e-3, warmup: 2 },
        valid_episodes: 2,
        valid_frames: 3,
        ..WorldConfig::default()
    }
}

fn device() -> On<Autodiff<Flex>> {
    On::open().unwrap()
}

/// Returns the losses of all steps and the PSNRs of all validations.
fn numbers(history: &WorldHistory) -> (Vec<f64>, Vec<[f64; 3]>) {
    let losses = history.train.iter().map(|record| record.loss).collect();
    let valid = history.valid.iter();
    (losses, valid.map(|v| [v.psnr, v.psnr_of_last, v.psnr_of_codec]).collect())
}

#[test]
fn a_few_steps_lower_the_loss() {
    let folder = tempfile::tempdir().unwrap();
    let run = WorldRun::new(folder.path());
    let (_, history) = train_world(&device(), &small(160), run).unwrap();
    let (losses, valid) = numbers(&history);
    assert_eq!((losses.len(), valid.len()), (160, 2));
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (before, after) = (mean(&losses[..5]), mean(&losses[155..]));
    // Noise and pictures both have a mean square of 1, and an untrained model predicts nothing.
    assert!((before - 2.0).abs() < 0.4, "{before}");
    assert!(after < 0.95 * before, "{before}, then {after}");
    // After so few steps, generated pictures may be worse than noise, but they are others.
    assert_ne!(valid[0][0], valid[1][0]);
    // The baselines do not depend on the model.
    assert_eq!(valid[0][1..], valid[1][1..]);
}

/// The run is stopped in the middle of an episode and of the two-step phase.
#[test]
fn a_stopped_run_resumes_bit_for_bit() {
    let config = WorldConfig { two_step: 4, steps_per_epoch: 5, ..small(9) };
    let model = |folder: &Path, world: kv_eval::world::World| {
        world.save(&folder.join("model"), WeightDtype::F32).unwrap();
        fs::read(folder.join("model/model.safetensors")).unwrap()
    };
    let whole = tempfile::tempdir().unwrap();
    let (world, history) = train_world(&device(), &config, WorldRun::new(whole.path())).unwrap();
    let wanted = model(whole.path(), world);

    let parts = tempfile::tempdir().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    let log = move |line: &str| {
        if line.starts_with("step     6/9") {
            asked.store(true, Ordering::SeqCst);
        }
    };
    let run =
        WorldRun { log: Some(Box::new(log)), stop: Some(stop), ..WorldRun::new(parts.path()) };
    let error = train_world(&device(), &config, run).unwrap_err();
    assert!(matches!(error, Error::Interrupted { step: 6, steps: 9, .. }), "{error}");
    let checkpoints = Checkpoints::of(parts.path());
    assert_eq!(checkpoints.steps().unwrap(), [5, 6]);

    // Records after the checkpoint are computed again.
    for resume in [Resume::Last, Resume::Step(9)] {
        let run = WorldRun { resume, ..WorldRun::new(parts.path()) };
        let (world, again) = train_world(&device(), &config, run).unwrap();
        assert_eq!(numbers(&again), numbers(&history));
        assert_eq!(model(parts.path(), world), wanted, "{resume:?}");
    }
    // The number of steps may change, since only the schedule depends on it; other settings may
    // not.
    let config = WorldConfig { two_step: 6, ..config };
    let error = |config: WorldConfig| {
        let run = WorldRun { resume: Resume::Last, ..WorldRun::new(parts.path()) };
        train_world(&device(), &config, run).unwrap_err().to_string()
    };
    let other = WorldConfig { batch: 3, ..config.clone() };
    assert!(error(other).contains("world-run.json: is missing or differs from the configuration"));
    let shorter = WorldConfig { steps: 8, ..config.clone() };
    assert!(error(shorter).contains("steps 8: must be at least 9, the steps already made"));
    let (world, step) = checkpointed_world(&device(), &config, parts.path(), None).unwrap();
    assert_eq!(step, 9);
    assert_eq!(model(parts.path(), world), wanted);
}

/// A run that is killed during a validation, even the one before the first step, can be resumed.
#[test]
fn a_checkpoint_is_written_before_its_validation() {
    let folder = tempfile::tempdir().unwrap();
    let (path, found) = (folder.path().to_path_buf(), Arc::new(Mutex::new(vec![])));
    let kept = found.clone();
    let log = move |line: &str| {
        if line.starts_with("valid after") {
            kept.lock().unwrap().push(Checkpoints::of(&path).last_complete().unwrap());
        }
    };
    let run = WorldRun { log: Some(Box::new(log)), ..WorldRun::new(folder.path()) };
    train_world(&device(), &small(3), run).unwrap();
    assert_eq!(*found.lock().unwrap(), [Some(0), Some(3)]);
}

#[test]
fn a_run_without_a_checkpoint_is_not_resumed_from_random_weights() {
    let first = tempfile::tempdir().unwrap();
    let (world, _) = train_world(&device(), &small(3), WorldRun::new(first.path())).unwrap();
    let model = first.path().join("model");
    world.save(&model, WeightDtype::F32).unwrap();
    let config = WorldConfig { seed: 1, ..small(4) };
    let from = |folder: &Path| WorldRun { from: Some(model.clone()), ..WorldRun::new(folder) };
    let whole = tempfile::tempdir().unwrap();
    let (_, history) = train_world(&device(), &config, from(whole.path())).unwrap();

    // A run that is stopped before its first step resumes from the model it started from.
    let folder = tempfile::tempdir().unwrap();
    let stop = Some(Arc::new(AtomicBool::new(true)));
    let run = WorldRun { stop, ..from(folder.path()) };
    let error = train_world(&device(), &config, run).unwrap_err();
    assert!(matches!(error, Error::Interrupted { step: 0, .. }), "{error}");
    let resume = || WorldRun { resume: Resume::Last, ..WorldRun::new(folder.path()) };
    let (_, again) = train_world(&device(), &config, resume()).unwrap();
    assert_eq!(numbers(&again), numbers(&history));

    let codec = || fs::read(folder.path().join("codec.safetensors")).ok();
    let (checkpoints, before) = (folder.path().join("checkpoints"), codec());
    fs::remove_dir_all(&checkpoints).unwrap();
    let error = train_world(&device(), &config, resume()).unwrap_err().to_string();
    assert!(error.contains("holds no checkpoint to resume from: start the run again"), "{error}");
    assert!(!checkpoints.exists());
    assert_eq!(codec(), before);
}

#[test]
fn invalid_settings_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |config: WorldConfig| {
        let error = train_world(&device(), &config, WorldRun::new(folder.path())).unwrap_err();
        let error = error.to_string();
        assert!(!error.contains('\n'), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{error}");
        error
    };
    for (config, wanted) in [
        (WorldConfig { patch: 7, ..small(2) }, "patch 7: must divide the 48 pixels"),
        (WorldConfig { channels: 0, ..small(2) }, "channels 0: must be between 1 and"),
        (WorldConfig { frames: 1, ..small(2) }, "frames 1: must be at least 2"),
        (WorldConfig { two_step: 4, ..small(3) }, "two-step 4: must be at most steps 3"),
        (WorldConfig { batch: 0, ..small(3) }, "batch 0: must be at least 1"),
        (WorldConfig { d_model: 24, ..small(3) }, "d_model = 24: over n_heads must be a multiple"),
        (WorldConfig { clip_norm: 0.0, ..small(3) }, "clip-norm 0: must be finite and above 0"),
        (small(2), "warmup 2: must be less than steps 2"),
    ] {
        let error = fails(config);
        assert!(error.contains(wanted), "{error}");
    }
    let error = fails(WorldConfig { cache: "k4v4-r64".parse().unwrap(), ..small(3) });
    assert!(error.contains("residual_length 64: must be at most the "), "{error}");
    let error = fails(WorldConfig { cache: "kint8vint8@3".parse().unwrap(), ..small(3) });
    assert!(error.contains("cache kint8vint8@3: selects more than the model's 2"), "{error}");
    WorldConfig { two_step: 3, ..small(3) }.validate().unwrap();
    fs::write(folder.path().join("history.jsonl"), "").unwrap();
    let error = train_world(&device(), &small(3), WorldRun::new(folder.path())).unwrap_err();
    assert!(error.to_string().contains("already holds a run (history.jsonl)"), "{error}");
}

/// Training and validation see frames as the cache stores them, in both phases: losses and PSNRs
/// differ from the float cache's, but not where the cache stores floats. New models have gates of
/// 0, so attention has an effect only after some steps.
#[test]
fn a_run_trains_for_its_cache() {
    let cached = |name: &str, two_step: usize| {
        let config = WorldConfig { cache: name.parse().unwrap(), two_step, ..small(8) };
        let folder = tempfile::tempdir().unwrap();
        let run = WorldRun::new(folder.path());
        let (_, history) = train_world(&device(), &config, run).unwrap();
        let saved = kv_train::world_config(folder.path()).unwrap().unwrap();
        assert_eq!(saved, config);
        numbers(&history)
    };
    for two_step in [0, 8] {
        let (float, valid) = cached("float", two_step);
        assert_eq!((float.clone(), valid.clone()), cached("float@1", two_step));
        for name in ["k2v16-g16-r16", "k16ve5m2@v1", "kint8fvint8f"] {
            let (losses, shown) = cached(name, two_step);
            // Quantization changes the prediction a little.
            assert_ne!(losses[7], float[7], "{name}");
            assert!((losses[7] / float[7] - 1.0).abs() < 0.1, "{name}: {losses:?} for {float:?}");
            assert_ne!(shown[1][0], valid[1][0], "{name}");
        }
    }
}

#[test]
fn a_run_starts_from_the_model_of_another() {
    let first = tempfile::tempdir().unwrap();
    let (world, history) = train_world(&device(), &small(3), WorldRun::new(first.path())).unwrap();
    let model = first.path().join("model");
    world.save(&model, WeightDtype::F32).unwrap();

    // With another seed, random weights would differ. The codec comes from the model, not from
    // episodes.
    let second = tempfile::tempdir().unwrap();
    let from = |folder: &Path| WorldRun { from: Some(model.clone()), ..WorldRun::new(folder) };
    let config = WorldConfig { seed: 1, ..small(4) };
    let (_, again) = train_world(&device(), &config, from(second.path())).unwrap();
    let (ended, began) = (history.valid.last().unwrap(), &again.valid[0]);
    assert_eq!([ended.psnr, ended.psnr_of_codec], [began.psnr, began.psnr_of_codec]);
    // Training changes the validation.
    assert_ne!(again.valid[1].psnr, began.psnr);

    let third = tempfile::tempdir().unwrap();
    for (config, wanted) in [
        (WorldConfig { layers: 3, ..small(4) }, "layers 3: must be 2, as in "),
        (WorldConfig { maze: 5, ..small(4) }, "maze 5: must be 0, as in "),
        (WorldConfig { patch: 8, ..small(4) }, "patch 8: must be 12, as in "),
    ] {
        let error = train_world(&device(), &config, from(third.path())).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let missing = WorldRun { from: Some(third.path().into()), ..WorldRun::new(third.path()) };
    let error = train_world(&device(), &config, missing).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    assert_eq!(fs::read_dir(third.path()).unwrap().count(), 0);
}
