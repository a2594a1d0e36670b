//! `--profile`: bytes and rates on the page, and the page in a browser.

use std::fs;

use serde_json::Value;

use crate::{
    common::{Workspace, kv_eval},
    profile::{AUSTEN, Page, generate, number},
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

/// The rate of copies in the table is the one that is measured, and the rates of a benchmark are
/// those of its phases.
#[test]
fn a_profile_agrees_with_benchmarks() {
    let space = Workspace::new();
    let (path, json) = (space.path("profile.html"), space.path("llm.json"));
    let size = ["--prompt", "256", "--generate", "64", "--depths", "0", "--repetitions", "5"];
    let files = ["--cache", "k4v4-r32", "--json", &json, "--profile", &path];
    // Another program may take the processor from one of few copies or repetitions.
    let apart = |_| -> f64 {
        let outcome = kv_eval(&[&["bench", "llm", "--model", AUSTEN][..], &size, &files].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let page = Page::read(&path);
        let result: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        let copied = number(&page.table("Operations in copy")["buffer"][5]);
        let measured = result["copy_bandwidth"].as_f64().unwrap() / 1e9;
        let phases = page.table("Phases");
        let points = result["points"].as_array().unwrap();
        let mut apart = vec![(copied / measured - 1.0) / 0.1];
        for (phase, test) in [("prefill", "pp256"), ("decode", "tg64")] {
            let point = points.iter().find(|point| point["test"] == test).unwrap();
            let rate = point["tokens_per_second"]["mean"].as_f64().unwrap();
            apart.push((number(&phases[phase][5]) / rate - 1.0) / 0.03);
        }
        let first = &points[0]["first_token_seconds"]["mean"];
        let prefill = number(&phases["prefill"][2]) / 1e6;
        apart.push((prefill / first.as_f64().unwrap() - 1.0) / 0.03);
        apart.into_iter().map(f64::abs).fold(0.0, f64::max)
    };
    let best = (0..3).map(apart).fold(f64::INFINITY, f64::min);
    assert!(best < 1.0, "{best} times as far apart as 10% of a copy's rate and 3% of the others");
}
