//! The `quantization_config` of weights in 8-bit floats, as DeepSeek publishes them.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Returns the rows and columns of the blocks that share a scale.
///
/// # Errors
/// Fails for a field that is missing or has a value that no published model has.
pub(super) fn block(config: &Map<String, Value>, path: &Path) -> Result<[usize; 2]> {
    let error = |field: &str, value: &Value, rule: &str| {
        let value = if value.is_null() { "missing".into() } else { value.to_string() };
        Err(Error::config(path, format!("quantization_config.{field}"), value, rule))
    };
    for (field, only) in [("fmt", "e4m3"), ("scale_fmt", "ue8m0"), ("activation_scheme", "dynamic")]
    {
        let value = config.get(field).unwrap_or(&Value::Null);
        if !value.is_null() && value != only {
            return error(field, value, &format!("must be {only}"));
        }
    }
    let field = "weight_block_size";
    let value = config.get(field).unwrap_or(&Value::Null);
    let sizes: Option<Vec<usize>> = serde_json::from_value(value.clone()).ok();
    match sizes.as_deref() {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok([rows, columns]),
        _ => error(field, value, "must be the rows and columns of a block, such as [128, 128]"),
    }
}
