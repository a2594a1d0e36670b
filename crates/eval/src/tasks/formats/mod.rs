//! Formats of task files, a file for each.

mod arc;
mod hellaswag;
mod lambada;
mod piqa;
mod plain;

use core::{fmt, str::FromStr};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::{
    fields::{Fields, Problem},
    item::TaskTarget,
};
use crate::{Error, Result};

/// All formats. A line that has the fields of several belongs to the first.
const ALL: [Format; 6] = [
    hellaswag::FORMAT,
    arc::FORMAT,
    piqa::FORMAT,
    plain::CHOICES,
    plain::CONTINUATION,
    lambada::FORMAT,
];

/// A format of task files.
#[derive(Clone, Copy, Debug)]
struct Format {
    name: &'static str,
    /// The fields by which lines are recognized.
    fields: &'static [&'static str],
    /// Returns the context and what is scored after it.
    read: fn(&Fields<'_>) -> Result<(String, TaskTarget), Problem>,
}

/// A format of task files, one JSON object per line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskFormat(usize);

impl TaskFormat {
    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..ALL.len()).map(Self)
    }

    /// Returns the short name.
    pub fn name(self) -> &'static str {
        ALL[self.0].name
    }

    /// Returns the fields of a line, without those that are ignored.
    pub fn fields(self) -> &'static [&'static str] {
        ALL[self.0].fields
    }

    /// Returns the first format whose fields a line has.
    pub(super) fn of(line: &Map<String, Value>) -> Result<Self, Problem> {
        let fields = Fields::new(line);
        let has = |format: &Self| format.fields().iter().all(|name| fields.get(name).is_some());
        Self::all().find(has).ok_or_else(|| {
            let names: Vec<&str> = line.keys().map(String::as_str).collect();
            let formats: Vec<String> = Self::all()
                .map(|format| format!("{} ({})", format.name(), format.fields().join(", ")))
                .collect();
            let rule = format!("must be the fields of one of {}", formats.join("; "));
            Problem::new("fields", super::fields::quoted(&names.join(", ")), rule)
        })
    }

    /// Returns the context and what is scored after it.
    pub(super) fn read(self, line: &Map<String, Value>) -> Result<(String, TaskTarget), Problem> {
        let fields = Fields::new(line);
        if let Some(name) = self.fields().iter().find(|name| fields.get(name).is_none()) {
            let all = self.fields().join(", ");
            let rule = format!("must be given, because lines of {self} have {all}");
            return Err(Problem::missing(*name, rule));
        }
        (ALL[self.0].read)(&fields)
    }
}

impl fmt::Display for TaskFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for TaskFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl FromStr for TaskFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::all().find(|format| format.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::all().map(Self::name).collect();
            Error::plan("format", format!("{name:?}"), format!("must be {}", names.join(", ")))
        })
    }
}

/// Returns choices after checking them.
fn choices(
    field: &str,
    choices: Vec<String>,
    gold: impl FnOnce(usize) -> Result<usize, Problem>,
) -> Result<TaskTarget, Problem> {
    if choices.len() < 2 {
        let rule = "must have at least two choices";
        return Err(Problem::new(field, format!("a list of {}", choices.len()), rule));
    }
    for (i, choice) in choices.iter().enumerate() {
        not_empty(&format!("{field}[{i}]"), choice)?;
    }
    let gold = gold(choices.len())?;
    Ok(TaskTarget::Choices { choices, gold })
}

/// Checks that a choice has text.
fn not_empty(field: &str, choice: &str) -> Result<(), Problem> {
    match choice.is_empty() {
        true => {
            let rule = "must have text, because accuracy is also measured per character";
            Err(Problem::new(field, "an empty choice", rule))
        }
        false => Ok(()),
    }
}
