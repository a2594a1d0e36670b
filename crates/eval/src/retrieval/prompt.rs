//! The prompts of retrieval tasks, in the words of RULER.

use kv_models::Tokenizer;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use super::{
    plan::{Haystack, NeedleType, RetrievalPlan, RetrievalTask},
    words::{ADJECTIVES, NOISE, NOUNS},
};
use crate::{Error, Result};

/// The hidden sentences, and the question about them.
pub(super) struct Question {
    /// The beginning of the prompt.
    introduction: String,
    /// The hidden sentences, the one with the given depth first.
    needles: Vec<String>,
    /// The end of the prompt: the question, and the beginning of the answer.
    ending: String,
    /// The values that the answer should contain.
    pub(super) expected: Vec<String>,
    /// True if upper and lower case differ.
    exact: bool,
}

impl NeedleType {
    fn random(self, rng: &mut Xoshiro256PlusPlus) -> String {
        match self {
            Self::Word => format!("{}-{}", pick(&ADJECTIVES, rng), pick(&NOUNS, rng)),
            Self::Number => rng.random_range(1_000_000..10_000_000).to_string(),
            Self::Uuid => {
                // The bits of version 4 and of its variant.
                let bits = rng.random::<u128>() & !(0xf << 76 | 0x3 << 62) | 4 << 76 | 2 << 62;
                let hex = format!("{bits:032x}");
                [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
            }
        }
    }

    /// Returns `n` different strings.
    fn distinct(self, n: usize, rng: &mut Xoshiro256PlusPlus) -> Vec<String> {
        let mut all: Vec<String> = vec![];
        while all.len() < n {
            let next = self.random(rng);
            if !all.contains(&next) {
                all.push(next);
            }
        }
        all
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Word => "word",
            Self::Number => "number",
            Self::Uuid => "uuid",
        }
    }
}

