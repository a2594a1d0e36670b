//! The repository's world model, and the program `kv-eval world`.

use std::{fs, path::Path};

use kv_cubecl::KvCacheConfig;
use kv_eval::world::{LayerCaches, MOST_DB, psnr, ssim};
use kv_world::Frame;
use serde_json::Value;

use crate::common::{Outcome, kv_eval};

fn world() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/world");
    folder.to_str().unwrap().to_string()
}

fn played(args: &[&str]) -> Outcome {
    let model = world();
    kv_eval(&[&["world", "--model", &model], args].concat())
}

fn numbers(point: &Value, of: &str) -> Vec<f64> {
    point[of].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// On unseen games, the model's frames are closer to the true frames than the last frame is, and
/// 8-bit values change them little.
#[test]
fn the_model_knows_its_maze() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let result = folder.path().join("result.json");
    let (out, result) = (out.to_str().unwrap(), result.to_str().unwrap());
    let outcome = played(&[
        "--frames",
        "8",
        "--seeds",
        "12",
        "--cache",
        "k16vint8",
        "--cache",
        "kint8vint8@2",
        "--cache",
        "float-f16",
        "--cache",
        "kint8vint8",
        "--out",
        out,
        "--json",
        result,
    ]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let result: Value = serde_json::from_slice(&fs::read(result).unwrap()).unwrap();
    let points = result["points"].as_array().unwrap();
    let names: Vec<_> = points.iter().map(|point| point["cache"].as_str().unwrap()).collect();
    assert_eq!(names, ["float", "k16vint8", "kint8vint8@2", "float-f16", "kint8vint8"]);
    let float = numbers(&points[0], "psnr");
    assert_eq!(float.len(), 8);
    let line = outcome.stdout.lines().find(|line| line.contains("of the last true frame")).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    let ends = words.iter().enumerate().filter(|(_, word)| word.starts_with("dB"));
    let found: Vec<f64> = ends.map(|(i, _)| words[i - 1].parse().unwrap()).collect();
    assert!(found[0] > found[1] + 1.0, "{line}");
    for (float, int8) in float.iter().zip(numbers(&points[1], "psnr")) {
        assert!(int8 > float - 0.5, "{int8} dB, float {float}");
    }
    // The float cache is compared with itself.
    assert!(numbers(&points[0], "twin_psnr").iter().all(|&x| x == 60.0));
    assert_eq!(points[0]["velocity_error"], 0.0);
    let error = |i: usize| points[i]["velocity_error"].as_f64().unwrap();
    assert!(0.0 < error(1) && error(1) < 0.05, "{}", error(1));
    // Heads of 32 channels take 64 bytes in f16, and 32 bytes with a scale of 2 in 8 bits.
    let bytes = |i: usize| points[i]["bytes"].as_f64().unwrap();
    let saved = bytes(3) / bytes(4);
    assert!((saved / (64.0 / 34.0) - 1.0).abs() < 0.01, "{saved}");
    for file in ["psnr.svg", "twin.svg", "sheet.png"] {
        assert!(fs::metadata(Path::new(out).join(file)).unwrap().len() > 1000, "{file}");
    }
}

#[test]
fn errors_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let inside = file.join("out");
    let (missing, inside) = (folder.path().join("none"), inside.to_str().unwrap());
    for (args, wanted) in [
        (&["--cache", "k5v5"][..], "k5v5"),
        (&["--cache", "kint8vint8@0"], "must have a number of layers"),
        (&["--cache", "kint8vint8@99"], "selects more than the"),
        (&["--cache", "k4v4"], "residual_length 128: must be at most"),
        (&["--frames", "0"], "frames 0: must be at least 1"),
        (&["--seeds", "0"], "seeds 0: must be at least 1"),
        (&["--context", "0"], "context 0: must be at least 1"),
        (&["--ring", "1"], "sliding_window 1 frame: must be at least 2 frames"),
        (
            &["--first-seed", "18446744073709551615"],
            "first-seed 18446744073709551615: must be at most 18446744073709551595, for 20 games",
        ),
        (&["--frames", "18446744073709551615"], "frames 18446744073709551615: with 8 true ones"),
        (&["--frames", "1152921504606846976"], "frames 1152921504606846976: with 8 true ones"),
        (&["--out", inside], "out "),
        (&["--json", inside], "json "),
        (&["--model", missing.to_str().unwrap()], "none"),
    ] {
        let outcome = match args[0] {
            "--model" => kv_eval(&[&["world"], args].concat()),
            _ => played(args),
        };
        let lines = outcome.error_lines();
        assert_ne!(outcome.code, 0, "{args:?}");
        assert!(lines.len() == 1 && lines[0].contains(wanted), "{args:?}: {lines:?}");
        // The games are printed after their true frames are rendered.
        assert!(outcome.stdout.is_empty(), "{args:?}: {}", outcome.stdout);
    }
}

