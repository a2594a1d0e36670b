//! The repository's world model, and the program `kv-eval world`.

use std::{fs, path::Path};

use burn::{module::Module, tensor::Tensor};
use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::world::{LayerCaches, MOST_DB, Truth, World, psnr, ssim};
use kv_models::{
    LoadOptions, QuantizeOptions,
    kv_weights::{Activations, GroupSize, WeightFormat},
};
use kv_world::Frame;
use kv_world_model::Noised;
use serde_json::Value;

use crate::common::{Outcome, kv_eval};

pub(crate) fn world() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/world");
    folder.to_str().unwrap().to_string()
}

pub(crate) fn played(args: &[&str]) -> Outcome {
    let model = world();
    kv_eval(&[&["world", "--model", &model], args].concat())
}

pub(crate) fn numbers(point: &Value, of: &str) -> Vec<f64> {
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
    let fine = folder.path().join("fine");
    let fine = fine.to_str().unwrap();
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
        (&["--running", "momentum=2"], "momentum 2: must be at least 0 and below 1"),
        (&["--key-running", "speed=1"], "running speed=1: is unknown"),
        (
            &["--running", "growth=3", "--cache", "k16vint8"],
            "running: no cache takes scales from frames",
        ),
        (
            &["--key-running", "growth=3", "--cache", "k16vint8f"],
            "key-running: no cache takes scales of keys from frames",
        ),
        (
            &["--running", "growth=3", "--key-running", "growth=3", "--value-running", "growth=3"],
            "running: both sides have a rule of their own",
        ),
        (&["--inspect-frame", "3"], "--inspect"),
        (&["--frames", "4", "--inspect", inside, "--inspect-frame", "12"], "inspect "),
        (
            &["--frames", "4", "--inspect", fine, "--inspect-frame", "12"],
            "inspect-frame 12: must be below 12, the number of frames with the true ones",
        ),
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
    for name in
        ["float", "k16vint8", "kint8vint8@2", "k4v4-r64@1", "kint8vint8@k2", "kint8vint8@k12v3"]
    {
        assert_eq!(name.parse::<LayerCaches>().unwrap().to_string(), name);
    }
    assert_eq!("kint8vint8@k2v2".parse::<LayerCaches>().unwrap().to_string(), "kint8vint8@2");
    let caches: LayerCaches = "kint8vint8@2".parse().unwrap();
    let float = KvCacheConfig::float();
    let stored = "kint8vint8".parse().unwrap();
    assert_eq!(caches.formats(3).unwrap(), [float, stored, stored]);
    let error = caches.formats(1).unwrap_err().to_string();
    assert_eq!(error, "cache kint8vint8@2: selects more than the model's 1 layers");
    for (name, wanted) in [
        ("ke5m2ve4m3@k1", ["k16ve4m3", "k16ve4m3", "ke5m2ve4m3"]),
        ("ke5m2ve4m3@v2", ["ke5m2v16", "ke5m2ve4m3", "ke5m2ve4m3"]),
        ("ke5m2ve4m3@k1v2", ["float", "k16ve4m3", "ke5m2ve4m3"]),
    ] {
        let formats = name.parse::<LayerCaches>().unwrap().formats(3).unwrap();
        assert_eq!(formats, wanted.map(|name| name.parse().unwrap()), "{name}");
    }
    // The rules of a policy are for layers of the model, and the suffix leaves the last ones.
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    fs::write(&policy, "[[rules]]\nlayers = \"0,2\"\ncache = \"kint8vint8\"\n").unwrap();
    let caches: LayerCaches = format!("{}@2", policy.display()).parse().unwrap();
    assert_eq!(caches.formats(3).unwrap(), [float, float, stored]);
    for name in ["kint8vint8@", "kint8vint8@0", "float@x", "k4v4@kv", "k4v4@k2v0", "k4v4@v2k2"] {
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

/// The gate fails, after the results are written, where a cache falls below the float one by more
/// than it allows.
#[test]
fn a_gate_compares_caches_with_float() {
    let short = ["--frames", "3", "--seeds", "1", "--context", "2", "--json", "-"];
    let gated = |cache: &str, most: &str| {
        played(&[&short[..], &["--cache", cache, "--max-drop", most]].concat())
    };
    // One scale in 16 bits for huge magnitudes rounds all values to 0.
    let broken = ["--value-running", "floor=1e6"];
    let gate = ["--cache", "k16vint8f", "--max-drop", "0.1"];
    let outcome = played(&[&short[..], &broken, &gate].concat());
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("error: max-drop 0.1: a frame with k16vint8f is "),
        "{}",
        outcome.stderr
    );
    let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let [float, other] = [0, 1].map(|i| -> Vec<f64> {
        serde_json::from_value(result["points"][i]["psnr"].clone()).unwrap()
    });
    let worst = float.iter().zip(&other).map(|(a, b)| a - b).fold(f64::NEG_INFINITY, f64::max);
    assert!(worst > 0.1 && outcome.stderr.contains(&format!("{worst:.2} dB")), "{worst}");
    // Just above what it is, it passes.
    let exact = format!("{}", worst + 1e-9);
    let gate = ["--cache", "k16vint8f", "--max-drop", &exact];
    assert_eq!(played(&[&short[..], &broken, &gate].concat()).code, 0);
    let below = format!("{}", worst - 1e-9);
    let gate = ["--cache", "k16vint8f", "--max-drop", &below];
    assert_eq!(played(&[&short[..], &broken, &gate].concat()).code, 1);
    assert_eq!(gated("kint8vint8", "0.5").code, 0);
    for (cache, most, wanted) in [
        ("float", "0.5", "max-drop 0.5: compares caches with the float one; add another --cache"),
        ("kint8vint8", "-1", "max-drop -1: must be finite and at least 0"),
        ("kint8vint8", "NaN", "max-drop NaN: must be finite and at least 0"),
    ] {
        let most = format!("--max-drop={most}");
        let outcome = played(&[&short[..], &["--cache", cache, &most]].concat());
        assert_eq!(outcome.code, 1, "{}", outcome.stderr);
        assert!(outcome.stderr.contains(wanted), "{}", outcome.stderr);
    }
}

/// Rules for running scales reach the caches, each its own side.
#[test]
fn running_scales_follow_their_rules() {
    let scales = |more: &[&str]| -> [Vec<f64>; 2] {
        let short = ["--frames", "2", "--seeds", "1", "--context", "3", "--json", "-"];
        let outcome = played(&[&short[..], &["--cache", "kint8fvint8p"], more].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let scales = result["points"][1]["scales"].as_array().unwrap().clone();
        ["keys", "values"].map(|side| {
            let of_side = scales.iter().filter(|scale| scale["side"] == side);
            of_side.map(|scale| scale["mean"].as_f64().unwrap()).collect()
        })
    };
    let [keys, values] = scales(&[]);
    let all = |scales: &[f64], wanted: f64| {
        !scales.is_empty() && scales.iter().all(|scale| (scale * 127.0 / wanted - 1.0).abs() < 1e-3)
    };
    assert!(!all(&keys, 0.25) && !all(&values, 0.25), "{keys:?} {values:?}");
    let [low_keys, low_values] = scales(&["--running", "floor=0.01,ceiling=0.25"]);
    assert!(all(&low_keys, 0.25) && all(&low_values, 0.25), "{low_keys:?} {low_values:?}");
    let [others, high] = scales(&["--value-running", "floor=99"]);
    assert!(!all(&others, 99.0) && all(&high, 99.0), "{others:?} {high:?}");
    let [low, high] = scales(&["--running", "floor=99", "--key-running", "ceiling=0.25"]);
    assert!(all(&low, 0.25) && all(&high, 99.0), "{low:?} {high:?}");
}

/// Scales go into a file at every n-th frame, with what saturates.
#[test]
fn scales_are_logged_by_frame() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("scales.jsonl");
    let short = ["--frames", "4", "--seeds", "2", "--context", "3", "--scales-every", "2"];
    let file = ["--scales", log.to_str().unwrap()];
    let caches = ["--cache", "kint8fv16", "--cache", "kint8vint8", "--running", "percentile=50"];
    let outcome = played(&[&short[..], &file, &caches, &["--cache", "k16vint8p"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("saturated"), "{}", outcome.stdout);
    let lines: Vec<Value> = fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |line: &Value| {
        let scales = line["layers"].as_array().unwrap();
        assert_eq!(scales.len(), 6);
        for scale in scales {
            let saturated = numbers(scale, "saturated");
            assert_eq!(saturated.len(), 2 * 4);
            // Half of the magnitudes are above their median; momentum delays it.
            if scale["side"] == "values" {
                assert!(saturated.iter().all(|x| (0.2..0.8).contains(x)), "{saturated:?}");
            }
        }
        let side = scales[0]["side"].as_str().unwrap().to_string();
        (line["cache"].as_str().unwrap().to_string(), line["frame"].as_u64().unwrap(), side)
    };
    let found: Vec<_> = lines.iter().map(of).collect();
    let wanted = ["kint8fv16", "k16vint8p"].into_iter().zip(["keys", "values"]);
    let wanted = wanted.flat_map(|(cache, side)| {
        [2, 4, 6].map(|frame| (cache.to_string(), frame, side.to_string()))
    });
    assert_eq!(found, wanted.collect::<Vec<_>>());
    let outcome = played(&[&short[..], &["--cache", "float-f16"]].concat());
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("--scales"), "{}", outcome.stderr);
    let outcome = played(&[&short[..], &file, &["--cache", "kint8vint8"]].concat());
    assert!(outcome.stderr.contains("no cache takes scales from frames"), "{}", outcome.stderr);
}

/// A model with quantized weights computes the same packed and restored, and is compared with the
/// model before.
#[test]
fn weights_are_quantized() {
    let device = On::<Flex>::open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let world = World::load(Path::new(&self::world()), &device).unwrap();
    let format = |format| QuantizeOptions::new([Some(format); 3]);
    let path = |name: &str| folder.path().join(name);
    let frame = Truth::new(world.maze(), [7], 2);
    let velocity = |world: &World| -> Vec<f32> {
        let x = world.latents(&frame.frames[1], &device).unsqueeze_dim::<5>(1);
        let t = Tensor::ones([1, 1], &*device);
        let input = Noised { x, t, controls: frame.controls(1, &device).unwrap() };
        let velocity = world.model.forward(input, KvCacheConfig::float()).unwrap();
        velocity.into_data().try_to_vec().unwrap()
    };
    let apart = |a: &[f32], b: &[f32]| {
        let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>();
        let off = squares(&mut a.iter().zip(b).map(|(a, b)| a - b));
        (off / squares(&mut b.iter().copied())).sqrt()
    };
    let exact = velocity(&world);
    let mut twins = vec![];
    for (name, kind, most) in [
        ("int8", WeightFormat::Int8(GroupSize::G32), 0.05),
        ("int4", WeightFormat::Int4(GroupSize::G32), 0.5),
    ] {
        world.save_quantized(&path(name), format(kind)).unwrap();
        let restored = World::load(&path(name), &device).unwrap();
        let packed = LoadOptions::default().with_packed(Some(Activations::Exact));
        let packed = World::load_with(&path(name), &device, packed).unwrap();
        // Only biases and the matrices with few columns are parameters.
        let params = packed.model.num_params();
        assert!(params < world.model.num_params() / 50, "{name}: {params}");
        assert_eq!(restored.model.num_params(), world.model.num_params());
        // The same products in another order.
        let [restored, packed] = [restored, packed].map(|world| velocity(&world));
        assert!(apart(&packed, &restored) < 1e-5, "{name}: {}", apart(&packed, &restored));
        // Int4 changes the predictions of this small model by a quarter.
        let off = apart(&restored, &exact);
        assert!(off > 1e-4 && off < most, "{name}: {off}");

        let (model, reference) = (path(name), self::world());
        let model = ["world", "--model", model.to_str().unwrap(), "--weights", "packed-exact"];
        let short = ["--reference", &reference, "--frames", "3", "--seeds", "1", "--json", "-"];
        let outcome = kv_eval(&[&model[..], &short, &["--cache", "float"]].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let [first, second] = [0, 1].map(|i| result["points"][i].clone());
        assert_eq!((&first["cache"], &second["cache"]), (&"reference".into(), &"float".into()));
        twins.push(numbers(&second, "twin_psnr").iter().sum::<f64>() / 3.0);
    }
    assert!(twins[0] > twins[1] + 3.0, "{twins:?}");
    // Nothing is overwritten, and nothing is left where it fails.
    let error = world.save_quantized(&path("int4"), format(WeightFormat::Mxfp4)).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    let wide = format(WeightFormat::Int8(GroupSize::G64));
    let error = world.save_quantized(&path("wide"), wide).unwrap_err().to_string();
    assert!(error.contains("wide/model.safetensors: tensor proj_in.weight: has 32"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}
