//! Runs that are stopped by signals, keys, requests or patience.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use burn::module::Module;
use kv_models::{
    LayerSpec, SaveOptions, WeightDtype,
    kv_cubecl::{Autodiff, Flex},
    llama::Config,
    save,
};
use kv_train::{Checkpoints, Error, History, Resume, Run, Texts, TrainConfig, checkpointed, train};

use crate::common::{
    Losses, World, fails, losses, program, qat_args, quantized, saved, succeeds, weights,
};

type Cpu = World<Autodiff<Flex>>;

/// Draws a number below `n` from a linear congruential generator.
fn pick(state: &mut u64, n: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % n
}

#[test]
fn two_hundred_stops_change_nothing() {
    let world = Cpu::new();
    let config = TrainConfig {
        seq_len: 48,
        batch: 1,
        accumulation: 2,
        steps: 240,
        steps_per_epoch: 7,
        valid_windows: 3,
        ..quantized()
    };
    let whole = world.train("whole", &config).unwrap();
    let texts = Texts { train: world.tokens("text.txt"), valid: None };
    let (mut state, mut stops, mut before) = (3, 0, 0);
    let trained = loop {
        // The run is asked to stop when it logs a line: within a step, between two steps, or in a
        // validation.
        let asked = Arc::new(AtomicBool::new(false));
        let (stop, lines) = (asked.clone(), AtomicUsize::new(0));
        let after = 1 + pick(&mut state, 5) as usize;
        let log = move |_: &str| {
            if lines.fetch_add(1, Ordering::Relaxed) + 1 == after {
                asked.store(true, Ordering::Relaxed);
            }
        };
        let run = Run {
            resume: if stops == 0 { Resume::No } else { Resume::Last },
            stop: Some(stop),
            log: Some(Box::new(log)),
            ..Run::new(world.path("stopped"))
        };
        match train(&world.device, world.model.clone(), &texts, &config, run) {
            Ok(trained) => break trained,
            Err(Error::Interrupted { step, steps, .. }) => {
                assert!(step >= before && steps == 240, "{step} after {before}");
                before = step;
                stops += 1;
            }
            Err(error) => panic!("after {stops} stops: {error}"),
        }
    };
    assert!(stops >= 200, "{stops}");
    assert_eq!(Losses::of(&trained.history), Losses::of(&whole.history));
    let (trained, whole) = (trained.model.convert().model, whole.model.convert().model);
    assert!(weights(&trained) == weights(&whole));
}

#[test]
fn stops_when_validation_gets_worse() {
    let world = Cpu::new();
    // Held-out letters whose order never occurs in the text.
    let letters: String = (0..800u32).map(|i| char::from(b'a' + (i * i % 26) as u8)).collect();
    world.write("letters.txt", &letters);
    let texts = Texts { train: world.tokens("text.txt"), valid: Some(world.tokens("letters.txt")) };
    let config = TrainConfig { patience: Some(1), steps: 40, ..quantized() };
    let train = |name: &str, config: &TrainConfig, resume| {
        world.train_on(world.model.clone(), &texts, name, config, resume).unwrap()
    };
    let trained = train("run", &config, Resume::No);
    let valid: Vec<f64> = trained.history.valid.iter().map(|record| record.nll).collect();
    assert!(trained.steps < 40, "{valid:?}");
    assert_eq!(trained.steps, 4 * (valid.len() - 1));
    assert_eq!(trained.history.train.len(), trained.steps);
    let (last, before) = valid.split_last().unwrap();
    assert!(before.is_sorted_by(|a, b| a > b) && last >= before.last().unwrap(), "{valid:?}");
    Checkpoints::of(&world.path("run")).check(trained.steps).unwrap();

    // The model is the best one, not the last.
    assert_eq!(trained.step, trained.steps - 4);
    let best = weights(&trained.model.convert().model);
    assert_eq!(trained.step == 0, best == weights(&world.model));

    // With more patience, the best model is in the middle of the run. Its checkpoint is kept, and
    // so is the last one.
    let patient = TrainConfig { patience: Some(100), ..config.clone() };
    let patient = train("patient", &patient, Resume::No);
    let valid: Vec<f64> = patient.history.valid.iter().map(|record| record.nll).collect();
    let lowest = valid.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!((patient.steps, valid[patient.step / 4]), (40, lowest), "{valid:?}");
    assert!((4..40).contains(&patient.step), "{valid:?}");
    let checkpoint = |step| {
        let (model, folder) = (world.model.clone(), world.path("patient"));
        let prepared = checkpointed(&world.device, model, &folder, step).unwrap();
        weights(&prepared.convert().model)
    };
    let middle = weights(&patient.model.convert().model);
    assert_eq!(checkpoint(patient.step), middle);
    assert_ne!(checkpoint(40), middle);

    // A resumed run remembers the best validation.
    let again = train("run", &config, Resume::Step(trained.step));
    assert_eq!(Losses::of(&again.history), Losses::of(&trained.history));
    assert_eq!(weights(&again.model.convert().model), best);
    // A finished run is returned as it ended.
    let again = train("run", &config, Resume::Last);
    assert_eq!(Losses::of(&again.history), Losses::of(&trained.history));
    assert_eq!((again.steps, again.step), (trained.steps, trained.step));
    assert_eq!(weights(&again.model.convert().model), best);
}

