//! Scores of tasks, computed again token by token with a real cache.

use kv_cubecl::{Flex, On};
use kv_eval::tasks::{Estimate, ItemScore, Task, TaskPlan, TaskReport, TaskTarget, score_tasks};
use kv_models::{LanguageModel, ModelCacheConfig, Tokenizer, ids_to_tensor, load};
use serde_json::{Value, json};

use crate::common::AUSTEN;

/// Float, and a cache that quantizes every token that is 16 tokens old.
const CACHES: [&str; 2] = ["float", "k2v2-g16-r16"];
const POSITIONS: usize = 1024;

fn model() -> (On<Flex>, LanguageModel, Tokenizer) {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    (device, loaded.model, loaded.tokenizer.unwrap())
}

fn text() -> String {
    let text = std::fs::read_to_string(format!("{AUSTEN}/heldout.txt")).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.dedup();
    lines.join("\n")
}

pub(super) fn task(name: &str, lines: &[Value]) -> Task {
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    Task::read(lines.join("\n").as_bytes(), name, None, None).unwrap()
}

/// Returns the log-likelihood of the last `n` tokens of `ids`, and whether each is the most likely
/// one.
fn stepwise(
    device: &On<Flex>,
    model: &LanguageModel,
    cache: &str,
    ids: &[u32],
    n: usize,
) -> (f64, bool) {
    let config = cache.parse::<ModelCacheConfig>().unwrap().with_capacity(ids.len());
    let mut cache = model.new_cache(&config, 1, device).unwrap();
    let (mut sum, mut greedy) = (0.0, true);
    for (i, pair) in ids.windows(2).enumerate() {
        let logits = model.step(ids_to_tensor(&pair[..1], [1, 1], device), &mut cache).unwrap();
        if i + 1 < ids.len() - n {
            continue;
        }
        let logits: Vec<f64> = logits.into_data().iter::<f64>().collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|x| (x - max).exp()).sum();
        let own = logits[pair[1] as usize];
        sum += own - max - total.ln();
        greedy &= own == max;
    }
    (sum, greedy)
}

/// Encodes as lm-evaluation-harness does: context and continuation.
fn pair(
    tokenizer: &Tokenizer,
    bos: Option<u32>,
    context: &str,
    next: &str,
) -> (Vec<u32>, Vec<u32>) {
    let eos = tokenizer.token_to_id("<|endoftext|>").unwrap();
    if context.is_empty() {
        return (vec![eos], tokenizer.encode(next).unwrap());
    }
    let encode = |text: &str| {
        let mut ids = tokenizer.encode(text).unwrap();
        if let Some(bos) = bos
            && !text.starts_with("<|endoftext|>")
        {
            ids.insert(0, bos);
        }
        ids
    };
    let spaces = context.len() - context.trim_end_matches(' ').len();
    let (context, moved) = context.split_at(context.len() - spaces);
    let context_ids = encode(context);
    let whole = encode(&format!("{context}{moved}{next}"));
    let next = whole[context_ids.len()..].to_vec();
    (context_ids, next)
}

/// Scores everything with float and a quantized cache, and compares it to [`stepwise`].
fn check(tasks: Vec<Task>, bos: Option<u32>) -> (TaskPlan, Vec<Vec<ItemScore>>) {
    let (device, model, tokenizer) = model();
    let caches = CACHES.map(|name| name.parse::<ModelCacheConfig>().unwrap());
    let plan = TaskPlan::new(&model, &tokenizer, caches, tasks, bos).unwrap();
    let mut seen = 0;
    let scores = score_tasks(&device, &model, &plan, || seen += 1).unwrap();
    assert_eq!(seen, 2 * plan.continuations());
    for (task, scores) in plan.tasks().iter().zip(&scores) {
        assert_eq!(scores.len(), 2 * task.items.len());
        for (item, scores) in task.items.iter().zip(scores.chunks(2)) {
            for (cache, score) in CACHES.iter().zip(scores) {
                assert_eq!((&score.cache[..], score.line), (*cache, item.line));
                for (i, next) in item.target.continuations().iter().enumerate() {
                    let (context, next) = pair(&tokenizer, bos, &item.context, next);
                    let ids = [&context[..], &next].concat();
                    let ids = &ids[ids.len().saturating_sub(POSITIONS + 1)..];
                    let (sum, greedy) = stepwise(&device, &model, cache, ids, next.len());
                    let found = score.log_likelihoods[i];
                    // The order of sums differs, which may also round a code of 2 bits to its
                    // neighbor.
                    let tolerance = if *cache == "float" { 1e-3 } else { 2e-2 };
                    let why =
                        format!("{cache} {}:{} {i}: {found}, not {sum}", task.name, item.line);
                    assert!((found - sum).abs() < tolerance, "{why}");
                    assert_eq!(score.greedy[i], greedy, "{why}");
                    assert_eq!(score.tokens[i], next.len(), "{why}");
                    let quantizes = *cache != "float" && ids.len() > 16;
                    assert_eq!(score.quantized[i], quantizes, "{why}, {} tokens", ids.len());
                }
            }
        }
    }
    (plan, scores)
}

