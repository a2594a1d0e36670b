//! ARC (Clark et al., 2018), as in the data set `allenai/ai2_arc`.
//!
//! Follows `lm_eval/tasks/arc` in lm-evaluation-harness.

use super::{Format, choices};
use crate::tasks::{
    fields::{Fields, Problem, quoted},
    item::TaskTarget,
};

pub(super) const FORMAT: Format =
    Format { name: "arc", fields: &["question", "choices", "answerKey"], read };

fn read(fields: &Fields<'_>) -> Result<(String, TaskTarget), Problem> {
    let context = format!("Question: {}\nAnswer:", fields.text("question")?);
    let (texts, labels) = match fields.objects("choices") {
        Some(list) => list?
            .iter()
            .map(|choice| Ok((choice.text("text")?, choice.text("label")?)))
            .collect::<Result<_, _>>()?,
        None => {
            let lists = fields.object("choices")?;
            (lists.texts("text")?, lists.texts("label")?)
        }
    };
    if texts.len() != labels.len() {
        let value = format!("a list of {}", labels.len());
        let rule = format!("must be as long as choices.text, which has {}", texts.len());
        return Err(Problem::new("choices.label", value, rule));
    }
    let key = fields.text("answerKey")?;
    let texts = texts.into_iter().map(String::from).collect();
    let target = choices("choices.text", texts, |_| {
        labels.iter().position(|label| *label == key).ok_or_else(|| {
            let rule = format!("must be one of {}", quoted(&labels.join(", ")));
            Problem::new("answerKey", quoted(key), rule)
        })
    })?;
    Ok((context, target))
}
