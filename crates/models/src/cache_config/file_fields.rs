//! Takes the fields of a policy's file one by one, and names the one that is wrong.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// A field of a file that breaks a rule.
#[derive(Debug, thiserror::Error)]
#[error("{name} = {value}: {rule}")]
pub(super) struct WrongField {
    pub(super) name: String,
    pub(super) value: String,
    pub(super) rule: String,
}

impl WrongField {
    pub(super) fn new(name: &str, value: impl ToString, rule: impl ToString) -> Self {
        Self { name: name.into(), value: value.to_string(), rule: rule.to_string() }
    }
}

pub(super) fn none_left(fields: Map<String, Value>) -> Result<(), WrongField> {
    match fields.into_iter().next() {
        None => Ok(()),
        Some((name, value)) => Err(WrongField::new(&name, value, "unknown field")),
    }
}

pub(super) fn optional<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<Option<T>, WrongField> {
    let Some(value) = fields.remove(name) else { return Ok(None) };
    let text = value.to_string();
    serde_json::from_value(value).map(Some).map_err(|error| WrongField::new(name, text, error))
}

pub(super) fn required<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<T, WrongField> {
    optional(fields, name)?.ok_or_else(|| WrongField::new(name, "missing", "the file needs it"))
}