#[cfg(unix)]
fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
}

/// The program is killed or stopped at random times, and resumed, until it ends by itself.
#[cfg(unix)]
#[test]
fn signals_at_any_time_change_nothing() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let (whole, run) = (world.string("whole"), world.string("run"));
    succeeds(&mut program(&qat_args(&model, &text, &whole, "300")));
    let (mut state, mut stopped) = (1, 0);
    for round in 0.. {
        let begun = Path::new(&run).join("train.json").is_file();
        let new = qat_args(&model, &text, &run, "300");
        let args = if begun { &["resume", &run][..] } else { &new };
        let mut command = program(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if round < 40 {
            thread::sleep(Duration::from_millis(20 + pick(&mut state, 250)));
            if child.try_wait().unwrap().is_none() {
                signal(&child, ["-INT", "-TERM", "-KILL"][pick(&mut state, 3) as usize]);
            }
        }
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => break,
            Some(130) => stopped += 1,
            // It was killed, or the signal came before it handled signals.
            None => {}
            Some(_) => panic!("{:?}: {stderr}", output.status),
        }
        assert!(round < 41, "it does not end");
    }
    assert!(stopped > 1, "{stopped}");
    assert_eq!(losses(&run), losses(&whole));
    assert!(saved(&run) == saved(&whole));
}

#[cfg(unix)]
#[test]
fn a_stopped_run_tells_how_to_resume() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    for name in ["-INT", "-TERM"] {
        let run = world.string(name);
        let mut command = program(&qat_args(&model, &text, &run, "4000"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while History::read(run.as_ref()).unwrap_or_default().train.len() < 3 {
            thread::sleep(Duration::from_millis(1));
        }
        // No other process may train in the folder of a running process.
        fails(&mut program(&["resume", &run]), &[&run, "another process is training"]);
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(130), "{stdout}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let step = Checkpoints::of(run.as_ref()).last_complete().unwrap().unwrap();
        let line = stdout.lines().last().unwrap();
        for part in [&format!("stopped after step {step} of 4000"), "kv-train resume", &run] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!stdout.contains("trained"), "{stdout}");
        assert!(fs::metadata(format!("{run}/model")).is_err());
    }
}

