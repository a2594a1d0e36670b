//! The program `kv-train`: the files of a run, and one clear line for each mistake.

use std::fs;

use kv_models::{
    ModelCacheConfig,
    kv_cubecl::{Autodiff, Flex},
};
use kv_train::TrainConfig;

use crate::common::{K2V2, World, fails, program, succeeds};

type Cpu = World<Autodiff<Flex>>;

#[test]
fn pretrain_then_qat() {
    let world = Cpu::new();
    let (text, base) = (world.string("text.txt"), world.string("base"));
    let common = [
        ["--text", &text],
        ["--seq-len", "64"],
        ["--steps", "6"],
        ["--steps-per-epoch", "3"],
        ["--holdout", "0.1"],
        ["--valid-windows", "2"],
        ["--eval-tokens", "200"],
    ];
    let common = common.concat();
    let architecture = [
        ["--vocab", "280"],
        ["--hidden", "32"],
        ["--intermediate", "64"],
        ["--layers", "1"],
        ["--heads", "2"],
        ["--kv-heads", "1"],
        ["--head-dim", "16"],
        ["--context", "128"],
    ];
    let architecture = architecture.concat();
    let args = [&["pretrain", "--out", &base][..], &architecture, &common].concat();
    let stdout = succeeds(&mut program(&args));
    assert!(stdout.contains("parameters") && stdout.contains("valid after"), "{stdout}");
    assert!(!stdout.contains('\u{1b}'), "no terminal, no escapes: {stdout:?}");
    let model = format!("{base}/model");
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(fs::metadata(format!("{model}/{name}")).is_ok(), "{name}");
    }
    assert!(fs::metadata(format!("{model}/kv_cache.json")).is_err(), "trained for no cache");
    // The seed decides the initial weights and the data order, and therefore the result.
    let again = world.string("again");
    succeeds(&mut program(&[&["pretrain", "--out", &again][..], &architecture, &common].concat()));
    let weights = |folder: &str| fs::read(format!("{folder}/model/model.safetensors")).unwrap();
    assert!(weights(&base) == weights(&again));

    let run = world.string("run");
    let qat = ["qat", "--model", &model, "--cache", "k2v2-g16-r16", "--out", &run];
    succeeds(&mut program(&[&qat[..], &common, &["--objective", "mixed:0.5"]].concat()));
    let names = [
        "model/kv_cache.json",
        "history.jsonl",
        "train.json",
        "run.json",
        "report.html",
        "loss.svg",
    ];
    for name in names {
        assert!(fs::metadata(format!("{run}/{name}")).is_ok(), "{name}");
    }
    let cache = fs::read_to_string(format!("{run}/model/kv_cache.json")).unwrap();
    assert!(cache.contains("\"residual_length\": 16"), "{cache}");
    // A policy file is accepted like the name of a cache, and all files of the run contain it.
    let (policy, by_layer) = (world.string("policy.toml"), world.string("by-layer"));
    let rules =
        "[[rules]]\ncache = \"k2v2-g16-r16\"\n[[rules]]\nlayers = -1\nside = \"keys\"\nformat = 8";
    fs::write(&policy, rules).unwrap();
    let by_policy = ["qat", "--model", &model, "--cache", &policy, "--out", &by_layer];
    succeeds(&mut program(&[&by_policy[..], &common].concat()));
    let written: ModelCacheConfig = rules_in(&policy);
    assert_eq!(rules_in(&format!("{by_layer}/model/kv_cache.json")), written);
    for file in ["run.json", "train.json"] {
        let json = fs::read_to_string(format!("{by_layer}/{file}")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let config = if file == "run.json" { &json["config"] } else { &json };
        let cache = serde_json::from_value::<ModelCacheConfig>(config["qat"]["cache"].clone());
        assert_eq!(cache.unwrap(), written, "{file}");
    }
    assert!(weights(&by_layer) != weights(&run), "the keys of the last layer are others");

    fails(&mut program(&["resume", &run]), &[&run, "is finished after 6 steps"]);
    let qat = [&qat[..], &common].concat();
    fails(&mut program(&qat), &[&run, "checkpoints up to step 6"]);
}

/// Reads the policy in a file.
fn rules_in(path: &str) -> ModelCacheConfig {
    ModelCacheConfig::read(path).unwrap()
}

