//! Runs that are stopped and go on, and folders that hold a run already.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeMap,
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

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::Tensor,
};
use common::{Losses, World, fails, program, quantized, succeeds, weights};
use kv_models::{
    LayerSpec, SaveOptions, WeightDtype,
    kv_cubecl::{Autodiff, Flex},
    llama::Config,
    save,
};
use kv_train::{Checkpoints, Error, History, Resume, Run, Texts, TrainConfig, checkpointed, train};

type Cpu = World<Autodiff<Flex>>;

/// A number below `n`, from a linear congruential generator.
fn pick(state: &mut u64, n: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % n
}

/// All files below a folder.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(contents(&path)),
            false => drop(files.insert(path.display().to_string(), fs::read(&path).unwrap())),
        }
    }
    files
}

fn saved(folder: &str) -> Vec<u8> {
    fs::read(format!("{folder}/model/model.safetensors")).unwrap()
}

fn losses(folder: &str) -> Losses {
    Losses::of(&History::read(folder.as_ref()).unwrap())
}

/// A run of `steps` steps with a validation after every fourth.
fn qat<'a>(model: &'a str, text: &'a str, out: &'a str, steps: &'a str) -> Vec<&'a str> {
    let mut args = vec!["qat", "--model", model, "--text", text, "--out", out];
    args.extend(["--cache", common::K2V2, "--seq-len", "48", "--holdout", "0.1"]);
    args.extend(["--valid-windows", "3", "--lr", "1e-3", "--warmup", "2", "--eval-tokens", "0"]);
    args.extend(["--batch", "1", "--accumulation", "2", "--steps-per-epoch", "4"]);
    args.extend(["--steps", steps]);
    args
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
        // The run is asked to stop when a line is told: within a step, between two, or in a
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
    // Held-out letters in an order that never occurs in the text.
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

    // With more patience, the best model is one in the middle. Its checkpoint is kept, and so is
    // the last.
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

    // A resumed run remembers what the best was.
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

/// The program is killed or asked to stop at random moments, and resumed, until it ends by itself.
#[cfg(unix)]
#[test]
fn signals_at_any_time_change_nothing() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let (whole, run) = (world.string("whole"), world.string("run"));
    succeeds(&mut program(&qat(&model, &text, &whole, "300")));
    let (mut state, mut stopped) = (1, 0);
    for round in 0.. {
        let begun = Path::new(&run).join("train.json").is_file();
        let new = qat(&model, &text, &run, "300");
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
            // It was killed, or got the signal before it handled signals.
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
fn a_stopped_run_says_how_to_go_on() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    for name in ["-INT", "-TERM"] {
        let run = world.string(name);
        let mut command = program(&qat(&model, &text, &run, "4000"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while History::read(run.as_ref()).unwrap_or_default().train.len() < 3 {
            thread::sleep(Duration::from_millis(1));
        }
        // Meanwhile no other process may train there.
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

/// The dashboard on a terminal made by `script`.
#[cfg(target_os = "linux")]
#[test]
fn the_dashboard_stops_by_its_keys_and_by_ctrl_c() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let whole = world.string("whole");
    succeeds(&mut program(&qat(&model, &text, &whole, "300")));
    for (name, keys, keeps) in [("ctrl-c", &["\u{3}"][..], true), ("stop", &["q", "s"], true)]
        .into_iter()
        .chain([("kill", &["q", "k"][..], false)])
    {
        let run = world.string(name);
        let args = qat(&model, &text, &run, "300").join(" ");
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
        // The alternate screen is entered, and left again.
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

#[test]
fn a_refused_start_changes_nothing() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let run = world.string("run");
    succeeds(&mut program(&qat(&model, &text, &run, "8")));
    let before = contents(run.as_ref());
    let args = qat(&model, &text, &run, "12");
    fails(
        &mut program(&args),
        &[&run, "already holds a run", "resume it, or choose another folder"],
    );
    let pretrain = |out: &str, parts: &[&str]| {
        let args = ["pretrain", "--text", &text, "--vocab", "270", "--out", out];
        fails(&mut program(&args), parts);
    };
    pretrain(&run, &[&run, "already holds a run"]);
    // Resuming a finished run from a step without a checkpoint fails and leaves it finished.
    fails(&mut program(&["resume", &run, "--from-step", "3"]), &["no checkpoint of step 3"]);
    assert!(before == contents(run.as_ref()));

    // A model's own folder is not taken for a run's.
    let before = contents(model.as_ref());
    pretrain(&model, &["tokenizer.json", "is there already"]);
    assert!(before == contents(model.as_ref()));

    // After a start that is refused for another reason, the same folder can be used at once.
    let new = world.string("new");
    let args = qat(&model, &text, &new, "8");
    let mut late = args.clone();
    let warmup = late.iter().position(|arg| *arg == "--warmup").unwrap();
    late[warmup + 1] = "9";
    fails(&mut program(&late), &["warmup 9"]);
    succeeds(&mut program(&args));
}

#[test]
fn a_reader_that_goes_away_does_not_end_a_run() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let run = world.string("run");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = program(&qat(&model, &text, &run, "8")).stdout(writer).status().unwrap();
    assert!(status.success(), "{status}");
    assert!(!saved(&run).is_empty());
}

#[test]
fn a_run_that_could_not_save_is_finished_by_resume() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let run = world.string("run");
    succeeds(&mut program(&qat(&model, &text, &run, "8")));
    let (expected, weights) = (losses(&run), saved(&run));
    fails(&mut program(&["resume", &run]), &[&run, "has done its 8 steps"]);

    // As after a failure to save: all steps were made, but there is no model.
    fs::remove_file(format!("{run}/result.json")).unwrap();
    fs::remove_dir_all(format!("{run}/model")).unwrap();
    fs::write(format!("{run}/model"), "in the way").unwrap();
    fails(&mut program(&["resume", &run]), &[&format!("{run}/model"), "is not a folder"]);
    fs::remove_file(format!("{run}/model")).unwrap();
    let stdout = succeeds(&mut program(&["resume", &run]));
    assert!(stdout.contains("trained 8 steps"), "{stdout}");
    assert!(saved(&run) == weights && losses(&run) == expected);

    // Any checkpoint can be saved.
    succeeds(&mut program(&["export", &run]));
    let exported = |step: usize| fs::read(format!("{run}/model-{step}/model.safetensors")).unwrap();
    assert!(exported(8) == weights);
    let stdout = succeeds(&mut program(&["export", &run, "--step", "4"]));
    assert!(stdout.contains("after step 4 of 8"), "{stdout}");
    let short = world.string("short");
    let out = world.string("exported");
    succeeds(&mut program(&["export", &run, "--step", "4", "--out", &out]));
    assert!(fs::read(format!("{out}/model.safetensors")).unwrap() == exported(4));
    assert!(exported(4) != weights);
    assert!(fs::metadata(format!("{run}/model-4/kv_cache.json")).is_ok());
    fails(&mut program(&["export", &run, "--step", "5"]), &["no checkpoint of step 5", "4 and 8"]);
    // A model that is there is not replaced.
    fs::write(format!("{out}/model.safetensors"), "mine").unwrap();
    let again = ["export", &run, "--step", "4", "--out", &out];
    fails(&mut program(&again), &[&format!("out {out}"), "is there already"]);
    assert_eq!(fs::read(format!("{out}/model.safetensors")).unwrap(), b"mine");
    fails(&mut program(&["export", &run]), &[&format!("{run}/model-8"), "is there already"]);
    fails(&mut program(&["export", &short]), &["run.json", "a run's folder"]);

    // Resumed from an earlier step, it makes the later ones again, with the same result.
    succeeds(&mut program(&["resume", &run, "--from-step", "4"]));
    assert!(saved(&run) == weights && losses(&run) == expected);
    // An older checkpoint may remain too, if writing one takes longer than the steps to the next.
    assert!(Checkpoints::of(run.as_ref()).steps().unwrap().ends_with(&[4, 8]));
}

/// What decides the weights is compared with what the run was started with, by content.
#[test]
fn a_run_is_resumed_only_with_what_it_was_started_with() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let (valid, run) = (world.string("valid.txt"), world.string("run"));
    world.write("valid.txt", &common::sentences(60));
    let mut args = qat(&model, &text, &run, "8");
    args.extend(["--valid-text", &valid]);
    succeeds(&mut program(&args));
    let expected = saved(&run);
    let resume = ["resume", run.as_str(), "--from-step", "4"];
    let weights = format!("{model}/model.safetensors");
    let tokenizer = format!("{model}/tokenizer.json");
    let other = world.string("other");
    {
        // Another model of the same shape.
        let model = common::tiny(common::architecture(), &world.device).valid();
        let model = model.map(&mut Halved);
        let options = SaveOptions { dtype: WeightDtype::F16, cache: None };
        save(&other, &model, &world.tokenizer, options).unwrap();
    }
    let others = fs::read(format!("{other}/model.safetensors")).unwrap();
    let mut text_of_others = fs::read(&text).unwrap();
    text_of_others.extend(b"And so on.");
    let mut spaced = fs::read(&tokenizer).unwrap();
    spaced.push(b'\n');
    for (path, content, what) in [
        (&text, &text_of_others, "text"),
        (&valid, &text_of_others, "valid-text"),
        (&weights, &others, "model and teacher"),
        (&tokenizer, &spaced, "model and teacher"),
    ] {
        let before = fs::read(path).unwrap();
        assert!(before != *content);
        fs::write(path, content).unwrap();
        let why = [&format!("{what} {path}")[..], "is not the file that the run was started with"];
        fails(&mut program(&resume), &why);
        if what.starts_with("model") {
            fails(&mut program(&["export", &run, "--step", "4"]), &why);
        }
        fs::remove_file(path).unwrap();
        fails(&mut program(&resume), &[what, path]);
        fs::write(path, before).unwrap();
    }
    succeeds(&mut program(&resume));
    assert!(saved(&run) == expected);

    // A run of an older version has no hashes.
    let spec = format!("{run}/run.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&spec).unwrap()).unwrap();
    assert_eq!(
        json.as_object_mut().unwrap().remove("inputs").unwrap().as_array().unwrap().len(),
        6
    );
    fs::write(&spec, json.to_string()).unwrap();
    let output = program(&resume).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && stderr.contains("note: ") && stderr.contains("no hashes"));
    assert!(saved(&run) == expected);
}

/// Multiplies all weights by 1/2.
struct Halved;

impl ModuleMapper for Halved {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.mul_scalar(0.5))
    }
}

