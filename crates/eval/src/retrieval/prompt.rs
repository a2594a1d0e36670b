//! The prompts of retrieval tasks, in the words of RULER.

use kv_models::Tokenizer;
use rand::{RngExt, rngs::Xoshiro256PlusPlus};

use super::{
    Haystack, RetrievalPlan, RetrievalTask, Spelling,
    words::{ADJECTIVES, NOUNS, REPEATED},
};
use crate::{Error, Result};

/// What is hidden, and how it is asked for.
pub(super) struct Question {
    /// The beginning of the prompt.
    introduction: String,
    /// The hidden sentences, first the one whose depth is given.
    needles: Vec<String>,
    /// The end of the prompt: the question, and the beginning of the answer.
    ending: String,
    /// What the answer should contain.
    expected: Vec<String>,
}

impl Spelling {
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

    /// Returns `n` strings that differ.
    fn several(self, n: usize, rng: &mut Xoshiro256PlusPlus) -> Vec<String> {
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
    pub(super) fn new(
        task: RetrievalTask,
        plan: &RetrievalPlan,
        rng: &mut Xoshiro256PlusPlus,
    ) -> Self {
        let n = if task == RetrievalTask::Single { 1 } else { plan.needles };
        let n_keys = if task == RetrievalTask::MultiValue { 1 } else { n };
        let keys = plan.keys.several(n_keys, rng);
        let values = plan.values.several(n, rng);
        let kind = plan.values.name();
        let needle = |(key, value): (&String, &String)| {
            format!("One of the special magic {kind}s for {key} is: {value}.")
        };
        let needles = keys.iter().cycle().zip(&values).map(needle).collect();
        match task {
            RetrievalTask::ToolCall => Self::tool_call(plan.keys, rng),
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
            },
        }
    }

    /// Hides a call of a tool in JSON, which the answer should contain character by character.
    fn tool_call(names: Spelling, rng: &mut Xoshiro256PlusPlus) -> Self {
        let mut random = |spelling: Spelling| spelling.random(rng);
        let (name, path) = (random(names), random(Spelling::Word));
        let (count, id) = (random(Spelling::Number), random(Spelling::Uuid));
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
        }
    }

    /// Returns whether an answer contains each of the expected strings, in any case.
    pub(super) fn found(&self, answer: &str) -> Vec<bool> {
        let answer = answer.to_lowercase();
        self.expected.iter().map(|value| answer.contains(value)).collect()
    }

    /// Returns the prompt with a haystack of these sentences.
    fn prompt(&self, hay: &[String], depth: usize, between: &str) -> String {
        let n = self.needles.len();
        let place = |nth: usize| {
            let part = depth as f64 / 100.0 + nth as f64 / n as f64;
            let part = if part > 1.0 { part - 1.0 } else { part };
            (part * hay.len() as f64) as usize
        };
        let needles = self.needles.iter().enumerate();
        let mut needles: Vec<_> = needles.map(|(nth, needle)| (place(nth), needle)).collect();
        needles.sort_by_key(|&(place, _)| place);
        let mut sentences: Vec<&str> = vec![];
        let mut done = 0;
        for (place, needle) in needles {
            sentences.extend(hay[done..place].iter().map(String::as_str));
            sentences.push(needle);
            done = place;
        }
        sentences.extend(hay[done..].iter().map(String::as_str));
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

/// A prompt, and the tokens left for its answer.
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    pub(super) room: usize,
}

impl Prompt {
    /// Takes as many sentences of the haystack as leave room for the answer in `context` tokens.
    pub(super) fn new(
        question: &Question,
        context: usize,
        depth: usize,
        plan: &RetrievalPlan,
        tokenizer: &Tokenizer,
        rng: &Xoshiro256PlusPlus,
    ) -> Result<Self> {
        // Twice the tokens of the values: models write more between them than this does.
        let room = 2 * tokenizer.encode(&question.expected.join(", "))?.len() + 16;
        // A sentence has at least one token.
        let hay = plan.haystack.sentences(context, rng.clone());
        let encode = |n: usize| {
            let text = question.prompt(&hay[..n], depth, plan.haystack.separator());
            let ids = tokenizer.encode(&text)?;
            Ok::<Vec<u32>, Error>(plan.bos.into_iter().chain(ids).collect())
        };
        let fits = |ids: &[u32]| ids.len() + room <= context;
        let (mut most, mut least) = (hay.len(), 0);
        let mut ids = encode(0)?;
        if !fits(&ids) {
            let rule = format!("must be at least the {} of the question", ids.len() + room);
            return Err(Error::plan("context", context, rule));
        }
        while least < most {
            let middle = (least + most).div_ceil(2);
            let tried = encode(middle)?;
            match fits(&tried) {
                true => (least, ids) = (middle, tried),
                false => most = middle - 1,
            }
        }
        if least == hay.len() {
            let rule = format!("too few to fill {context} tokens");
            return Err(Error::plan("text", format!("of {least} sentences"), rule));
        }
        Ok(Self { ids, room })
    }
}

impl Haystack {
    /// Splits a text into sentences.
    pub fn of_text(text: &str) -> Self {
        let words = text.split_whitespace();
        let (mut all, mut sentence) = (vec![], String::new());
        for word in words {
            if !sentence.is_empty() {
                sentence.push(' ');
            }
            sentence.push_str(word);
            if word.ends_with(['.', '!', '?']) {
                all.push(core::mem::take(&mut sentence));
            }
        }
        all.extend(Some(sentence).filter(|rest| !rest.is_empty()));
        Self::Text(all)
    }

