//! A temporary model, and runs of the program on it.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use kv_cubecl::{Flex, On};
use kv_models::{LanguageModel, load};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// The small model of the repository.
pub(crate) const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");

/// Returns [`AUSTEN`], and the first tokens of its held-out text.
pub(crate) fn austen(tokens: usize) -> (On<Flex>, LanguageModel, Vec<u32>) {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let text = fs::read_to_string(Path::new(AUSTEN).join("heldout.txt")).unwrap();
    let mut ids = loaded.tokenizer.unwrap().encode(&text).unwrap();
    ids.truncate(tokens);
    (device, loaded.model, ids)
}

/// The exit code and output of a run of the program.
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// The error lines of the program, without Mesa's line about a missing session directory.
    pub(crate) fn error_lines(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| !line.contains("XDG_RUNTIME_DIR")).collect()
    }
}

/// Asserts that the program failed with exactly one line that contains all of `parts`.
#[track_caller]
pub(crate) fn assert_one_line(outcome: &Outcome, parts: &[&str]) {
    assert_ne!(outcome.code, 0, "it succeeded: {}", outcome.stdout);
    let lines: Vec<&str> = outcome.error_lines();
    assert_eq!(lines.len(), 1, "not one line: {:?}", outcome.stderr);
    assert!(lines[0].starts_with("error: "), "{}", lines[0]);
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    for part in parts {
        assert!(lines[0].contains(part), "{part:?} is not in {:?}", lines[0]);
    }
}

/// Evaluates the text of a workspace with its model.
pub(crate) fn ppl(space: &Workspace, more: &[&str]) -> Outcome {
    let (model, text) = (space.model(), space.text());
    let mut args = vec!["ppl", "--model", &model, "--text", &text];
    args.extend(more);
    kv_eval(&args)
}

pub(crate) fn kv_eval(args: &[&str]) -> Outcome {
    kv_eval_in(args, &[])
}

pub(crate) fn kv_eval_in(args: &[&str], environment: &[(&str, &str)]) -> Outcome {
    let output = Command::new(env!("CARGO_BIN_EXE_kv-eval"))
        .args(args)
        .envs(environment.iter().copied())
        .output()
        .expect("the program starts");
    Outcome {
        code: output.status.code().expect("it ended by itself"),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// A temporary folder with a tiny Llama, a tokenizer of single bytes, and a text.
pub(crate) struct Workspace {
    folder: tempfile::TempDir,
}

impl Workspace {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/models/llama-tiny");
        let model = folder.path().join("model");
        fs::create_dir(&model).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(source.join(file), model.join(file)).unwrap();
        }
        fs::write(model.join("tokenizer.json"), byte_tokenizer()).unwrap();
        let text = "The quick brown fox jumps over the lazy dog, and 0123456789. ".repeat(12);
        fs::write(folder.path().join("text.txt"), text).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_string()
    }

    pub(crate) fn model(&self) -> String {
        self.path("model")
    }

    /// Copies the model to another folder.
    pub(crate) fn copy(&self, name: &str) -> String {
        let copy = self.folder.path().join(name);
        fs::create_dir(&copy).unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            fs::copy(self.file(file), copy.join(file)).unwrap();
        }
        self.path(name)
    }

    /// Writes a `kv_cache.json` into the model folder `model`: 2 bits, groups of 16, a residual of
    /// 32, 3 sinks.
    pub(crate) fn write_cache(&self, model: &str) {
        let json = serde_json::json!({
            "key_format": 2, "value_format": 2, "group_size": 16, "residual_length": 32,
            "flush": "before", "sink_tokens": 3, "capacity": 512, "float": "f32",
        });
        fs::write(Path::new(model).join("kv_cache.json"), json.to_string()).unwrap();
    }

    pub(crate) fn text(&self) -> String {
        self.path("text.txt")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("model").join(name)
    }

    /// Keeps, changes or drops each tensor.
    pub(crate) fn rewrite_weights(
        &self,
        change: impl Fn(&str, Vec<f32>) -> Option<(String, Vec<f32>)>,
    ) {
        let bytes = fs::read(self.file("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut kept: HashMap<String, (Vec<usize>, Vec<u8>)> = HashMap::new();
        for (name, view) in tensors.tensors() {
            let data: Vec<f32> = view
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect();
            if let Some((name, data)) = change(&name, data) {
                let data = data.iter().flat_map(|x| x.to_le_bytes()).collect();
                kept.insert(name, (view.shape().to_vec(), data));
            }
        }
        let views = kept.iter().map(|(name, (shape, data))| {
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        fs::write(self.file("model.safetensors"), bytes).unwrap();
    }

    pub(crate) fn rewrite_config(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.file("config.json")).unwrap();
        assert!(text.contains(from));
        fs::write(self.file("config.json"), text.replace(from, to)).unwrap();
    }
}

/// Returns a byte-level tokenizer without merges: one id per byte.
fn byte_tokenizer() -> String {
    // GPT-2's alphabet: printable bytes map to themselves, the others to characters past 255.
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut moved = 256;
    let vocab: serde_json::Map<String, serde_json::Value> = (0..256u32)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                moved += 1;
                moved - 1
            };
            (char::from_u32(code).unwrap().to_string(), byte.into())
        })
        .collect();
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
        },
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
        },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] }
    })
    .to_string()
}
