//! `kv-eval world --inspect` and `--dtype`.

use std::fs;

use kv_eval::world::MOST_DB;
use serde_json::Value;

use crate::{
    common::kv_eval,
    world_play::{numbers, played, world},
};

/// One frame's attention adds up to 1 over the frames that a layer sees, and the histograms count
/// every number.
#[test]
fn a_frame_is_inspected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("frame.jsonl");
    let inspect = ["--inspect", file.to_str().unwrap(), "--inspect-frame", "18"];
    let short = ["--frames", "13", "--seeds", "2", "--sinks", "1"];
    let caches = ["--cache", "kint8vint8", "--cache", "kint8fvint8f", "--cache", "k4v4-r32"];
    let outcome = played(&[&short[..], &inspect, &caches].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let text = fs::read_to_string(&file).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<_> = lines.iter().map(|line| line["cache"].as_str().unwrap()).collect();
    assert_eq!(names, ["float", "kint8vint8", "kint8fvint8f", "k4v4-r32"]);
    // Of 12 frames, or of 4 in local layers, and of the sink.
    let windows: Vec<u64> = vec![0].into_iter().chain(7..19).collect();
    let local: Vec<u64> = vec![0].into_iter().chain(15..19).collect();
    let mut shares: Vec<Vec<f64>> = vec![];
    for line in &lines {
        let inspected = &line["inspected"];
        assert_eq!(inspected["frame"], 18);
        let layers = inspected["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 6);
        let mut of_cache = vec![];
        for (i, layer) in layers.iter().enumerate() {
            let frames: Vec<u64> = serde_json::from_value(layer["frames"].clone()).unwrap();
            // Every second layer is global.
            assert_eq!(&frames, if i % 2 == 0 { &windows } else { &local }, "layer {i}");
            let attention: Vec<Vec<Vec<f64>>> =
                serde_json::from_value(layer["attention"].clone()).unwrap();
            assert_eq!((attention.len(), attention[0].len()), (4, 36));
            for row in attention.iter().flatten() {
                assert_eq!(row.len(), frames.len());
                // Sums of weights in f32.
                assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-4, "{row:?}");
                of_cache.extend(row);
            }
            for side in ["keys", "values"] {
                let counts: Vec<Vec<u64>> = serde_json::from_value(layer[side].clone()).unwrap();
                assert_eq!(counts.len(), 4);
                for of_head in counts {
                    assert_eq!(of_head.iter().sum::<u64>(), 2 * 36 * 32, "{side}");
                }
            }
        }
        shares.push(of_cache);
    }
    // The caches store nearly the same keys, and not the very same ones.
    for (name, of_cache) in names.iter().zip(&shares).skip(1) {
        let most = of_cache.iter().zip(&shares[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(most > 1e-6 && most < 0.5, "{name}: {most}");
    }
}

/// In bf16 the model predicts nearly what it predicts in f32.
#[test]
fn a_world_in_bf16_is_compared_with_f32() {
    let (model, reference) = (world(), world());
    let short = ["--dtype", "bf16", "--reference", &reference, "--frames", "4", "--seeds", "2"];
    let caches = ["--cache", "float", "--cache", "kint8vint8", "--json", "-"];
    let outcome = kv_eval(&[&["world", "--model", &model][..], &short, &caches].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
    for i in [1, 2] {
        // bf16 has 8 bits of mantissa: numbers are off by 0.2% on average.
        let error = result["points"][i]["velocity_error"].as_f64().unwrap();
        assert!((1e-3..0.05).contains(&error), "{error}");
        let twin = numbers(&result["points"][i], "twin_psnr");
        assert!(twin.iter().all(|&db| db > 30.0 && db < MOST_DB), "{twin:?}");
    }
}