/// Items whose right choice repeats a passage of the context, which the model was trained to do.
fn copies() -> Vec<Value> {
    let text = text();
    let lines: Vec<&str> = text.lines().filter(|line| line.len() > 50).take(30).collect();
    let items = lines.windows(3).step_by(3).enumerate().map(|(i, lines)| {
        let ends = [lines[0], lines[1], lines[2]].map(|line| line.rsplit_once(' ').unwrap().1);
        let (cue, right) = lines[0].rsplit_once(' ').unwrap();
        let mut choices = vec![ends[1], ends[2]];
        choices.insert(i % 3, right);
        json!({"id": i, "context": format!("{}\n{cue}", lines[0]), "choices": choices,
            "gold": i % 3})
    });
    items.collect()
}

#[test]
fn scores_are_those_of_a_cache_filled_token_by_token() {
    let choices = [copies(), spaced()].concat();
    let text = text();
    let lines: Vec<&str> = text.lines().filter(|line| line.len() > 60).skip(40).take(12).collect();
    let words: Vec<Value> = lines
        .chunks(2)
        .map(|two| json!({"text": format!("{} {}", two[0].trim(), two[1].trim())}))
        .collect();
    let parts: Vec<Value> = lines[..4]
        .iter()
        // Some of these splits are inside a word.
        .map(|line| json!({"context": &line[..40], "continuation": &line[40..]}))
        .collect();
    let tasks = vec![task("choices", &choices), task("words", &words), task("parts", &parts)];
    let (plan, scores) = check(tasks, None);
    assert_eq!(plan.truncated(), 0);
    // Copied passages have known answers.
    let copied: Vec<&ItemScore> = scores[0].iter().filter(|it| it.id.is_some()).collect();
    assert_eq!(copied.len(), 20);
    let right = copied.iter().filter(|it| it.cache == "float" && it.is_right()).count();
    assert!(right >= 9, "{right} of 10");
}

/// Contexts that end with spaces, that are empty, and choices that share their first tokens.
fn spaced() -> Vec<Value> {
    let context = "She was not in the least surprised, and said that he was  ";
    vec![
        json!({"context": context, "choices": ["gone", "not gone at all"], "gold": 0}),
        json!({"context": context.trim_end(), "choices": ["a", "b", "the"], "gold": 2}),
        json!({"context": "", "choices": ["She was", "\u{e9}\u{1f600}", "  "], "gold": 1}),
        json!({"context": "\u{0}\u{202e}\u{fffd}", "choices": ["\u{7f}", "x"], "gold": "0"}),
    ]
}

#[test]
fn contexts_that_are_too_long_lose_their_first_tokens() {
    let long: String = text().chars().take(9000).collect();
    let lines = [
        json!({"context": long, "choices": ["Anne", "Elizabeth and her father"], "gold": 0}),
        json!({"context": "He said that she was", "choices": ["Anne", "there"], "gold": 1}),
    ];
    let (plan, scores) = check(vec![task("long", &lines)], None);
    assert_eq!((plan.longest(), plan.truncated()), (POSITIONS, 2));
    let report = TaskReport::new(&plan, scores);
    assert_eq!((report.scores[1].truncated, report.scores[1].continuations), (2, 4));
    assert_eq!((report.scores[0].quantized, report.scores[1].quantized), (0, 2));
}