/// Returns a frame by a formula that other software can repeat: `(37 i + 11 i^2 / 7 + shift) mod
/// 256` for byte i, and a ramp from row 24 on.
fn frame(shift: usize) -> Frame {
    let byte = |i: usize| match i < 3 * 24 * 48 {
        true => ((37 * i + 11 * i * i / 7 + shift) % 256) as u8,
        false => (i / 30 % 256) as u8,
    };
    Frame::from_rgb((0..3 * 48 * 48).map(byte).collect())
}

/// The numbers equal numpy's, which follow the definition window by window.
#[test]
fn quality_equals_other_software() {
    for (a, b, decibels, similarity) in SAMPLES {
        let (a, b) = (frame(a), frame(b));
        assert!((psnr(&a, &b) - decibels).abs() < 1e-9, "{}", psnr(&a, &b));
        assert!((ssim(&a, &b) - similarity).abs() < 1e-9, "{}", ssim(&a, &b));
    }
    let same = frame(3);
    assert_eq!(psnr(&same, &same), MOST_DB);
    assert!((ssim(&same, &same) - 1.0).abs() < 1e-12);
}

/// Shifts of two frames, their PSNR and SSIM.
const SAMPLES: [(usize, usize, f64, f64); 3] = [
    (0, 1, 29.3364464119, 0.9967196693),
    (0, 40, 11.7498323675, 0.5594595602),
    (5, 90, 9.5160016000, 0.2295999109),
];

#[test]
fn names_are_read_as_they_are_printed() {
    for name in ["float", "k16vint8", "kint8vint8@2", "k4v4-r64@1"] {
        assert_eq!(name.parse::<LayerCaches>().unwrap().to_string(), name);
    }
    let caches: LayerCaches = "kint8vint8@2".parse().unwrap();
    let float = KvCacheConfig::float();
    let stored = "kint8vint8".parse().unwrap();
    assert_eq!(caches.formats(3).unwrap(), [float, stored, stored]);
    let error = caches.formats(1).unwrap_err().to_string();
    assert_eq!(error, "cache kint8vint8@2: selects more than the model's 1 layers");
    for name in ["kint8vint8@", "kint8vint8@0", "float@x"] {
        let error = name.parse::<LayerCaches>().unwrap_err().to_string();
        assert!(error.contains("must have a number of layers"), "{error}");
    }
    assert!("nothing@1".parse::<LayerCaches>().is_err());
}

/// A ring longer than the model's window is clamped to it, with a note.
#[test]
fn a_ring_beyond_the_models_window_is_noted() {
    let short = ["--frames", "2", "--seeds", "1", "--context", "2", "--cache", "float-f16"];
    let outcome = played(&[&short[..], &["--ring", "99"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let note = "note: ring 99: the model sees at most 12 frames, so these are kept";
    assert!(outcome.stderr.contains(note), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("rings of 12 frames"), "{}", outcome.stdout);
    let outcome = played(&[&short[..], &["--ring", "8"]].concat());
    assert!(!outcome.stderr.contains("note: "), "{}", outcome.stderr);
}
