//! `--profile`: bytes and rates on the page, frames of a world model, and the page in a browser.

use std::fs;

use serde_json::Value;

use crate::{
    common::{Workspace, kv_eval},
    profile::{AUSTEN, Bar, Page, assert_near, generate, number},
};

/// Projections read their weights once a step, and attention its cache as it grows.
#[test]
fn operations_show_the_bytes_that_they_read() {
    let space = Workspace::new();
    let path = space.path("profile.html");
    let more = ["--weights", "restored", "--prompt-tokens", "300", "--max-tokens", "21"];
    let outcome = generate(AUSTEN, &path, &more);
    assert!(outcome.stderr.contains("Operations in "), "no summary: {}", outcome.stderr);
    let page = Page::read(&path);
    let operations = page.table("Operations in decode");
    let device = burn::tensor::Device::flex();
    let model = kv_models::load(AUSTEN, &device).unwrap().model;
    let spec = model.spec();
    let (width, steps) = (spec.hidden_size, 20);
    let rows: usize = spec.layers.iter().map(|layer| layer.qkv_rows()).sum();
    let config: kv_cubecl::KvCacheConfig = "k4v4-r32".parse().unwrap();
    let cache = model.new_cache(config.with_capacity(512), 1, &device).unwrap();
    let read =
        |context| cache.layers().iter().map(|layer| layer.bytes_read(context)).sum::<usize>();
    for (operation, bytes) in [
        ("qkv", 4 * rows * width * steps),
        ("head", 4 * spec.vocab_size * width * steps),
        ("embedding", 4 * width * steps),
        ("attend", (301..301 + steps).map(read).sum()),
    ] {
        let cells = &operations[operation];
        let [megabytes, rate] = [4, 5].map(|i| number(&cells[i]));
        // Megabytes are printed with three digits behind the point.
        assert!((megabytes * 1e6 - bytes as f64).abs() <= 500.0, "{operation}: {megabytes} MB");
        let expected = bytes as f64 / 1e6 / number(&cells[1]);
        assert!((rate / expected - 1.0).abs() < 0.05 || rate < 0.2, "{operation}: {rate} GB/s");
        assert!(cells[6].ends_with('%'), "{operation}: {cells:?}");
    }
    assert_eq!(operations["attention_norm"][4..], ["", "", ""]);
}

/// A browser runs the page's script, which lists the phases and draws, and logs no error.
#[test]
#[ignore = "needs a headless browser: KV_BROWSER names it, such as chromium-headless-shell"]
fn a_browser_opens_the_page() {
    let browser = std::env::var("KV_BROWSER").expect("KV_BROWSER names a browser");
    let space = Workspace::new();
    let path = space.path("profile.html");
    generate(AUSTEN, &path, &["--prompt-tokens", "40", "--max-tokens", "4"]);
    let options = ["--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"];
    let run = std::process::Command::new(browser)
        .args(["--headless", "--virtual-time-budget=5000"])
        .args(options)
        .arg(format!("file://{path}"))
        .output()
        .unwrap();
    let (dom, log) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{log}");
    assert!(!log.contains("CONSOLE") && !log.contains("Uncaught"), "{log}");
    // The script makes the options; the file has none.
    assert!(!fs::read_to_string(&path).unwrap().contains(">decode_3<"));
    for phase in ["prefill", "decode_1", "decode_3"] {
        assert!(dom.contains(&format!(">{phase}")), "no {phase} in the list of phases");
    }
    assert!(dom.contains("<h2>Operations in decode</h2>") && dom.contains(">GB/s<"), "no tables");
}