#[test]
fn texts_begin_with_one_bos() {
    let (_, _, tokenizer) = model();
    let eos = tokenizer.token_to_id("<|endoftext|>");
    let lines = [
        json!({"context": "It was", "continuation": " not so."}),
        json!({"context": "<|endoftext|>It was", "continuation": " not so."}),
        json!({"context": "  ", "continuation": "so."}),
    ];
    let (_, scores) = check(vec![task("bos", &lines)], eos);
    assert_eq!(scores[0][0].log_likelihoods, scores[0][2].log_likelihoods);
}

#[test]
fn a_continuation_that_begins_with_the_prefix_gets_no_second_one() {
    let (device, model, tokenizer) = model();
    let line = |next: &str| json!({"context": "", "continuation": next});
    let lines = [line("<|endoftext|>It was so."), line("It was so.")];
    let float = [ModelCacheConfig::from(kv_cubecl::KvCacheConfig::float())];
    let plan = TaskPlan::new(&model, &tokenizer, float, vec![task("a", &lines)], None).unwrap();
    let scores = score_tasks(&device, &model, &plan, || ()).unwrap();
    assert_eq!(scores[0][0].log_likelihoods, scores[0][1].log_likelihoods);
}

/// Choices of other characters and lengths, about which the model knows nothing.
fn guesses() -> Vec<Value> {
    let (text, mut state) = (text(), 7u64);
    let words: Vec<&str> = text.split_whitespace().take(4000).collect();
    let mut next = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let item = |i| {
        let at = next(3000);
        let choices = match i % 2 {
            0 => [words[next(4000)], words[next(4000)], words[next(4000)]].map(String::from),
            // Characters of 2, 3 and 4 bytes.
            _ => ["\u{e9}", "\u{5b57}", "\u{1f600}"].map(|it| it.repeat(1 + next(3))),
        };
        json!({"context": words[at..at + 30].join(" "), "choices": choices, "gold": next(3)})
    };
    (0..40).map(item).collect()
}

/// Returns the index of the first largest number.
fn argmax(numbers: impl IntoIterator<Item = f64>) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (i, number) in numbers.into_iter().enumerate() {
        if number > best.1 {
            best = (i, number);
        }
    }
    best.0
}

fn close(estimate: Estimate, samples: &[f64]) {
    let n = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / n;
    let variance = samples.iter().map(|x| x * x - mean * mean).sum::<f64>() / (n - 1.0);
    assert!((estimate.value - mean).abs() < 1e-9, "{estimate:?}: mean {mean}");
    let stderr = (variance / n).sqrt();
    assert!((estimate.stderr.unwrap() - stderr).abs() < 1e-7, "{estimate:?}: error {stderr}");
}

/// The scores of an item, by log-likelihood and per character.
struct Row {
    right: [f64; 2],
    answers: [usize; 2],
    sums: Vec<f64>,
    of_gold: f64,
}

