//! Renders conversations with the Jinja template in a model's files.

use std::{fmt, io};

use minijinja::{Environment, ErrorKind, Value, context, syntax::SyntaxConfig, value::Serde};
use serde::{Deserialize, Serialize};
use serde_json::ser::Formatter;

use crate::{
    error::{Error, Result},
    tokenizer::Tokenizer,
};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text of the message.
    pub content: String,
}

impl Message {
    /// Creates a message from `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A model's chat template: `chat_template` in `tokenizer_config.json` or in a GGUF file, or
/// `chat_template.jinja`.
///
/// It renders as `apply_chat_template` of the transformers library does, except that `strftime_now`
/// is undefined: without today's date, a conversation has the same ids every day. Templates that
/// use the date contain a fixed one for this case.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

const NAME: &str = "chat_template";

/// The most instructions of a rendering, about a second. Long conversations take a hundredth.
const FUEL: u64 = 20_000_000;

impl ChatTemplate {
    /// Returns the template of a tokenizer; `None` if it has none.
    ///
    /// # Errors
    /// Fails with [`Error::ChatTemplate`] for an invalid template.
    pub fn of(tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let (bos_token, eos_token) = tokenizer.template_tokens();
        let new = |source| Self::new(source, bos_token, eos_token);
        tokenizer.chat_template().map(new).transpose()
    }

    /// Parses the template `source`, which can use the two tokens as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// Fails with [`Error::ChatTemplate`] for an invalid template.
    pub fn new(source: &str, bos_token: Option<String>, eos_token: Option<String>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        let mut syntax = SyntaxConfig::builder();
        environment
            .set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |why: String| -> Result<Value, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        environment.add_template_owned(NAME, source.to_string()).map_err(failed)?;
        Ok(Self { environment, bos_token, eos_token })
    }

    /// Renders a conversation up to the start of the model's answer. The template writes the
    /// begin-of-text token if the model has one, so [`encode`](Tokenizer::encode) adds none.
    ///
    /// # Errors
    /// Fails with [`Error::ChatTemplate`] when the template rejects the conversation, for example
    /// because of a role that it does not know.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.render_values(Value::from(Serde(messages)), Value::from(()))
    }

    /// Renders a conversation of messages with any fields, such as `tool_calls`, and `tools` that
    /// the model may call. Otherwise does the same as [`render`](Self::render).
    ///
    /// # Errors
    /// Fails as [`render`](Self::render) does.
    pub fn render_json(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
    ) -> Result<String> {
        let tools = tools.map_or(Value::from(()), |tools| Value::from(Serde(tools)));
        self.render_values(Value::from(Serde(messages)), tools)
    }

    fn render_values(&self, messages: Value, tools: Value) -> Result<String> {
        let Self { environment, bos_token, eos_token } = self;
        let template = environment.get_template(NAME).map_err(failed)?;
        let context = context! {
            messages => messages,
            bos_token => defined(bos_token),
            eos_token => defined(eos_token),
            tools => tools,
            add_generation_prompt => true,
        };
        template.render(context).map_err(failed)
    }
}

/// Returns the token as a template value. Without a token the value is undefined, which a template
/// can test.
fn defined(token: &Option<String>) -> Value {
    token.as_deref().map_or(Value::UNDEFINED, Value::from)
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

fn failed(error: minijinja::Error) -> Error {
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let detail = error.detail().map_or_else(|| error.kind().to_string(), ToString::to_string);
    Error::ChatTemplate { why: line + &detail }
}

/// The filter `tojson`. It writes JSON as Python's `json.dumps` with `ensure_ascii=False` does:
/// with a space after `,` and `:`, and without escapes for non-ASCII characters.
fn to_json(value: Value, options: minijinja::value::Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut bytes = vec![];
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
        Some(n) => {
            let indent = " ".repeat(n);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
        }
    };
    let failed = |why: String| minijinja::Error::new(ErrorKind::InvalidOperation, why);
    written.map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| failed(error.to_string()))?;
    Ok(Value::from(text))
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
