//! PIQA (Bisk et al., 2020), as in the data set `baber/piqa`.
//!
//! Follows `lm_eval/tasks/piqa` in lm-evaluation-harness.

use super::{Format, choices, not_empty};
use crate::tasks::{
    fields::{Fields, Problem},
    item::TaskTarget,
};

pub(super) const FORMAT: Format =
    Format { name: "piqa", fields: &["goal", "sol1", "sol2", "label"], read };

fn read(fields: &Fields<'_>) -> Result<(String, TaskTarget), Problem> {
    let context = format!("Question: {}\nAnswer:", fields.text("goal")?);
    let mut solutions = vec![];
    for name in ["sol1", "sol2"] {
        let solution = fields.text(name)?;
        not_empty(name, solution)?;
        solutions.push(solution.to_string());
    }
    let target = choices("sol", solutions, |n| fields.index("label", n))?;
    Ok((context, target))
}
