//! Resuming after kills, damaged files and full disks.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use kv_models::kv_cubecl::{Autodiff, Flex};
use kv_train::{Adapter, Checkpoints, Error, History, Objective, Resume, TrainConfig};

use crate::common::{Losses, World, fails, program, quantized, succeeds};

type Cpu = World<Autodiff<Flex>>;

const PARTS: [&str; 3] = ["model", "optimizer", "schedule"];

/// The command line of a short run.
fn qat<'a>(model: &'a str, text: &'a str, out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["qat", "--model", model, "--text", text, "--out", out];
    args.extend(["--cache", crate::common::K2V2, "--seq-len", "96", "--holdout", "0.1"]);
    args.extend(["--valid-windows", "3", "--lr", "1e-3", "--warmup", "2", "--eval-tokens", "0"]);
    args.extend(more);
    args
}

#[test]
fn a_killed_run_resumes_bit_for_bit() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let more = ["--batch", "2", "--accumulation", "2", "--steps", "30", "--steps-per-epoch", "10"];
    let whole = world.string("whole");
    succeeds(&mut program(&qat(&model, &text, &whole, &more)));
    let expected = Losses::of(&History::read(whole.as_ref()).unwrap());
    assert_eq!((expected.train.len(), expected.valid.len()), (60, 4));

    // It is killed in the middle of the second epoch; on a busy machine, the kill may come later.
    let killed = (0..5).map(|i| world.string(&format!("killed {i}"))).find(|folder| {
        let mut command = program(&qat(&model, &text, folder, &more));
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let trained = || {
            let history = History::read(folder.as_ref()).unwrap_or_default();
            history.train.last().map_or(0, |record| record.step + 1)
        };
        while trained() < 13 && child.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        (13..20).contains(&trained())
    });
    let killed = killed.unwrap();
    let checkpoints = Checkpoints::of(killed.as_ref());
    // The checkpoint may still have been incomplete.
    assert!(matches!(checkpoints.last_complete().unwrap(), Some(0 | 10)));
    succeeds(&mut program(&["resume", &killed]));
    assert_eq!(Losses::of(&History::read(killed.as_ref()).unwrap()), expected);
    assert!(checkpoints.steps().unwrap().ends_with(&[20, 30]));
    // The weights are equal, too.
    let weights = |folder: &str| fs::read(format!("{folder}/model/model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&killed));
}

#[test]
fn every_kind_of_run_resumes_exactly() {
    let world = Cpu::new();
    let adapter = Some(Adapter { rank: 2, alpha: 4.0 });
    let objective = Objective::Distillation;
    for (name, config) in [
        ("plain", crate::common::config()),
        ("adapters", TrainConfig { adapter, ..quantized() }),
        ("distilled", TrainConfig { objective, float_share: 0.25, ..quantized() }),
    ] {
        let trained = world.train(name, &config).unwrap();
        let (expected, model) = (Losses::of(&trained.history), trained.model.convert().model);
        let again = world.resume(name, &config, Resume::Step(8)).unwrap();
        assert_eq!(Losses::of(&again.history), expected, "{name}");
        let again = again.model.convert().model;
        assert_eq!(crate::common::weights(&again), crate::common::weights(&model), "{name}");
    }
}

#[test]
fn damage_is_reported_and_the_previous_epoch_resumes() {
    let world = Cpu::new();
    let expected = world.losses("run", &quantized());
    let checkpoints = Checkpoints::of(&world.path("run"));
    assert!(checkpoints.steps().unwrap().ends_with(&[8, 12]), "the last two are kept");
    checkpoints.check(8).unwrap();
    checkpoints.check(12).unwrap();

    let refuses = |file: &str, parts: &[&str]| {
        let error = world.resume("run", &quantized(), Resume::Last).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
        let error = error.to_string();
        assert!(!error.contains('\n') && error.contains(file), "{file} is not in {error}");
        for part in parts {
            assert!(error.contains(part), "{file}: {part:?} is not in {error:?}");
        }
    };
    for part in PARTS {
        for name in [format!("step-12.{part}.bpk"), format!("step-12.{part}.json")] {
            let path = world.path("run/checkpoints").join(&name);
            let bytes = fs::read(&path).unwrap();
            let file = format!("step-12.{part}.bpk");
            let hint = "resume with --from-step 8";
            let seal = name.ends_with("json");

            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            refuses(&file, &[if seal { &name } else { "is truncated" }, hint]);
            fs::write(&path, []).unwrap();
            refuses(&file, &[hint]);
            for at in [0, bytes.len() / 2, bytes.len() - 1] {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1;
                fs::write(&path, flipped).unwrap();
                refuses(&file, &[if seal { hint } else { "is damaged" }, hint]);
            }
            fs::remove_file(&path).unwrap();
            if seal {
                let error = world.resume("run", &quantized(), Resume::Step(12)).unwrap_err();
                assert!(error.to_string().contains("was not completed"), "{error}");
            } else {
                refuses(&file, &["No such file", hint]);
            }
            fs::write(&path, bytes).unwrap();
            checkpoints.check(12).unwrap();
        }
    }

    // An incomplete checkpoint, with some parts missing or without a seal, is skipped.
    for name in ["optimizer.json", "optimizer.bpk", "schedule.json", "schedule.bpk"] {
        fs::remove_file(world.path("run/checkpoints").join(format!("step-12.{name}"))).unwrap();
    }
    // Unfinished files of a killed process are removed from every folder of the run.
    let unfinished: Vec<PathBuf> = ["", "checkpoints/", "model/", "tokens/"]
        .map(|folder| world.path(&format!("run/{folder}.unfinished-a1B2c3-step-12.optimizer.bpk")))
        .into();
    for path in &unfinished {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, [0; 1000]).unwrap();
    }
    let again = world.resume("run", &quantized(), Resume::Last).unwrap();
    assert!(unfinished.iter().all(|path| !path.exists()));
    assert_eq!(Losses::of(&again.history), expected);
    checkpoints.check(12).unwrap();

    // Step 4 may exist as well if its validation was the best.
    for step in checkpoints.steps().unwrap() {
        let path = world.path(&format!("run/checkpoints/step-{step}.model.bpk"));
        fs::write(path, "not a model").unwrap();
    }
    refuses("step-12.model.bpk", &["no other checkpoint is intact"]);
}