/// The spans of copies, prompts and steps last as long as a benchmark measures, whatever else the
/// machine does meanwhile, and the table has their sums.
#[test]
fn a_profile_agrees_with_benchmarks() {
    const STEPS: usize = 64;
    let space = Workspace::new();
    let (path, json) = (space.path("profile.html"), space.path("llm.json"));
    let size = ["--prompt", "256", "--generate", "64", "--depths", "0", "--repetitions", "5"];
    let files = ["--cache", "k4v4-r32", "--json", &json, "--profile", &path];
    let outcome = kv_eval(&[&["bench", "llm", "--model", AUSTEN][..], &size, &files].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let page = Page::read(&path);
    let result: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let bars = page.lane("main");
    let near = |found: f64, measured: f64, most: f64, what: &str| {
        assert!((found / measured - 1.0).abs() < most, "{what}: {found}, measured {measured}");
    };
    // The milliseconds of each copy. The benchmark makes the last nine, the profile the others.
    let length = |bar: &Bar| bar.end - bar.start;
    let mut copies: Vec<f64> = bars.iter().filter(|bar| bar.name == "buffer").map(length).collect();
    let mut copies = copies.split_off(copies.len() - 9);
    copies.sort_by(f64::total_cmp);
    let measured = result["copy_bandwidth"].as_f64().unwrap();
    near(128.0 * 1024.0 * 1024.0 / copies[4] * 1e3, measured, 0.1, "a copy");
    // Spans of the warm-up are within its phase, so they are not outermost.
    let outermost = |name: &str| -> Vec<f64> {
        let of_name = |bar: &&Bar| bar.depth == 0 && bar.name.starts_with(name);
        bars.iter().filter(of_name).map(length).collect()
    };
    let (prompts, steps) = (outermost("prefill"), outermost("decode_"));
    let texts: Vec<f64> = steps.chunks(STEPS).map(|steps| steps.iter().sum()).collect();
    assert_eq!((prompts.len(), texts.len()), (5, 5));
    let mean = |numbers: &mut dyn Iterator<Item = f64>| numbers.sum::<f64>() / 5.0;
    let points = result["points"].as_array().unwrap();
    let point = |test: &str| points.iter().find(|point| point["test"] == test).unwrap();
    let rate = |test: &str| point(test)["tokens_per_second"]["mean"].as_f64().unwrap();
    let phases = page.table("Phases");
    // The benchmark also counts the time between spans. Beside other work, this was 5% of the time
    // of steps that take 0.4 ms.
    for (phase, test, tokens, spans, most) in [
        ("prefill", "pp256", 256.0, &prompts, 0.03),
        ("decode", "tg64", STEPS as f64, &texts, 0.08),
    ] {
        let found = mean(&mut spans.iter().map(|ms| 1e3 * tokens / ms));
        near(found, rate(test), most, test);
        near(number(&phases[phase][1]), spans.iter().sum(), 0.01, phase);
        near(
            number(&phases[phase][5]) * spans.iter().sum::<f64>() / 1e3,
            5.0 * tokens,
            0.01,
            phase,
        );
    }
    let first = point("pp256")["first_token_seconds"]["mean"].as_f64().unwrap();
    near(mean(&mut prompts.iter().copied()) / 1e3, first, 0.03, "time to the first token");
}

/// A world model's frames are phases, and its operations have names and fill them.
#[test]
fn frames_of_a_world_model_are_phases() {
    let space = Workspace::new();
    let (path, json) = (space.path("profile.html"), space.path("world.json"));
    let short = ["world", "--seeds", "4", "--context", "3", "--frames", "5"];
    let outcome = kv_eval(
        &[&short[..], &["--cache", "kint8vint8", "--json", &json, "--profile", &path]].concat(),
    );
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let page = Page::read(&path);
    let phases = page.table("Phases");
    // With each of two caches.
    let counts = ["see", "frame", "picture"].map(|phase| &*phases[phase][0]);
    assert_eq!(counts, ["6", "10", "10"]);
    let json: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let seconds = |i: usize| json["points"][i]["model_seconds"].as_f64().unwrap();
    let printed = 5.0 * (seconds(0) + seconds(1));
    assert_near(number(&phases["frame"][1]) / 1e3, printed, "frames");
    let operations = page.table("Operations in frame");
    // Two steps for each frame, in six layers.
    for operation in ["qkv", "attend", "attention_gate", "mlp.up", "mlp.down", "rope"] {
        assert_eq!(operations[operation][0], "120", "{operation}");
    }
    let sum: f64 = operations
        .iter()
        .filter(|(name, _)| *name != "total")
        .map(|(_, cells)| number(&cells[1]))
        .sum();
    assert_near(sum, number(&phases["frame"][1]), "operations");
    assert!(page.html.contains("a world model of 6 layers in f32"));
}
