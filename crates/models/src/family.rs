//! [`Family`]: the files of a model family, and how a model is built from them.

use std::path::Path;

use burn::tensor::Device;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    gguf::{GgufNames, Metadata},
    model::LanguageModel,
};

/// The fields of a `config.json`.
pub type JsonFields = Map<String, Value>;

/// The `config.json` of a Hugging Face folder.
#[derive(Clone, Copy, Debug)]
pub struct ConfigJson<'a> {
    /// The text of the file.
    pub text: &'a str,
    /// The path of the file, for messages.
    pub path: &'a Path,
}

impl ConfigJson<'_> {
    /// Deserializes the fields of `T`.
    ///
    /// # Errors
    /// Fails with [`Error::Malformed`] for text that is not JSON, and with [`Error::Config`] for a
    /// field of another type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.text).map_err(|error| {
            if let Some((field, value, rule)) = self.wrong_field::<T>() {
                return Error::config(self.path, field, value, rule);
            }
            let why = match serde_json::from_str::<Value>(self.text) {
                Ok(value) if !value.is_object() => "it must hold an object".into(),
                _ => error.to_string(),
            };
            match why.strip_prefix(MISSING).and_then(|rest| rest.split('`').nth(1)) {
                Some(field) => Error::config(self.path, field, "missing", "the model needs it"),
                None => Error::Malformed { path: self.path.into(), format: "config.json", why },
            }
        })
    }

    /// Deserializes `T` of the fields, and of `defaults` for fields that are absent or null.
    ///
    /// # Errors
    /// Fails as [`parse`](Self::parse) does.
    pub(crate) fn parse_with<T: DeserializeOwned>(&self, defaults: Value) -> Result<T> {
        let mut fields: JsonFields = self.parse()?;
        fields.retain(|_, value| !value.is_null());
        if let Value::Object(defaults) = defaults {
            for (name, value) in defaults {
                fields.entry(name).or_insert(value);
            }
        }
        let text = Value::Object(fields).to_string();
        ConfigJson { text: &text, path: self.path }.parse()
    }

    /// Checks that fields have their only supported value, if they are there.
    ///
    /// # Errors
    /// Fails with [`Error::Config`] for the first one that has another value.
    pub(crate) fn check_only<const N: usize>(&self, only: [(&str, Value); N]) -> Result<()> {
        let fields: JsonFields = self.parse()?;
        let wrong = only.into_iter().find_map(|(name, only)| {
            let value = fields.get(name).filter(|value| !value.is_null() && **value != only)?;
            Some(Error::config(self.path, name, shown(value), format!("must be {}", shown(&only))))
        });
        wrong.map_or(Ok(()), Err)
    }

    /// Returns the text of the fields of the language model. A model with images has them in
    /// `text_config`, and the tied head beside it.
    pub(crate) fn text_fields(&self) -> Result<String> {
        let mut fields = self.parse::<Map<String, Value>>()?;
        let Some(Value::Object(mut text)) = fields.remove("text_config") else {
            return Ok(self.text.into());
        };
        if let Some(tied) = fields.remove("tie_word_embeddings") {
            text.entry("tie_word_embeddings").or_insert(tied);
        }
        Ok(Value::Object(text).to_string())
    }

    /// Returns the fields of `config` and the names of its family, as `config.json` has them.
    ///
    /// # Errors
    /// Fails for numbers that are not finite; `path` is for the message.
    pub fn fields(
        config: &impl Serialize,
        path: &Path,
        model_type: &str,
        architecture: &str,
    ) -> Result<JsonFields> {
        let Ok(Value::Object(mut fields)) = serde_json::to_value(config) else {
            return Err(Error::config(path, "config", model_type, "must have finite numbers"));
        };
        fields.insert("model_type".into(), model_type.into());
        fields.insert("architectures".into(), [architecture].into());
        Ok(fields)
    }

    /// Returns the first field that `T` cannot read, its value and the rule, because serde's
    /// messages do not name the field. Messages about missing fields are ignored.
    fn wrong_field<T: DeserializeOwned>(&self) -> Option<(String, Value, String)> {
        let why = |value: Value| {
            let error = serde_json::from_value::<T>(value).err()?.to_string();
            (!error.starts_with(MISSING)).then_some(error)
        };
        let fields: JsonFields = serde_json::from_str(self.text).ok()?;
        let (field, value, why) = wrong_part(&Value::Object(fields), &why)?;
        (!field.is_empty()).then(|| (field, value, rule(&why)))
    }
}

