//! Task files: preprocessing, wrong lines and damaged files.

use kv_eval::{
    Error,
    tasks::{Task, TaskFormat, TaskPlan, TaskTarget},
};
use kv_models::{ModelCacheConfig, load};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::common::AUSTEN;

/// A line of each format.
const LINES: [(&str, &str); 7] = [
    (
        "hellaswag",
        concat!(
            r#"{"ind": 24, "activity_label": "Removing ice from car", "ctx": "unused", "#,
            r#""ctx_a": "Then, the man writes over the snow.", "ctx_b": "then A Woman", "#,
            r#""endings": [", the man adds wax.", "  smiles [substeps] and  waves. ", "#,
            r#""\u00e9tait [x\ny] l\u00e0"], "label": "1"}"#,
        ),
    ),
    (
        "arc",
        concat!(
            r#"{"id": "MCAS_1", "question": "What is hot?", "choices": {"#,
            r#""text": ["ice", "the sun"], "#,
            r#""label": ["A", "B"]}, "answerKey": "B"}"#,
        ),
    ),
    (
        "arc",
        concat!(
            r#"{"id": "MCAS_2", "question": "What is cold?", "choices": [{"text": "ice", "#,
            r#""label": "1"}, {"label": "2", "text": "the sun"}], "answerKey": "1"}"#,
        ),
    ),
    ("piqa", r#"{"goal": "To boil water,", "sol1": "heat it.", "sol2": "cool it.", "label": 0}"#),
    ("lambada", r#"{"text": "He took his hat and\nhis  coat", "domain": "none"}"#),
    ("choices", r#"{"context": "One two ", "choices": ["three", "four"], "gold": 0}"#),
    ("continuation", r#"{"context": "One tw", "continuation": "o three"}"#),
];

fn read(text: &str) -> Result<Task, Error> {
    Task::read(text.as_bytes(), "file.jsonl", None, None)
}

/// Returns the texts that lm-evaluation-harness scores.
fn texts(line: &str) -> (String, Vec<String>, Option<usize>) {
    let item = read(line).unwrap().items.remove(0);
    let continuations = item.target.continuations();
    (item.context, continuations, item.target.gold())
}

/// Expected texts of HellaSwag are from `utils.py` of the task, run by Python; the others from the
/// templates in the task's YAML file.
#[test]
fn lines_become_the_texts_of_the_harness() {
    for (name, line) in LINES {
        assert_eq!(read(line).unwrap().format.name(), name);
    }
    let [swag, arc, list, piqa, lambada, choices, continuation] = LINES.map(|(_, it)| texts(it));
    assert_eq!(
        swag,
        (
            "Removing ice from car: Then, the man writes over the snow. Then a woman".into(),
            vec![
                " , the man adds wax.".into(),
                " smiles and waves.".into(),
                " \u{e9}tait [x\ny] l\u{e0}".into()
            ],
            Some(1)
        )
    );
    let wiki = concat!(
        r#"{"activity_label": "Home and Garden", "ctx_a": "[header] How to clean a pot [title] "#,
        r#"Scrub it. [step] Use  sand. [title]", "ctx_b": "", "#,
        r#""endings": ["[step] Rinse it.", "[title] Dry it."], "label": 0}"#,
    );
    assert_eq!(
        texts(wiki),
        (
            "Home and Garden: How to clean a pot. Scrub it. Use sand.. ".into(),
            vec!["  Rinse it.".into(), "  Dry it.".into()],
            Some(0)
        )
    );
    let answers = |a: &str, b: &str| vec![a.to_string(), b.to_string()];
    let question = "Question: What is hot?\nAnswer:".to_string();
    assert_eq!(arc, (question, answers(" ice", " the sun"), Some(1)));
    let question = "Question: What is cold?\nAnswer:".to_string();
    assert_eq!(list, (question, answers(" ice", " the sun"), Some(0)));
    let question = "Question: To boil water,\nAnswer:".to_string();
    assert_eq!(piqa, (question, answers(" heat it.", " cool it."), Some(0)));
    assert_eq!(lambada, ("He took his hat and\nhis ".into(), vec![" coat".into()], None));
    assert_eq!(choices, ("One two ".into(), answers(" three", " four"), Some(0)));
    assert_eq!(continuation, ("One tw".into(), vec!["o three".into()], None));
    assert_eq!(texts(r#"{"text": "word"}"#), (String::new(), vec![" word".into()], None));
}

#[test]
fn files_have_one_format_and_may_be_cut_short() {
    let two = |a: usize, b: usize| format!("{}\n{}\n", LINES[a].1, LINES[b].1);
    let task = read(&two(1, 2)).unwrap();
    assert_eq!(task.items.len(), 2);
    let ids: Vec<_> = task.items.iter().map(|item| (item.line, item.id.as_deref())).collect();
    assert_eq!(ids, [(1, Some("MCAS_1")), (2, Some("MCAS_2"))]);
    assert_eq!((task.continuations(), task.longest()), (4, 31 + 8));
    // Empty lines, a byte order mark and carriage returns.
    let spaced = format!("\u{feff}{}\r\n\r\n  \n{}", LINES[3].1, LINES[3].1);
    let lines: Vec<usize> = read(&spaced).unwrap().items.iter().map(|item| item.line).collect();
    assert_eq!(lines, [1, 4]);
    // Lines beyond the limit are not read.
    let cut = format!("{}\nno JSON", LINES[3].1);
    assert!(read(&cut).is_err());
    let limited = Task::read(cut.as_bytes(), "f", None, Some(1)).unwrap();
    assert_eq!(limited.items.len(), 1);
    // A chosen format reads lines that have the fields of another one, too.
    let both = r#"{"text": "a b", "context": "c", "continuation": " d"}"#;
    assert_eq!(read(both).unwrap().format.name(), "continuation");
    let lambada: TaskFormat = "lambada".parse().unwrap();
    let item = Task::read(both.as_bytes(), "f", Some(lambada), None).unwrap().items.remove(0);
    assert_eq!(item.target, TaskTarget::Continuation(" b".into()));
    let error = "swag".parse::<TaskFormat>().unwrap_err().to_string();
    assert_eq!(
        error,
        "format \"swag\": must be hellaswag, arc, piqa, choices, continuation, lambada"
    );
}

#[test]
fn wrong_lines_are_named() {
    let changed = |at: usize, from: &str, to: &str| {
        assert!(LINES[at].1.contains(from), "{from}");
        LINES[at].1.replacen(from, to, 1)
    };
    let second = |line: &str| format!("{}\n{line}", LINES[5].1);
    for (text, expected) in [
        (second("{"), "file.jsonl:2: line = \"{\": must be a JSON object: "),
        (second("[1, 2]"), "file.jsonl:2: line = a list of 2: must be a JSON object"),
        (second("3"), "file.jsonl:2: line = 3: must be a JSON object"),
        (
            second(LINES[3].1),
            "file.jsonl:2: context = missing: must be given, because lines of choices have \
             context, choices, gold",
        ),
        (
            r#"{"a": 1, "b": 2}"#.into(),
            "file.jsonl:1: fields = \"a, b\": must be the fields of one of hellaswag (ctx_a, ",
        ),
        ("{}".into(), "file.jsonl:1: fields = \"\": must be the fields of one of "),
        (
            changed(0, "\"1\"}", "\"3\"}"),
            "file.jsonl:1: label = \"3\": must be the number of a choice, from 0 to 2",
        ),
        (changed(0, "\"1\"}", "\"\"}"), "label = \"\": must be the number of a choice"),
        (changed(0, "\"then A Woman\"", "7"), "ctx_b = 7: must be a string"),
        (
            changed(0, ", the man adds wax.", "[x]"),
            "file.jsonl:1: endings[0] = an empty choice: must have text",
        ),
        (changed(0, "\", the man adds wax.\"", "null"), "endings[0] = null: must be a string"),
        (changed(1, "\"B\"}", "\"C\"}"), "answerKey = \"C\": must be one of \"A, B\""),
        (changed(1, "\"A\", \"B\"", "\"A\""), "choices.label = a list of 1: must be as long as"),
        (changed(1, "\"text\": [\"ice\", \"the sun\"]", "\"text\": 1"), "choices.text = 1: "),
        (changed(2, "\"label\": \"1\"", "\"labels\": 1"), "choices[0].label = missing: "),
        (
            changed(2, "{\"text\": \"ice\", \"label\": \"1\"}", "7"),
            "choices[0] = 7: must be an obj",
        ),
        (changed(3, "\"label\": 0", "\"label\": -1"), "label = -1: must be the number of a"),
        (changed(3, "heat it.", ""), "sol1 = an empty choice: must have text"),
        (changed(4, " coat", " coat "), "must not be empty or end with a space"),
        (changed(4, "He took his hat and\\nhis  coat", ""), "text = \"\": must not be empty or"),
        (changed(5, "0}", "2}"), "gold = 2: must be the number of a choice, from 0 to 1"),
        (changed(5, "0}", "0.5}"), "gold = 0.5: must be the number of a choice"),
        (changed(5, "\"three\", ", ""), "choices = a list of 1: must have at least two choices"),
        (changed(5, "[\"three\", \"four\"]", "{}"), "choices = an object of 0: must be a list"),
        (changed(6, "o three", ""), "continuation = \"\": must have text"),
        (
            format!("{}\n{}", LINES[1].1, changed(2, "MCAS_2", "MCAS_1")),
            "file.jsonl:2: id = \"MCAS_1\": is also the id of line 1",
        ),
        (changed(5, "One two ", "\\ud800"), "line = \"{\\\"context\\\": \\\"\\\\ud800"),
        (format!("{}1", "[".repeat(100_000)), "must be a JSON object: recursion limit"),
        (format!("\"{}\"", "a".repeat(1 << 20)), "aaa ..\": must be a JSON object"),
    ] {
        let error = read(&text).unwrap_err();
        assert!(matches!(error, Error::TaskLine { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(expected), "{message}, not {expected}");
        assert!(message.len() < 600 && message.lines().count() == 1, "{message}");
    }
    let bytes = [LINES[5].1.as_bytes(), b"\n{\"context\": \"\xff\"}"].concat();
    let error = Task::read(&bytes[..], "file.jsonl", None, None).unwrap_err().to_string();
    assert!(error.contains("file.jsonl:2: line = ") && error.contains("must be UTF-8"), "{error}");
    for empty in ["", "\n", " \r\n\n"] {
        let error = read(empty).unwrap_err().to_string();
        assert!(error.starts_with("task file.jsonl: has no items"), "{error}");
    }
    let error = Task::read(&b"{}"[..], "f", None, Some(0)).unwrap_err().to_string();
    assert_eq!(error, "limit 0: must be at least 1");
}

/// Files with random changes are read or refused in one line, and what is read can be encoded.
#[test]
fn damaged_files_do_not_panic() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    let device = kv_cubecl::On::<kv_cubecl::Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let (mut refused, mut encoded) = (0, 0);
    for case in 0..4000 {
        let (_, line) = LINES[case % LINES.len()];
        let mut bytes = format!("{line}\n{line}\n").into_bytes();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len().max(1));
            match rng.random_range(0..5) {
                _ if bytes.is_empty() => bytes.push(b'0'),
                0 => bytes[at] = rng.random_range(0..=255),
                1 => bytes[at] = b"{}[]\",:\\0-. \n"[rng.random_range(0..13)],
                2 => drop(bytes.remove(at)),
                3 => bytes.truncate(at + 1),
                _ => {
                    let end = rng.random_range(at..bytes.len());
                    let part = bytes[at..end].to_vec();
                    bytes.splice(at..at, part);
                }
            }
        }
        let task = match Task::read(&bytes[..], "damaged", None, None) {
            Ok(task) => task,
            Err(error) => {
                let message = error.to_string();
                let named = message.starts_with("damaged:") || message.starts_with("task damaged:");
                assert!(named && message.lines().count() == 1, "{message}");
                refused += 1;
                continue;
            }
        };
        assert!(!task.items.is_empty());
        let float: ModelCacheConfig = "float".parse().unwrap();
        match TaskPlan::new(&loaded.model, &tokenizer, [float], vec![task.clone()], None) {
            Ok(plan) => {
                assert_eq!(plan.continuations(), task.continuations());
                encoded += 1;
            }
            Err(error) => assert!(error.to_string().starts_with("damaged:"), "{error}"),
        }
    }
    assert!(refused > 500 && encoded > 200, "{refused} refused, {encoded} encoded");
}
