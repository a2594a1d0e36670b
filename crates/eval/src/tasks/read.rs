//! Task files: [`Task`].

use core::str::from_utf8;
use std::{collections::HashMap, io::BufRead};

use kv_models::one_line;
use serde_json::Value;

use super::{
    TaskFormat,
    fields::{Problem, quoted, shown},
    item::{TaskItem, TaskTarget},
};
use crate::{Error, Result};

/// A task: the items of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The name of the file.
    pub name: String,
    /// Its format.
    pub format: TaskFormat,
    /// The items, at least one.
    pub items: Vec<TaskItem>,
}

impl Task {
    /// Reads at most `limit` items, one JSON object per line. Empty lines are skipped. Without a
    /// `format`, the fields of the first object decide. Messages call the file `name`.
    ///
    /// # Errors
    /// [`Error::TaskLine`] for a line that cannot be read or breaks a rule of the format, and for
    /// an `id` that two lines have; [`Error::Plan`] for a file without items.
    pub fn read(
        reader: impl BufRead,
        name: &str,
        format: Option<TaskFormat>,
        limit: Option<usize>,
    ) -> Result<Self> {
        if limit == Some(0) {
            return Err(Error::plan("limit", 0, "must be at least 1"));
        }
        let (mut format, mut items, mut ids) = (format, vec![], HashMap::new());
        for (i, bytes) in reader.split(b'\n').enumerate() {
            if limit.is_some_and(|limit| items.len() >= limit) {
                break;
            }
            let line = i + 1;
            let item = bytes
                .map_err(|error| {
                    Problem::new("line", "unreadable", one_line(&error.to_string(), 200))
                })
                .and_then(|bytes| item(&bytes, line, &mut format, &mut ids))
                .map_err(|problem| in_line(name, line, problem))?;
            items.extend(item);
        }
        match format {
            Some(format) if !items.is_empty() => Ok(Self { name: name.to_string(), format, items }),
            _ => Err(Error::plan("task", name, "has no items; give a file with JSON objects")),
        }
    }
}

/// Returns the error for a field of a line.
pub(super) fn in_line(file: &str, line: usize, problem: Problem) -> Error {
    let Problem { field, value, rule } = problem;
    Error::TaskLine { file: file.to_string(), line, field, value, rule }
}

/// Reads the item of a line; `None` if the line is empty.
fn item(
    bytes: &[u8],
    line: usize,
    format: &mut Option<TaskFormat>,
    ids: &mut HashMap<String, usize>,
) -> Result<Option<TaskItem>, Problem> {
    let text = from_utf8(bytes).map_err(|error| {
        let rule = format!("must be UTF-8, but is not after byte {}", error.valid_up_to());
        Problem::new("line", quoted(&String::from_utf8_lossy(bytes)), rule)
    })?;
    // Some editors put a byte order mark before the first line.
    let text = if line == 1 { text.trim_start_matches('\u{feff}') } else { text };
    if text.trim().is_empty() {
        return Ok(None);
    }
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let why = one_line(&error.to_string(), 200);
        Problem::new("line", quoted(text), format!("must be a JSON object: {why}"))
    })?;
    let Value::Object(fields) = value else {
        return Err(Problem::new("line", shown(&value), "must be a JSON object"));
    };
    let format = match *format {
        Some(format) => format,
        None => *format.insert(TaskFormat::of(&fields)?),
    };
    let (context, target) = format.read(&fields)?;
    let id = match fields.get("id") {
        Some(Value::String(id)) => Some(id.clone()),
        Some(Value::Null) | None => None,
        Some(id) => Some(id.to_string()),
    };
    if let Some(id) = &id
        && let Some(first) = ids.insert(id.clone(), line)
    {
        let rule = format!("is also the id of line {first}; give each line its own");
        return Err(Problem::new("id", quoted(id), rule));
    }
    Ok(Some(TaskItem { line, id, context, target }))
}

impl Task {
    /// Returns whether items have choices.
    pub(super) fn has_choices(&self) -> bool {
        self.items.iter().any(|item| matches!(item.target, TaskTarget::Choices { .. }))
    }

    /// Returns the bytes of the longest text that a model processes.
    pub fn longest(&self) -> usize {
        let of_item = |item: &TaskItem| {
            let texts = item.target.continuations();
            item.context.len() + texts.iter().map(String::len).max().unwrap_or(0)
        };
        self.items.iter().map(of_item).max().unwrap_or(0)
    }

    /// Returns the number of texts that are scored.
    pub fn continuations(&self) -> usize {
        self.items.iter().map(|item| item.target.len()).sum()
    }
}
