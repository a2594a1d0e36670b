//! HellaSwag (Zellers et al., 2019), as in the data set `Rowan/hellaswag`.
//!
//! Follows `lm_eval/tasks/hellaswag` in lm-evaluation-harness.

use super::{Format, choices};
use crate::tasks::{
    fields::{Fields, Problem},
    item::TaskTarget,
    python::{capitalize, strip},
};

pub(super) const FORMAT: Format = Format {
    name: "hellaswag",
    fields: &["ctx_a", "ctx_b", "activity_label", "endings", "label"],
    read,
};

fn read(fields: &Fields<'_>) -> Result<(String, TaskTarget), Problem> {
    let [label, first, second] =
        [fields.text("activity_label")?, fields.text("ctx_a")?, fields.text("ctx_b")?];
    let context = clean(&format!("{label}: {first} {}", capitalize(second)));
    let endings = fields.texts("endings")?.into_iter().map(clean).collect();
    let target = choices("endings", endings, |n| fields.index("label", n))?;
    Ok((context, target))
}

/// Removes what the data set's source, WikiHow, left in brackets.
fn clean(text: &str) -> String {
    let text = strip(text).replace(" [title]", ". ");
    without_brackets(&text).replace("  ", " ")
}

/// Removes all matches of the regular expression `\[.*?\]`, where `.` is not a line feed.
fn without_brackets(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(open) = rest.find('[') {
        let (before, from) = rest.split_at(open);
        kept.push_str(before);
        rest = match from.find([']', '\n']) {
            Some(end) if from.as_bytes()[end] == b']' => &from[end + 1..],
            // Brackets up to the line feed, or the end, have no match.
            other => {
                let (unmatched, after) = from.split_at(other.unwrap_or(from.len()));
                kept.push_str(unmatched);
                after
            }
        };
    }
    kept + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are from Python's `re.sub`.
    #[test]
    fn brackets_are_removed_as_by_the_regular_expression() {
        for (text, expected) in [
            ("a [b] c", "a  c"),
            ("[a] [b]", " "),
            ("a [[b] c] d", "a  c] d"),
            ("a [b", "a [b"),
            ("a ] b [", "a ] b ["),
            ("a [b\nc] [d] e", "a [b\nc]  e"),
            ("[[\n[x]y]", "[[\ny]"),
            ("\u{e9}[\u{e9}]\u{e9}", "\u{e9}\u{e9}"),
            ("", ""),
        ] {
            assert_eq!(without_brackets(text), expected, "{text:?}");
        }
        assert_eq!(clean(" a [title] b   c [step] d "), "a. b  c d");
    }
}