    /// Returns `n` sentences, or all of a text that has fewer.
    fn sentences(&self, n: usize, mut rng: Xoshiro256PlusPlus) -> Vec<String> {
        match self {
            Self::Text(all) => all[..n.min(all.len())].to_vec(),
            Self::Repeated => vec![REPEATED.to_string(); n],
            Self::Noise => {
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
            Self::Text(_) => " ",
            Self::Noise | Self::Repeated => "\n",
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn plan(keys: Spelling, values: Spelling) -> RetrievalPlan {
        RetrievalPlan {
            tasks: vec![RetrievalTask::MultiKey],
            keys,
            values,
            haystack: Haystack::Repeated,
            contexts: vec![1024],
            depths: vec![0],
            needles: 3,
            samples: 1,
            seed: 0,
            bos: None,
        }
    }

    fn question(task: RetrievalTask, keys: Spelling, values: Spelling) -> Question {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
        Question::new(task, &plan(keys, values), &mut rng)
    }

    fn hay(n: usize) -> Vec<String> {
        (0..n).map(|i| format!("Hay {i}.")).collect()
    }

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
        let question = question(RetrievalTask::Single, Spelling::Word, Spelling::Number);
        let (key, value) = (keys(&question)[0], &question.expected[0]);
        for (depth, place) in [(0, 0), (25, 1), (50, 2), (99, 3), (100, 4)] {
            let needle = format!("One of the special magic numbers for {key} is: {value}.");
            let mut sentences = hay(4);
            sentences.insert(place, needle);
            let expected = format!(
                "A special magic number is hidden within the following text. Make sure to \
                 memorize it. I will quiz you about the number afterwards.\n{}\nWhat is the \
                 special magic number for {key} mentioned in the provided text? The special magic \
                 number for {key} mentioned in the provided text is",
                sentences.join("\n")
            );
            assert_eq!(question.prompt(&hay(4), depth, "\n"), expected, "at {depth}%");
        }
    }

    #[test]
    fn several_needles_are_spread() {
        let question = question(RetrievalTask::MultiKey, Spelling::Uuid, Spelling::Word);
        let text = question.prompt(&hay(9), 50, " ");
        let place = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} in {text}"));
        // At 50%, 83% and, from the beginning again, 17% of nine sentences.
        let places: Vec<usize> = question.needles.iter().map(|needle| place(needle)).collect();
        for (needle, (before, after)) in places.iter().zip([(3, 4), (6, 7), (0, 1)]) {
            let near = place(&format!("Hay {before}."))..place(&format!("Hay {after}."));
            assert!(near.contains(needle), "{text}");
        }
        let ending = format!("for {} mentioned in the provided text is", keys(&question)[0]);
        assert!(text.ends_with(&ending), "{text}");
        assert!(question.needles[0].ends_with(&format!(" is: {}.", question.expected[0])));
    }

    #[test]
    fn tasks_ask_for_keys_and_expect_their_values() {
        let values = question(RetrievalTask::MultiValue, Spelling::Word, Spelling::Number);
        let all = keys(&values);
        assert_eq!((all.len(), values.expected.len()), (3, 3));
        assert!(all.iter().all(|key| *key == all[0]));
        let queries = question(RetrievalTask::MultiQuery, Spelling::Word, Spelling::Number);
        let all = keys(&queries);
        let asked = format!("for {}, {}, and {} mentioned", all[0], all[1], all[2]);
        assert!(queries.ending.contains(&asked), "{}", queries.ending);
        for (needle, value) in queries.needles.iter().zip(&queries.expected) {
            assert!(needle.ends_with(&format!(" is: {value}.")), "{needle}");
        }
        let answer = format!(" {} and {}.", queries.expected[2], queries.expected[0]);
        assert_eq!(queries.found(&answer), [true, false, true]);
        let call = question(RetrievalTask::ToolCall, Spelling::Word, Spelling::Number);
        let json: serde_json::Value = serde_json::from_str(&call.expected[0]).unwrap();
        assert!(json["arguments"]["count"].is_u64(), "{json}");
        assert!(call.needles[0].ends_with(&call.expected[0]));
        assert_eq!(call.found(&call.expected[0].replace("count", "coun")), [false]);
    }

    #[test]
    fn spellings() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for number in Spelling::Number.several(64, &mut rng) {
            assert!(number.len() == 7 && number.parse::<u32>().is_ok(), "{number}");
        }
        for uuid in Spelling::Uuid.several(64, &mut rng) {
            let parts: Vec<&str> = uuid.split('-').collect();
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
            assert!(parts.concat().bytes().all(|digit| digit.is_ascii_hexdigit()), "{uuid}");
            assert!(parts[2].starts_with('4') && parts[3].starts_with(['8', '9', 'a', 'b']));
        }
        let words = Spelling::Word.several(64, &mut rng);
        assert!(words.iter().all(|word| word.split('-').count() == 2));
        let mut upper = question(RetrievalTask::Single, Spelling::Word, Spelling::Word);
        upper.expected = vec![words[0].clone()];
        assert_eq!(upper.found(&words[0].to_uppercase()), [true]);
    }

    #[test]
    fn texts_become_sentences() {
        let text = "It was so.  She\nsaid: yes! And\n\nthen";
        let expected = ["It was so.", "She said: yes!", "And then"];
        assert_eq!(Haystack::of_text(text), Haystack::Text(expected.map(String::from).into()));
    }
}
