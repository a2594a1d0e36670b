//! Other settings of a tokenizer's files: the begin-of-text token, the chat template, and settings
//! that are ignored.

use std::{collections::HashMap, path::Path};

use serde::Deserialize;
use serde_json::{Value as Json, json};
use tokenizers::{Encoding, PostProcessor, PostProcessorWrapper, Token};

use crate::{
    error::{Error, Result},
    files::read_to_string,
};

#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    pub(super) bos: Option<u32>,
    pub(super) adds_bos: bool,
    /// The spelling of the token that templates call `eos_token`.
    pub(super) eos_token: Option<String>,
    pub(super) chat_template: Option<String>,
    pub(super) notes: Vec<String>,
}

/// The fields of `tokenizer_config.json` that are used.
#[derive(Default, Deserialize)]
struct Config {
    bos_token: Option<Spelling>,
    eos_token: Option<Spelling>,
    add_bos_token: Option<bool>,
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a token must be a text or an object with the text as its content")]
enum Spelling {
    Plain(String),
    Token { content: String },
}

impl Spelling {
    fn into_string(self) -> String {
        match self {
            Self::Plain(text) | Self::Token { content: text } => text,
        }
    }
}

/// One template, or several with names; the one called `default` is for conversations.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "chat_template must be a text, a list of named ones or an object of texts"
)]
enum Templates {
    One(String),
    Named(Vec<Named>),
    ByName(HashMap<String, String>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl Templates {
    fn default(self) -> Option<String> {
        match self {
            Self::One(template) => Some(template),
            Self::Named(all) => {
                all.into_iter().find(|named| named.name == "default").map(|named| named.template)
            }
            Self::ByName(mut all) => all.remove("default"),
        }
    }
}

impl Settings {
    /// Reads `tokenizer_config.json` and `chat_template.jinja`, if they exist.
    pub(super) fn read(folder: &Path, inner: &mut tokenizers::Tokenizer) -> Result<Self> {
        let path = folder.join("tokenizer_config.json");
        let config = match read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).map_err(|error| {
                let why = error.to_string();
                Error::Malformed { path: path.clone(), format: "json", why }
            })?,
            Err(Error::NotFound { .. }) => Config::default(),
            Err(error) => return Err(error),
        };
        let Config { bos_token, eos_token, add_bos_token, chat_template } = config;
        let bos_token = bos_token.map(Spelling::into_string);
        let bos = bos_token.as_ref().and_then(|token| inner.token_to_id(token));
        match (add_bos_token, bos) {
            // The post-processor in `tokenizer.json` is kept.
            (None, _) => {}
            (Some(false), _) => {
                inner.with_post_processor(None::<PostProcessorWrapper>);
            }
            (Some(true), Some(bos)) => begin_with(inner, bos, &path)?,
            (Some(true), None) => {
                let (value, rule) = (bos_token.unwrap_or("missing".into()), "must be a token");
                return Err(Error::config(path, "bos_token", value, rule));
            }
        }
        // The file takes precedence, because it is the newer way to store the template.
        let chat_template = match read_to_string(&folder.join("chat_template.jinja")) {
            Ok(template) => Some(template),
            Err(Error::NotFound { .. }) => chat_template.and_then(Templates::default),
            Err(error) => return Err(error),
        };
        let eos_token = eos_token.map(Spelling::into_string);
        Ok(Self { bos, eos_token, chat_template, ..Self::default() })
    }

    /// Removes settings that would change the ids of a text.
    pub(super) fn encode_whole(
        &mut self,
        inner: &mut tokenizers::Tokenizer,
        path: &Path,
    ) -> Result<()> {
        let mut ignored = vec![];
        if let Some(truncation) = inner.get_truncation() {
            ignored.push(format!("truncation to {} tokens", truncation.max_length));
            inner.with_truncation(None).map_err(Error::tokenizer)?;
        }
        if inner.get_padding().is_some() {
            ignored.push("padding".into());
            inner.with_padding(None);
        }
        if !ignored.is_empty() {
            let (path, what) = (path.display(), ignored.join(" and "));
            self.notes.push(format!("{path}: ignores {what}, because texts are encoded whole"));
        }
        Ok(())
    }

    /// Finds the tokens that the post-processor puts before a text.
    pub(super) fn follow_template(
        &mut self,
        inner: &tokenizers::Tokenizer,
        path: &Path,
    ) -> Result<()> {
        let Some(template) = inner.get_post_processor() else { return Ok(()) };
        // An id outside every vocabulary represents the text.
        let text = Token::new(u32::MAX, String::new(), (0, 0));
        let encoding = Encoding::from_tokens(vec![text], 0);
        let encoding = template.process(encoding, None, true).map_err(Error::tokenizer)?;
        let before: Vec<u32> =
            encoding.get_ids().iter().copied().take_while(|&id| id != u32::MAX).collect();
        match before[..] {
            [] => {}
            [id] => (self.bos, self.adds_bos) = (Some(id), true),
            _ => {
                let n = before.len();
                let why = format!("{} begins texts with {n} tokens {before:?}", path.display());
                return Err(Error::unsupported("more than one begin-of-text token", why));
            }
        }
        Ok(())
    }
}

/// Makes texts begin with `bos`, instead of the tokens of the post-processor.
pub(super) fn begin_with(inner: &mut tokenizers::Tokenizer, bos: u32, path: &Path) -> Result<()> {
    let Some(token) = inner.id_to_token(bos) else {
        let why =
            format!("{}: the begin-of-text id {bos} is not in the vocabulary", path.display());
        return Err(Error::tokenizer(why));
    };
    let begin = |side| json!({"SpecialToken": {"id": token, "type_id": side}});
    let text = |name, side| json!({"Sequence": {"id": name, "type_id": side}});
    let template: Json = json!({
        "type": "TemplateProcessing",
        "single": [begin(0), text("A", 0)],
        "pair": [begin(0), text("A", 0), begin(1), text("B", 1)],
        "special_tokens": {token.clone(): {"id": token, "ids": [bos], "tokens": [token]}},
    });
    let template: PostProcessorWrapper =
        serde_json::from_value(template).map_err(Error::tokenizer)?;
    inner.with_post_processor(Some(template));
    Ok(())
}
