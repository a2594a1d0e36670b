//! LAMBADA (Paperno et al., 2016), as in the data set `EleutherAI/lambada_openai`.
//!
//! Follows `lm_eval/tasks/lambada` in lm-evaluation-harness.

use super::Format;
use crate::tasks::{
    fields::{Fields, Problem, quoted},
    item::TaskTarget,
};

pub(super) const FORMAT: Format = Format { name: "lambada", fields: &["text"], read };

/// Splits a text at its last space. The last word is to be predicted.
fn read(fields: &Fields<'_>) -> Result<(String, TaskTarget), Problem> {
    let text = fields.text("text")?;
    let (context, word) = text.rsplit_once(' ').unwrap_or(("", text));
    if word.is_empty() {
        let rule = "must not be empty or end with a space, because the last word is the target";
        return Err(Problem::new("text", quoted(text), rule));
    }
    Ok((context.to_string(), TaskTarget::Continuation(format!(" {word}"))))
}
