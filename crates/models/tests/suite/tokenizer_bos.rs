//! Texts begin with the begin-of-text token as in transformers and llama.cpp.

use std::{collections::HashMap, fs};

use kv_models::{SaveOptions, Tokenizer, load, save};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::common::{GgmlType, Value, bos_vocabulary, device, fixture, tiny, write_gguf};

/// Ids of a text by transformers and by llama.cpp, see `fixtures/README.md`.
#[derive(Deserialize)]
struct Bos {
    text: String,
    ids: Vec<u32>,
    #[serde(rename = "llama.cpp")]
    llama_cpp: LlamaCpp,
}

#[derive(Deserialize)]
struct LlamaCpp {
    #[serde(rename = "llama-bpe true")]
    ids: Vec<u32>,
    /// `true` if texts begin with the token, by pre-tokenizer and `add_bos_token`.
    begins_with_bos: HashMap<String, bool>,
}

fn bos() -> Bos {
    serde_json::from_slice(&fs::read(fixture("bos/expected.json")).unwrap()).unwrap()
}

/// Returns the ids of a text as a model receives them.
fn with_bos(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let bos = tokenizer.leading_bos();
    bos.into_iter().chain(tokenizer.encode(text).unwrap()).collect()
}

#[test]
fn texts_begin_as_in_transformers() {
    let Bos { text, ids, .. } = bos();
    let tokenizer = Tokenizer::from_file(fixture("bos/tokenizer.json"), &[2]).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (Some(1), true));
    assert_eq!(with_bos(&tokenizer, &text), ids);

    // tokenizer_config.json takes precedence over the saved tokenizer.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    fs::copy(fixture("bos/tokenizer.json"), &file).unwrap();
    let configured = |config: &str| {
        fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        Tokenizer::from_folder(folder.path(), &[2])
    };
    for (config, bos, adds) in [
        (r#"{"bos_token": "<s>"}"#, Some(1), true),
        (r#"{"bos_token": "<s>", "add_bos_token": false}"#, Some(1), false),
        (r#"{"bos_token": {"content": "</s>"}, "add_bos_token": true}"#, Some(2), true),
        (r#"{"add_bos_token": false}"#, None, false),
    ] {
        let tokenizer = configured(config).unwrap();
        assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (bos, adds), "{config}");
        assert_eq!(tokenizer.encode(&text).unwrap(), ids[1..], "{config}");
    }
    let error = configured(r#"{"bos_token": "<none>", "add_bos_token": true}"#).unwrap_err();
    assert!(error.to_string().contains("bos_token = <none>: must be a token"), "{error}");

    // Two tokens before a text are rejected.
    let mut json: Json = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let single = json["post_processor"]["processors"][1]["single"].as_array_mut().unwrap();
    single.insert(0, single[0].clone());
    fs::write(&file, json.to_string()).unwrap();
    let error = configured("{}").unwrap_err().to_string();
    assert!(error.contains("begins texts with 2 tokens [1, 1]"), "{error}");
}

#[test]
fn texts_begin_as_in_llama_cpp() {
    let Bos { text, llama_cpp, .. } = bos();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let written = |more: &[(&str, Value)]| {
        let extra = bos_vocabulary(more);
        let extra: Vec<_> =
            extra.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        write_gguf(&tiny("llama-tiny"), &file, GgmlType::F32, &extra);
        load(&file, &device()).unwrap()
    };
    assert!(llama_cpp.begins_with_bos.len() > 5);
    for (case, begins) in llama_cpp.begins_with_bos {
        let (pre, adds) = case.split_once(' ').unwrap();
        let mut more = vec![("tokenizer.ggml.pre", Value::String(pre.into()))];
        if adds != "None" {
            more.push(("tokenizer.ggml.add_bos_token", Value::Bool(adds == "True")));
        }
        let tokenizer = written(&more).tokenizer.unwrap();
        assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (Some(1), begins), "{case}");
    }
    let adds = ("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let loaded = written(std::slice::from_ref(&adds));
    let tokenizer = loaded.tokenizer.unwrap();
    assert_eq!(with_bos(&tokenizer, &text), llama_cpp.ids);

    // A saved model has the same setting.
    let saved = folder.path().join("saved");
    save(&saved, &loaded.model, &tokenizer, SaveOptions::default()).unwrap();
    assert_eq!(
        with_bos(&load(&saved, &device()).unwrap().tokenizer.unwrap(), &text),
        llama_cpp.ids
    );
    let config = fs::read_to_string(saved.join("config.json")).unwrap();
    assert!(config.contains("\"bos_token_id\": 1"), "{config}");

    let beyond = ("tokenizer.ggml.bos_token_id", Value::U32(256));
    let error = written(&[adds, beyond]).tokenizer.unwrap_err().to_string();
    assert!(error.contains("the begin-of-text id 256 is not in the vocabulary"), "{error}");
}