/// The Hadamard transform is folded into the saved weights, so the saved cache must not apply it
/// again.
#[test]
fn a_hadamard_transform_is_saved_once() {
    let world = Cpu::new();
    let (model, text, out) =
        (world.save_model("base"), world.string("text.txt"), world.string("out"));
    let cache = "k2v2-g16-r16-hadv";
    let args = ["--model", &model, "--text", &text, "--cache", cache, "--out", &out];
    let more = ["--seq-len", "96", "--steps", "1", "--steps-per-epoch", "1", "--lr", "1e-9"];
    let evaluated = ["--eval-tokens", "300", "--plain"];
    let table = succeeds(&mut program(&[&["qat"][..], &args, &more, &evaluated].concat()));
    let perplexity = |name: &str, cache: &str| -> f64 {
        let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row.starts_with(&[name, cache])).expect(&table);
        row[2].parse().unwrap()
    };
    let (before, after) = (perplexity("before", cache), perplexity("after", "k2v2-g16-r16"));
    // Some codes round the other way. Without the transform, the numbers would differ much more.
    assert!((before - after).abs() < 2e-3 * before, "{before} and {after}\n{table}");
    let saved = fs::read_to_string(format!("{out}/model/kv_cache.json")).unwrap();
    assert!(!saved.contains("hadamard_values"), "{saved}");
}

