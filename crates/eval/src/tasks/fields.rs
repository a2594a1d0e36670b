//! The fields of one line of a task file.

use kv_models::one_line;
use serde_json::{Map, Value};

/// Characters of a value that messages quote.
const QUOTED: usize = 40;

/// A field that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) field: String,
    pub(super) value: String,
    pub(super) rule: String,
}

impl Problem {
    pub(super) fn new(
        field: impl Into<String>,
        value: impl Into<String>,
        rule: impl Into<String>,
    ) -> Self {
        Self { field: field.into(), value: value.into(), rule: rule.into() }
    }

    pub(super) fn missing(field: impl Into<String>, rule: impl Into<String>) -> Self {
        Self::new(field, "missing", rule)
    }
}

/// Returns the beginning of a text in quotes, for a message.
pub(super) fn quoted(text: &str) -> String {
    format!("{:?}", one_line(text, QUOTED))
}

/// Returns the beginning of a value as JSON, for a message.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Array(values) => format!("a list of {}", values.len()),
        Value::Object(fields) => format!("an object of {}", fields.len()),
        other => one_line(&other.to_string(), QUOTED),
    }
}

/// The fields of an object. An object inside another one has a path.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, path: String::new() }
    }

    /// Returns the path of a field, such as `choices.text`.
    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Returns a value that is not null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn value(&self, name: &str) -> Result<&'a Value, Problem> {
        self.get(name).ok_or_else(|| Problem::missing(self.path(name), "must be given"))
    }

    fn problem(&self, name: &str, value: &Value, rule: &str) -> Problem {
        Problem::new(self.path(name), shown(value), rule)
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a str, Problem> {
        let value = self.value(name)?;
        value.as_str().ok_or_else(|| self.problem(name, value, "must be a string"))
    }

    pub(super) fn texts(&self, name: &str) -> Result<Vec<&'a str>, Problem> {
        let values = self.list(name)?.iter().enumerate();
        let text = |(i, value): (usize, &'a Value)| {
            value.as_str().ok_or_else(|| {
                let field = format!("{}[{i}]", self.path(name));
                Problem::new(field, shown(value), "must be a string")
            })
        };
        values.map(text).collect()
    }

    fn list(&self, name: &str) -> Result<&'a [Value], Problem> {
        let value = self.value(name)?;
        let list = value.as_array().map(Vec::as_slice);
        list.ok_or_else(|| self.problem(name, value, "must be a list"))
    }

    /// Returns the objects of a list; `None` if the field is not a list.
    pub(super) fn objects(&self, name: &str) -> Option<Result<Vec<Self>, Problem>> {
        let list = self.get(name)?.as_array()?.iter().enumerate();
        let object = |(i, value): (usize, &'a Value)| {
            let path = format!("{}[{i}]", self.path(name));
            match value.as_object() {
                Some(map) => Ok(Self { map, path: format!("{path}.") }),
                None => Err(Problem::new(path, shown(value), "must be an object")),
            }
        };
        Some(list.map(object).collect())
    }

    pub(super) fn object(&self, name: &str) -> Result<Self, Problem> {
        let value = self.value(name)?;
        match value.as_object() {
            Some(map) => Ok(Self { map, path: format!("{}.", self.path(name)) }),
            None => Err(self.problem(name, value, "must be an object")),
        }
    }

    /// Returns a number below `n`, which is a JSON number or a string of digits.
    pub(super) fn index(&self, name: &str, n: usize) -> Result<usize, Problem> {
        let value = self.value(name)?;
        let digits = |text: &&str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
        let number = match value {
            Value::String(text) => Some(&**text).filter(digits).and_then(|it| it.parse().ok()),
            value => value.as_u64().and_then(|number| number.try_into().ok()),
        };
        number.filter(|&number: &usize| number < n).ok_or_else(|| {
            let rule = format!("must be the number of a choice, from 0 to {}", n.saturating_sub(1));
            self.problem(name, value, &rule)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(json: &str) -> Result<usize, Problem> {
        let value: Value = serde_json::from_str(json).unwrap();
        let map: Map<_, _> = [("label".to_string(), value)].into_iter().collect();
        Fields::new(&map).index("label", 4)
    }

    #[test]
    fn numbers_of_choices_are_numbers_or_digits() {
        for (json, expected) in [("3", 3), ("\"0\"", 0), ("\"03\"", 3)] {
            assert_eq!(index(json).unwrap(), expected, "{json}");
        }
        for json in ["4", "-1", "1.0", "\"\"", "\"-1\"", "\" 1\"", "\"4\"", "[1]", "1e30", "true"] {
            let problem = index(json).unwrap_err();
            assert_eq!(problem.rule, "must be the number of a choice, from 0 to 3", "{json}");
        }
        let long = format!("\"{}\"", "9".repeat(100));
        assert!(index(&long).unwrap_err().value.len() < 60);
        assert_eq!(index("null").unwrap_err().value, "missing");
    }
}