fn pick(words: &[&'static str], rng: &mut Xoshiro256PlusPlus) -> &'static str {
    words[rng.random_range(0..words.len())]
}

impl Question {
    fn new(task: RetrievalTask, plan: &RetrievalPlan, rng: &mut Xoshiro256PlusPlus) -> Self {
        let n = if task == RetrievalTask::Single { 1 } else { plan.count };
        let n_keys = if task == RetrievalTask::MultiValue { 1 } else { n };
        let keys = plan.keys.distinct(n_keys, rng);
        let values = plan.values.distinct(n, rng);
        let kind = plan.values.name();
        let needle = |(key, value): (&String, &String)| {
            format!("One of the special magic {kind}s for {key} is: {value}.")
        };
        let needles = keys.iter().cycle().zip(&values).map(needle).collect();
        match task {
            RetrievalTask::ToolCall => Self::tool_call(rng),
            RetrievalTask::Single | RetrievalTask::MultiKey => Self {
                introduction: format!(
                    "A special magic {kind} is hidden within the following text. Make sure to \
                     memorize it. I will quiz you about the {kind} afterwards.\n"
                ),
                needles,
                ending: format!(
                    "\nWhat is the special magic {kind} for {key} mentioned in the provided text? \
                     The special magic {kind} for {key} mentioned in the provided text is",
                    key = keys[0]
                ),
                expected: values[..1].to_vec(),
                exact: false,
            },
            RetrievalTask::MultiValue | RetrievalTask::MultiQuery => Self {
                introduction: format!(
                    "Some special magic {kind}s are hidden within the following text. Make sure to \
                     memorize it. I will quiz you about the {kind}s afterwards.\n"
                ),
                needles,
                ending: format!(
                    "\nWhat are all the special magic {kind}s for {keys} mentioned in the provided \
                     text? The special magic {kind}s for {keys} mentioned in the provided text are",
                    keys = enumeration(&keys)
                ),
                expected: values,
                exact: false,
            },
        }
    }

    /// Hides a tool call in JSON.
    fn tool_call(rng: &mut Xoshiro256PlusPlus) -> Self {
        let mut random = |kind: NeedleType| kind.random(rng);
        let (name, path) = (random(NeedleType::Word), random(NeedleType::Word));
        let (count, id) = (random(NeedleType::Number), random(NeedleType::Uuid));
        let arguments = format!(r#"{{"path": "/{path}", "count": {count}, "id": "{id}"}}"#);
        let call = format!(r#"{{"name": "{name}", "arguments": {arguments}}}"#);
        Self {
            introduction: "A tool call is hidden within the following text. Make sure to memorize \
                           it. I will ask you to repeat it afterwards.\n"
                .to_string(),
            needles: vec![format!("The tool call is: {call}")],
            ending: "\nWhat is the tool call mentioned in the provided text? The tool call is:"
                .to_string(),
            expected: vec![call],
            exact: true,
        }
    }

    /// Returns whether an answer contains each of the expected values.
    pub(super) fn found(&self, answer: &str) -> Vec<bool> {
        let case = |text: &str| if self.exact { text.to_string() } else { text.to_lowercase() };
        let answer = case(answer);
        self.expected.iter().map(|value| answer.contains(&case(value))).collect()
    }

    /// Returns the prompt with a haystack of these sentences. Further needles follow the first at
    /// equal distances, wrapping around at the end. Without a depth, they are spread evenly.
    fn prompt(&self, hay: &[&str], depth: Option<usize>, between: &str) -> String {
        let n = self.needles.len() as f64;
        let first = depth.map_or(0.5 / n, |depth| depth as f64 / 100.0);
        let place = |nth: usize| {
            let part = first + nth as f64 / n;
            let part = if part > 1.0 { part - 1.0 } else { part };
            (part * hay.len() as f64) as usize
        };
        let needles = self.needles.iter().enumerate();
        let mut needles: Vec<_> = needles.map(|(nth, needle)| (place(nth), needle)).collect();
        needles.sort_by_key(|&(place, _)| place);
        let mut sentences: Vec<&str> = vec![];
        let mut done = 0;
        for (place, needle) in needles {
            sentences.extend(&hay[done..place]);
            sentences.push(needle);
            done = place;
        }
        sentences.extend(&hay[done..]);
        format!("{}{}{}", self.introduction, sentences.join(between), self.ending)
    }
}

/// Writes `a`, `a and b`, or `a, b, and c`.
fn enumeration(words: &[String]) -> String {
    match words {
        [first, second] => format!("{first} and {second}"),
        [before @ .., last] if !before.is_empty() => format!("{}, and {last}", before.join(", ")),
        _ => words.concat(),
    }
}

/// A prompt with its question, and the tokens that are left for the answer.
pub(super) struct Prompt {
    pub(super) question: Question,
    pub(super) ids: Vec<u32>,
    pub(super) answer_tokens: usize,
}

impl Prompt {
    /// Takes as many sentences of the haystack as leave tokens for the answer in `context`.
    pub(super) fn new(
        task: RetrievalTask,
        context: usize,
        depth: Option<usize>,
        sample: usize,
        plan: &RetrievalPlan,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        // Each depth has its own needles, and each context the same.
        let stream = (sample as u64) << 8 | depth.map_or(0, |depth| depth as u64 + 1);
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(plan.seed.rotate_left(32) ^ stream);
        let question = Question::new(task, plan, &mut rng);
        // Models write more between the values than commas.
        let answer_tokens = 2 * tokenizer.encode(&question.expected.join(", "))?.len() + 16;
        // A sentence has at least two tokens.
        let hay = plan.haystack.sentences(context / 2, rng);
        let hay: Vec<&str> = hay.iter().map(String::as_str).collect();
        let fitting = |n: usize| {
            let text = question.prompt(&hay[..n], depth, plan.haystack.separator());
            let ids = tokenizer.encode(&text)?;
            let ids: Vec<u32> = plan.bos.into_iter().chain(ids).collect();
            let tokens = ids.len() + answer_tokens;
            Ok::<_, Error>((tokens, (tokens <= context).then_some(ids)))
        };
        let (least, ids) = fitting(0)?;
        let Some(mut ids) = ids else {
            let rule = format!("must be at least {least}, the tokens of question and answer");
            return Err(Error::plan("context", context, rule));
        };
        // The sentences that fit are at least `low` and fewer than `high`: first doubled, then
        // halved.
        let (mut low, mut high) = (0, hay.len() + 1);
        let mut next = 1;
        while low + 1 < high {
            match fitting(next)? {
                (_, Some(fit)) => (low, ids) = (next, fit),
                (_, None) => high = next,
            }
            let doubled = if high > hay.len() { 2 * next } else { usize::MAX };
            next = doubled.min((low + high) / 2).max(low + 1);
        }
        if low == hay.len() {
            let rule = format!("fill less than {context} tokens; give a longer text");
            return Err(Error::plan("text", format!("{low} sentences"), rule));
        }
        Ok(Self { question, ids, answer_tokens })
    }
}

/// The most words of a sentence, so that prompts come close to their context.
const MAX_WORDS: usize = 32;

impl Haystack {
    /// Splits a text into sentences, and long ones into parts.
    pub fn from_text(name: impl Into<String>, text: &str) -> Self {
        let mut sentences = vec![];
        let mut words: Vec<&str> = vec![];
        for word in text.split_whitespace() {
            words.push(word);
            let closing = ['"', '\'', ')', '\u{201d}', '\u{2019}'];
            let ends = word.trim_end_matches(closing).ends_with(['.', '!', '?']);
            if ends || words.len() == MAX_WORDS {
                sentences.push(words.join(" "));
                words.clear();
            }
        }
        if !words.is_empty() {
            sentences.push(words.join(" "));
        }
        Self::Text { name: name.into(), sentences }
    }

    /// Returns `n` sentences, or all of a text that has fewer.
    fn sentences(&self, n: usize, mut rng: Xoshiro256PlusPlus) -> Vec<String> {
        match self {
            Self::Text { sentences, .. } => sentences[..n.min(sentences.len())].to_vec(),
            Self::Noise => vec![NOISE.to_string(); n],
            Self::Words => {
                let mut sentence = || {
                    let n_words = rng.random_range(8..=16);
                    let words = (0..n_words).map(|i| match i % 2 {
                        0 => pick(&ADJECTIVES, &mut rng),
                        _ => pick(&NOUNS, &mut rng),
                    });
                    words.collect::<Vec<_>>().join(" ") + "."
                };
                (0..n).map(|_| sentence()).collect()
            }
        }
    }

    const fn separator(&self) -> &'static str {
        match self {
            Self::Text { .. } => " ",
            Self::Noise | Self::Words => "\n",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(keys: NeedleType, values: NeedleType) -> RetrievalPlan {
        RetrievalPlan {
            tasks: vec![RetrievalTask::MultiKey],
            keys,
            values,
            haystack: Haystack::Noise,
            contexts: vec![1024],
            depths: vec![0],
            count: 3,
            samples: 1,
            seed: 0,
            bos: None,
        }
    }

    fn question(task: RetrievalTask, keys: NeedleType, values: NeedleType) -> Question {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
        Question::new(task, &plan(keys, values), &mut rng)
    }

    const HAY: [&str; 9] =
        ["Hay 0.", "Hay 1.", "Hay 2.", "Hay 3.", "Hay 4.", "Hay 5.", "Hay 6.", "Hay 7.", "Hay 8."];

    /// Returns the keys of all needles.
    fn keys(question: &Question) -> Vec<&str> {
        fn key(needle: &str) -> &str {
            let (_, rest) = needle.split_once(" for ").unwrap();
            rest.split_once(" is: ").unwrap().0
        }
        question.needles.iter().map(|needle| key(needle)).collect()
    }

    #[test]
    fn one_needle_stands_at_its_depth() {
        let question = question(RetrievalTask::Single, NeedleType::Word, NeedleType::Number);
        let (key, value) = (keys(&question)[0], &question.expected[0]);
        for (depth, place) in [(0, 0), (25, 1), (50, 2), (99, 3), (100, 4)] {
            let needle = format!("One of the special magic numbers for {key} is: {value}.");
            let mut sentences = HAY[..4].to_vec();
            sentences.insert(place, &needle);
            let expected = format!(
                "A special magic number is hidden within the following text. Make sure to \
                 memorize it. I will quiz you about the number afterwards.\n{}\nWhat is the \
                 special magic number for {key} mentioned in the provided text? The special magic \
                 number for {key} mentioned in the provided text is",
                sentences.join("\n")
            );
            assert_eq!(question.prompt(&HAY[..4], Some(depth), "\n"), expected, "at {depth}%");
        }
    }

    #[test]
    fn several_needles_are_spread() {
        let question = question(RetrievalTask::MultiKey, NeedleType::Uuid, NeedleType::Word);
        // At 50%, 83% and, from the beginning again, 17% of nine sentences; and in the middle of
        // each third.
        for (depth, sentences) in [(Some(50), [4, 7, 1]), (None, [1, 4, 7])] {
            let text = question.prompt(&HAY, depth, " ");
            for (needle, after) in question.needles.iter().zip(sentences) {
                let around = [HAY[after - 1], needle, HAY[after]].join(" ");
                assert!(text.contains(&around), "{around} in {text}");
            }
        }
        let text = question.prompt(&HAY, None, " ");
        let ending = format!("for {} mentioned in the provided text is", keys(&question)[0]);
        assert!(text.ends_with(&ending), "{text}");
        assert!(question.needles[0].ends_with(&format!(" is: {}.", question.expected[0])));
    }

    #[test]
    fn tasks_ask_for_keys_and_expect_their_values() {
        let values = question(RetrievalTask::MultiValue, NeedleType::Word, NeedleType::Number);
        let all = keys(&values);
        assert_eq!((all.len(), values.expected.len()), (3, 3));
        assert!(all.iter().all(|key| *key == all[0]));
        let queries = question(RetrievalTask::MultiQuery, NeedleType::Word, NeedleType::Number);
        let all = keys(&queries);
        let asked = format!("for {}, {}, and {} mentioned", all[0], all[1], all[2]);
        assert!(queries.ending.contains(&asked), "{}", queries.ending);
        for (needle, value) in queries.needles.iter().zip(&queries.expected) {
            assert!(needle.ends_with(&format!(" is: {value}.")), "{needle}");
        }
        let answer = format!(" {} and {}.", queries.expected[2], queries.expected[0]);
        assert_eq!(queries.found(&answer), [true, false, true]);
        let call = question(RetrievalTask::ToolCall, NeedleType::Word, NeedleType::Number);
        let json: serde_json::Value = serde_json::from_str(&call.expected[0]).unwrap();
        assert!(json["arguments"]["count"].is_u64(), "{json}");
        assert!(call.needles[0].ends_with(&call.expected[0]));
        assert_eq!(call.found(&call.expected[0]), [true]);
        assert_eq!(call.found(&call.expected[0].replace("count", "Count")), [false]);
    }

    #[test]
    fn spellings() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for number in NeedleType::Number.distinct(64, &mut rng) {
            assert!(number.len() == 7 && number.parse::<u32>().is_ok(), "{number}");
        }
        for uuid in NeedleType::Uuid.distinct(64, &mut rng) {
            let parts: Vec<&str> = uuid.split('-').collect();
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
            assert!(parts.concat().bytes().all(|digit| digit.is_ascii_hexdigit()), "{uuid}");
            assert!(parts[2].starts_with('4') && parts[3].starts_with(['8', '9', 'a', 'b']));
        }
        let words = NeedleType::Word.distinct(64, &mut rng);
        assert!(words.iter().all(|word| word.split('-').count() == 2));
        let mut upper = question(RetrievalTask::Single, NeedleType::Word, NeedleType::Word);
        upper.expected = vec![words[0].clone()];
        assert_eq!(upper.found(&words[0].to_uppercase()), [true]);
    }

    #[test]
    fn texts_become_sentences() {
        let text = "It was \u{201c}so.\u{201d}  She\nsaid: yes! And\n\nthen";
        let long = "so ".repeat(40);
        let Haystack::Text { name, sentences } =
            Haystack::from_text("a", &format!("{text} {long}"))
        else {
            panic!("a text")
        };
        assert_eq!(name, "a");
        let parts = ["It was \u{201c}so.\u{201d}", "She said: yes!"];
        assert_eq!(sentences[..2], parts);
        let words: Vec<usize> = sentences.iter().map(|it| it.split(' ').count()).collect();
        assert_eq!(words, [3, 3, 32, 10], "{sentences:?}");
    }
}