#[test]
fn a_damaged_history_is_reported() {
    let world = Cpu::new();
    let expected = world.losses("run", &quantized());
    let path = world.path("run/history.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let resume = || world.resume("run", &quantized(), Resume::Step(8));

    // A last line that a kill cut short is ignored.
    fs::write(&path, &text[..text.len() - 20]).unwrap();
    assert_eq!(Losses::of(&resume().unwrap().history), expected);

    fs::write(&path, text.replacen("loss", "lost", 1)).unwrap();
    let error = resume().unwrap_err().to_string();
    assert!(error.contains("history.jsonl") && error.contains("line 1"), "{error}");
    fs::remove_file(&path).unwrap();
    let error = resume().unwrap_err().to_string();
    assert!(error.contains("history.jsonl"), "{error}");
    fs::write(&path, &text).unwrap();
    assert_eq!(Losses::of(&resume().unwrap().history), expected);
}

/// Runs `kv-train` with files limited to `blocks` of 512 bytes: writes fail as on a full disk.
pub(crate) fn limited(blocks: usize, args: &[&str]) -> Command {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_kv-train")).args(args);
    command
}

#[test]
fn a_full_disk_is_an_error_and_keeps_complete_checkpoints() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    // Weights take 0.4 MB, the optimizer's moments 0.7 MB.
    let blocks = 1000;
    let more = ["--batch", "1", "--steps", "12", "--steps-per-epoch", "4"];

    // It fails before the first step. Without the limit, the same command succeeds.
    let first = world.string("first");
    let command = &mut limited(blocks, &qat(&model, &text, &first, &more));
    fails(command, &[&first, "MiB for the run's checkpoints", "File too large"]);
    assert!(Checkpoints::of(first.as_ref()).steps().unwrap().is_empty());
    succeeds(&mut program(&qat(&model, &text, &first, &more)));

    // A resumed run keeps its checkpoint.
    let run = world.string("run");
    succeeds(&mut program(&qat(&model, &text, &run, &more)));
    let expected = Losses::of(&History::read(run.as_ref()).unwrap());
    assert_eq!(Losses::of(&History::read(first.as_ref()).unwrap()), expected);
    for part in PARTS {
        for extension in ["bpk", "json"] {
            fs::remove_file(format!("{run}/checkpoints/step-12.{part}.{extension}")).unwrap();
        }
    }
    fs::remove_file(format!("{run}/result.json")).unwrap();
    let resume = ["resume", &run];
    fails(&mut limited(blocks, &resume), &["MiB for the run's checkpoints", "File too large"]);
    fails(&mut limited(2, &resume), &["MiB for the run's checkpoints", "File too large"]);
    let checkpoints = Checkpoints::of(run.as_ref());
    checkpoints.check(8).unwrap();
    succeeds(&mut program(&resume));
    assert_eq!(Losses::of(&History::read(run.as_ref()).unwrap()), expected);
    let weights = |run: &str| fs::read(format!("{run}/model/model.safetensors")).unwrap();
    assert!(weights(&run) == weights(&first));
}

