//! Plain formats: a context, and choices or a continuation.

use super::{Format, choices};
use crate::tasks::{
    fields::{Fields, Problem},
    item::TaskTarget,
};

/// Scores like `output_type: multiple_choice` of lm-evaluation-harness.
pub(super) const CHOICES: Format = Format {
    name: "choices",
    fields: &["context", "choices", "gold"],
    read: |fields| {
        let texts = fields.texts("choices")?.into_iter().map(String::from).collect();
        let target = choices("choices", texts, |n| fields.index("gold", n))?;
        Ok((fields.text("context")?.to_string(), target))
    },
};

/// Scores like `output_type: loglikelihood`, which adds no delimiter.
pub(super) const CONTINUATION: Format =
    Format { name: "continuation", fields: &["context", "continuation"], read };

fn read(fields: &Fields<'_>) -> Result<(String, TaskTarget), Problem> {
    let continuation = fields.text("continuation")?;
    if continuation.is_empty() {
        let rule = "must have text; without a space at its beginning it continues a word";
        return Err(Problem::new("continuation", "\"\"", rule));
    }
    let context = fields.text("context")?.to_string();
    Ok((context, TaskTarget::Continuation(continuation.to_string())))
}