/// Returns the innermost part of `value` that `why` refuses alone: its path, value and reason.
fn wrong_part(
    value: &Value,
    why: &dyn Fn(Value) -> Option<String>,
) -> Option<(String, Value, String)> {
    let inner = match value {
        Value::Object(fields) => fields.iter().find_map(|(name, inner)| {
            let alone = |inner| why(Map::from_iter([(name.clone(), inner)]).into());
            let (rest, value, why) = wrong_part(inner, &alone)?;
            Some((inside(name, &rest), value, why))
        }),
        Value::Array(items) => items.iter().enumerate().find_map(|(i, inner)| {
            let alone = |inner| {
                let why = why(vec![inner].into())?;
                (!why.starts_with("invalid length")).then_some(why)
            };
            let (rest, value, why) = wrong_part(inner, &alone)?;
            Some((inside(&format!("[{i}]"), &rest), value, why))
        }),
        _ => None,
    };
    inner.or_else(|| Some((String::new(), value.clone(), why(value.clone())?)))
}

/// Returns the path of the part `rest` of a field; an empty `rest` is the whole field.
fn inside(field: &str, rest: &str) -> String {
    let dot = if rest.is_empty() || rest.starts_with('[') { "" } else { "." };
    format!("{field}{dot}{rest}")
}

/// Returns the rule of one of serde's messages, without names of Rust types.
fn rule(why: &str) -> String {
    let why = why.split(" at line ").next().unwrap_or(why);
    let Some((found, expected)) = why.rsplit_once("expected ") else { return why.into() };
    let expected = expected.replace('`', "");
    if found.starts_with("unknown field") {
        return format!("is not a known field; must be {expected}");
    }
    let must = match expected.as_str() {
        "usize" | "u64" => "an integer of at least 0",
        "u32" => "an integer from 0 to 4294967295",
        "u8" => "an integer from 0 to 255",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text",
        "a sequence" => "a list",
        "a map" => "an object",
        name if name.starts_with("struct ") => "an object",
        other => other,
    };
    format!("must be {must}")
}

/// The start of serde's messages about missing fields.
const MISSING: &str = "missing field";

/// Returns a value as messages have it: texts without quotes.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// A family of models that [`load`](crate::load()) builds; [`register`](crate::register) makes one
/// known.
pub trait Family: Sync {
    /// Returns the values of `model_type` in `config.json` that the family reads.
    fn model_types(&self) -> &'static [&'static str];

    /// Returns the values of `quant_method` in `config.json` that the family reads.
    fn quantizations(&self) -> &'static [&'static str] {
        &[]
    }

    /// Builds a model of a Hugging Face folder, taking each tensor out of `weights`.
    ///
    /// # Errors
    /// Fails for a field of `config` that is missing or breaks a rule, for an unsupported feature,
    /// and for a tensor that is missing, left over or of another shape.
    fn import(&self, config: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel>;

    /// Builds a model with random weights, which depend on the device's seed.
    ///
    /// # Errors
    /// Fails as [`import`](Self::import) does for a `config`, and with [`Error::Unsupported`] for a
    /// family whose models cannot be trained from scratch.
    fn random(&self, config: &ConfigJson<'_>, device: &Device) -> Result<LanguageModel> {
        let _ = device;
        let why = format!("the family of {} needs a checkpoint", config.path.display());
        Err(Error::unsupported("random weights", why))
    }

    /// Returns the GGUF architectures that the family reads, with the names of their tensors.
    /// `NAME with experts` stands for the files of an architecture whose `expert_count` is above 0.
    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        &[]
    }

    /// Builds a model of a GGUF file. The tensors have their Hugging Face names in `weights`.
    ///
    /// # Errors
    /// Fails as [`import`](Self::import) does, and with [`Error::Unsupported`] for a family without
    /// GGUF files.
    fn import_gguf(&self, metadata: &Metadata<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let _ = weights;
        Err(no_gguf(metadata))
    }
}

/// Returns the error of a family without GGUF files.
pub(crate) fn no_gguf(metadata: &Metadata<'_>) -> Error {
    let why = format!("{} has it; its family reads no GGUF files", metadata.path().display());
    Error::unsupported(format!("GGUF architecture {}", metadata.arch()), why)
}
