//! The folder of a run: refused starts, resume and export.

use std::{collections::BTreeMap, fs, path::Path};

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::Tensor,
};
use kv_models::{
    SaveOptions, WeightDtype,
    kv_cubecl::{Autodiff, Flex},
    save,
};
use kv_train::{Checkpoints, History};

use crate::common::{World, fails, losses, program, qat_args, saved, succeeds};

type Cpu = World<Autodiff<Flex>>;

/// Reads all files below a folder.
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

#[test]
fn a_refused_start_changes_nothing() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let run = world.string("run");
    succeeds(&mut program(&qat_args(&model, &text, &run, "8")));
    let before = contents(run.as_ref());
    let args = qat_args(&model, &text, &run, "12");
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

    // The folder of a model is not mistaken for the folder of a run.
    let before = contents(model.as_ref());
    pretrain(&model, &["tokenizer.json", "already exists"]);
    assert!(before == contents(model.as_ref()));

    // After a start that is refused for another reason, the folder can still be used.
    let new = world.string("new");
    let args = qat_args(&model, &text, &new, "8");
    let mut late = args.clone();
    let warmup = late.iter().position(|arg| *arg == "--warmup").unwrap();
    late[warmup + 1] = "9";
    fails(&mut program(&late), &["warmup 9"]);
    succeeds(&mut program(&args));
}

#[test]
fn a_closed_output_does_not_end_a_run() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let run = world.string("run");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = program(&qat_args(&model, &text, &run, "8")).stdout(writer).status().unwrap();
    assert!(status.success(), "{status}");
    assert!(!saved(&run).is_empty());
}

#[test]
fn resume_finishes_a_run_that_could_not_save() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let run = world.string("run");
    succeeds(&mut program(&qat_args(&model, &text, &run, "8")));
    let (expected, weights) = (losses(&run), saved(&run));
    fails(&mut program(&["resume", &run]), &[&run, "is finished after 8 steps"]);

    // The state after a failure to save: all steps are made, but there is no model.
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
    // An existing model is not replaced.
    fs::write(format!("{out}/model.safetensors"), "mine").unwrap();
    let again = ["export", &run, "--step", "4", "--out", &out];
    fails(&mut program(&again), &[&format!("out {out}"), "already exists"]);
    assert_eq!(fs::read(format!("{out}/model.safetensors")).unwrap(), b"mine");
    fails(&mut program(&["export", &run]), &[&format!("{run}/model-8"), "already exists"]);
    fails(&mut program(&["export", &short]), &["run.json", "name the folder of a run"]);

    // A run resumed from an earlier step computes the later steps again, with the same result.
    succeeds(&mut program(&["resume", &run, "--from-step", "4"]));
    assert!(saved(&run) == weights && losses(&run) == expected);
    // An older checkpoint may remain if writing takes longer than the steps between two
    // checkpoints.
    assert!(Checkpoints::of(run.as_ref()).steps().unwrap().ends_with(&[4, 8]));
}

/// Files are compared by content with the ones that the run was started with.
#[test]
fn a_run_is_resumed_only_with_its_original_files() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let (valid, run) = (world.string("valid.txt"), world.string("run"));
    world.write("valid.txt", &crate::common::sentences(60));
    let mut args = qat_args(&model, &text, &run, "8");
    args.extend(["--valid-text", &valid]);
    succeeds(&mut program(&args));
    let expected = saved(&run);
    let resume = ["resume", run.as_str(), "--from-step", "4"];
    let weights = format!("{model}/model.safetensors");
    let tokenizer = format!("{model}/tokenizer.json");
    let other = world.string("other");
    {
        // Another model of the same shape.
        let model = crate::common::tiny(crate::common::architecture(), &world.device).valid();
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
        let why =
            [&format!("{what} {path}")[..], "differs from the file that the run was started with"];
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
fn a_run_from_scratch_needs_its_tokenizer_and_texts() {
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
    fails(&mut program(&resume), &["tokenizer tokenizer.json", "differs from the file"]);
}

/// Older versions started runs whose evaluation then failed at the end.
#[test]
fn resume_finishes_a_run_whose_evaluation_fails() {
    let world = Cpu::new();
    let (model, text, run) =
        (world.save_model("base"), world.string("text.txt"), world.string("run"));
    succeeds(&mut program(&qat_args(&model, &text, &run, "8")));
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

#[test]
fn a_short_last_epoch_and_a_validation_before_the_first_step() {
    let world = Cpu::new();
    let (model, text, run) =
        (world.save_model("base"), world.string("text.txt"), world.string("run"));
    let args = qat_args(&model, &text, &run, "30");
    let args: Vec<&str> = args.into_iter().filter(|arg| *arg != "--steps-per-epoch").collect();
    // Without the option's value 4, the default is 25.
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