#[test]
fn notes_on_the_model_are_printed() {
    let world = Cpu::new();
    let (model, text, out) =
        (world.save_model("base"), world.string("text.txt"), world.string("out"));
    let path = format!("{model}/tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    tokenizer["truncation"] = serde_json::json!(
        {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    );
    fs::write(&path, tokenizer.to_string()).unwrap();
    let args = ["--model", &model, "--text", &text, "--cache", K2V2, "--out", &out];
    let more = ["--seq-len", "96", "--steps", "1", "--steps-per-epoch", "1", "--eval-tokens", "0"];
    let output = program(&[&["qat"][..], &args, &more].concat()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    let notes = stderr.lines().filter(|line| line.starts_with("note: "));
    assert!(notes.clone().any(|line| line.contains("truncation")), "{stderr}");
}

#[test]
fn mistakes_are_one_line() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    world.write("short.txt", "the cat saw the moon.");
    world.write("empty.txt", "");
    world.write("bad.jsonl", "{\"text\": \"one\"}\n{\"body\": \"two\"}\n");
    world.write("file", "in the way");
    let (short, empty, bad) =
        (world.string("short.txt"), world.string("empty.txt"), world.string("bad.jsonl"));
    let (out, file, nowhere) = (world.string("out"), world.string("file"), world.string("nowhere"));

    // Each call replaces the value of one option of a valid command.
    let good = [
        ("--model", model.as_str()),
        ("--text", &text),
        ("--cache", K2V2),
        ("--out", &out),
        ("--seq-len", "96"),
        ("--steps", "4"),
        ("--steps-per-epoch", "2"),
        ("--batch", "1"),
        ("--lr", "1e-3"),
        ("--eval-tokens", "0"),
    ];
    let with = |option: &str, value: &str, parts: &[&str]| {
        let mut args = vec!["qat".to_string()];
        let others = good.iter().filter(|(name, _)| *name != option);
        args.extend(others.map(|(name, value)| format!("{name}={value}")));
        args.push(if value.is_empty() { option.into() } else { format!("{option}={value}") });
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        fails(&mut program(&args), parts);
    };
    with("--model", &nowhere, &[&nowhere]);
    with("--model", &file, &[&file]);
    with("--text", &nowhere, &[&nowhere, "not found"]);
    with("--text", &empty, &[&empty, "no text"]);
    with("--text", &bad, &["line 2", "field `text` is missing"]);
    with("--text", &short, &["seq_len = 96", "need at least"]);
    with("--valid-text", &short, &["seq_len = 96", "need at least"]);
    with("--cache", "k5v5", &["k5v5", "--cache"]);
    with("--cache", "nowhere.toml", &["nowhere.toml: not found"]);
    let policy = world.string("policy.toml");
    fs::write(&policy, "[[rules]]\nlayers = \"0..9\"\nformat = \"int8\"").unwrap();
    with("--cache", &policy, &["rules[0].layers = 0..9: the model has layers 0 to 1"]);
    with("--cache", "k2v2-g64-r64", &["group_size", "64", "head_dim 32"]);
    with("--cache", "k2v2-g16-r24", &["residual_length"]);
    with("--cache", "k2v2-r0", &["residual_length"]);
    with("--cache", "k2v2-s18446744073709551615", &["sink_tokens"]);
    with("--out", &file, &[&file]);
    with("--out", &format!("{file}/below"), &[&file]);
    with("--seq-len", "129", &["seq-len 129", "128 positions"]);
    with("--seq-len", "0", &["seq-len 0"]);
    with("--lr", "0", &["lr 0", "above 0"]);
    with("--lr", "NaN", &["lr NaN"]);
    with("--lr", "fast", &["--lr", "fast"]);
    with("--min-lr", "1", &["lr 0.001", "min-lr"]);
    with("--batch", "0", &["batch 0"]);
    with("--objective", "rl", &["objective rl", "ce, kl, or mixed:W"]);
    with("--objective", "mixed:2", &["objective mixed:2"]);
    with("--trainable", "layer", &["'layer'", "--trainable", "a similar value exists: 'layers'"]);
    with("--trainable", "head", &["'head'", "--trainable", "all, layers, attention, qkv"]);
    with("--beta-2", "1", &["beta-2 1", "below 1"]);
    with("--eval-tokens", "1", &["eval-tokens 1", "at least 2", "or 0"]);
    with("--cache", "float", &["cache float", "is float in all layers"]);
    with("--float-layers", "0,1", &["cache ", "is float in all layers"]);
    with("--memory", "1M", &["training needs at least", "but --memory allows 1.0 MB", "weights"]);
    with("--memory", "16", &["--memory", "no unit"]);
    with("--threads", "0", &["--threads", "1..=1024"]);
    with("--float-layers", "2", &["rules[1].layers = 2"]);
    with("--float-share", "2", &["float-share 2"]);
    with("--lora", "0", &["lora 0"]);
    with("--lora-alpha", "1", &["--lora"]);
    with("--holdout", "1", &["holdout 1"]);
    with("--patience", "0", &["patience 0"]);
    with("--warmup", "4", &["warmup 4"]);
    with("--cache", "k2v2", &["seq-len 96", "at least 129"]);
    with("--backend", "tpu", &["tpu"]);
    with("--fast", "", &["--fast"]);
    #[cfg(not(feature = "cuda"))]
    with("--backend", "cuda", &["cuda is not built into", "--features cuda"]);

    fails(&mut program(&["resume", &nowhere]), &["nowhere/run.json", "name the folder of a run"]);
    fails(&mut program(&["resume", &model]), &["run.json", "name the folder of a run"]);
    for (option, field) in [("--steps", "steps 3"), ("--two-step", "two-step 3")] {
        let message =
            format!("{field}: only runs of world models can change their number of steps");
        fails(&mut program(&["resume", &model, option, "3"]), &[&message]);
    }
    world.write("base/run.json", "{\"backend\": \"flex\"}");
    fails(&mut program(&["resume", &model]), &["run.json", "missing field"]);
    fails(&mut program(&["pretrain", "--text", &text]), &["--out"]);
    let pretrain = |more: &[&str], parts: &[&str]| {
        let args = ["pretrain", "--text", &text, "--out", &out];
        fails(&mut program(&[&args[..], more].concat()), parts);
    };
    pretrain(&["--vocab", "100"], &["vocab_size = 100", "at least 257"]);
    pretrain(&["--vocab", "5000"], &["vocab_size = 5000", "the texts give only"]);
    pretrain(
        &["--vocab", "260", "--kv-heads", "3"],
        &["num_key_value_heads", "3", "num_attention_heads 4"],
    );
    pretrain(&["--vocab", "260", "--head-dim", "0"], &["head_dim", "0", "between 1"]);
    // 100000 * 256 * (768 of queries, keys, values and output + 3 * 704) weights, none of them
    // created.
    let parts = ["memory: training needs at least", "weights 294.91 GB", "moments 589.83 GB"];
    let refused = world.string("refused");
    let args = ["pretrain", "--text", &text, "--out", &refused, "--layers", "100000"];
    fails(&mut program(&args), &parts);
    assert!(!world.path("refused").exists(), "a refused run has left files");
}

/// The largest u64 gives an error of one line or a run that ends, for every option with a number.
#[test]
fn no_option_overflows() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let most = u64::MAX.to_string();
    let qat = [
        "--steps",
        "--steps-per-epoch",
        "--seq-len",
        "--batch",
        "--accumulation",
        "--warmup",
        "--seed",
        "--valid-windows",
        "--patience",
        "--eval-tokens",
        "--lora",
        "--start-step",
        "--devices",
        "--float-layers",
        "--threads",
    ];
    let ran = |command: &mut std::process::Command, option: &str, fine: &[&str]| {
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        match output.status.code() {
            Some(0) => assert!(fine.contains(&option), "{option} succeeded"),
            Some(1 | 2) => {
                assert_eq!(stderr.lines().count(), 1, "{option}: {stderr}");
                assert!(!fine.contains(&option), "{option}: {stderr}");
            }
            code => panic!("{option}: {code:?}: {stderr}"),
        }
    };
    for option in qat {
        let out = world.string(option);
        let good = [
            ("--model", model.as_str()),
            ("--text", &text),
            ("--cache", K2V2),
            ("--out", &out),
            ("--seq-len", "96"),
            ("--steps", "2"),
            ("--batch", "1"),
            ("--eval-tokens", "0"),
            ("--warmup", "1"),
            ("--valid-windows", "1"),
        ];
        let mut args = vec!["qat"];
        for (name, value) in good.iter().filter(|(name, _)| *name != option) {
            args.extend([name, value]);
        }
        args.extend([option, &most]);
        let fine =
            ["--steps-per-epoch", "--seed", "--valid-windows", "--patience", "--eval-tokens"];
        ran(&mut program(&args), option, &fine);
    }
    for option in [
        "--vocab",
        "--hidden",
        "--intermediate",
        "--layers",
        "--heads",
        "--kv-heads",
        "--head-dim",
        "--context",
    ] {
        let out = world.string(option);
        let args = ["pretrain", "--text", &text, "--out", &out, "--steps", "1", option, &most];
        ran(&mut program(&args), option, &[]);
    }
    for option in [
        "--patch",
        "--channels",
        "--hidden",
        "--layers",
        "--heads",
        "--local-idx",
        "--local-window",
        "--frames",
        "--batch",
        "--two-step",
        "--steps-per-epoch",
        "--warmup",
        "--valid-frames",
    ] {
        let out = world.string(&format!("world{option}"));
        let good = [
            ("--patch", "12"),
            ("--channels", "8"),
            ("--hidden", "32"),
            ("--layers", "2"),
            ("--heads", "2"),
            ("--local-window", "2"),
            ("--frames", "4"),
            ("--batch", "2"),
            ("--steps", "2"),
            ("--two-step", "1"),
            ("--warmup", "1"),
            ("--valid-frames", "2"),
        ];
        let mut args = vec!["world", "--out", &out];
        for (name, value) in good.iter().filter(|(name, _)| *name != option) {
            args.extend([name, value]);
        }
        args.extend([option, &most]);
        ran(&mut program(&args), option, &["--steps-per-epoch", "--local-window"]);
    }
    for option in ["--seq-len", "--batch", "--lora"] {
        let args = ["bench", "--model", &model, "--cache", K2V2, option, &most];
        ran(&mut program(&args), option, &[]);
    }
}

