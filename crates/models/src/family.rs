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
            let why = error.to_string();
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

    /// Returns the first field that `T` cannot read, its value and the reason, because serde's
    /// messages do not name the field. Messages about missing fields are ignored.
    fn wrong_field<T: DeserializeOwned>(&self) -> Option<(String, Value, String)> {
        let why = |fields: JsonFields| {
            serde_json::from_value::<T>(Value::Object(fields)).err().map(|error| error.to_string())
        };
        let fields: JsonFields = serde_json::from_str(self.text).ok()?;
        fields.into_iter().find_map(|(name, value)| {
            let wrong = why(Map::from_iter([(name.clone(), value.clone())]));
            Some((name, value, wrong.filter(|wrong| !wrong.starts_with(MISSING))?))
        })
    }
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
