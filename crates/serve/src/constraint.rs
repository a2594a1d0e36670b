//! Texts that must match a JSON schema, a regular expression or a grammar, by llguidance.

use std::{fmt, sync::Arc, thread};

use kv_models::Tokenizer;
use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};
use serde_json::Value;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

/// Compiles constraints for a tokenizer.
pub struct Constraints {
    factory: ParserFactory,
}

/// The state of a constraint in one text.
#[derive(Clone)]
pub struct Constraint(Matcher);

/// The most bytes of a schema or grammar, as text or as JSON. llguidance compiles a definition that
/// refers to another one recursively, so this limits the depth of its stack.
const MOST_BYTES: usize = 64 << 10;
/// The stack in which a constraint is compiled. [`MOST_BYTES`] hold up to 8,000 definitions that
/// refer to the next one each. Only the part of the stack that is used takes memory.
const STACK: usize = 512 << 20;
/// The most bytes of all tools of a call that is required.
const MOST_TOOLS: usize = 16 * MOST_BYTES;
/// The most `not`, `and` and `or` of a grammar with conditions. Nested conditions are evaluated and
/// dropped recursively on threads with an ordinary stack.
const MOST_CONDITIONS: usize = 1000;

/// The byte before the spelling of a control token, which no text contains.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

impl Constraints {
    /// Prepares the vocabulary of `n_ids` tokens.
    ///
    /// # Errors
    /// Fails for a tokenizer without an end-of-text token, with which a constrained text ends.
    pub fn new(tokenizer: &Tokenizer, n_ids: usize) -> Result<Self, String> {
        let eos: Vec<u32> =
            tokenizer.eos().iter().copied().filter(|&id| (id as usize) < n_ids).collect();
        let Some(&first) = eos.first() else {
            return Err("the model's tokenizer has no end-of-text token".into());
        };
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            match tokenizer.is_special(id) || eos.contains(&id) {
                true => [&[CONTROL][..], &bytes].concat(),
                false => bytes,
            }
        };
        let words: Vec<Vec<u8>> = (0..n_ids as u32).map(word).collect();
        let info = TokRxInfo::new(n_ids as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let capabilities = InferenceCapabilities::default();
        let factory = ParserFactory::new(&env, capabilities, &[]).map_err(|it| it.to_string())?;
        let mut constraints = Self { factory };
        constraints.factory.quiet();
        constraints.factory.limits_mut().verbose_errors = false;
        Ok(constraints)
    }

    /// Compiles a constraint on a thread of its own, for its deep stack.
    fn compile(&self, grammar: TopLevelGrammar) -> Result<Constraint, String> {
        let compile = || {
            let parser = self.factory.create_parser(grammar);
            let parser = parser.map_err(|error| one_line(&error.to_string()))?;
            Ok(Constraint(Matcher::new(Ok(parser))))
        };
        thread::scope(|scope| {
            let builder = thread::Builder::new().name("constraint".into()).stack_size(STACK);
            let failed = |why: String| format!("the constraint cannot be compiled: {why}");
            let compiling =
                builder.spawn_scoped(scope, compile).map_err(|error| failed(error.to_string()))?;
            compiling.join().unwrap_or_else(|_| Err(failed("llguidance has panicked".into())))
        })
    }

    /// Constrains a text to JSON of this schema.
    ///
    /// # Errors
    /// Fails for a schema that is invalid, too large, or uses what llguidance does not support.
    pub fn schema(&self, schema: &Value) -> Result<Constraint, String> {
        check_bytes("constraint", schema.to_string().len(), MOST_BYTES)?;
        self.compile(TopLevelGrammar::from_json_schema(schema.clone()))
    }

    /// Constrains a text to a regular expression.
    ///
    /// # Errors
    /// Fails for an invalid or too large expression.
    pub fn regex(&self, regex: &str) -> Result<Constraint, String> {
        check_bytes("constraint", regex.len(), MOST_BYTES)?;
        self.compile(TopLevelGrammar::from_regex(regex))
    }

    /// Constrains a text to a grammar in llguidance's variant of Lark.
    ///
    /// # Errors
    /// Fails for an invalid or too large grammar.
    pub fn grammar(&self, lark: &str) -> Result<Constraint, String> {
        let words = lark.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        let conditions = words.filter(|word| matches!(*word, "not" | "and" | "or")).count();
        if lark.contains("%if") && conditions > MOST_CONDITIONS {
            return Err(format!(
                "a grammar with %if may have {MOST_CONDITIONS} not, and, or, but has {conditions}"
            ));
        }
        check_bytes("constraint", lark.len(), MOST_BYTES)?;
        self.compile(TopLevelGrammar::from_lark(lark.into()))
    }

    /// Constrains a text to calls of one of these tools, `(name, schema of its arguments)`, in the
    /// format that [`ToolCalls`](crate::tools::ToolCalls) reads.
    ///
    /// # Errors
    /// Fails as [`schema`](Self::schema) does.
    pub(crate) fn tool_call(&self, tools: &[(String, Value)]) -> Result<Constraint, String> {
        for (name, arguments) in tools {
            let size = arguments.to_string().len();
            check_bytes(&format!("schema of the tool {name}"), size, MOST_BYTES)?;
        }
        // Each schema is a document of its own, in which `#/$defs/..` refers to its definitions.
        let call = |(i, (name, arguments)): (usize, &(String, Value))| {
            let name = Value::from(name.as_str());
            let open = format!("<tool_call>\n{{\"name\": {name}, \"arguments\": ");
            let [open, close] = [open.as_str(), "}\n</tool_call>"].map(Value::from);
            format!("call{i}: {open} json{i} {close}\njson{i}: %json {arguments}\n")
        };
        let calls: String = tools.iter().enumerate().map(call).collect();
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
        let grammar = format!("start: {}\n{calls}", names.join(" | "));
        check_bytes("list of tools", grammar.len(), MOST_TOOLS)?;
        self.compile(TopLevelGrammar::from_lark(grammar))
    }
}

fn check_bytes(what: &str, size: usize, most: usize) -> Result<(), String> {
    match size <= most {
        true => Ok(()),
        false => Err(format!("the {what} has {size} bytes, but may have {most}")),
    }
}

impl Constraint {
    /// Sets the logits of all tokens that may not follow to negative infinity. Once the text
    /// matches and cannot continue, only end-of-text tokens may follow.
    ///
    /// # Errors
    /// Fails when the constraint takes too much time or memory.
    pub(crate) fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.0.compute_mask_or_eos().map_err(|it| one_line(&it.to_string()))?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if !allowed.is_allowed(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Appends a token to the text.
    ///
    /// # Errors
    /// Fails for a token that may not follow.
    pub(crate) fn push(&mut self, id: u32) -> Result<(), String> {
        if self.0.is_stopped() {
            return Ok(());
        }
        self.0.consume_token(id).map_err(|it| one_line(&it.to_string()))
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl fmt::Debug for Constraints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraints").finish_non_exhaustive()
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Constraint").finish_non_exhaustive()
    }
}