/// Shows the dashboard on a terminal created by `script`.
#[cfg(target_os = "linux")]
#[test]
fn keys_and_ctrl_c_stop_the_dashboard() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let whole = world.string("whole");
    succeeds(&mut program(&qat_args(&model, &text, &whole, "300")));
    for (name, keys, keeps) in [("ctrl-c", &["\u{3}"][..], true), ("stop", &["q", "s"], true)]
        .into_iter()
        .chain([("kill", &["q", "k"][..], false)])
    {
        let run = world.string(name);
        let args = qat_args(&model, &text, &run, "300").join(" ");
        let line = format!("stty rows 40 cols 120; {} {args}", env!("CARGO_BIN_EXE_kv-train"));
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        script.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = script.spawn().expect("script of util-linux");
        let mut input = child.stdin.take().unwrap();
        while History::read(run.as_ref()).unwrap_or_default().train.len() < 20 {
            assert!(child.try_wait().unwrap().is_none(), "{name} ended by itself");
            thread::sleep(Duration::from_millis(5));
        }
        for key in keys {
            input.write_all(key.as_bytes()).unwrap();
            input.flush().unwrap();
            thread::sleep(Duration::from_millis(400));
        }
        let output = child.wait_with_output().unwrap();
        drop(input);
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(130), "{name}: {stdout}");
        // The alternate screen is entered and left.
        let (last, shown) = (stdout.rfind("\u{1b}[?1049l"), stdout.rfind("\u{1b}[?25h"));
        assert!(stdout.contains("\u{1b}[?1049h") && last.is_some(), "{name}: {stdout}");
        assert!(shown > stdout.rfind("\u{1b}[?25l"), "{name}: the cursor is hidden");
        let said = &stdout[last.unwrap()..];
        assert!(said.contains("stopped after step") && said.contains("resume"), "{name}: {said}");
        assert!(!said.contains("panicked"), "{name}: {said}");
        let step = Checkpoints::of(run.as_ref()).last_complete().unwrap().unwrap();
        assert!(said.contains(&format!("step {step} of 300")), "{name}: {said}");
        let made = History::read(run.as_ref()).unwrap().train.last().unwrap().step as usize;
        assert!(!keeps || made <= step, "{name}: steps up to {made} for a checkpoint of {step}");
        let stdout = succeeds(&mut program(&["resume", &run, "--plain"]));
        assert!(stdout.contains(&format!("resuming after step {step} of 300")), "{stdout}");
        assert!(saved(&run) == saved(&whole), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_quantize_leaves_nothing() {
    let world = Cpu::new();
    let attention = LayerSpec::new(8, 8, 64);
    let (hidden_size, intermediate_size, rotary_dim) = (512, 2048, 64);
    let large = Config {
        attention,
        hidden_size,
        intermediate_size,
        rotary_dim,
        n_layers: 12,
        ..crate::common::architecture()
    };
    let options = SaveOptions { dtype: WeightDtype::F16, cache: None };
    let large_model = crate::common::tiny(large, &world.device).valid();
    save(world.path("large"), &large_model, &world.tokenizer, options).unwrap();
    let (model, out) = (world.string("large"), world.string("int4"));
    let args = ["quantize", "--model", &model, "--format", "int4", "--range", "least-error"];
    let unfinished = || {
        let entries = fs::read_dir(world.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(".unfinished-")).count()
    };
    let mut command = program(&[&args[..], &["--out", &out]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while unfinished() == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was interrupted");
        thread::sleep(Duration::from_millis(1));
    }
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stdout}");
    assert!(stdout.contains("interrupted, nothing is written"), "{stdout}");
    assert_eq!(unfinished(), 0);
    assert!(!world.path("int4").exists());
}

/// Includes commands that have nothing to finish.
#[cfg(unix)]
#[test]
fn every_interrupted_command_exits_with_130() {
    let world = Cpu::new();
    let model = world.save_model("base");
    let world_run = world.string("world");
    let bench = ["bench", "--model", &model, "--cache", crate::common::K2V2, "--seq-len", "96"];
    let bench = [&bench[..], &["--steps", "1000000"]].concat();
    let maze = ["world", "--out", &world_run];
    for (args, most) in [(&bench[..], 20), (&maze, 1)] {
        let mut command = program(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        thread::sleep(Duration::from_secs(1));
        for _ in 0..most {
            if child.try_wait().unwrap().is_some() {
                break;
            }
            signal(&child, "-INT");
            thread::sleep(Duration::from_millis(100));
        }
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(130), "{args:?}");
    }
}

/// The terminal, created by `script`, cannot move its cursor.
#[cfg(target_os = "linux")]
#[test]
fn a_dumb_terminal_gets_lines() {
    let world = Cpu::new();
    let (model, text, run) =
        (world.save_model("base"), world.string("text.txt"), world.string("run"));
    let args = qat_args(&model, &text, &run, "8").join(" ");
    let line = format!("{} {args}", env!("CARGO_BIN_EXE_kv-train"));
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env("TERM", "dumb").stdin(Stdio::piped()).stdout(Stdio::piped());
    let child = script.spawn().expect("script of util-linux");
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}");
    assert!(!stdout.contains('\u{1b}'), "no escapes: {stdout:?}");
    assert_eq!(stdout.matches("TERM \"dumb\"").count(), 1, "{stdout}");
    assert!(stdout.contains("valid after     4"), "{stdout}");
}