#[test]
fn a_run_from_scratch_keeps_its_tokenizer_and_its_texts() {
    let world = Cpu::new();
    let (text, run) = (world.string("text.txt"), world.string("run"));
    let mut args = vec!["pretrain", "--text", &text, "--out", &run, "--vocab", "280"];
    args.extend(["--hidden", "32", "--intermediate", "64", "--layers", "1", "--heads", "2"]);
    args.extend(["--kv-heads", "1", "--head-dim", "16", "--context", "64", "--seq-len", "32"]);
    args.extend([
        "--steps",
        "4",
        "--steps-per-epoch",
        "2",
        "--eval-tokens",
        "0",
        "--holdout",
        "0.1",
    ]);
    succeeds(&mut program(&args));
    let expected = saved(&run);
    let resume = ["resume", run.as_str(), "--from-step", "2"];
    succeeds(&mut program(&resume));
    assert!(saved(&run) == expected);
    let tokenizer = format!("{run}/tokenizer.json");
    let mut spaced = fs::read(&tokenizer).unwrap();
    spaced.push(b'\n');
    fs::write(&tokenizer, spaced).unwrap();
    fails(&mut program(&resume), &["tokenizer tokenizer.json", "is not the file"]);
}

/// Older versions started runs that could not be evaluated in the end, and failed then.
#[test]
fn a_run_whose_evaluation_cannot_be_made_is_finished_by_resume() {
    let world = Cpu::new();
    let (model, text, run) =
        (world.save_model("base"), world.string("text.txt"), world.string("run"));
    succeeds(&mut program(&qat(&model, &text, &run, "8")));
    let weights = saved(&run);
    let spec = format!("{run}/run.json");
    let started = fs::read_to_string(&spec).unwrap();
    assert!(started.contains("\"eval_tokens\": 0"), "{started}");
    fs::write(&spec, started.replace("\"eval_tokens\": 0", "\"eval_tokens\": 1")).unwrap();
    for again in [&["resume", run.as_str()][..], &["resume", &run, "--eval-tokens", "64"]] {
        fs::remove_file(format!("{run}/result.json")).unwrap();
        fs::remove_dir_all(format!("{run}/model")).unwrap();
        let output = program(again).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}");
        let skipped = stderr.contains("will not be evaluated");
        assert_eq!(skipped, again.len() == 2, "{stderr}");
        assert_eq!(String::from_utf8(output.stdout).unwrap().contains("perplexity"), !skipped);
        assert!(saved(&run) == weights);
    }
    fails(
        &mut program(&["resume", &run, "--from-step", "4", "--eval-tokens", "1"]),
        &["eval-tokens 1"],
    );
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
        ..common::architecture()
    };
    let options = SaveOptions { dtype: WeightDtype::F16, cache: None };
    let large_model = common::tiny(large, &world.device).valid();
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

