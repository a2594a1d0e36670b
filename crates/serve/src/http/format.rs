//! `response_format`, and vLLM's fields for other constraints.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{app::App, error::ApiError};
use crate::{constraint::Constraint, tools::named};

/// The fields for constraints. A request has at most one.
const FIELDS: [&str; 5] =
    ["response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"];

/// Returns the constraint that a request's fields ask for.
pub(super) fn constraint(
    app: &App,
    fields: &BTreeMap<String, Value>,
) -> Result<Option<Constraint>, ApiError> {
    let given = FIELDS.into_iter().filter_map(|name| Some((name, fields.get(name)?)));
    let mut given = given.filter(|(_, value)| !value.is_null());
    let Some((name, value)) = given.next() else { return Ok(None) };
    if let Some((second, _)) = given.next() {
        return Err(ApiError::field(second, "given", format!("cannot be used with {name}")));
    }
    let wrong = |rule: String| ApiError::field(name, value, rule);
    let text = || value.as_str().ok_or_else(|| wrong("must be a string".into()));
    let constraints = app.constraints.as_ref().map_err(|why| wrong(why.clone()));
    let compiled = match name {
        "response_format" => match value["type"].as_str() {
            Some("text") => return Ok(None),
            Some("json_object") => constraints?.schema(&json!({"type": "object"})),
            Some("json_schema") => {
                let schema = value["json_schema"].get("schema");
                let missing = || wrong("json_schema.schema is missing".into());
                constraints?.schema(schema.ok_or_else(missing)?)
            }
            _ => return Err(wrong("type must be text, json_object or json_schema".into())),
        },
        // A schema may be a string of JSON.
        "guided_json" => match value.as_str().map(serde_json::from_str::<Value>) {
            None => constraints?.schema(value),
            Some(Ok(schema)) => constraints?.schema(&schema),
            Some(Err(error)) => return Err(wrong(format!("must be JSON: {error}"))),
        },
        "guided_regex" => constraints?.regex(text()?),
        "guided_choice" => {
            let choices = value.as_array().filter(|it| {
                !it.is_empty()
                    && it.iter().all(|choice| choice.as_str().is_some_and(|s| !s.is_empty()))
            });
            let choices = choices.ok_or_else(|| wrong("must be a list of strings".into()))?;
            let choices: Vec<String> = choices.iter().map(Value::to_string).collect();
            constraints?.grammar(&format!("start: {}\n", choices.join(" | ")))
        }
        _ => constraints?.grammar(text()?),
    };
    compiled.map(Some).map_err(wrong)
}

/// The tools of a request.
#[derive(Default)]
pub(super) struct Tools {
    /// Set if the answer may call tools.
    pub(super) are_read: bool,
    /// Set if the answer must be a call.
    pub(super) constraint: Option<Constraint>,
}

/// Returns how the tools of a request are used, by `tool_choice`.
pub(super) fn tools(
    app: &App,
    tools: Option<&Value>,
    choice: Option<&Value>,
) -> Result<Tools, ApiError> {
    let wrong = |rule: &str| {
        ApiError::field("tool_choice", choice.map_or("none".into(), Value::to_string), rule)
    };
    let Some(given) = tools else {
        return match choice.and_then(Value::as_str) {
            None if choice.is_some() => Err(wrong("needs tools")),
            Some("required") => Err(wrong("needs tools")),
            _ => Ok(Tools::default()),
        };
    };
    let named = named(given).map_err(|rule| ApiError::field("tools", given, rule))?;
    let must = match choice {
        None | Some(Value::Null) => vec![],
        Some(Value::String(word)) => match word.as_str() {
            "auto" => vec![],
            "none" => return Ok(Tools::default()),
            "required" => named,
            _ => return Err(wrong("must be none, auto, required or a function")),
        },
        Some(function) => {
            let name = function["function"]["name"].as_str();
            let name = name.ok_or_else(|| wrong("must be none, auto, required or a function"))?;
            let tool = named.into_iter().find(|(it, _)| it == name);
            vec![tool.ok_or_else(|| wrong("must be the name of one of the tools"))?]
        }
    };
    if must.is_empty() {
        return Ok(Tools { are_read: true, constraint: None });
    }
    let constraints = app.constraints.as_ref().map_err(|why| wrong(why))?;
    let constraint = constraints.tool_call(&must).map_err(|why| wrong(&why))?;
    Ok(Tools { are_read: true, constraint: Some(constraint) })
}
