//! Tool calls in a model's answer.

use serde_json::{Value, json};

/// The tags before and after a call. Templates of Hermes, Qwen and others teach this format.
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Separates tool calls from the text of an answer that arrives in pieces.
///
/// A call is `<tool_call>{"name": .., "arguments": {..}}</tool_call>`. One that is incomplete or no
/// such JSON stays a part of the text.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToolCalls {
    /// Text that may be the start of a call.
    held: String,
    calls: Vec<Value>,
}

impl ToolCalls {
    /// Appends a piece of the answer. Returns the text that belongs to no call.
    pub(crate) fn push(&mut self, piece: &str) -> String {
        self.held += piece;
        let mut text = String::new();
        while let Some(open) = self.held.find(OPEN) {
            text += &self.held[..open];
            self.held.drain(..open);
            let Some(close) = self.held.find(CLOSE) else { return text };
            let end = close + CLOSE.len();
            match call(&self.held[OPEN.len()..close], self.calls.len()) {
                Some(call) => self.calls.push(call),
                None => text += &self.held[..end],
            }
            self.held.drain(..end);
        }
        // The end of the piece may be the start of a tag.
        let begins = |n: &usize| self.held.ends_with(&OPEN[..*n]);
        let kept = (1..OPEN.len()).rev().find(begins).unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - kept);
        text += &std::mem::replace(&mut self.held, kept);
        text
    }

    /// Returns the text that turned out to be no call, and the calls.
    pub(crate) fn finish(self) -> (String, Vec<Value>) {
        (self.held, self.calls)
    }
}

/// Returns a call as the API has it, with its number `index`.
fn call(text: &str, index: usize) -> Option<Value> {
    let parsed: Value = serde_json::from_str(text.trim()).ok()?;
    let name = parsed.get("name")?.as_str()?;
    let arguments = match parsed.get("arguments").or_else(|| parsed.get("parameters"))? {
        Value::String(arguments) => arguments.clone(),
        arguments => arguments.to_string(),
    };
    let id = format!("call_{:024x}", rand::random::<u128>() >> 32);
    Some(json!({
        "index": index, "id": id, "type": "function",
        "function": {"name": name, "arguments": arguments},
    }))
}

/// Returns the name and the schema of the arguments of each tool of a request.
pub(crate) fn named(tools: &Value) -> Result<Vec<(String, Value)>, String> {
    let list = tools.as_array().ok_or("must be a list")?;
    let tool = |(i, tool): (usize, &Value)| {
        let function = tool.get("function").filter(|_| tool["type"] == "function");
        let name = function.and_then(|it| it["name"].as_str()).filter(|name| !name.is_empty());
        let Some((function, name)) = function.zip(name) else {
            let rule = "must be {\"type\": \"function\", \"function\": {\"name\": ..}}";
            return Err(format!("tool {i} {rule}"));
        };
        let schema = function.get("parameters").filter(|it| !it.is_null()).cloned();
        Ok((name.to_string(), schema.unwrap_or_else(|| json!({"type": "object"}))))
    };
    list.iter().enumerate().map(tool).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    /// Returns the text and the calls of an answer that arrives in pieces of `n` characters.
    fn read(answer: &str, n: usize) -> (String, Vec<(String, String)>) {
        let mut calls = ToolCalls::default();
        let mut text = String::new();
        let letters: Vec<char> = answer.chars().collect();
        for piece in letters.chunks(n) {
            text += &calls.push(&piece.iter().collect::<String>());
        }
        let (rest, calls) = calls.finish();
        let field = |call: &Value, name: &str| call["function"][name].as_str().unwrap().to_string();
        let calls = calls.iter().map(|call| (field(call, "name"), field(call, "arguments")));
        (text + &rest, calls.collect())
    }

    #[test]
    fn calls_are_found_whatever_the_pieces() {
        let sum = "<tool_call>\n{\"name\": \"sum\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let now = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
        for n in 1..90 {
            let (text, calls) = read(&format!("Let me see. {sum}\n{now} é<tool"), n);
            assert_eq!(text, "Let me see. \n é<tool", "{n}");
            let expected = [("sum", "{\"a\":1}"), ("now", "{}")];
            assert_eq!(calls, expected.map(|(a, b)| (a.to_string(), b.to_string())), "{n}");
            for wrong in ["<tool_call>nothing</tool_call>", "<tool_call>{\"name\": \"x\"", "a < b"]
            {
                assert_eq!(read(wrong, n), (wrong.to_string(), vec![]), "{n}");
            }
        }
    }

    #[test]
    fn tools_have_a_name_and_a_schema() {
        let tool = json!([{"type": "function", "function": {"name": "now"}}]);
        assert_eq!(named(&tool).unwrap(), [("now".to_string(), json!({"type": "object"}))]);
        for wrong in [
            json!(3),
            json!([3]),
            json!([{"type": "function"}]),
            json!([{"function": {"name": "a"}}]),
        ] {
            assert!(named(&wrong).is_err(), "{wrong}");
        }
    }
}