#[test]
fn a_full_disk_leaves_no_part_of_a_quantized_model() {
    let world = Cpu::new();
    let (model, out) = (world.save_model("base"), world.string("int4"));
    let quantize = ["quantize", "--model", &model, "--format", "int4", "--out", &out];
    let files = || fs::read_dir(world.folder.path()).unwrap().count();
    let before = files();
    // Weights take 60 kB, the configuration 2 kB, the tokenizer 15 kB.
    for blocks in [2, 20, 100] {
        fails(&mut limited(blocks, &quantize), &[&out[1..], "cannot write", "File too large"]);
        assert_eq!(files(), before);
    }
    succeeds(&mut program(&quantize));
}

#[test]
fn a_full_disk_fails_token_cache_and_history() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let out = world.string("tokens-run");
    let command = &mut limited(8, &qat(&model, &text, &out, &["--steps", "9"]));
    fails(command, &["cannot write the token cache", "File too large"]);
    assert_eq!(fs::read_dir(format!("{out}/tokens")).unwrap().count(), 0);

    // The history exceeds a limit that the checkpoints of a small model do not.
    let out = world.string("history-run");
    let small = world.save_small_model("small");
    let args = [
        &["qat", "--model", &small, "--text", &text, "--out", &out, "--cache", "k2v2-g16-r16"][..],
        &["--seq-len", "32", "--batch", "1", "--steps", "2000", "--steps-per-epoch", "2000"],
        &["--holdout", "0.1", "--valid-windows", "1", "--eval-tokens", "0", "--lr", "1e-4"],
    ]
    .concat();
    let command = &mut limited(250, &args);
    fails(command, &["history.jsonl", "File too large"]);
    assert_eq!(Checkpoints::of(out.as_ref()).steps().unwrap(), [0]);
    let history = History::read(out.as_ref()).unwrap();
    assert!(history.train.len() > 30, "what was written can be read");
    // Without the limit, the run resumes and ends like a run that never had one.
    succeeds(&mut program(&["resume", &out]));
    let whole = world.string("whole");
    let args: Vec<&str> = args.iter().map(|&arg| if arg == out { &whole } else { arg }).collect();
    succeeds(&mut program(&args));
    let weights = |run: &str| fs::read(format!("{run}/model/model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&out));
}