/// Also where there is nothing to finish.
#[cfg(unix)]
#[test]
fn every_interrupted_command_exits_with_130() {
    let world = Cpu::new();
    let model = world.save_model("base");
    let world_run = world.string("world");
    let bench = ["bench", "--model", &model, "--cache", common::K2V2, "--seq-len", "96"];
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

/// A terminal that cannot move its cursor, made by `script`.
#[cfg(target_os = "linux")]
#[test]
fn a_dumb_terminal_has_lines() {
    let world = Cpu::new();
    let (model, text, run) =
        (world.save_model("base"), world.string("text.txt"), world.string("run"));
    let args = qat(&model, &text, &run, "8").join(" ");
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

#[test]
fn a_short_last_epoch_and_a_validation_before_the_first_step() {
    let world = Cpu::new();
    let (model, text, run) =
        (world.save_model("base"), world.string("text.txt"), world.string("run"));
    let args = qat(&model, &text, &run, "30");
    let args: Vec<&str> = args.into_iter().filter(|arg| *arg != "--steps-per-epoch").collect();
    // The default of 25 steps in place of the 4 that stood there.
    let at = args.iter().position(|arg| *arg == "4").unwrap();
    let args = [&args[..at], &args[at + 1..]].concat();
    let stdout = succeeds(&mut program(&args));
    let steps: Vec<u64> =
        History::read(run.as_ref()).unwrap().valid.iter().map(|record| record.step).collect();
    assert_eq!(steps, [0, 25, 30]);
    assert!(stdout.contains("valid after     0"), "{stdout}");
    let report = fs::read_to_string(format!("{run}/report.html")).unwrap();
    assert!(report.contains(">0</td>") && report.contains("saved"), "{report}");
    let result = fs::read_to_string(format!("{run}/result.json")).unwrap();
    assert!(result.contains("\"step\": 30"), "{result}");
}