#[test]
fn a_run_that_fits_prints_nothing_about_memory() {
    let world = Cpu::new();
    let (model, text, out) =
        (world.save_model("base"), world.string("text.txt"), world.string("out"));
    let args = ["qat", "--model", &model, "--text", &text, "--cache", K2V2, "--out", &out];
    let more = ["--seq-len", "96", "--steps", "1", "--eval-tokens", "0", "--memory", "64M"];
    let output = program(&[&args[..], &more, &["--threads", "1"]].concat()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// A run can be shortened to fewer steps than its two-step phase if that phase is shortened, too.
#[test]
fn a_world_run_can_be_shortened() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run").to_str().unwrap().to_string();
    let args = [
        "--patch=12",
        "--channels=8",
        "--hidden=32",
        "--layers=2",
        "--heads=2",
        "--local-window=2",
        "--frames=4",
        "--batch=2",
        "--steps=4",
        "--two-step=3",
        "--steps-per-epoch=2",
        "--warmup=1",
        "--valid-frames=2",
    ];
    let output = succeeds(&mut program(&[&["world", "--out", &out][..], &args].concat()));
    assert!(output.starts_with("4 steps, two denoising steps per frame from step 2"), "{output}");
    let resume = ["resume", &out, "--from-step", "2", "--steps", "2"];
    fails(&mut program(&resume), &["two-step 3: must be at most steps 2"]);
    let output = succeeds(&mut program(&[&resume[..], &["--two-step", "1"]].concat()));
    let resuming = "resuming after step 2 of 2, two denoising steps per frame from step 2";
    assert!(output.starts_with(resuming), "{output}");
    assert!(output.contains("trained 2 steps"), "{output}");
}

#[test]
fn help_and_version() {
    assert!(succeeds(&mut program(&["--version"])).starts_with("kv-train "));
    let help = |command: &str| succeeds(&mut program(&[command, "--help"]));
    for command in ["qat", "pretrain", "world", "bench", "resume", "quantize", "export"] {
        let help = help(command);
        assert!(help.contains("Usage:") && help.contains("Example"), "{help}");
        assert!(help.contains(&format!("  kv-train {command} ")), "{help}");
        assert!(help.contains("--threads"), "{help}");
    }
    assert!(succeeds(&mut program(&["--help"])).contains("Example"));
    // The defaults in the help are the ones that a run gets.
    let config = TrainConfig::default();
    let lines = help("qat");
    for (option, default) in [
        ("--steps ", config.steps.to_string()),
        ("--lr ", config.schedule.lr.to_string()),
        ("--batch ", config.batch.to_string()),
        ("--seq-len ", config.seq_len.to_string()),
        ("--warmup ", config.schedule.warmup.to_string()),
    ] {
        let at = lines.find(&format!("      {option}")).unwrap();
        let said = lines[at..].split("\n\n").next().unwrap();
        let here = [format!("[default: {default}]"), format!("[default: qat {default}, ")];
        assert!(here.iter().any(|here| said.contains(here)), "{said}");
    }
}