#[test]
fn metrics_follow_from_the_log_likelihoods() {
    let (device, model, tokenizer) = model();
    let caches = CACHES.map(|name| name.parse::<ModelCacheConfig>().unwrap());
    let tasks = vec![task("guesses", &guesses()), task("more", &copies())];
    let plan = TaskPlan::new(&model, &tokenizer, caches, tasks, None).unwrap();
    let scores = score_tasks(&device, &model, &plan, || ()).unwrap();
    let report = TaskReport::new(&plan, scores.clone());
    assert_eq!((report.scores.len(), report.items.len()), (4, 100));
    let (mut by_bytes_differs, mut changes) = (0, 0);
    for (t, (task, scores)) in plan.tasks().iter().zip(&scores).enumerate() {
        let mut rows = [vec![], vec![]];
        for (item, scores) in task.items.iter().zip(scores.chunks(2)) {
            let TaskTarget::Choices { choices, gold } = &item.target else { panic!("choices") };
            for (score, rows) in scores.iter().zip(&mut rows) {
                let sums = &score.log_likelihoods;
                let by = |length: fn(&String) -> usize| {
                    argmax(sums.iter().zip(choices).map(|(sum, it)| sum / length(it) as f64))
                };
                let (plain, norm) = (argmax(sums.iter().copied()), by(|it| it.chars().count()));
                assert_eq!((score.answer, score.answer_norm), (Some(plain), Some(norm)));
                by_bytes_differs += usize::from(norm != by(|it| it.len()));
                let right = |answer| if answer == *gold { 1.0 } else { 0.0 };
                rows.push(Row {
                    right: [right(plain), right(norm)],
                    answers: [plain, norm],
                    sums: sums.clone(),
                    of_gold: sums[*gold],
                });
            }
        }
        let [float, other] = &rows;
        for (metrics, rows) in report.scores[2 * t..].iter().zip([float, other]) {
            close(metrics.acc, &rows.iter().map(|row| row.right[0]).collect::<Vec<_>>());
            close(
                metrics.acc_norm.unwrap(),
                &rows.iter().map(|row| row.right[1]).collect::<Vec<_>>(),
            );
        }
        assert!(report.scores[2 * t].over_first.is_none());
        let change = report.scores[2 * t + 1].over_first.clone().unwrap();
        let pairs: Vec<_> = float.iter().zip(other).collect();
        let differences = |of: fn(&Row) -> f64| {
            pairs.iter().map(|(float, other)| of(other) - of(float)).collect::<Vec<f64>>()
        };
        close(change.acc, &differences(|row| row.right[0]));
        close(change.acc_norm.unwrap(), &differences(|row| row.right[1]));
        close(change.log_likelihood, &differences(|row| row.of_gold));
        let changed = |which: usize| {
            pairs.iter().filter(|(a, b)| a.answers[which] != b.answers[which]).count()
        };
        assert_eq!((change.changed, change.changed_norm), (changed(0), Some(changed(1))));
        changes += change.changed;
        let all: Vec<f64> = pairs
            .iter()
            .flat_map(|(a, b)| a.sums.iter().zip(&b.sums).map(|(a, b)| (a - b).abs()))
            .collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!((change.mean_abs_change - mean).abs() < 1e-9 && mean > 0.01, "{mean}");
    }
    // Otherwise the items would not distinguish these rules.
    assert!(by_bytes_differs > 0 && changes > 0, "{by_bytes_differs} {changes}");
}

#[test]
fn perplexity_is_that_of_the_last_words() {
    let (device, model, tokenizer) = model();
    let text = text();
    let lines: Vec<Value> = text
        .lines()
        .filter(|line| line.len() > 60)
        .take(20)
        .map(|line| json!({"text": line.trim()}))
        .collect();
    let caches = CACHES.map(|name| name.parse::<ModelCacheConfig>().unwrap());
    let plan =
        TaskPlan::new(&model, &tokenizer, caches, vec![task("words", &lines)], None).unwrap();
    let scores = score_tasks(&device, &model, &plan, || ()).unwrap().remove(0);
    let report = TaskReport::new(&plan, vec![scores.clone()]);
    let of = |nth: usize| -> Vec<&ItemScore> { scores.iter().skip(nth).step_by(2).collect() };
    let sums = |nth| of(nth).iter().map(|it| it.log_likelihoods[0]).collect::<Vec<f64>>();
    let greedy = |nth| -> Vec<f64> {
        of(nth).iter().map(|it| if it.greedy[0] { 1.0 } else { 0.0 }).collect()
    };
    for nth in 0..2 {
        let (metrics, sums) = (&report.scores[nth], sums(nth));
        let mean = sums.iter().sum::<f64>() / 20.0;
        let perplexity = metrics.perplexity.unwrap();
        assert!((perplexity.value / (-mean).exp() - 1.0).abs() < 1e-9, "{perplexity:?}");
        // The delta method: a small change of the mean changes its exponential in proportion.
        let variance = sums.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 19.0;
        let stderr = (variance / 20.0).sqrt();
        let (up, down) = ((-(mean - 1e-6)).exp(), (-(mean + 1e-6)).exp());
        let expected = stderr * (up - down) / 2e-6;
        assert!((perplexity.stderr.unwrap() / expected - 1.0).abs() < 1e-6, "{perplexity:?}");
        close(metrics.acc, &greedy(nth));
        assert!(metrics.acc_norm.is_none());
    }
    let change = report.scores[1].over_first.as_ref().unwrap();
    let differences: Vec<f64> = sums(1).iter().zip(sums(0)).map(|(a, b)| a - b).collect();
    close(change.log_likelihood, &differences);
    let changed = greedy(0).iter().zip(greedy(1)).filter(|(a, b)| **a != *b).count();
    assert_eq!((change.changed, change.changed_norm), (changed, None));
    assert_eq!(Estimate::mean(&[0.5]), Estimate { value: 0.5, stderr: None });
}
