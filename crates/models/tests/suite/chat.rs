//! Chat templates against the transformers library, see `fixtures/README.md`.

use std::{collections::HashMap, fs};

use kv_models::{ChatTemplate, Error, SaveOptions, Tokenizer, chat::Message, load, save};
use serde::Deserialize;

use crate::common::{GgmlType, Value, copy, device, fixture, smollm2, tiny, write_gguf};

#[derive(Deserialize)]
struct Fixture {
    templates: HashMap<String, String>,
    cases: Vec<Case>,
    /// The ids of the cases of template `smollm2`, in order.
    smollm2_ids: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Message>,
    /// `None` if the template refuses the conversation.
    rendered: Option<String>,
}

fn chat() -> Fixture {
    serde_json::from_slice(&fs::read(fixture("chat.json")).unwrap()).unwrap()
}

fn template(source: &str) -> kv_models::Result<ChatTemplate> {
    ChatTemplate::new(source, Some("<s>".into()), Some("</s>".into()))
}

#[test]
fn conversations_are_rendered_as_by_transformers() {
    let Fixture { templates, cases, .. } = chat();
    for Case { template: name, messages, rendered } in cases {
        let found = template(&templates[&name]).unwrap().render(&messages);
        match rendered {
            Some(rendered) => assert_eq!(found.unwrap(), rendered, "{name}"),
            None => {
                let error = found.unwrap_err();
                assert!(matches!(error, Error::ChatTemplate { .. }), "{error:?}");
                assert!(error.to_string().contains("System role not supported"), "{error}");
            }
        }
    }
}

#[test]
fn invalid_templates_are_errors() {
    for source in ["{% for x in %}", "{{ messages", "{% if true %}"] {
        let error = template(source).unwrap_err().to_string();
        assert!(error.starts_with("chat template: line 1: "), "{error}");
    }
    let unknown = template("{{ messages[0].content.frobnicate() }}").unwrap();
    let error = unknown.render(&[Message::new("user", "hi")]).unwrap_err().to_string();
    assert!(error.starts_with("chat template: line 1: ") && !error.contains('\n'), "{error}");
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_gets_the_ids_of_transformers() {
    let tokenizer = Tokenizer::from_gguf(smollm2()).unwrap();
    let template = ChatTemplate::of(&tokenizer).unwrap().unwrap();
    let Fixture { cases, smollm2_ids, .. } = chat();
    let cases: Vec<Case> = cases.into_iter().filter(|case| case.template == "smollm2").collect();
    assert_eq!(cases.len(), smollm2_ids.len());
    for (case, expected) in cases.iter().zip(smollm2_ids) {
        let text = template.render(&case.messages).unwrap();
        assert_eq!(tokenizer.encode(&text).unwrap(), expected);
    }
}

/// Returns the template of a model folder with `tokenizer_config` and optionally
/// `chat_template.jinja`.
fn of_folder(tokenizer_config: &str, file: Option<&str>) -> kv_models::Result<Option<String>> {
    let folder = copy(&tiny("llama-tiny"));
    fs::copy(fixture("bos").join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), tokenizer_config).unwrap();
    if let Some(file) = file {
        fs::write(folder.path().join("chat_template.jinja"), file).unwrap();
    }
    let loaded = load(folder.path(), &device()).unwrap();
    let template = ChatTemplate::of(&loaded.tokenizer?)?;
    template.map(|template| template.render(&[Message::new("user", "hi")])).transpose()
}

#[test]
fn templates_are_found_in_files() {
    let found = |config: &str, file| of_folder(config, file).unwrap();
    assert_eq!(found("{}", None), None);
    assert_eq!(found(r#"{"chat_template": null}"#, None), None);
    let one = r#"{"chat_template": "one {{ bos_token }}{{ eos_token }}", "eos_token": "</s>",
                  "bos_token": {"content": "<s>", "lstrip": false}}"#;
    assert_eq!(found(one, None).unwrap(), "one <s></s>");
    assert_eq!(found(one, Some("of its own file")).unwrap(), "of its own file");
    let named = r#"{"chat_template": [{"name": "rag", "template": "rag"},
                                      {"name": "default", "template": "default"}]}"#;
    assert_eq!(found(named, None).unwrap(), "default");
    assert!(matches!(of_folder("{", None), Err(Error::Malformed { .. })));

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let extra = crate::common::bos_vocabulary(&[
        (
            "tokenizer.chat_template",
            Value::String("{{ messages[0].content }}{{ eos_token }}".into()),
        ),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ]);
    let extra: Vec<_> = extra.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    write_gguf(&tiny("llama-tiny"), &file, GgmlType::F32, &extra);
    let loaded = load(&file, &device()).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let rendered = |tokenizer: &Tokenizer| {
        ChatTemplate::of(tokenizer).unwrap().unwrap().render(&[Message::new("user", "hi")]).unwrap()
    };
    assert_eq!(rendered(&tokenizer), "hi</s>");

    // A saved model keeps the template.
    let saved = folder.path().join("saved");
    save(&saved, &loaded.model, &tokenizer, SaveOptions::default()).unwrap();
    assert_eq!(rendered(&load(&saved, &device()).unwrap().tokenizer.unwrap()), "hi</s>");
}

#[test]
fn a_missing_token_is_empty() {
    let source = "{{ bos_token }}{% if eos_token is defined %}</s>{% endif %}x";
    let template = ChatTemplate::new(source, None, None).unwrap();
    assert_eq!(template.render(&[]).unwrap(), "x");
}
